"""docs/about/architecture.md: everything that it names exists; tests/test_house.py compares its picture."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "about" / "architecture.md").read_text(encoding="utf-8")
JOURNEYS = re.findall(r"^### (.+?)\n\n```text\n(.+?)```", PAGE, re.MULTILINE | re.DOTALL)


def test_everything_that_is_named_exists():
    names = set(re.findall(r"`(emrun(?:\.\w+)+)`", PAGE)) - {"emrun.datasets", "emrun.hooks"}
    assert len(names) > 10
    for name in names:
        pkgutil.resolve_name(name)


def defined_in(path):
    """Return the names of functions and classes in a file, and of methods as `Class.method` and `method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            found |= methods | {f"{node.name}.{name}" for name in methods}
    return found


def test_there_are_three_journeys_of_about_a_screen():
    assert [name for name, _ in JOURNEYS] == ["A config", "A batch", "A checkpoint"]
    assert all(12 <= len(tree.splitlines()) <= 20 for _, tree in JOURNEYS)


@pytest.mark.parametrize(("name", "tree"), JOURNEYS, ids=[name for name, _ in JOURNEYS])
def test_each_call_of_a_journey_is_in_the_file_of_its_margin(name, tree):
    for line in tree.splitlines():
        call, path = line.split()[:2]
        assert call in defined_in(ROOT / "emrun" / path), line
