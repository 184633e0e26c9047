"""Stands for `python -I PROGRAM ARGUMENTS` in a process that has imported PyTorch and forgets emrun: see forked.py."""

import runpy
import sys

for name in [each for each in sys.modules if each.partition(".")[0] == "emrun"]:
    del sys.modules[name]
del sys.path[0], sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
