"""The horizon: how many updates the run will make, from the limits of hooks and the length of the train stream."""

import logging

import pytest
import torch
from doubles import LossOfOne, Streams

from emrun import AbstractHook, MainLoop, create_training, resume_training
from emrun.base.errors import HookError
from emrun.base.types import Horizon
from emrun.hooks import StopAfter
from emrun.training.create import train


class Look(AbstractHook):
    """Keeps the horizon at the beginning of each epoch."""

    def __init__(self, **limits):
        super().__init__()
        self.limits = limits
        self.seen = []

    def before_epoch(self):
        self.seen.append(self.main_loop.horizon)


def loop_of(*hooks, known=None, **arguments):
    """Return a loop with a pass of three batches; `known` is what the dataset says."""
    dataset = Streams(train=[{"x": [1]}] * 3)
    if known is not None:
        dataset.num_batches = {"train": known}
    return MainLoop(LossOfOne(), dataset, hooks, **arguments)


@pytest.mark.parametrize(
    ("limits", "arguments", "updates"),
    [
        ({"updates": 200}, {}, 200),
        ({"iterations": 200}, {}, 200),
        ({"epochs": 5}, {"known": 3}, 15),
        ({"passes": 5}, {"known": 3}, 15),
        ({"epochs": 5}, {"fixed_epoch_size": 7}, 35),
        ({"epochs": 5, "passes": 2}, {"fixed_epoch_size": 7, "known": 3}, 6),
        ({"epochs": 5, "updates": 14}, {"known": 3}, 14),
        ({"epochs": 0}, {"known": 3}, 0),
    ],
)
def test_the_horizon_is_the_smallest_limit_in_updates(limits, arguments, updates):
    loop = loop_of(StopAfter(minutes=9, **limits), **arguments)
    assert loop.horizon.updates == updates
    assert not loop.horizon.missing


class Rows:
    """A million rows, which are asked of `ctx.batches` in two calls; a batch is counted."""

    made = 0

    def train_stream(self, ctx):
        for size in (600_001, 400_000):
            for rows in ctx.batches(size, 100, shuffle=True):
                self.made += 1
                yield {"x": rows}


class Changes(AbstractHook):
    def before_batch(self, batch):
        batch["x"] = batch["x"][:50]


@pytest.mark.parametrize(
    ("arguments", "hooks", "of_pass"),
    [
        ({"skip_zeroth_epoch": True}, [], 10_001),
        ({}, [], 10_001),
        ({"fixed_batch_size": 100}, [], 10_000),
        ({"fixed_batch_size": 50}, [], None),
        ({"fixed_batch_size": 50, "skip_zeroth_epoch": True}, [Changes()], None),
        ({}, [Changes()], None),
        ({"overfit": 7}, [], 7),
        ({"fixed_epoch_size": 500, "skip_zeroth_epoch": True}, [], 10_001),
    ],
)
def test_the_length_of_a_pass_is_what_ctx_batches_is_asked_for(arguments, hooks, of_pass):
    data = Rows()
    loop = MainLoop(LossOfOne(), data, [*hooks, StopAfter(passes=2)], **arguments)
    loop.check_hooks()
    assert loop.horizon.updates_per_pass == of_pass
    assert data.made == 0


def test_a_stream_that_may_lose_a_batch_or_has_no_end_is_not_asked():
    class Endless:
        def train_stream(self, ctx):
            while True:
                yield from ({"x": rows} for rows in ctx.batches(4, 2))

    class Same:
        def __init__(self):
            self.batches = iter([{"x": [1]}] * 3)

        def train_stream(self, ctx):
            return self.batches

    for data in (Endless(), Same()):
        loop = MainLoop(LossOfOne(), data, [StopAfter(epochs=2)], skip_zeroth_epoch=True)
        assert loop.horizon.updates is None
    assert len(list(data.batches)) == 3


def test_batches_that_are_dropped_count_neither_in_the_zeroth_epoch_nor_in_the_schedule():
    data = Streams(train=[{"x": [1, 2]}, {"x": [1]}, {"x": [3, 4]}])
    data.num_batches = {"train": 3}
    look = Look()
    MainLoop(LossOfOne(), data, [look, StopAfter(epochs=2)], fixed_batch_size=2).run_training()
    assert look.seen[1:] == [Horizon(4, 2)] * 2


def test_limits_of_several_hooks_count():
    assert loop_of(StopAfter(epochs=5), Look(updates=8), known=3).horizon.updates == 8


def test_the_zeroth_epoch_tells_the_length_of_a_pass():
    look = Look()
    loop_of(look, StopAfter(epochs=2)).run_training()
    assert look.seen[0] == Horizon(None, is_awaited=True)
    assert look.seen[1:] == [Horizon(6, 3)] * 2


def test_of_what_the_dataset_and_the_zeroth_epoch_say_the_dataset_counts_and_a_pass_of_another_length_warns(caplog):
    look = Look()
    loop_of(look, StopAfter(epochs=3), known=4).run_training()
    assert look.seen == [Horizon(12, 4)] * 4
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warning.startswith(
        "pass 1 of stream 'train' had 3 batches, but the schedule was made for 4 (from num_batches of the dataset);"
    )


def test_a_pass_of_another_length_within_epochs_of_a_fixed_size_warns(caplog):
    loop_of(Look(), StopAfter(passes=2), known=4, fixed_epoch_size=2).run_training()
    assert caplog.text.count("had 3 batches") == 1


@pytest.mark.parametrize("hooks", [[StopAfter(epochs=3)], [StopAfter(updates=9), Look()]], ids=["no one", "updates"])
def test_a_length_that_nothing_depends_on_is_not_warned_of(caplog, hooks):
    loop_of(*hooks, known=4).run_training()
    assert "batches" not in caplog.text


@pytest.mark.parametrize(
    ("limits", "arguments", "missing"),
    [
        ({"minutes": 5}, {}, "no hook limits the updates of the run; add for example StopAfter: {updates: 1000}"),
        ({"epochs": 5}, {"skip_zeroth_epoch": True}, "or do not skip the zeroth epoch"),
        ({"passes": 5, "updates": 7}, {"fixed_epoch_size": 2}, "pass of stream 'train' is not known; give StopAfter a"),
    ],
)
def test_what_is_missing_is_named_with_the_ways_out(limits, arguments, missing):
    horizon = loop_of(StopAfter(**limits), **arguments).horizon
    assert horizon.updates is None
    assert missing in horizon.missing


@pytest.mark.parametrize(
    ("hooks", "arguments", "message"),
    [
        (
            [StopAfter(epochs=3), StopAfter(epochs=5)],
            {},
            "epochs: 5 contradicts epochs: 3 of StopAfter; the larger limit is never reached, remove it",
        ),
        (
            [StopAfter(epochs=3, passes=2)],
            {},
            "passes: 2 contradicts epochs: 3, as every epoch is a pass without main_loop.fixed_epoch_size",
        ),
        ([StopAfter(updates=3, iterations=4)], {}, "iterations: 4 contradicts updates: 3, as every"),
        ([StopAfter(passes=2)], {"fixed_epoch_size": 2}, "an epoch is not a pass, and the number of batches of a pass"),
        ([Look(minutes=3)], {}, "limits: 'minutes': 3 is not a whole number of epochs, passes, updates, iterations"),
        ([Look(epochs=2.5)], {}, "limits: 'epochs': 2.5 is not a whole number of"),
    ],
)
def test_limits_that_contradict_each_other_or_cannot_be_counted_are_an_error(hooks, arguments, message):
    with pytest.raises(HookError) as caught:
        loop_of(*hooks, **arguments).run_training()
    assert message in str(caught.value)
    assert caught.value.hook_index == len(hooks) - 1


def test_limits_that_agree_are_no_error():
    loop = loop_of(StopAfter(epochs=2, updates=5), StopAfter(epochs=2), Look(passes=2))
    loop.run_training()
    assert loop.updates_done == 5


DATA = """
class Data:
    def __init__(self, n):
        self.n = n

    def train_stream(self):
        return [{"x": [[1.0]]}] * self.n
"""


def test_the_length_of_a_pass_is_kept_in_the_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "horizon_data.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    config = {
        "dataset": {"class": "horizon_data.Data", "n": 3},
        "model": {
            "module": {"class": "torch.nn.Linear", "in_features": 1, "out_features": 1},
            "inputs": ["x"],
            "outputs": ["loss"],
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "hooks": [{"StopAfter": {"epochs": 2}}],
    }
    train(create_training(config, output_dir="run"))
    state = torch.load(tmp_path / "run" / "checkpoints" / "latest" / "state.pt", weights_only=True)
    assert state["horizon"] == {"batches_per_pass": 3, "lengths": {"train": "3 batches"}}
    resumed = resume_training("run", ["hooks.StopAfter.epochs=4", "dataset.n=5"])
    assert resumed.main_loop.horizon == Horizon(12, 3)
