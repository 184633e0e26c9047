"""The test that tells which of two configs is better, and what may be compared."""

import math

import numpy as np
import pytest

from emrun.base.errors import UsageError
from emrun.config.config import load_config
from emrun.launch.pairs import (
    check_comparable,
    direction_of,
    finished_runs,
    half_width,
    judge,
    pairs_of,
    resolution,
    train_only,
    worst_for_missing,
)
from emrun.launch.settings import Sweep
from emrun.launch.trials import Trials
from emrun.storage.code.files import note_batch

BASE = {
    "seed": 1,
    "dataset": {"class": "Majority", "n": 20, "batch_size": 4},
    "model": {"class": "X", "metrics": {"accuracy": {"import": "a"}}, "optimizer": {"lr": 1}},
    "hooks": [{"StopAfter": {"epochs": 3}}, "LogVariables"],
}


def verdicts(effect, runs, most=12):
    """Return the words and the numbers of pairs of many comparisons with noise of one in the differences."""
    random = np.random.default_rng(3)
    found = []
    for _ in range(runs):
        b = random.normal(effect, 1.0, most).tolist()
        words = (judge([0.0] * n, b[:n], "max")["verdict"] for n in range(3, most + 1))
        found.append(next(((word, n) for n, word in enumerate(words, 3) if word != "undecided"), ("undecided", most)))
    return found


def test_without_a_difference_wrong_verdicts_are_rare():
    assert sum(word != "undecided" for word, _ in verdicts(0.0, runs=100)) <= 0.05 * 100


def test_a_difference_of_twice_the_noise_is_found():
    found = verdicts(2.0, runs=200)
    assert sum(word == "b" for word, _ in found) >= 0.9 * 200
    assert all(word in ("b", "undecided") for word, _ in found)
    assert np.median([pairs for _, pairs in found]) <= 7


def test_the_interval_is_where_the_e_value_is_20():
    values = [0.3, 0.5, 0.1, 0.45, 0.2]
    n, half = len(values), half_width(values)
    t, k, r = math.sqrt(n) * half / np.std(values, ddof=1), n - 1, 1 + 4 * n
    e = ((1 + t**2 / k) / (1 + t**2 / (k * r))) ** (n / 2) / math.sqrt(r)
    assert e == pytest.approx(20)


def test_too_few_pairs_have_no_interval():
    verdict = judge([1.0, 1.1, 0.9], [2.0, 2.2, 1.9], "max")
    assert (verdict["verdict"], verdict["interval"]) == ("undecided", None)
    assert math.isinf(half_width([1.0]))


def test_the_better_one_depends_on_the_direction_and_small_differences_may_not_matter():
    a, b = [0.0] * 8, [0.10, 0.11, 0.09, 0.10, 0.12, 0.08, 0.10, 0.10]
    assert judge(a, b, "max")["verdict"] == "b"
    assert judge(a, b, "min")["verdict"] == "a"
    assert judge(a, b, "min", by=0.5)["verdict"] == "none"
    assert judge(a, b, "min", by=0.01)["verdict"] == "a"


def test_the_same_values_are_no_difference():
    assert judge([0.5, 0.25, 0.5], [0.5, 0.25, 0.5], "max")["verdict"] == "none"


def test_values_that_can_only_be_some_numbers_widen_the_interval():
    assert resolution([0.5, 0.75, 0.5, 1.0]) == 0.25
    assert resolution([1.0, 1.0]) == 0.0
    same = judge([0.5] * 6, [0.75] * 6, "max")
    assert same["interval"][0] < 0.25 < same["interval"][1]


def test_missing_values_are_worse_than_all_others():
    a, b = worst_for_missing([[0.1, None, 0.3], [0.2, 0.4, math.nan]], "min")
    assert (a, b) == ([0.1, pytest.approx(0.7), 0.3], [0.2, 0.4, pytest.approx(0.7)])
    assert worst_for_missing([[2.0, 1.0], [math.inf, 1.0]], "max")[1][0] == 0.0
    with pytest.raises(UsageError, match="no run is finished"):
        worst_for_missing([[None], [math.nan]], "max")


@pytest.mark.parametrize(("values", "condition"), [([0.5] * 6, "min"), ([0.0] * 6, "max"), ([1, 2, 1, 3, 2, 1], "max")])
def test_a_config_whose_runs_all_fail_loses_also_if_the_others_are_equal(values, condition):
    assert judge(*worst_for_missing([values, [None] * 6], condition), condition)["verdict"] == "a"
    assert judge(*worst_for_missing([[math.nan] * 6, values], condition), condition)["verdict"] == "b"


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("dataset.n=30", "the data of the two differ"),
        ("model.metrics.accuracy={import: b}", "the metrics of the two differ"),
        ("hooks.StopAfter.epochs=4", "the budget of the two differ"),
    ],
)
def test_what_cannot_be_compared_is_refused(override, what):
    trees = [load_config(BASE, overrides).tree for overrides in ((), (override,))]
    with pytest.raises(UsageError, match=what):
        check_comparable(*trees, "accuracy")


def test_keys_that_change_the_training_alone_may_differ():
    trees = [load_config(BASE, overrides).tree for overrides in ((), ("dataset.n=30",))]
    assert check_comparable(*trees, "accuracy", ["batch_size", "n"])
    trees = [load_config(BASE, overrides).tree for overrides in ((), ("dataset.n=30", "dataset.batch_size=5"))]
    assert not check_comparable(*trees, "accuracy", ["batch_size", "n"])
    assert not check_comparable(trees[0], trees[0], "accuracy", ["batch_size", "n"])


@pytest.mark.parametrize(
    ("overrides", "stream", "keys"),
    [
        ((), "valid", ["train", "batch_size", "balance"]),
        (("dataset.split={test: 0.5}",), "valid", ["batch_size", "balance"]),
        ((), "train", ["batch_size"]),
        (("main_loop={train_stream_name: valid}",), "valid", ["batch_size"]),
        (("dataset={class: Majority}",), "valid", ["batch_size"]),
    ],
)
def test_the_class_of_the_dataset_says_which(overrides, stream, keys):
    model = {"class": "TorchModel", "module": {"class": "torch.nn.Identity"}}
    config = {**BASE, "model": model, "hooks": [], "dataset": {"class": "Table", "train": "a.csv"}}
    assert list(train_only(load_config(config, overrides), stream)) == keys


def test_what_is_evaluated_must_be_the_same_in_the_first_pair(tmp_path):
    sides = [Trials(load_config(BASE, given), (), Sweep(repeats=2), tmp_path) for given in ((), ("dataset.n=30",))]
    pair = pairs_of(sides, {})[0]
    for trial, digest in zip(pair.trials, "ab", strict=True):
        code = trial.directory / "code"
        code.mkdir(parents=True)
        note_batch(code, ("train", 1, 1), {"x": digest})
        note_batch(code, ("test", 0, 1), {"x": digest, "y": "c"})
        note_batch(code, ("valid", 0, 1), {"x": "c"})
    pair.check_evaluated("valid")
    with pytest.raises(UsageError, match=r"the data of the two differ: 'x' in the first batch of stream 'test'"):
        pair.check_evaluated("test")


def test_other_models_and_batches_can_be_compared():
    trees = [load_config(BASE, given).tree for given in ((), ("dataset.batch_size=5", "model.optimizer.lr=2"))]
    check_comparable(*trees, "accuracy")


def test_the_trials_of_a_config_and_itself_are_one(tmp_path):
    sides = [Trials(load_config(BASE, given), (), Sweep(repeats=3), tmp_path) for given in ((), ("name=other",))]
    pairs = pairs_of(sides, {})
    assert [len(next(each.grid()).trials) for each in pairs] == [1, 1, 1]
    assert len({pair.trials for pair in pairs}) == 3


CONFIG = """\
seed: 1
dataset: {class: Digits, batch_size: 32}
model: {module: {class: my_model.Net}, optimizer: {class: AdamW, lr: 0.003}}
hooks:
  - ComputeStats: {variables: [loss, accuracy]}
  - StopAfter: {epochs: 3}
"""


def test_a_finished_run_with_config_and_seed_of_a_trial_takes_its_place(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(Trials, "code", property(lambda self: Unchanged(), lambda self, value: None), raising=False)
    make_run("killed", [0.5], status="killed", config=CONFIG)
    run = make_run("one", [0.5, 0.6], config=CONFIG).directory
    side = Trials(load_config(run), (), Sweep(repeats=2, objective="valid/accuracy/mean"), tmp_path / "runs")
    for sources, root in (((str(run),), tmp_path), ((), tmp_path / "log"), ((str(run.parent / "killed"),), tmp_path)):
        first, second = pairs_of([side], finished_runs(sources, root))
        assert first.trials[0].directory == run
        assert second.trials[0].directory.parent == tmp_path / "runs"
    monkeypatch.setattr(Unchanged, "changed", lambda self, directory: ["my_model"])
    assert pairs_of([side], finished_runs([str(run)], tmp_path))[0].trials[0].directory.parent == tmp_path / "runs"


class Unchanged:
    """The code of runs, which is not recorded here."""

    def changed(self, directory):
        return []


@pytest.mark.parametrize(
    ("name", "direction"),
    [("loss", "min"), ("valid_loss", "min"), ("accuracy", "max"), ("f1", "max"), ("size", None)],
)
def test_the_name_of_a_variable_tells_the_direction(name, direction):
    assert direction_of(name) == direction
