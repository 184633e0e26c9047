"""A run from top to bottom: build its parts, create it, resume it, evaluate it.

Read `create` (what `emrun train` does), then `build` (from a config to objects), `evaluate` and `resume`; `user_code`
gathers what the run is made from.

May import: the root, `base`, `ranks`, `config`, `storage`, `record`, `loop`, `runs`.
"""
