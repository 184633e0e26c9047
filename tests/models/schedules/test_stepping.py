"""Schedulers: when the learning rate changes, alone and inside of each other, and by a metric."""

import warnings

import numpy as np
import pytest
import torch
from doubles import Normed, Streams

from emrun import AbstractHook, Factory, MainLoop, TorchModel, TrainingTerminated, create_model
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import ComputeStats, StopAfter
from emrun.models.optimizers.build import build_optimizer
from emrun.models.schedules.stepping import build_scheduler

EXPONENTIAL = torch.optim.lr_scheduler.ExponentialLR
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


def sgd(**arguments):
    return Factory(torch.optim.SGD, **{"lr": 1.0, "momentum": 0.5, **arguments})


DATA = Streams(
    train=[{"x": torch.full((2, 2), float(i))} for i in range(3)],
    valid=[{"x": torch.ones(1, 2)}] * 2,
)


class Rates(AbstractHook):
    """Keeps the learning rate of each update and after each epoch."""

    def __init__(self):
        super().__init__()
        self.updates = []
        self.epochs = []

    def before_update(self, model):
        self.updates.append(model.optimizer.param_groups[0]["lr"])

    def after_epoch(self):
        self.epochs.append(self.main_loop.model.optimizer.param_groups[0]["lr"])


def scheduled(scheduler, **options):
    return Factory(scheduler, options=options, **({"gamma": 0.5} if scheduler is EXPONENTIAL else {"patience": 0}))


def train(scheduler, epochs=3, extra_streams=("valid",), stop=None, hooks=(), momentum=0.0, **arguments):
    rates = Rates()
    model = TorchModel(Normed(), optimizer=sgd(momentum=momentum), scheduler=scheduler)
    hooks = [ComputeStats(["loss"]), *hooks, rates, stop or StopAfter(epochs=epochs)]
    loop = MainLoop(model, DATA, hooks, extra_streams=extra_streams, **arguments)
    loop.run_training()
    return loop, rates


def rate_of(loop):
    return loop.model.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("options", [{}, {"step_on": "epoch"}])
def test_a_scheduler_steps_after_each_training_epoch_and_not_after_the_zeroth(options):
    loop, rates = train(scheduled(EXPONENTIAL, **options))
    assert rates.updates == [1.0] * 3 + [0.5] * 3 + [0.25] * 3
    assert rates.epochs == [1.0, 1.0, 0.5, 0.25]  # hooks see the rate of the epoch that ended
    assert rate_of(loop) == 0.125


def test_a_scheduler_on_updates_steps_after_each_update():
    loop, rates = train(scheduled(EXPONENTIAL, step_on="update"), epochs=2)
    assert rates.updates == [0.5**n for n in range(6)]
    assert rates.epochs == [1.0, 0.5**3, 0.5**6]
    assert rate_of(loop) == 0.5**6


def test_after_update_sees_the_learning_rate_of_that_update():
    class Look(AbstractHook):
        def __init__(self):
            super().__init__()
            self.seen = []

        def after_update(self, model):
            self.seen.append(model.optimizer.param_groups[0]["lr"])

    look = Look()
    model = TorchModel(Normed(), optimizer=sgd(), scheduler=scheduled(EXPONENTIAL, step_on="update"))
    with MainLoop(model, DATA, [look]) as loop:
        loop.epoch(["train"])
    assert look.seen == [1.0, 0.5, 0.25]


class EndOnce(AbstractHook):
    """Ends the first training after so many updates or epochs."""

    def __init__(self, updates=0, epochs=0):
        super().__init__()
        self.left = [updates, epochs]
        self.evaluated = 0

    def count(self, index):
        self.left[index] -= 1
        if self.left[index] == 0:
            raise TrainingTerminated

    def after_update(self):
        self.count(0)

    def after_epoch(self, epoch_id):
        if epoch_id:
            self.count(1)

    def after_batch(self):
        self.evaluated += not self.main_loop.training


@pytest.mark.parametrize("step_on", ["epoch", "update"])
@pytest.mark.parametrize("end", [{"updates": 2}, {"epochs": 1}], ids=["cut short", "complete"])
def test_a_scheduler_does_not_step_in_an_evaluation(step_on, end):
    stop = EndOnce(**end)
    loop, rates = train(scheduled(EXPONENTIAL, step_on=step_on), stop=stop)
    before = rate_of(loop)
    expected = len(rates.updates) if step_on == "update" else end.get("epochs", 0)
    assert before == 0.5**expected
    stop.evaluated = 0
    loop.run_evaluation("valid")
    assert rate_of(loop) == before
    with loop:
        loop.epoch([], ["valid"])
    assert rate_of(loop) == before
    assert stop.evaluated == 4  # the batches of both evaluations were run


def test_an_evaluation_by_a_hook_does_not_keep_the_scheduler_from_stepping():
    class Evaluate(AbstractHook):
        def after_epoch(self, epoch_id):
            if epoch_id and not self.main_loop.evaluating:
                self.main_loop.run_evaluation("valid")

    model = TorchModel(Normed(), optimizer=sgd(), scheduler=scheduled(EXPONENTIAL))
    loop = MainLoop(model, DATA, [Evaluate(), StopAfter(epochs=2)])
    loop.run_training()
    assert rate_of(loop) == 0.25


def test_a_metric_decides_when_the_rate_is_reduced():
    class Worse(AbstractHook):
        writes = ("score",)

        def after_epoch(self, epoch_id, epoch_data):
            epoch_data["valid"]["score"] = {1: 3.0, 2: 2.0}.get(epoch_id, 5.0)

    rates = Rates()
    scheduler = scheduled(PLATEAU, metric="valid/score")
    model = TorchModel(Normed(), optimizer=sgd(), scheduler=scheduler)
    hooks = [Worse(), rates, StopAfter(epochs=4)]
    loop = MainLoop(model, DATA, hooks, extra_streams=["valid"])
    loop.run_training()
    assert rates.epochs == [1.0, 1.0, 1.0, 1.0, 0.1]
    assert rate_of(loop) == pytest.approx(0.01)


@pytest.mark.parametrize("metric", ["valid/loss/mean", "valid/loss"])
def test_the_metric_of_a_scheduler_may_be_a_statistic(metric):
    class Means(AbstractHook):
        def __init__(self):
            super().__init__()
            self.seen = []

        def after_epoch(self, epoch_id, epoch_data):
            if epoch_id:
                self.seen.append(epoch_data["valid"]["loss"]["mean"])

    means = Means()
    model = TorchModel(Normed(), optimizer=sgd(), scheduler=scheduled(PLATEAU, metric=metric))
    hooks = [ComputeStats(["loss"]), means, StopAfter(epochs=3)]
    MainLoop(model, DATA, hooks, extra_streams=["valid"]).run_training()
    assert model.scheduler.scheduler.best == min(means.seen)
    assert model.scheduler.scheduler.last_epoch == len(means.seen) == 3


def test_epochs_that_do_not_evaluate_the_stream_of_the_metric_are_passed_over():
    scheduler = scheduled(PLATEAU, metric="valid/loss/mean")
    loop, _ = train(scheduler, epochs=4, extra_streams=[{"valid": "2 epochs"}])
    assert loop.model.scheduler.scheduler.last_epoch == 2


def test_a_metric_that_is_not_there_is_an_error():
    class Forgetful(ComputeStats):
        def after_epoch(self, epoch_id, epoch_data):
            if epoch_id == 0:
                super().after_epoch(epoch_id, epoch_data)

    model = TorchModel(Normed(), optimizer=sgd(), scheduler=scheduled(PLATEAU, metric="valid/loss/mean"))
    loop = MainLoop(model, DATA, [Forgetful(["loss"]), StopAfter(epochs=2)], extra_streams=["valid"])
    with pytest.raises(
        ArgumentError,
        match=r"scheduler: the schedule monitors valid/loss/mean, but there is no 'loss': valid has nothing; see Comp",
    ):
        loop.run_training()


def test_a_metric_that_no_hook_writes_is_an_error_before_any_batch():
    with pytest.raises(HookError, match=r"TorchModel monitors valid/los/mean, but no hook writes 'los/mean'; did you"):
        train(scheduled(PLATEAU, metric="valid/los/mean"))


def test_a_metric_of_a_stream_that_is_not_run_is_an_error_before_any_batch():
    with pytest.raises(HookError, match=r"stream 'valid' is not run"):
        train(scheduled(PLATEAU, metric="valid/loss/mean"), extra_streams=[])


@pytest.mark.parametrize(
    ("scheduler", "options", "message"),
    [
        (PLATEAU, {}, "scheduler: ReduceLROnPlateau needs `metric`, e.g. valid/loss/mean"),
        (PLATEAU, {"metric": "valid/loss/mean", "step_on": "update"}, "scheduler.metric: statistics exist only"),
        (PLATEAU, {"metric": "loss"}, "scheduler.metric: 'loss' is not an address such as valid/loss"),
        (PLATEAU, {"metric": "a//d"}, "scheduler.metric: 'a//d' is not an address"),
        (PLATEAU, {"metric": 3}, "scheduler.metric: 3 is not an address"),
        (EXPONENTIAL, {"metric": "valid/loss/mean"}, "scheduler.metric: ExponentialLR does not take a metric"),
        (EXPONENTIAL, {"step_on": "batch"}, "scheduler.step_on: 'batch' is neither epoch nor update"),
    ],
)
def test_wrong_options_of_a_scheduler_are_refused(scheduler, options, message):
    optimizer = build_optimizer(Normed(), sgd())
    with pytest.raises(ArgumentError) as caught:
        build_scheduler(optimizer, scheduled(scheduler, **options))
    assert str(caught.value).startswith(message)


def test_a_scheduler_without_an_optimizer_is_refused():
    with pytest.raises(
        ArgumentError, match=r"scheduler: there is no optimizer whose learning rate the scheduler could set"
    ):
        TorchModel(Normed(), scheduler=scheduled(EXPONENTIAL))


@pytest.mark.parametrize("step_on", ["epoch", "update"])
@pytest.mark.parametrize(
    ("scheduler", "arguments"),
    [
        (torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 4}),
        (torch.optim.lr_scheduler.OneCycleLR, {"max_lr": 0.1, "total_steps": 20}),
        (torch.optim.lr_scheduler.LinearLR, {"total_iters": 3}),
        (torch.optim.lr_scheduler.StepLR, {"step_size": 2}),
    ],
)
def test_schedulers_follow_the_same_rates_as_in_a_raw_loop_without_a_warning(scheduler, arguments, step_on):
    # Warnings are errors here: torch warns when a scheduler steps before the optimizer.
    _, rates = train(Factory(scheduler, options={"step_on": step_on}, **arguments), epochs=4)
    net = Normed()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    by_hand, expected = scheduler(optimizer, **arguments), []
    for _ in range(4):
        for _ in range(3):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if step_on == "update":
                by_hand.step()
        if step_on == "epoch":
            by_hand.step()
    assert rates.updates == expected


def parts(each, made):
    """Return a warm-up and a decay, made by a function of a class and its arguments."""
    return [made(each.LinearLR, start_factor=0.25, total_iters=2), made(each.CosineAnnealingLR, T_max=5)]


@pytest.mark.parametrize("step_on", ["epoch", "update"])
@pytest.mark.parametrize("kind", ["SequentialLR", "ChainedScheduler", "both"])
@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # of SequentialLR in torch 2.6 itself
def test_schedulers_of_schedulers_follow_the_same_rates_as_in_a_raw_loop(kind, step_on):
    each = torch.optim.lr_scheduler

    def whole(made, **options):
        both = parts(each, made)
        if kind == "SequentialLR":
            return made(each.SequentialLR, schedulers=both, milestones=[2], **options)
        chained = made(each.ChainedScheduler, both, **(options if kind != "both" else {}))
        if kind == "ChainedScheduler":
            return chained
        return made(each.SequentialLR, [chained, made(each.ExponentialLR, gamma=0.5)], milestones=[2], **options)

    _, rates = train(whole(Factory, options={"step_on": step_on}), epochs=4)
    optimizer, expected = torch.optim.SGD(Normed().parameters(), lr=1.0), []

    def by_hand(scheduler, *args, **arguments):
        first = () if scheduler is each.ChainedScheduler else (optimizer,)
        return scheduler(*first, *args, **arguments)

    with warnings.catch_warnings(action="ignore"):  # torch's of the order, when a chain begins a sequence
        scheduler = whole(by_hand)
    for _ in range(4):
        for _ in range(3):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if step_on == "update":
                scheduler.step()
        if step_on == "epoch":
            scheduler.step()
    assert rates.updates == expected
    assert len(set(expected)) > 3


def test_a_part_without_an_optimizer_among_its_parameters_gets_none(tmp_path, monkeypatch):
    (tmp_path / "curves.py").write_text(
        "class Halving:\n    def __init__(self, base):\n        self.base = base\n"
        "    def __call__(self, step):\n        return self.base**step\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    curve = {"class": "curves.Halving", "base": 0.5}
    config = {
        "model": {
            "module": {"class": "torch.nn.Linear", "in_features": 1, "out_features": 1},
            "inputs": ["x"],
            "outputs": ["y"],
            "optimizer": {"class": "SGD", "lr": 1.0},
            "scheduler": {"class": "ChainedScheduler", "schedulers": [{"class": "LambdaLR", "lr_lambda": curve}]},
        }
    }
    model = create_model({"dataset": {"class": "Digits"}, **config})
    model.optimizer.step()
    model.scheduler.step(None)
    assert model.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("fast", "'fast'"),
        ("3.0", "'3.0'"),
        ([1.0, 2.0], "[1.0, 2.0]"),
        (torch.ones(2), "Tensor of shape (2,)"),
        (None, "None"),
        ({"mean": "x"}, "'x'"),
    ],
    ids=str,
)
def test_a_metric_that_is_not_a_number_is_named(value, shown):
    class Writes(AbstractHook):
        writes = ("score",)

        def after_epoch(self, epoch_data):
            epoch_data["valid"]["score"] = value

    model = TorchModel(Normed(), optimizer=sgd(), scheduler=scheduled(PLATEAU, metric="valid/score"))
    loop = MainLoop(model, DATA, [Writes(), StopAfter(epochs=1)], extra_streams=["valid"])
    with pytest.raises(ArgumentError) as caught:
        loop.run_training()
    assert f"monitors valid/score, which is not a number: {shown}; see ComputeStats" in str(caught.value)


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor([0.5]), 1, float("nan")], ids=str)
def test_a_metric_may_be_a_number_of_any_library(value):
    class Writes(AbstractHook):
        writes = ("score",)

        def after_epoch(self, epoch_data):
            epoch_data["valid"]["score"] = value

    model = TorchModel(Normed(), optimizer=sgd(), scheduler=scheduled(PLATEAU, metric="valid/score"))
    MainLoop(model, DATA, [Writes(), StopAfter(epochs=1)], extra_streams=["valid"]).run_training()
    assert model.scheduler.scheduler.last_epoch == 1


def warmed(scheduler, warmup, **options):
    return scheduled(scheduler, warmup=warmup, **options)


@pytest.mark.parametrize(
    ("warmup", "shares", "counted"),
    [
        ("2 updates", [1 / 2, 1, 1, 1, 1, 1], 2),
        ("3 updates", [1 / 3, 2 / 3, 1, 1, 1, 1], 1),
        ("4 updates", [1 / 4, 2 / 4, 3 / 4, 1, 1, 1], 1),
        ("1 pass", [1 / 3, 2 / 3, 1, 1, 1, 1], 1),
        ("50%", [1 / 3, 2 / 3, 1, 1, 1, 1], 1),
        ("100%", [update / 6 for update in range(1, 7)], 0),
        ("0%", [1] * 6, 2),
        (0, [1] * 6, 2),
    ],
)
def test_a_plateau_counts_the_epochs_with_an_update_after_the_warmup(warmup, shares, counted):
    loop, rates = train(warmed(PLATEAU, warmup, metric="valid/loss/mean"), epochs=2)
    assert rates.updates == shares
    assert loop.model.scheduler.scheduler.last_epoch == counted


def test_what_happens_in_the_warmup_reduces_no_rate():
    options = {"metric": "valid/worse/mean"}
    plain, plain_rates = train(scheduled(PLATEAU, **options), 4, hooks=[Worse()])
    loop, rates = train(warmed(PLATEAU, "6 updates", **options), 6, hooks=[Worse()])
    assert rates.updates[:6] == [update / 6 for update in range(1, 7)]
    assert rates.updates[6:] == plain_rates.updates
    assert rate_of(loop) == rate_of(plain) < 1


class Worse(AbstractHook):
    """Writes a statistic that gets worse with each epoch."""

    writes = ("worse",)

    def after_epoch(self, epoch_id, epoch_data):
        epoch_data["valid"]["worse"] = {"mean": float(epoch_id)}


@pytest.mark.parametrize(
    ("scheduler", "arguments"),
    [
        (torch.optim.lr_scheduler.ExponentialLR, {"gamma": 0.5}),
        (torch.optim.lr_scheduler.LinearLR, {"start_factor": 0.5, "total_iters": 4}),
        (torch.optim.lr_scheduler.OneCycleLR, {"max_lr": 2.0, "total_steps": 9}),
        (torch.optim.lr_scheduler.LambdaLR, {"lr_lambda": lambda step: 4.0 + step}),
    ],
)
def test_a_warmup_precedes_any_scheduler_and_ends_at_its_first_rate(scheduler, arguments):
    form = Factory(scheduler, options={"step_on": "update", "warmup": "3 updates"}, **arguments)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
    raw, expected = scheduler(optimizer, **arguments), []
    for _ in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        raw.step()
    _, rates = train(form, epochs=3, momentum=0.5)
    assert rates.updates == [expected[0] * (update / 3) for update in (1, 2, 3)] + expected


def test_a_warmup_keeps_the_shares_of_parameter_groups_and_counts_windows():
    groups = sgd(momentum=0.0)
    groups.options["groups"] = [{"match": "bias", "lr": 0.5}]
    model = TorchModel(
        torch.nn.Linear(2, 1), inputs=["x"], outputs=["y"], loss=Factory(Mean, options={"inputs": ["y"]}),
        optimizer=groups, scheduler=warmed(EXPONENTIAL, "2 updates"), accumulate=2,
    )  # fmt: skip
    rates = []

    class All(AbstractHook):
        def before_update(self, model):
            rates.append([group["lr"] for group in model.optimizer.param_groups])

    MainLoop(model, DATA, [All(), StopAfter(epochs=2)]).run_training()
    assert sorted(rates[0]) == [0.25, 0.5]
    assert [sorted(each) for each in rates[1:]] == [[0.5, 1.0]] * 3


class Mean:
    def __call__(self, y):
        return y.mean()


@pytest.mark.parametrize(
    ("warmup", "key", "message"),
    [
        (5, "scheduler.warmup", "5 is not a length with a unit; write a share of the run such as '5%', or"),
        ("7 updates", "scheduler.warmup", "7 updates: the run makes only 6 updates; make the warm-up shorter"),
        (True, "scheduler.warmup", "True is not a length with a unit"),
    ],
)
def test_a_wrong_warmup_is_refused_before_an_update(warmup, key, message):
    with pytest.raises(ArgumentError) as caught:
        train(warmed(EXPONENTIAL, warmup), epochs=2)
    assert caught.value.argument == key
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("options", "line", "rates"),
    [
        ({"metric": "valid/loss/mean"}, "{} over 9 updates: {}, warm-up 3 updates; the rate depends on {}", None),
        ({"step_on": "update"}, "{} over 9 updates: {}, warm-up 3 updates", [1, 2, 3, 3, 1.5]),
        ({}, "{} over 9 updates, 3 epochs: {}, warm-up 3 updates", [1, 3, 1.5]),
    ],
)
def test_the_plan_has_the_warmup(options, line, rates):
    kind = PLATEAU if "metric" in options else EXPONENTIAL
    form = warmed(kind, "3 updates", **options)
    model = TorchModel(Normed(), optimizer=sgd(momentum=0.0), scheduler=form)
    data = Streams(train=[{"x": torch.ones(2, 2)}] * 3, valid=[])
    data.num_batches = {"train": 3}
    loop = MainLoop(model, data, [ComputeStats(["loss"]), StopAfter(epochs=3)], extra_streams=["valid"])
    plan = loop.model.schedule_plan()
    assert plan.lines()[0] == line.format("learning rate", kind.__name__, "valid/loss/mean")
    if rates is not None:
        assert [3 * each for each in plan.rates[0][: len(rates)]] == pytest.approx(rates)
