"""SaveBest: which epochs are better, what it reads, and what happens when it cannot save."""

import json
import logging
import math

import numpy as np
import pytest
import torch
from campaign import thinned

from emrun import AbstractHook, MainLoop, create_training, resume_training
from emrun.base.errors import ArgumentError, ConfigError, HookError, StorageError
from emrun.hooks import ComputeStats, SaveBest, StopAfter
from emrun.training.create import train

NAN = math.nan


def named(run):
    """Return name -> epoch of a run's checkpoints."""
    links = sorted(path for path in run.checkpoints.iterdir() if path.is_symlink())
    return {path.name: json.loads((path / "manifest.json").read_text())["epoch"] for path in links}


class Look(AbstractHook):
    """Keeps the epoch of a checkpoint after each epoch."""

    def __init__(self, name="best"):
        super().__init__()
        self.name = name
        self.seen = []

    def after_epoch_profile(self):
        self.requested = True

    def before_epoch(self, epoch_id):
        if epoch_id:
            self.look()

    def after_training(self):
        self.look()

    def look(self):
        place = self.main_loop.run.checkpoints / self.name
        self.seen.append(json.loads((place / "manifest.json").read_text())["epoch"] if place.exists() else None)


@pytest.fixture
def best_epochs(scripted, numbers, write, run):
    """Return the epoch of the checkpoint after each epoch with these values."""

    def train(values, variable="score", aggregation="mean", stream="valid", extra_streams=("valid",), **arguments):
        look = Look(arguments.get("model_name", "best"))
        hooks = [
            look,
            write(values, stream, variable, aggregation),
            SaveBest(variable=variable, aggregation=aggregation, stream=stream, **arguments),
            StopAfter(epochs=len(values) - 1),
        ]
        loop = MainLoop(scripted(), numbers, hooks, extra_streams=extra_streams, run=run)
        assert loop.run_training().status == "finished"
        return look.seen

    return train


def with_best(hook, value):
    """Return the state of a hook whose best value so far is this one, in the first epoch."""
    return {**hook.state_dict(), "kept": [{"value": value, "epoch": 1}]}


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits([*in_docstring(SaveBest), {"StopAfter": {"epochs": 3}}])
    scores = [line["streams"]["valid"]["accuracy"]["mean"] for line in training.main_loop.metrics]
    manifest = json.loads((training.output_dir / "checkpoints" / "best" / "manifest.json").read_text())
    assert manifest["epoch"] == scores.index(max(scores))


BETTER = [
    ("min", [5, 4, 4, 3, 9], [0, 1, 1, 3, 3]),  # equal is not better
    ("max", [5, 4, 5, 6, 6, -1], [0, 0, 0, 3, 3, 3]),
    ("min", [0.0, -0.0, -1.0], [0, 0, 2]),
    ("min", [1.0, -math.inf, -5], [0, 1, 1]),
    ("max", [-math.inf, -1e300], [0, 1]),
    ("min", [NAN, 7, 8], [None, 1, 1]),  # a first NaN does not stick
    ("max", [NAN, NAN, 1, NAN, 2], [None, None, 2, 2, 4]),  # NaN is never better
    ("min", [NAN, NAN], [None, None]),
]


@pytest.mark.parametrize(
    ("condition", "values", "epochs"), thinned(BETTER, [BETTER[0], BETTER[1], BETTER[3], BETTER[6]])
)
def test_an_epoch_that_is_strictly_better_is_saved(best_epochs, condition, values, epochs):
    assert best_epochs(values, condition=condition) == epochs


def test_less_of_the_mean_loss_of_valid_is_better_by_default():
    assert list(SaveBest().monitors) == ["valid/loss/mean"]
    assert SaveBest().name == "best"


def test_another_aggregation_counts(best_epochs):
    assert best_epochs([3, 1, 2], variable="loss", aggregation="std") == [0, 1, 1]


@pytest.mark.parametrize("aggregation", [None, ""])
def test_a_plain_number_counts_without_an_aggregation(best_epochs, aggregation):
    assert best_epochs([3, 1, 2], aggregation=aggregation) == [0, 1, 1]


def test_a_plain_number_is_its_own_mean(scripted, numbers, write, run):
    hooks = [write([3, 1, 2], aggregation=None), SaveBest(variable="score"), StopAfter(epochs=2)]
    MainLoop(scripted(), numbers, hooks, extra_streams=["valid"], run=run).run_training()
    assert named(run) == {"best": 1, "latest": 2}


@pytest.mark.parametrize(
    ("condition", "values", "kept"),
    [
        ("min", [9, 4, 6, 5, 7], {"best": 1, "best-1": 1, "best-2": 2, "best-3": 3}),
        ("max", [1, 5, 5, 5, 5], {"best": 1, "best-1": 1, "best-2": 2, "best-3": 3}),  # of equals, the earliest
        ("min", [NAN, 2, NAN, 1, NAN], {"best": 3, "best-1": 1, "best-3": 3}),
    ],
    ids=["the three best", "equal values", "NaN"],
)
def test_the_best_few_are_kept_under_their_epochs(scripted, numbers, write, run, condition, values, kept):
    hooks = [write(values), SaveBest(variable="score", condition=condition, keep=3), StopAfter(epochs=4)]
    MainLoop(scripted(), numbers, hooks, extra_streams=["valid"], run=run).run_training()
    assert named(run) == {**kept, "latest": 4}
    assert len([path for path in run.checkpoints.iterdir() if not path.is_symlink()]) == len({*kept.values(), 4})


def test_a_resume_keeps_the_same_checkpoints_as_an_uninterrupted_run(tmp_path, digits_config):
    best = {"SaveBest": {"variable": "accuracy", "condition": "max", "keep": 2}}
    stats = {"ComputeStats": {"variables": ["loss", "accuracy"]}}
    config = digits_config([stats, best, {"StopAfter": {"epochs": 5}}], batch_size=500)
    straight = create_training(config, output_dir=tmp_path / "straight")
    train(straight)
    train(create_training(config, output_dir=tmp_path / "two", overrides=["hooks.StopAfter.epochs=2"]))
    resumed = resume_training(tmp_path / "two", overrides=["hooks.StopAfter.epochs=5"])
    train(resumed)
    assert named(resumed.main_loop.run) == named(straight.main_loop.run)
    assert len(named(straight.main_loop.run)) == 4


def test_another_stream_counts(best_epochs):
    assert best_epochs([3, 1, 2], stream="train") == [0, 1, 1]


def test_the_checkpoint_may_have_another_name(best_epochs, run):
    assert best_epochs([3, 1, 2], model_name="lowest") == [0, 1, 1]
    assert not (run.checkpoints / "best").exists()


def test_epochs_that_do_not_evaluate_the_stream_are_passed_over(best_epochs):
    values = [5, None, 4, None, 6]
    assert best_epochs(values, extra_streams=[{"valid": "2 epochs"}]) == [0, 0, 2, 2, 2]


def test_two_of_them_keep_two_checkpoints(scripted, numbers, write, run):
    lowest, highest = Look("lowest"), Look("highest")
    hooks = [
        lowest,
        highest,
        write([2, 3, 1]),
        SaveBest(model_name="lowest", variable="score"),
        SaveBest(model_name="highest", variable="score", condition="max"),
        StopAfter(epochs=2),
    ]
    MainLoop(scripted(), numbers, hooks, extra_streams=["valid"], run=run).run_training()
    assert (lowest.seen, highest.seen) == ([0, 0, 2], [0, 1, 1])


def test_an_evaluation_neither_saves_nor_counts(scripted, numbers, write, run):
    best = SaveBest(variable="score")
    loop = MainLoop(scripted(), numbers, [write([1.0]), best], run=run)
    loop.run_evaluation("valid")
    assert not run.checkpoints.exists()
    assert best.state_dict()["kept"] == []


@pytest.mark.parametrize("before", [{"variable": "loss"}, {"stream": "test"}, {"condition": "max"}], ids=str)
def test_the_best_value_of_another_statistic_does_not_count(before, caplog):
    best = SaveBest(variable="score")
    best.load_state_dict(with_best(SaveBest(**{"variable": "score", **before}), 2.0))
    assert best.state_dict() == SaveBest(variable="score").state_dict()
    assert "SaveBest now watches another statistic, valid/score/mean" in caplog.text


def test_a_resume_names_the_hook_it_removes_and_checkpoints_that_no_hook_saves_stay(tmp_path, digits_config, caplog):
    caplog.set_level(logging.INFO)
    hooks = ["ComputeStats", {"SaveBest": {"keep": 3}}, {"StopAfter": {"epochs": 2}}]
    train(create_training(digits_config(hooks, batch_size=500), output_dir=tmp_path / "run"))
    training = resume_training(tmp_path / "run", ["~hooks.SaveBest", "hooks.StopAfter.epochs=3"])
    train(training)
    assert "changed: hooks.SaveBest: {'keep': 3} -> not set, hooks.StopAfter.epochs: 2 -> 3" in caplog.messages
    assert named(training.main_loop.run) == {"best": 2, "best-0": 0, "best-1": 1, "best-2": 2, "latest": 3}


def test_bests_stay_when_hooks_are_listed_in_another_order_with_a_new_one_first(tmp_path, digits_config):
    loss = {"SaveBest": {"condition": "max"}}  # the zeroth epoch is the best: a later checkpoint would replace it
    accuracy = {"SaveBest": {"model_name": "acc", "variable": "accuracy"}}
    stats = {"ComputeStats": {"variables": ["loss", "accuracy"]}}
    config = digits_config([stats, loss, accuracy, {"StopAfter": {"epochs": 1}}], batch_size=500)
    train(create_training(config, output_dir=tmp_path / "run"))
    hooks = [stats, {"SaveBest": {"model_name": "new"}}, accuracy, loss, {"StopAfter": {"epochs": 2}}]
    resumed = resume_training(tmp_path / "run", [f"hooks={json.dumps(hooks)}"])
    train(resumed)
    assert named(resumed.main_loop.run) == {"acc": 0, "best": 0, "latest": 2, "new": 2}


def test_it_continues_from_the_best_value_of_its_state(scripted, numbers, write, run):
    best = SaveBest(variable="score")
    best.load_state_dict(with_best(best, 2.0))
    look = Look()
    hooks = [look, write([4, 3, 1]), best, StopAfter(epochs=2)]
    MainLoop(scripted(), numbers, hooks, extra_streams=["valid"], run=run).run_training()
    assert look.seen == [None, None, 2]
    assert best.state_dict()["kept"] == [{"value": 1.0, "epoch": 2}]


def test_without_a_run_directory_it_is_an_error_at_the_start(scripted, numbers):
    with pytest.raises(HookError, match=r"SaveBest saves checkpoints, but the main loop has no run directory"):
        MainLoop(scripted(), numbers, [SaveBest()])


def test_a_checkpoint_that_cannot_be_saved_fails_the_training(scripted, numbers, write, run):
    hooks = [write([2, 1]), SaveBest(variable="score"), StopAfter(epochs=1)]
    loop = MainLoop(scripted(failures=1), numbers, hooks, extra_streams=["valid"], run=run)
    with pytest.raises(StorageError, match=r"the disk is full"):
        loop.run_training()
    assert loop.outcome.exit_status == 74


@pytest.mark.parametrize(("policy", "warnings"), [("warn", 1), ("ignore", 0)])
def test_the_training_continues_without_the_checkpoint(scripted, numbers, write, run, policy, warnings, caplog):
    look = Look()
    hooks = [look, write([3, 2, 1]), SaveBest(variable="score", on_save_failure=policy), StopAfter(epochs=2)]
    loop = MainLoop(scripted(failures=1), numbers, hooks, extra_streams=["valid"], run=run)
    assert loop.run_training().status == "finished"
    assert look.seen == [None, 1, 2]
    told = [record for record in caplog.records if "no checkpoint was saved" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING] * warnings


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"condition": "less"}, "condition", "'less' is not one of min, max"),
        ({"on_save_failure": "fail"}, "on_save_failure", "'fail' is not one of error, warn, ignore"),
        ({"model_name": ""}, "model_name", "'' is not a name"),
        ({"model_name": 3}, "model_name", "3 is not a name"),
        ({"keep": 0}, "keep", "0 is not a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        SaveBest(**arguments)
    assert caught.value.argument == argument
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([{"SaveBest": None}, {"ComputeStats": {"variables": ["loss"]}}],
         "hooks[0].SaveBest: SaveBest monitors valid/loss/mean, which ComputeStats writes later; move this hook"),
        ([{"ComputeStats": {"variables": ["loss"]}}, {"SaveBest": {"variable": "los"}}],
         "hooks[1].SaveBest: SaveBest monitors valid/los/mean, but no hook writes 'los/mean'; did you mean"),
        ([{"ComputeStats": {"variables": ["loss"]}}, {"SaveBest": {"aggregation": "max"}}],
         "hooks[1].SaveBest: SaveBest monitors valid/loss/max, but no hook writes 'loss/max'"),
        ([{"ComputeStats": {"variables": ["loss"]}}, {"SaveBest": {"stream": "vaild"}}],
         "stream 'vaild' is not run; did you mean 'valid'?"),
        ([{"ComputeStats": {"variables": ["loss"]}}, {"SaveBest": {"condition": "less"}}],
         "hooks[1].SaveBest.condition: 'less' is not one of min, max"),
    ],
)  # fmt: skip
def test_what_it_cannot_read_is_an_error_before_the_training(tmp_path, digits_config, hooks, message):
    with pytest.raises(ConfigError) as caught:
        create_training(digits_config([*hooks, {"StopAfter": {"epochs": 1}}]), output_root=tmp_path)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("written", "aggregation", "message"),
    [
        ({}, "mean", "there is no 'loss': valid has nothing"),
        ({"loss": 3.0}, "std", "there is no 'loss/std': valid has loss"),
    ],
)
def test_what_is_not_there_after_all_is_an_error(scripted, numbers, run, written, aggregation, message):
    class Forget(ComputeStats):
        def after_epoch(self, epoch_id, epoch_data):
            epoch_data["valid"].update(written)

    hooks = [Forget([{"loss": ["mean", "std"]}]), SaveBest(aggregation=aggregation), StopAfter(epochs=1)]
    loop = MainLoop(scripted(), numbers, hooks, extra_streams=["valid"], run=run)
    with pytest.raises(HookError, match=rf"SaveBest monitors valid/loss/{aggregation}, but {message}"):
        loop.run_training()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("3.0", "'3.0'"),
        (None, "None"),
        (np.ones(2), "ndarray of shape (2,)"),
        (torch.ones(2, 2), "Tensor of shape (2, 2)"),
        ([1.0], "[1.0]"),
    ],
    ids=str,
)
def test_what_is_not_a_number_is_an_error_that_names_it(best_epochs, value, told):
    with pytest.raises(HookError) as caught:
        best_epochs([value], aggregation=None)
    assert str(caught.value) == f"SaveBest monitors valid/score, which is not a number: {told}"


def test_a_variable_without_an_aggregation_is_its_mean(scripted, numbers, run):
    stats = ComputeStats([{"loss": ["mean", "std"]}])
    best = SaveBest(aggregation=None)
    MainLoop(scripted(), numbers, [stats, best, StopAfter(epochs=1)], extra_streams=["valid"], run=run).run_training()

    class Stats(ComputeStats):
        writes = property(lambda self: ("loss",), lambda self, names: None)

    hooks = [Stats([{"loss": ["max", "std"]}]), SaveBest(aggregation=None), StopAfter(epochs=1)]
    with pytest.raises(HookError, match=r"valid/loss, but there is no 'loss': valid has loss/max, loss/std"):
        MainLoop(scripted(), numbers, hooks, extra_streams=["valid"], run=run).run_training()


def test_numbers_of_any_kind_are_compared(best_epochs):
    values = [np.float32(3.0), np.array(1.0), torch.tensor(2.0), np.array([0.5])]
    assert best_epochs(values, aggregation=None) == [0, 1, 1, 3]
