"""The training loop and its collaborators, each with one question to answer.

Read `main_loop` first, then `state` (where are we), `saving` (what is saved when) and `interrupts`.

May import: the root of emrun, `streams`, `storage`.
"""
