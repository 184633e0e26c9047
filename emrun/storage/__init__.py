"""What is on disk: each file is whole or absent. Knows neither the loop nor configs.

Read `files` and `sealed` (how something is written whole), `checkpoints` (how one is committed and found) with its
`manifest` and `checkpoint_names`, then `run` (the run directory, and how one is made) with its `trace`, `metrics` and
`log`, and `lock` (who may write it). `capsules` keep what failed, with `draws`; `state_file` and `weights` are two
formats; `lines` is a file that only grows.

May import: the root of emrun.
"""
