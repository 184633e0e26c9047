"""The files that emrun writes: each file is complete or absent. This package knows neither the loop nor configs.

Read `files` and `sealed` (how a file or a folder is written completely or not at all), `checkpoints` (how a checkpoint
is committed and found) with its `manifest` and `checkpoint_names`, then `run` (the run directory and its creation) with
its `trace`, `metrics` and `log`, and `lock` (which process may write the run). `capsules` stores failed steps, with the
random states from `draws`; `state_file` and `weights` are two file formats; `lines` is a file that only grows, such as
the step record (`steps`, read by `step_columns`). `saved_weights` reads weights that any program saved.
`code_record` writes what the run is made from, with the files of `code` and `first_batches`; `git` asks git.

May import: the root of emrun.
"""
