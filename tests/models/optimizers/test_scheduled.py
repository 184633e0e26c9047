"""An optimizer with its schedule: their plan for the length of a run, when it is known; the rates of an update."""

import logging

import pytest
import torch
from doubles import SGD, Affine, Streams

from emrun import AbstractHook, Factory, MainLoop, TorchModel, UpdateSkipped
from emrun.base.errors import ArgumentError
from emrun.hooks import StopAfter
from emrun.models.optimizers.scheduled import ScheduledOptimizer
from emrun.models.schedules.built_in import Constant, Cosine

XY = [{"x": [1.0, 2.0], "y": [3.0, 5.0]}] * 4
STEP = torch.optim.lr_scheduler.StepLR


def model_of(scheduler, *, known=True, stop=None, **arguments):
    """Return the model of a loop with four batches in a pass."""
    dataset = Streams(train=XY)
    if known:
        dataset.num_batches = {"train": 4}
    model = TorchModel(Affine(), optimizer=SGD, scheduler=scheduler)
    MainLoop(model, dataset, [StopAfter(**(stop or {"epochs": 5}))], **arguments)
    return model


def train(model):
    model._main_loop.run_training()


def test_the_rates_of_the_plan_are_those_of_the_updates():
    model = model_of(Factory(Cosine, warmup="10%", final=0.1))
    plan = model.schedule_plan()
    assert (plan.name, plan.updates, plan.steps) == ("Cosine, warm-up 2 updates", 20, None)
    found = []
    model.optimizer.register_step_pre_hook(lambda its, *_: found.append(its.param_groups[0]["lr"]))
    train(model)
    assert list(plan.rates[0]) == found


@pytest.mark.parametrize(
    ("stop", "arguments", "steps"),
    [
        ({"epochs": 5}, {}, 5),
        ({"passes": 5}, {}, 5),
        ({"updates": 20}, {}, 5),
        ({"epochs": 5, "updates": 18}, {}, 4),
        ({"updates": 20}, {"fixed_epoch_size": 2}, 10),
        ({"passes": 5, "epochs": 9}, {"fixed_epoch_size": 2}, 9),
        ({"epochs": 5}, {"known": False}, 5),
    ],
)
def test_a_scheduler_of_torch_steps_as_often_as_there_are_epochs(stop, arguments, steps):
    plan = model_of(Factory(STEP, step_size=2, gamma=0.5), stop=stop, **arguments).schedule_plan()
    assert plan.steps == steps
    assert list(plan.rates[0]) == [0.1 * 0.5 ** (epoch // 2) for epoch in range(steps)]


def test_the_plan_shows_shares_until_the_zeroth_epoch_has_told_the_length(caplog):
    caplog.set_level(logging.INFO)
    model = model_of(Factory(Cosine, warmup="10%", final=0.1), known=False)
    first = model.schedule_plan()
    assert first.lines()[0] == (
        "learning rate: Cosine, warm-up 10%; the number of updates is known after the zeroth epoch"
    )
    assert first.lines()[1].startswith("  0% 0.0001, 25% 0.094, 50%")
    train(model)
    assert caplog.text.count("learning rate over 20 updates: Cosine, warm-up 2 updates") == 1


def test_lengths_in_updates_are_not_drawn_over_a_run_of_unknown_length():
    plan = model_of(Factory(Cosine, warmup="3 updates"), known=False).schedule_plan()
    assert not plan.rates
    assert "warm-up 3 updates; the number of updates is known after the zeroth epoch" in plan.lines()[0]


def test_a_scheduler_of_torch_that_raises_is_found_once_the_length_is_known():
    options = {"step_on": "update"}
    scheduler = Factory(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=2, options=options)
    model = model_of(scheduler, known=False)
    assert model.schedule_plan().note == "the length of the run is known after the zeroth epoch"
    with pytest.raises(ArgumentError, match="OneCycleLR makes 2 steps, but the run has 20 updates"):
        train(model)
    assert model._main_loop.updates_done == 0


@pytest.mark.parametrize(
    ("scheduler", "stop", "note"),
    [
        (Factory(Constant, warmup="2 updates"), {"minutes": 5}, "no hook limits the updates of the run"),
        (Factory(STEP, step_size=2), {"minutes": 5}, "the length of the run is not known"),
        (
            Factory(torch.optim.lr_scheduler.ReduceLROnPlateau, options={"metric": "train/loss"}),
            {"epochs": 5},
            "the rate depends on train/loss",
        ),
        (
            Factory(STEP, step_size=2, options={"step_on": "update"}),
            {"updates": 60_000},
            "the rates of a schedule of more than 50000 steps are not known in advance",
        ),
    ],
)
def test_what_cannot_be_known_is_said(scheduler, stop, note):
    assert model_of(scheduler, stop=stop).schedule_plan().note == note


def test_a_model_without_a_schedule_has_no_plan():
    assert model_of(None).schedule_plan() is None
    assert TorchModel(Affine(), optimizer=SGD, scheduler=Factory(Cosine)).schedule_plan() is None  # without a loop


def test_the_rates_of_an_update_are_numbers_those_of_each_group_that_has_one():
    form = Factory(torch.optim.SGD, options={"groups": [{"match": "w", "lr": 0.5}]}, lr=0.125)
    member = ScheduledOptimizer(Affine(), "", form, None)
    first, second = member.optimizer.param_groups
    member.note_rates()
    assert member.rates == [0.125, 0.5]
    first["lr"] = torch.tensor(0.25)
    member.note_rates()
    assert (member.rates, type(member.rates[0])) == ([0.25, 0.5], float)
    del second["lr"]
    member.note_rates()
    assert member.rates == [0.25]


class SkipsFirst(AbstractHook):
    def before_update(self):
        if not self.main_loop.updates_done:
            raise UpdateSkipped("it is the first")


def test_a_scheduler_steps_after_a_first_update_that_is_skipped_and_torch_does_not_warn():
    model = TorchModel(Affine(), optimizer=SGD, scheduler=Factory(STEP, step_size=1, options={"step_on": "update"}))
    MainLoop(model, Streams(train=XY[:1]), [SkipsFirst(), StopAfter(epochs=2)]).run_training()
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
