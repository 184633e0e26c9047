"""Values of trials, and the mean of several."""

import json
import math

import pytest
from scipy import stats

from emrun.launch.results import objective_of, result_of, summary_of, t_quantile, value_of
from emrun.launch.settings import Sweep
from emrun.launch.trials import Trial
from emrun.runs.stored_run import StoredRun

VALUES = [(0, 0.1), (1, 0.5), (2, 0.3), (3, 0.4)]


def test_the_value_is_that_of_the_best_or_of_the_last_epoch_but_the_zeroth():
    assert value_of(VALUES[1:], Sweep()) == 0.3
    assert value_of(VALUES[1:], Sweep(condition="max")) == 0.5
    assert value_of(VALUES[1:], Sweep(epoch="last")) == 0.4
    assert value_of([], Sweep()) is None


@pytest.mark.parametrize(("every", "epochs", "value"), [("2", 1, None), ("1", 1, 0.0), ("2", 0, 0.5)])
def test_the_zeroth_epoch_counts_only_in_a_trial_that_has_no_other(make_run, every, epochs, value):
    made = make_run("trial", (0.5, 0.0)[: epochs + 1])
    lines = [json.loads(line) for line in (made.directory / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:] if every == "2" else ():
        line["streams"].pop("valid")
    (made.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trial = Trial((), made.directory, 1, None)
    assert result_of(trial, Sweep(objective="valid/accuracy/mean")).value == value


def test_nan_is_never_the_best():
    assert value_of([(1, math.nan), (2, 0.7)], Sweep()) == 0.7
    assert math.isnan(value_of([(1, math.nan)], Sweep(condition="max")))


def test_the_objective_is_read_from_the_metrics(tmp_path):
    lines = [
        {"epoch": 1, "iteration": 3, "streams": {"valid": {"loss": {"mean": 0.5, "std": 1.0}, "f1": 0.25}}},
        {"epoch": 2, "iteration": 6, "streams": {"train": {}}},
        {"epoch": 3, "iteration": 9, "streams": {"valid": {"loss": {"mean": "NaN"}}}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = StoredRun(tmp_path)
    assert objective_of(run, "valid/loss/std") == [(1, 1.0)]
    assert objective_of(run, "valid/f1") == objective_of(run, "valid/f1/mean") == [(1, 0.25)]
    assert repr(objective_of(run, "valid/loss")) == "[(1, 0.5), (3, nan)]"


def test_the_interval_is_that_of_students_t_distribution():
    values = [0.3, 0.5, 0.1, 0.4]
    found = summary_of(values)
    low, high = stats.t.interval(0.95, 3, loc=found["mean"], scale=stats.sem(values))
    assert (found["mean"] - found["interval"], found["mean"] + found["interval"]) == pytest.approx(
        (low, high), rel=1e-4
    )
    assert found["deviation"] == pytest.approx(stats.tstd(values))


def test_the_quantiles_are_right_to_four_digits():
    for degrees in (*range(1, 60), 100, 1000, 10**6):
        assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-4)


def test_one_value_has_no_deviation_and_none_has_no_mean():
    assert list(summary_of([2.0, None]).values()) == [1, 2.0, None, None]
    assert list(summary_of([]).values()) == [0, None, None, None]
    assert summary_of([1.0, math.inf])["deviation"] is None
