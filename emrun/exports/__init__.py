"""What leaves a run: programs, weights and archives that work where emrun is not installed.

Read `export.py` first: what the command and the function do; `formats.py` lists the formats, each with its function.
`programs.py` tells how a program is made: `measured.py` runs the model on a stream, `program.py` is the module that
`tracing.py` traces, `comparison.py` runs the result by `outside.py` in a process without emrun, `folder.py` writes, and
`card.py` and `identity.py` describe it.

May import: the root, `base`, `ranks`, `config`, `storage`, `record`, `loop`, `runs`, `training`.
"""
