"""Which cases `make test` leaves to campaigns, from the table of CPU seconds."""

import re
from types import SimpleNamespace

import cpu_seconds
import pytest

PLACE = "tests/test_some.py"


class Item(SimpleNamespace):
    """As much of a test of pytest as is asked for."""

    def iter_markers(self, name):
        return [each for each in self.marks if each == name]

    def add_marker(self, name):
        self.marks.append(name)


@pytest.mark.parametrize(
    ("count", "seconds", "stay"), [(1, 9.0, 1), (2, 1.4, 2), (8, 1.9, 8), (2, 9.0, 1), (14, 18.6, 1), (6, 3.0, 3)]
)
def test_cases_that_take_long_share_the_seconds_of_a_test_and_one_always_stays(count, seconds, stay):
    assert cpu_seconds.staying(count, seconds) == stay


def left(monkeypatch, tmp_path, items):
    table = tmp_path / "cpu_seconds.md"
    table.write_text(f"| test | cases |\n|---|---|\n| `{PLACE}::test_a` |   6 |   3.0 |   2 |   1.0 |\n")
    monkeypatch.setattr(cpu_seconds, "TABLE", table)
    cpu_seconds.leave_to_campaigns(items)
    return [item.nodeid.partition("::")[2] for item in items if "campaign" in item.marks]


def test_the_cases_that_stay_are_spread_over_all_and_those_of_other_tests_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_seconds, "MANY", 8)
    items = [Item(nodeid=f"{PLACE}::test_a[{number}]", marks=[]) for number in range(6)]
    items += [Item(nodeid=f"{PLACE}::test_b[{number}]", marks=[]) for number in range(2)]
    assert left(monkeypatch, tmp_path, items) == ["test_a[1]", "test_a[2]", "test_a[4]", "test_a[5]"]


def test_a_run_of_few_tests_and_a_test_that_is_marked_have_all_cases(monkeypatch, tmp_path):
    items = [Item(nodeid=f"{PLACE}::test_a[{number}]", marks=[]) for number in range(6)]
    assert left(monkeypatch, tmp_path, items) == []
    monkeypatch.setattr(cpu_seconds, "MANY", 6)
    for item in items:
        item.marks.append("whole")
    assert left(monkeypatch, tmp_path, items) == []


def test_the_tests_of_the_table_are_there():
    names = re.findall(r"^\| `(tests/[^`]+)::(\w+)`", cpu_seconds.TABLE.read_text(), re.MULTILINE)
    assert names
    for file, test in names:
        assert f"def {test}(" in (cpu_seconds.TESTS.parent / file).read_text(), f"{file}::{test}"
