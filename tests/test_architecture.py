"""docs/architecture.md: every module, class and function in it exists; tests/test_house.py compares its picture."""

import pkgutil
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_everything_that_is_named_exists():
    names = set(re.findall(r"`(emrun(?:\.\w+)+)`", PAGE)) - {"emrun.datasets", "emrun.hooks"}
    assert len(names) > 50
    for name in names:
        pkgutil.resolve_name(name)
