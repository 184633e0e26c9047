"""Conditions that runs are chosen by."""

import math
from datetime import timedelta

import pytest
from stored_runs import BEGIN

from emrun.base.errors import UsageError
from emrun.runs.columns import rows_of
from emrun.runs.conditions import Condition, time_of
from emrun.runs.finding import find_runs


@pytest.fixture
def holds(make_run, tmp_path):
    """Return a function that says whether a condition holds for a run, two days after it began."""
    make_run("a", (0.1, 0.7, 0.6))

    def holds(text):
        condition = Condition.parse(text)
        root = tmp_path / "log"
        (row,) = rows_of(find_runs(root), root, [condition.column], BEGIN + timedelta(days=2))
        return condition.holds(row)

    return holds


HOLD = [
    "model.module.channels=32", "model.module.channels=32.0", "model.module.channels = 32", "model.module.width=32",
    "model.module.channels!=33", "model.module.channels>31", "model.module.channels<=32", "valid/accuracy<0.65",
    "max:valid/accuracy>=0.7", "status=finished", "dataset.class=Digits", "dataset=emrun.datasets.digits.Digits",
    "hooks.SaveBest.condition=max", "hooks.0.variables=[loss, accuracy]", "age>1d", "age<3d", "duration=2min",
    "train/loss!=nan", "valid/accuracy!=inf", "max:valid/accuracy=0.7",
    "size<1MB", "begin>2026-11-19", "begin<2026-11-22", "epochs=2", "missing.key!=1", "name=a",
]  # fmt: skip
DO_NOT = [
    "model.module.channels=33", "model.module.channels='32'", "model.module.channels>x", "model.module<3",
    "missing.key=1", "missing.key<1", "missing.key=null", "status=failed", "age>3d", "seed=true", "dataset=Digit",
]  # fmt: skip


def test_conditions_that_hold_and_those_that_do_not(holds):
    assert [text for text in (*HOLD, *DO_NOT) if holds(text)] == HOLD


@pytest.mark.parametrize(("last", "shown"), [("nan", ["nan", "NaN", ".nan"]), ("-inf", ["-inf", "-.inf", "-Infinity"])])
def test_statistics_that_are_not_finite_are_found(make_run, tmp_path, last, shown):
    make_run("a", (0.1, float(last)))
    root = tmp_path / "log"
    for text in shown:
        condition = Condition.parse(f"valid/accuracy={text}")
        (row,) = rows_of(find_runs(root), root, [condition.column])
        assert condition.holds(row)


def test_values_that_cannot_be_compared_are_an_error(make_run, tmp_path):
    make_run("a", (0.1, 0.7, 0.6))
    found = list(find_runs(tmp_path / "log"))
    for text in ("model.module.channels>x", "model.module.channels<=[1]"):
        condition = Condition.parse(text)
        with pytest.raises(UsageError, match=r"cannot be compared: a run has \d+"):
            condition.check(rows_of(found, tmp_path / "log", [condition.column]))
    condition = Condition.parse("model.module.channels>3")
    condition.check(rows_of(found, tmp_path / "log", [condition.column]))


@pytest.mark.parametrize(("text", "message"), [
    ("epochs", "'epochs' is not a condition"),
    ("=3", "'=3' is not a condition"),
    ("status=finshed", "'finshed' is not a status; did you mean 'finished'"),
    ("age>3", "age: '3' is not a time such as 30d"),
    ("size>3 apples", "size: '3 apples' is not a size such as 500MB"),
    ("begin>yesterday", "begin: 'yesterday' is not a time"),
    ("begin>0001-01-01", "begin: '0001-01-01' is not a time"),
    ("seed=[1", r"seed: "),
    ("\x1b[31m", r"'\\\\x1b\[31m' is not a condition"),
])  # fmt: skip
def test_what_is_not_a_condition_is_an_error(text, message):
    with pytest.raises(UsageError, match=message):
        Condition.parse(text)


def test_only_numbers_that_are_not_finite_are_read_as_such():
    assert [Condition.parse(f"valid/loss<{text}").wanted for text in ("+.inf", "-Infinity", "+-inf")] == [
        math.inf, -math.inf, "+-inf",
    ]  # fmt: skip


def test_times_have_units():
    assert [time_of(text, "age") for text in ("40s", "1.5h", "2 d", "1w")] == [40, 5400, 172800, 604800]
