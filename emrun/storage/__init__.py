"""The files that emrun writes: each file is complete or absent. This package knows neither the loop nor configs.

Read `files` and `sealed` (how a file or a folder is written completely or not at all), the package `checkpoints`, then
`run` (the run directory and its creation) with its `trace`, `class_names` and `log`, and `lock` (which process may
write the run). `capsules` stores failed steps, with the random states from `step_randomness`; `lines` is a file that
only grows, such as those of the package `record`. The package `code` records what the run was made from.

May import: the root, `base`, `ranks`.
"""
