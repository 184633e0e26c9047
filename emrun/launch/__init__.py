"""Starts many runs: trials of a sweep, in processes that have imported PyTorch.

Read `settings` (the section `sweep` of a config) and `parameters` (what is tried), `trials` (a config for each trial,
its identity and its directory), `results` (what the directories say), `search` (the methods and pruners of Optuna),
`jobs` (the processes) and `sweep` (which trial comes next).

May import: the root, `base`, `ranks`, `config`, `storage`, `runs`.
"""
