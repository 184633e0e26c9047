"""`python -m emrun`: the same as the command `emrun`."""

import sys

# Python's -m puts the current directory first: a folder `datasets` there would hide the installed library of that name.
sys.path.append(sys.path.pop(0))

from emrun.cli import main

if __name__ == "__main__":
    sys.exit(main())
