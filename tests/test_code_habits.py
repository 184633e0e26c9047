"""Habits that save statements and cost readers: the places that are left only get fewer."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import code_habits
import pytest
from code_habits import ROOT, RULES

LEFT = {
    "datasets": {"R5": 4, "R6": 3, "R9": 1},
    "emrun": {"R5": 2, "R10": 1},
    "emrun/base": {"R5": 1},
    "emrun/cli": {"R5": 3},
    "emrun/config": {"R5": 2, "R6": 1},
    "emrun/diagnosis": {"R5": 22, "R6": 1},
    "emrun/launch": {"R5": 3, "R10": 1},
    "emrun/models": {"R5": 8},
    "emrun/record": {"R5": 7},
    "emrun/streams": {"R5": 12, "R10": 2},
    "emrun/training": {"R5": 5},
    "hooks": {"R5": 11, "R6": 1},
}
"""Room -> rule -> its places that are left. A room that has none of a rule gets none."""


def test_the_places_of_each_room_are_those_that_are_listed():
    found = {
        room: {rule: each for rule, each in rules.items() if each} for room, rules in code_habits.counted().items()
    }
    for room in {**found, **LEFT}:
        for rule in RULES:
            places, listed = found.get(room, {}).get(rule, []), LEFT.get(room, {}).get(rule, 0)
            more = f"{room}, {rule}: {len(places)} places instead of {listed}; write out one of {places}"
            assert len(places) <= listed, more
            assert len(places) == listed, (
                f"{rule}: only {len(places)} places of {listed} are left; shorten LEFT[{room!r}]"
            )


# --- the rules --------------------------------------------------------------------------------------------------------


def rules_in(text, path="emrun/part.py"):
    return [rule for rule, _ in code_habits.places(Path(path), text)]


BREAKS = {
    "R1": [
        "f(*(a, b))",
        "pair = a, b\nf(*pair)",
        "def g():\n    pair = a, b\n    f(*pair)",
        "g = lambda: f(*(a, b))",
        "class A:\n    x = f(*(a, b))",
    ],
    "R2": ["how = {'a': 1}\nf(**how)"],
    "R3": ["self.a, self.b = x, y", "self.a, b = x, y", "self.a, self.b = (f(x) for x in y)"],
    "R4": ["a, b = f(x), y", "a, b = (f(x) for x in y)", "a, b = [1], 2"],
    "R5": ["other.thing = 3", "self.part.thing = 3", "other.count += 1", "for each in parts:\n    each.a = 1"],
    "R6": ["switched_on(other, 'name')", "setattr(other, name, 3)", "base.switched_on(other, 'name')"],
    "R7": ["x = [a] * (b is not None)", "x = 's' * (n != 1)", "x = bool(a) * f'{b}'", "x = [a] * (not b)"],
    "R8": [
        "x = (a if b else c) if d else e",
        "x = a if (b if c else d) else e",
        "x = a if b else c if d else e if f else g",
    ],
    "R9": ["for each in a if b else c:\n    f(each)", "f() if a else g()", "f(), g()"],
    "R10": ["class A:\n    def __init__(self, a, b, c, d, *, e, f, g):\n        pass"],
}
KEEPS = [
    "f(*pair)",
    "pair = f()\ng(*pair)",
    "x = [*(a, b)]",
    "f(**how)",
    "how = f()\ng(**how)",
    "how = {'a': 1}\nf(how)",
    "a, b = b, a",
    "self.a, self.b = self.b, self.a",
    "a, b = 0, []",
    "a, b = x, y.z",
    "a, b = f()",
    "made = A()\nmade.thing = 3",
    "self.thing = 3",
    "weight.grad = None",
    "sys.stdout = stream",
    "setattr(other, 'name', 3)",
    "x = [a] * n",
    "x = 2 * (a > b)",
    "x = a if b else c",
    "x = a if b else c if d else e",
    "for each in a:\n    f(each)",
    "class A:\n    def __init__(self, a, b, c, *, d, e, f):\n        pass",
    "class MainLoop:\n    def __init__(self, a, b, c, d, *, e, f, g):\n        pass",
]


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule, texts in BREAKS.items() for text in texts], ids=str)
def test_a_place_breaks_a_rule(rule, text):
    assert rules_in(text) == [rule]


@pytest.mark.parametrize("text", KEEPS)
def test_plain_code_keeps_the_rules(text):
    assert rules_in(text) == []


def test_constructors_of_hooks_and_datasets_are_schemas():
    (text,) = BREAKS["R10"]
    assert rules_in(text, "hooks/part.py") == rules_in(text, "datasets/part.py") == []


def test_each_place_is_found_once_and_with_its_line():
    text = "class A:\n    def f(self):\n        def g():\n            other.a = 1\n        return g\n"
    assert list(code_habits.places(Path("emrun/part.py"), text)) == [("R5", 4)]


def test_the_script_prints_the_places_of_a_rule():
    rooms = code_habits.counted(["emrun/launch", "emrun/ranks"])
    command = [sys.executable, "tests/code_habits.py", "--list", "R10", "emrun/launch", "emrun/ranks"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    places = [place for room in ("emrun/launch", "emrun/ranks") for place in rooms.get(room, {}).get("R10", ())]
    assert re.findall(r"^\S+:\d+$", printed, re.MULTILINE) == places
    assert f"R10: {len(places)}" in printed.splitlines()[-1]


# --- private attributes of others -------------------------------------------------------------------------------------


def test_each_file_that_may_use_private_attributes_of_others_does():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    listed = {name for name, rules in table.items() if "SLF001" in rules and not name.startswith("tests/")}
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "SLF001"]
    folders = ("emrun", "hooks", "datasets", "benchmarks", "sample_configs")
    exclude = ["--exclude", "emrun/hooks", "--exclude", "emrun/datasets", "--exclude", "emrun/sample_configs"]
    output = ["--output-format", "concise", "--quiet"]
    found = subprocess.run(
        [*command, *exclude, *output, *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stderr == ""
    assert {line.partition(":")[0] for line in found.stdout.splitlines()} == listed
