"""torch's schedulers run ahead on a dummy: the rates they will give."""

import threading

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from emrun.base.errors import ArgumentError
from emrun.models.schedules.preview import on_dummy, rates_ahead, without_rate


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def ahead(make, steps, unit="epochs"):
    return rates_ahead(on_dummy(make(optimizer())), steps, unit)


def warm_cosine(its):
    parts = [torchs.LinearLR(its, total_iters=5), torchs.CosineAnnealingLR(its, T_max=15)]
    return torchs.SequentialLR(its, parts, milestones=[5])


SCHEDULES = {  # scheduler, number of steps
    "cosine": (lambda o: torchs.CosineAnnealingLR(o, T_max=20), 20),
    "cosine that is not at its end": (lambda o: torchs.CosineAnnealingLR(o, T_max=20), 8),
    "cosine that is at its end a little early": (lambda o: torchs.CosineAnnealingLR(o, T_max=20), 60),
    "one cycle": (lambda o: torchs.OneCycleLR(o, max_lr=0.3, total_steps=50), 50),
    "warm-up alone": (lambda o: torchs.LinearLR(o), 100),
    "warm-up and cosine": (warm_cosine, 20),
    "step": (lambda o: torchs.StepLR(o, step_size=5), 20),
    "steps": (lambda o: torchs.MultiStepLR(o, [10, 15]), 20),
    "linear to a tenth, early": (lambda o: torchs.LinearLR(o, 1.0, 0.1, total_iters=5), 100),
    "exponential": (lambda o: torchs.ExponentialLR(o, 0.9), 100),
    "polynomial": (lambda o: torchs.PolynomialLR(o, total_iters=20), 20),
    "restarts": (lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=5), 100),
    "cyclic": (lambda o: torchs.CyclicLR(o, 0.01, 0.1, step_size_up=10), 100),
    "chained": (lambda o: torchs.ChainedScheduler([torchs.ConstantLR(o), torchs.ExponentialLR(o, 0.9)]), 20),
    "a function that is constant": (lambda o: torchs.LambdaLR(o, lambda step: 1.0), 20),
    "a trial of an epoch": (lambda o: torchs.StepLR(o, step_size=30), 1),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # of SequentialLR in torch 2.6 itself
def test_a_schedule_has_the_rates_that_it_will_give(name):
    make, steps = SCHEDULES[name]
    found = ahead(make, steps)
    its, expected = optimizer(), []
    scheduler = make(its)
    for _ in range(steps + 1):
        expected.append(its.param_groups[0]["lr"])
        its.step()
        if len(expected) <= steps:
            scheduler.step()
    assert found == [expected]


def test_the_scheduler_and_its_optimizer_are_left_as_they_are():
    its = optimizer()
    scheduler = warm_cosine(its)
    before = repr(scheduler.state_dict()), repr(its.param_groups)
    rates_ahead(on_dummy(scheduler), 20, "epochs")
    assert (repr(scheduler.state_dict()), repr(its.param_groups)) == before


def test_a_scheduler_of_the_users_own_is_not_run_ahead():
    class Own(torchs.StepLR):
        pass

    assert on_dummy(Own(optimizer(), 3)) is None
    assert on_dummy(torchs.ChainedScheduler([Own(optimizer(), 3)])) is None


@pytest.mark.parametrize(
    ("make", "steps", "key", "message"),
    [
        (
            lambda o: torchs.OneCycleLR(o, 0.3, epochs=2, steps_per_epoch=10),
            30,
            "scheduler.total_steps",
            "OneCycleLR makes 20 steps, but the run has 30 epochs (torch: Tried to step 21 times",
        ),
        (
            lambda o: torchs.LambdaLR(o, lambda step: 1 / (3 - step)),
            5,
            "scheduler",
            "LambdaLR makes 2 steps, but the run has 5 epochs (torch: division by zero)",
        ),
        (
            lambda o: torchs.ExponentialLR(o, float("nan")),
            5,
            "scheduler",
            "ExponentialLR makes 0 steps, but the run has 5 epochs (torch: its next rate is nan)",
        ),
    ],
)
def test_a_step_that_raises_is_an_error_with_the_key_to_change(make, steps, key, message):
    with pytest.raises(ArgumentError) as caught:
        ahead(make, steps)
    assert caught.value.argument == key
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("make", "steps", "count"),
    [
        (lambda o: torchs.PolynomialLR(o, total_iters=5), 50, 45),
        (lambda o: torchs.ExponentialLR(o, 0.5), 200, 180),
        (lambda o: torchs.CosineAnnealingLR(o, T_max=20), 20, 0),
        (lambda o: torchs.StepLR(o, step_size=5), 20, 0),
    ],
)
def test_steps_without_a_rate_are_counted(make, steps, count):
    assert without_rate(ahead(make, steps), [0.1]) == count


def test_what_cannot_be_copied_is_not_run_ahead():
    its = optimizer()
    its.param_groups[0]["lock"] = threading.Lock()
    assert on_dummy(torchs.StepLR(its, 3)) is None
