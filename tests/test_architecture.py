"""docs/architecture.md: its picture is what the script draws, and every module, class and function in it exists."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DRAWING = re.compile(r"<!-- drawn by tests/house_picture.py -->\n\n(.*)\n<!-- end of the drawing -->\n", re.DOTALL)


def test_the_picture_is_that_of_the_imports():
    """`python tests/house_picture.py --write` draws it anew."""
    script = ROOT / "tests" / "house_picture.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert DRAWING.search(PAGE)[1] == done.stdout


def test_everything_that_is_named_exists():
    names = set(re.findall(r"`(emrun(?:\.\w+)+)`", PAGE)) - {"emrun.datasets", "emrun.hooks"}
    assert len(names) > 50
    for name in names:
        pkgutil.resolve_name(name)
