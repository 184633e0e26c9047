"""Reads run directories without PyTorch and without any code of the user: finds, compares and removes runs.

Read `stored_run.py` first: a run as its directory describes it. `finding.py` finds runs below a directory.

A run directory may be somebody else's: every field is checked, files are read up to a size, links are not followed to
other directories, and no name in a run is a path. No module of `storage` or `record` that needs torch is imported.

May import: the root, `base`, `config`, `storage`, `record`.
"""
