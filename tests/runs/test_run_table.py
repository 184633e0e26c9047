"""What runs have recorded, as rows of one table."""

import pytest

from emrun.base.errors import UsageError
from emrun.record.steps import Chunk
from emrun.runs.run_table import RunTable
from emrun.runs.stored_run import StoredRun

STEPS = [Chunk(1, 1, {"loss": [0.5, float("nan")]}), Chunk(10, 5, {"loss": [0.25, 0.2], "norm": [None, 2.0]})]


@pytest.fixture
def runs(make_run):
    return {name: StoredRun(make_run(name, (0.1, 0.7), steps=STEPS).directory) for name in ("a", "b")}


def test_an_epoch_is_a_row(runs):
    table = RunTable({"a": runs["a"]})
    keys = ["epoch", "iteration", "seconds", "train/loss", "valid/loss", "valid/accuracy", "valid/accuracy/std"]
    assert table.keys() == keys
    assert [row["valid/accuracy"] for row in table.rows(keys)] == [0.1, 0.7]
    assert [row["epoch"] for row in table.rows(["epoch"])] == [0, 1]


def test_a_step_is_a_row(runs):
    table = RunTable({"a": runs["a"]}, by_step=True)
    assert table.keys() == ["iteration", "loss", "norm"]
    rows = [*table.rows(["iteration"])]
    assert [row["iteration"] for row in rows] == [1, 2, 10, 15]
    assert rows[0] == {"run": "a", "iteration": 1, "loss": 0.5}
    assert rows[3] == {"run": "a", "iteration": 15, "loss": 0.2, "norm": 2.0}


def test_rows_of_several_runs_have_the_run_and_values_of_its_config(runs):
    rows = [*RunTable(runs).rows(["model.optimizer.lr", "model.nothing"])]
    assert RunTable(runs).keys()[:2] == ["run", "epoch"]
    assert [(row["run"], row["model.optimizer.lr"], "model.nothing" in row) for row in rows] == [
        (name, 0.003, False) for name in ("a", "a", "b", "b")
    ]


@pytest.mark.parametrize(("options", "statistics"), [
    ({"streams": ["valid"]}, ["valid/loss", "valid/accuracy", "valid/accuracy/std"]),
    ({"variables": ["loss"]}, ["train/loss", "valid/loss"]),
    ({"variables": ["accuracy/std", "loss"], "streams": ["valid"]}, ["valid/loss", "valid/accuracy/std"]),
])  # fmt: skip
def test_statistics_are_chosen_by_stream_and_variable(runs, options, statistics):
    assert RunTable({"a": runs["a"]}, **options).keys()[3:] == statistics


@pytest.mark.parametrize(("options", "message"), [
    ({"streams": ["vaild"]}, r"the stream 'vaild'; did you mean 'valid'\? \(there are train, valid\)"),
    ({"variables": ["los"]}, r"the variable 'los'; did you mean 'loss'\? \(there are loss, accuracy\)"),
    ({"streams": ["train"], "by_step": True}, "the steps are those of the train stream"),
    ({"variables": ["nrm"], "by_step": True}, r"the variable 'nrm'; did you mean 'norm'"),
])  # fmt: skip
def test_what_no_run_has_recorded_is_an_error(runs, options, message):
    with pytest.raises(UsageError, match=message):
        RunTable(runs, **options).keys()


def test_a_key_that_is_neither_recorded_nor_of_the_config_is_an_error(runs):
    RunTable(runs).check_keys(["run", "epoch", "valid/loss", "seed"])
    with pytest.raises(UsageError, match=r"'valid/los' is neither recorded .*; did you mean 'valid/loss'"):
        RunTable(runs).check_keys(["valid/los"])


def test_values_that_are_not_numbers_are_left_out(runs):
    with (runs["a"].directory / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "seconds": "\\u001b", "streams": {"valid": {"loss": {"mean": [1]}, "x": "NaN"}}}\n')
    row = [*RunTable({"a": runs["a"]}).rows(["epoch"])][-1]
    assert repr(row) == "{'run': 'a', 'epoch': 2, 'valid/x': nan}"
