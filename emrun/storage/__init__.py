"""What is on disk: each file is whole or absent. Knows neither the loop nor configs.

Read `files` (how a file is written), `checkpoints` (how one is committed, named, found), then `run` (the run
directory), `lock` (who may write it) and `capsules` (what is kept of a failed step).

May import: the root of emrun.
"""
