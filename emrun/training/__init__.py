"""A run from top to bottom: build its parts, create it, resume it, evaluate it.

Read `create` (what `emrun train` does), then `build` (from a config to objects), `evaluate` and `resume`.

May import: the root of emrun, `config`, `storage`, `loop`.
"""
