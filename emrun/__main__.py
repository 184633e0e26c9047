"""`python -m emrun`: the same as the command `emrun`."""

import sys

# Python's -m puts the current directory first: a folder `datasets` there would hide the installed library of that name.
# A worker process imports this module again, with the path of its parent.
if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))

from emrun.cli import main

if __name__ == "__main__":
    sys.exit(main())
