"""What is on disk: each file is whole or absent. Knows neither the loop nor configs.

Read `files` (how a file is written), `manifest` and `checkpoints` (what a checkpoint is, how one is committed, found),
`checkpoint_names` (its names), then `run` (the run directory, with its `trace`, `metrics` and `log`), `run_directories`
(how one is made), `lock` (who may write it) and `capsules` (what is kept of a failed step, with `draws` and `packing`).

May import: the root of emrun.
"""
