"""Stands for `python -P -c CODE ARGUMENT` in a process that has imported PyTorch: see test_verify_resume.py."""

import os
import sys
import tempfile

_, _, code, argument = sys.argv[1:]
sys.argv[1:] = [argument]
sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
tempfile.tempdir = None
exec(code)
