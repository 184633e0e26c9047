"""A run from top to bottom: build its parts, create it, resume it, evaluate it.

Read `create` (what `emrun train` does), `build` (config to objects), then `evaluate` and `resume`.

May import: the root of emrun, `config`, `storage`, `loop`.
"""
