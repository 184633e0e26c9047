"""Schedules in a run: when they step, and what the horizon is; tests/training has their resumes."""

from itertools import count

import pytest
import torch
from doubles import SGD, Affine, Streams

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.base.errors import ArgumentError, StateError
from emrun.base.types import Horizon
from emrun.hooks import StopAfter
from emrun.models.schedules.built_in import Constant, Cosine, Linear

XY = [{"x": [1.0, 2.0], "y": [3.0, 5.0]}] * 5


class Rates(AbstractHook):
    """Keeps the learning rate of each update."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_update(self, model):
        self.seen.append(model.optimizer.param_groups[0]["lr"])


def loop_of(scheduler, *hooks, **arguments):
    rates = Rates()
    model = TorchModel(Affine(), optimizer=SGD, scheduler=scheduler)
    return MainLoop(model, Streams(train=XY, valid=XY[:1]), [rates, *hooks], **arguments), rates


def test_the_length_of_the_run_is_that_of_its_limits_and_of_the_zeroth_epoch():
    loop, rates = loop_of(Factory(Linear), StopAfter(epochs=2))
    loop.run_training()
    assert rates.seen == pytest.approx([0.1 * (1 - done / 10) for done in range(10)])
    assert loop.model.optimizer.param_groups[0]["lr"] == 0.0


def test_the_first_rate_is_recorded_for_the_zeroth_epoch():
    class First(AbstractHook):
        def after_epoch(self, epoch_id, epoch_data):
            if epoch_id == 0:
                self.rate = epoch_data["train"]["learning_rate"]

    first = First()
    loop, _ = loop_of(Factory(Linear, warmup="40%"), first, StopAfter(epochs=2))
    loop.run_training()
    assert first.rate == pytest.approx(0.1 / 4)


def test_an_evaluation_needs_no_horizon_and_changes_no_rate():
    loop, _ = loop_of(Factory(Cosine, warmup="5%"), StopAfter(minutes=1))
    loop.run_evaluation("valid")
    with loop:
        loop.epoch([], ["valid"])
    assert loop.model.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("scheduler", "stop", "arguments", "message"),
    [
        (Factory(Cosine), {"minutes": 1}, {}, "scheduler: Cosine needs the number of updates of the run, which is not"),
        (
            Factory(Cosine),
            {"epochs": 1},
            {"skip_zeroth_epoch": True},
            "set main_loop.fixed_epoch_size, or add num_batches to the dataset, or do not skip the zeroth epoch",
        ),
        (Factory(Constant, warmup="5%"), {"minutes": 1}, {}, "scheduler.warmup: 5%, but the number of updates of the"),
        (
            Factory(Constant, warmup="1 pass"),
            {"updates": 9},
            {"fixed_epoch_size": 2},
            "of a pass is not known: add num",
        ),
        (
            Factory(Cosine, warmup="50 updates"),
            {"epochs": 2},
            {},
            "scheduler.warmup: 50 updates: the run makes only 10",
        ),
    ],
)
def test_what_nothing_tells_is_an_error_before_the_first_update(scheduler, stop, arguments, message):
    loop, rates = loop_of(scheduler, StopAfter(**stop), **arguments)
    with pytest.raises(ArgumentError) as caught:
        loop.run_training()
    assert message in str(caught.value)
    assert not rates.seen


@pytest.mark.parametrize("limit", [{"minutes": 1}, {"epochs": 1}])
def test_a_schedule_in_updates_without_an_end_needs_no_horizon(limit):
    stop = StopAfter(**limit)
    stop.clock = count().__next__  # a second later each time
    loop, rates = loop_of(Factory(Constant, warmup="4 updates"), stop, skip_zeroth_epoch=True)
    loop.run_training()
    assert rates.seen[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


def test_a_group_that_a_hook_adds_follows_the_schedule():
    class Adds(AbstractHook):
        def before_training(self):
            new = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0}
            self.main_loop.model.optimizer.add_param_group(new)

    loop, _ = loop_of(Factory(Linear), Adds(), StopAfter(updates=4))
    loop.run_training()
    assert [group["lr"] for group in loop.model.optimizer.param_groups] == [0.0, 0.0]


def test_options_of_torchs_schedulers_are_refused():
    for name, value in {"step_on": "epoch", "metric": "valid/loss"}.items():
        with pytest.raises(
            ArgumentError, match="Cosine steps after each update, and watches nothing; remove"
        ) as caught:
            TorchModel(Affine(), optimizer=SGD, scheduler=Factory(Cosine, options={name: value}))
        assert caught.value.argument == f"scheduler.{name}"


@pytest.mark.parametrize("forged", [{"updates_done": -1}, {"updates_done": 2**70}, {"plan": {"began": -(2**70)}}])
def test_a_forged_number_of_updates_is_not_counted_through(forged):
    schedule = Constant(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    schedule.begin(Horizon(10))
    saved = schedule.state_dict()
    with pytest.raises(StateError, match="scheduler of the checkpoint has made"):
        schedule.load_state_dict({**saved, "state": {**saved["state"], **forged}})


def test_a_warm_up_and_a_cool_down_of_0_are_none():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert Linear(optimizer, warmup=0, cooldown=0.0).warmup is None
    with pytest.raises(ArgumentError, match="5 is not a length with a unit"):
        Linear(optimizer, warmup=5)
