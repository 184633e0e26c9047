"""Stands for torchrun in a process that has imported PyTorch: see test_ranks.py.

torchrun looks in its stack for the name of a function, and would search thousands of modules for the source of each.
"""

import inspect
import runpy
import sys
from traceback import walk_stack
from types import SimpleNamespace


def names():
    """Return the names of the functions in the stack, as `inspect.stack` does."""
    return [SimpleNamespace(function=frame.f_code.co_name) for frame, _ in walk_stack(sys._getframe(1))]


inspect.stack = names
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
