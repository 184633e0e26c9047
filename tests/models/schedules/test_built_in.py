"""The schedules against their formulas, those of torch and those of transformers."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

from emrun.base.errors import ArgumentError
from emrun.base.types import Horizon
from emrun.models.schedules.built_in import Constant, Cosine, Exponential, InverseSqrt, Linear, Polynomial, Steps

N = 200
BASE = 3e-3


def optimizer(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (BASE,)]
    return torch.optim.SGD(groups)


def rates(schedule, updates=N, horizon=None):
    """Return the rate of each update of the first parameter group."""
    schedule.begin(horizon or Horizon(N, 50))
    found = []
    for _ in range(updates):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


def closed_form_of_torch(make):
    """Return the rates of torch's closed form, which torch itself replaces by a recursion that rounds."""
    scheduler = make(optimizer())
    found = []
    for done in range(N):
        scheduler.last_epoch = done
        found.append(scheduler._get_closed_form_lr()[0])
    return found


def stepped(make):
    """Return the rates of torch's scheduler as it steps."""
    its = optimizer()
    scheduler, found = make(its), []
    for _ in range(N):
        found.append(its.param_groups[0]["lr"])
        its.step()
        scheduler.step()
    return found


TO_THE_LAST_BIT = {
    "Linear": (lambda o: Linear(o), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, N)),
    "Cosine": (lambda o: Cosine(o), lambda o: lr_scheduler.CosineAnnealingLR(o, N)),
    "Polynomial": (lambda o: Polynomial(o, power=2.0), lambda o: lr_scheduler.PolynomialLR(o, N, 2.0)),
    "Steps": (
        lambda o: Steps(o, ["30%", "100 updates", "3 passes"], gamma=0.3),
        lambda o: lr_scheduler.MultiStepLR(o, [60, 100, 150], 0.3),
    ),
}


@pytest.mark.parametrize("name", TO_THE_LAST_BIT)
def test_a_schedule_is_torchs_closed_form_to_the_last_bit_and_nearly_its_recursion(name):
    own, torchs = TO_THE_LAST_BIT[name]
    found = rates(own(optimizer()))
    assert found == closed_form_of_torch(torchs)
    assert found == pytest.approx(
        stepped(torchs), rel=1e-9, abs=1e-15
    )  # it multiplies the last rate, and rounds each time
    assert len(set(found)) > 3


@pytest.mark.parametrize("final", [0.1, 0.5])
def test_decays_to_more_than_0_are_torchs_but_for_rounding(final):
    """torch rounds `final * lr` and the height of the decay; here both are shares."""
    pairs = [
        (Linear(optimizer(), final=final), lambda o: lr_scheduler.LinearLR(o, 1.0, final, N)),
        (Cosine(optimizer(), final=final), lambda o: lr_scheduler.CosineAnnealingLR(o, N, eta_min=final * BASE)),
        (Exponential(optimizer(), final=final), lambda o: lr_scheduler.ExponentialLR(o, final ** (1 / N))),
    ]
    for own, torchs in pairs:
        assert rates(own) == pytest.approx(closed_form_of_torch(torchs), rel=1e-12)


def test_cycles_are_warm_restarts_of_equal_length():
    torchs = stepped(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=N // 4))
    assert rates(Cosine(optimizer(), cycles=4)) == pytest.approx(torchs, rel=1e-12, abs=1e-18)


def of_transformers(step, warmup, total, minimum):
    """The factor of `get_cosine_with_min_lr_schedule_with_warmup` with `min_lr_rate`."""
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    factor = 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress))
    return max(0, factor * (1 - minimum) + minimum)


def test_warm_up_and_cosine_beside_transformers():
    """transformers starts its warm-up at 0, so that the first update changes nothing; here it is one update ahead."""
    found = rates(Cosine(optimizer(), warmup="5%", final=0.1))
    table = {k: (found[k - 1] / BASE, of_transformers(k - 1, 10, N, 0.1)) for k in range(1, N + 1)}
    assert [table[k] for k in (1, 2, 10)] == [(0.1, 0.0), (0.2, 0.1), (1.0, 0.9)]
    for k in range(11, N + 1):
        own, theirs = table[k]
        assert own == pytest.approx(theirs, rel=1e-14)
    assert [round(table[k][0], 4) for k in (11, 50, 100, 150, 200)] == [1.0, 0.9096, 0.5946, 0.2507, 0.1001]


@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        (lambda o: Constant(o), lambda k: 1),
        (lambda o: Constant(o, warmup="10 updates"), lambda k: min(1, k / 10)),
        (
            lambda o: Constant(o, warmup="5%", cooldown="20%", final=0.1),
            lambda k: k / 10 if k <= 10 else 1 if k <= 160 else 1 - 0.9 * (k - 161) / 40,
        ),
        (
            lambda o: Linear(o, warmup="10%", cooldown="10%", final=0.5),
            lambda k: k / 20 if k <= 20 else 1 - 0.5 * (k - 21) / 160 if k <= 180 else 0.5,
        ),
        (lambda o: InverseSqrt(o, warmup="16 updates"), lambda k: k / 16 if k <= 16 else 1 / math.sqrt((k - 1) / 16)),
        (lambda o: InverseSqrt(o, timescale="1 pass"), lambda k: 1 / math.sqrt(1 + (k - 1) / 50)),
        (
            lambda o: InverseSqrt(o, warmup="16 updates", cooldown="25%"),
            lambda k: (
                k / 16
                if k <= 16
                else 1 / math.sqrt((k - 1) / 16)
                if k <= 150
                else (1 - (k - 151) / 50) / math.sqrt(150 / 16)
            ),
        ),
        (
            lambda o: Exponential(o, warmup="10 updates", final=0.01),
            lambda k: k / 10 if k <= 10 else 0.01 ** ((k - 11) / 190),
        ),
        (
            lambda o: Steps(o, ["50%"], gamma=0.1, warmup="5%", cooldown="40 updates", final=0.05),
            lambda k: k / 10 if k <= 10 else 1 if k <= 100 else 0.1 if k <= 160 else 0.1 - 0.05 * (k - 161) / 40,
        ),
        (lambda o: Polynomial(o, final=0.2, power=3), lambda k: 0.2 + 0.8 * (1 - (k - 1) / 200) ** 3),
    ],
)
def test_every_update_has_the_rate_of_the_formula(schedule, formula):
    assert rates(schedule(optimizer())) == pytest.approx([BASE * formula(k) for k in range(1, N + 1)], rel=1e-12)


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("cls", [Linear, Cosine, Polynomial])
def test_after_the_end_the_rate_stays_at_the_final_one(cls, final):
    found = rates(cls(optimizer(), final=final, warmup="5%"), updates=N + 50)
    assert found[N:] == pytest.approx([BASE * final] * 50)
    cooled = rates(Constant(optimizer(), cooldown="10%", final=final), updates=N + 50)
    assert cooled[N:] == pytest.approx([BASE * final] * 50)


def test_each_group_has_its_own_rate():
    its = optimizer(1.0, 0.1)
    schedule = Cosine(its, warmup="10 updates", final=0.2)
    schedule.begin(Horizon(100))
    for _ in range(60):
        schedule.step()
    one, other = [group["lr"] for group in its.param_groups]
    assert other == pytest.approx(one / 10)
    assert one < 1


def test_an_exponential_schedule_may_increase_the_rate():
    found = rates(Exponential(optimizer(), final=1e6), updates=N + 1)
    assert [found[0], found[N // 2], found[N]] == pytest.approx([found[0], found[0] * 1e3, found[0] * 1e6])


def test_a_rate_that_is_a_tensor_stays_one():
    its = optimizer(torch.tensor(1.0))
    assert float(rates(Linear(its), updates=51)[0]) == pytest.approx(1 - 51 / N)  # the same tensor, later
    assert isinstance(its.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize(
    ("make", "argument", "message"),
    [
        (lambda o: Cosine(o, final=1.5), "final", "1.5 is not a share of the rate, from 0 to 1"),
        (lambda o: Cosine(o, final="0.1"), "final", "'0.1' is not a share of the rate, from 0 to 1"),
        (lambda o: Cosine(o, cycles=0), "cycles", "0 is not a whole number of at least 1"),
        (lambda o: Cosine(o, warmup=500), "warmup", "500 is not a length with a unit; write a share of the run"),
        (lambda o: Exponential(o, final=0), "final", "an exponential decay does not reach 0; write for example 0.01"),
        (lambda o: Exponential(o, final=float("inf")), "final", "inf is not a share of the rate, a positive number"),
        (
            lambda o: Exponential(o, final=10, warmup="5%"),
            "warmup",
            "a rate that increases to a final above 1 needs no",
        ),
        (lambda o: Constant(o, final=0.1), "final", "0.1 is where the cool-down ends, and there is none; add cooldown"),
        (lambda o: Polynomial(o, power=-1), "power", "-1 is not a positive number"),
        (lambda o: InverseSqrt(o), "timescale", "give a timescale or a warmup, such as '500 updates'"),
        (lambda o: Steps(o, "50%"), "milestones", "'50%' is not a list such as ['50%', '75%']"),
        (lambda o: Steps(o, [30, 80]), "milestones[0]", "30 is not a length with a unit"),
        (lambda o: Steps(o, ["50%"], gamma=10**400), "gamma", "0 is not a number of at least 0"),
        (lambda o: Steps(o, ["50%"], gamma=-1), "gamma", "-1 is not a number of at least 0"),
    ],
)
def test_arguments_that_are_not_allowed_are_an_error(make, argument, message):
    with pytest.raises(ArgumentError) as caught:
        make(optimizer())
    assert caught.value.argument == argument
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("make", "argument", "message"),
    [
        (lambda o: Cosine(o, warmup="500 updates"), "warmup", "500 updates: the run makes only 200 updates; make the"),
        (
            lambda o: Constant(o, warmup="60%", cooldown="50%"),
            "cooldown",
            "50%: the run makes only 200 updates, fewer than 120 of warm-up and 100 of cool-down",
        ),
        (lambda o: Cosine(o, cycles=191, warmup="5%"), "cycles", "191 is more than the 190 updates of the decay"),
        (lambda o: Steps(o, ["50%", "75%"], gamma=1e300), "gamma", "1e+300 makes the rate infinite"),
        (
            lambda o: Steps(o, ["250 updates"]),
            "milestones[0]",
            "must be after fewer than 200",
        ),
        (
            lambda o: Steps(o, ["5%"], warmup="5%"),
            "milestones[0]",
            "it must be after more than 10",
        ),
        (
            lambda o: Steps(o, ["50%", "2 passes"]),
            "milestones[1]",
            "2 passes is after 100 updates; it must be after more than 100",
        ),
        (
            lambda o: Steps(o, ["95%"], cooldown="10%"),
            "milestones[0]",
            "it must be after fewer than 180",
        ),
        (
            lambda o: Steps(o, ["60%"], warmup="50%", cooldown="50%"),
            "milestones[0]",
            "60% is after 120 updates; it must be after fewer than 100",
        ),
        (lambda o: InverseSqrt(o, timescale="0.1%"), "timescale", "0.1% is less than an update, as a timescale"),
    ],
)
def test_a_run_that_is_too_short_for_the_schedule_is_an_error(make, argument, message):
    with pytest.raises(ArgumentError) as caught:
        make(optimizer()).begin(Horizon(N, 50))
    assert caught.value.argument == f"scheduler.{argument}"
    assert message in caught.value.message
