"""The last, lowest and highest value of a statistic, and the statistic that SaveBest watches."""

import pytest
from stored_runs import CONFIG

from emrun.runs.stored_run import StoredRun
from emrun.runs.summaries import Summaries


def test_each_value_has_its_epoch_and_nan_is_never_the_best(make_run):
    found = Summaries(StoredRun(make_run("a", (0.5, float("nan"), 0.9, 0.9, 0.6)).directory), ["valid/loss/mean"])
    assert found.best == (0.9, 2)
    assert [found.of("valid/accuracy/mean", which) for which in ("last", "min", "max")] == [
        (0.6, 4),
        (0.6, 4),
        (0.9, 2),
    ]
    assert found.of("valid/loss/mean", "min")[1] == 2
    assert found.of("test/loss", "last") is None


@pytest.mark.parametrize(("hook", "watched"), [
    ("SaveBest: {variable: accuracy, condition: max}", ("valid/accuracy/mean", "max")),
    ("SaveBest", ("valid/loss/mean", "min")),
    ("SaveBest: {variable: f1, aggregation: null, stream: test}", ("test/f1", "min")),
    ("SaveBest: 3", ("valid/loss/mean", "min")),
    ("LogVariables", ("valid/loss/mean", "min")),
])  # fmt: skip
def test_what_save_best_watches_is_best(make_run, hook, watched):
    config = CONFIG.replace("SaveBest: {variable: accuracy, condition: max}", hook)
    assert Summaries(StoredRun(make_run("a", config=config).directory)).watched == watched


def test_a_damaged_config_or_file_is_a_problem_and_no_error(make_run):
    directory = make_run("a", (0.1, 0.2)).directory
    (directory / "config.yaml").write_text("a: [")
    (directory / "metrics.jsonl").unlink()
    (directory / "metrics.jsonl").mkdir()
    found = Summaries(StoredRun(directory))
    assert (found.watched, found.best) == (("valid/loss/mean", "min"), None)
    assert any("not a regular file" in each for each in found.run.problems)
