"""What leaves a run: programs, weights and archives that work where emrun is not installed.

Read `export.py` first: what `emrun export` and `emrun.export` do; `formats.py` lists the formats, each with its
function.

May import: the root, `base`, `ranks`, `config`, `storage`, `record`, `loop`, `runs`, `training`.
"""
