"""What learns about a training by running it.

Read `trial` (`emrun check`), `verification` and `probe` (`emrun verify-resume`), `replay`, `stream_bench`.

May import: the root of emrun, `config`, `streams`, `storage`, `loop`, `training`.
"""
