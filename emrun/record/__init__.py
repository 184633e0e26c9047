"""The rows of a run: one writer, one reader, and the sinks that are made from them.

`metrics_log.py` writes what a run measures: `metrics.jsonl` has the epochs, `steps.jsonl` the steps, `rows.jsonl` what
sinks ask for. All three are exact after any kill, to the byte. `rows.py` reads them again, in order. A sink, such as a
CSV file or a service, is a function of these rows: see `sinks.py`.

May import: the root, `base`, `ranks`, `storage`.
"""
