"""The parts of `Diagnose`: `look` (what the layers return, and how an update changes them), `findings`, `verdicts`.

May import: what `hooks` may.
"""
