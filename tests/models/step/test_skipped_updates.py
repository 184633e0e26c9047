"""Updates that hooks or the gradients in float16 skip."""

import logging

import pytest
import torch
from doubles import SGD, Push, Streams, run

from emrun import AbstractHook, Factory, MainLoop, TorchModel, UpdateSkipped
from emrun.base.errors import HookError
from emrun.hooks import StopOnNaN

BATCHES = [{"x": [0.0, 0.0]}] * 4


class SkipsSecond(AbstractHook):
    """Skips each second update."""

    def __init__(self, event="before_update"):
        super().__init__()
        setattr(self, event, self.skip)

    def skip(self, **_):
        if self.main_loop.updates_done % 2 == 1:
            raise UpdateSkipped("it is the second")


class Log(AbstractHook):
    def __init__(self):
        super().__init__()
        self.seen = []

    def before_update(self, model):
        self.seen.append("before")

    def after_update(self, model):
        self.seen.append("after")

    def after_epoch(self, epoch_id, epoch_data):
        self.seen.append({name: dict(values) for name, values in epoch_data.items()}["train"].get("skipped_updates"))


def test_the_log_names_the_optimizer_if_there_are_several(caplog):
    caplog.set_level(logging.INFO)

    class SkipsLast(AbstractHook):
        def before_update(self, model, optimizer):
            if optimizer is model.optimizers["last"]:
                raise UpdateSkipped("it is the last")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return {"loss": self.a * self.b * x}

    forms = {name: Factory(torch.optim.SGD, lr=0.1) for name in ("first", "last")}
    forms["first"].options, forms["last"].options = {"match": "a"}, {"match": "b"}
    run(TorchModel(Net(), optimizer=forms, device="cpu"), BATCHES, SkipsLast())
    assert (
        "update 1 of optimizer 'last' was skipped: it is the last; skipped_updates counts such updates"
        in caplog.messages
    )


@pytest.mark.parametrize("step_on", [{"class": torch.optim.lr_scheduler.StepLR, "step_size": 2, "gamma": 0.5}])
def test_a_skipped_update_makes_no_step_and_counts(step_on, caplog, recwarn):
    caplog.set_level(logging.INFO)
    scheduler = Factory(step_on.pop("class"), **step_on)
    scheduler.options = {"step_on": "update"}
    model, log = TorchModel(Push(), optimizer=SGD, scheduler=scheduler, device="cpu"), Log()

    class Gradient(AbstractHook):
        def after_batch(self):
            has_gradient.append(model.module.w.grad is not None)

    has_gradient = []
    loop = MainLoop(model, Streams(train=BATCHES), [SkipsSecond(), log, Gradient()])
    with loop:
        loop.epoch(["train"])
        loop.epoch(["train"])
    assert log.seen == [*["before", "after", "before"] * 2, 2] * 2
    assert has_gradient == [True, False] * 4
    assert loop.updates_done == 8
    assert model.module.w.item() == pytest.approx(1 - 0.1 - 0.05 - 0.025 - 0.0125)  # the rate is halved every 2 updates
    assert caplog.text.count("update 2 was skipped: it is the second") == 1
    assert caplog.text.count("2 skipped updates in this epoch") == 2
    assert not recwarn.list


def test_a_window_can_be_skipped():
    model = TorchModel(Push(), optimizer=SGD, accumulate=2, device="cpu")
    run(model, BATCHES, SkipsSecond())
    assert model.module.w.item() == pytest.approx(0.9)
    assert model.has_updated is False


def test_the_reasons_of_several_hooks_are_joined(caplog):
    caplog.set_level(logging.INFO)

    class Other(AbstractHook):
        def before_update(self):
            raise UpdateSkipped("another reason")

    first, second = Other(), SkipsSecond()
    run(TorchModel(Push(), optimizer=SGD, device="cpu"), BATCHES[:2], second, first)
    assert "update 1 was skipped: another reason" in caplog.text


@pytest.mark.parametrize("event", ["after_batch", "before_epoch", "after_epoch"])
def test_it_is_an_error_in_another_event(event):
    class Wrong(AbstractHook):
        pass

    def skip(self, **_):
        raise UpdateSkipped

    setattr(Wrong, event, skip)
    with pytest.raises(HookError, match=f"Wrong raised UpdateSkipped in {event}; .* only be skipped in before_update"):
        run(TorchModel(Push(), optimizer=SGD, device="cpu"), BATCHES, Wrong())


class Large(Push):
    """Its gradients in float16 are not finite before the scale is reduced."""

    def forward(self, x):
        large = (self.w * torch.ones(1, 1)) @ torch.full((1, 1), 4.0)  # in float16
        return {"loss": large.squeeze() * torch.ones_like(x)}


def test_a_gradient_that_the_scale_skips_does_not_stop_the_run(caplog):
    caplog.set_level(logging.INFO)
    model, log = TorchModel(Large(), optimizer=SGD, precision="fp16", device="cpu"), Log()
    run(model, BATCHES, StopOnNaN(after_batch=True, stop_on_inf=True), log)
    assert log.seen[0] == "before"
    assert log.seen[-1] >= 1
    assert log.seen.count("after") == 4 - log.seen[-1]
    assert "update 1 was skipped: gradients in float16 are not finite" in caplog.text
    assert "the scale of the loss is now" in caplog.text


def test_a_scale_below_one_is_a_warning(caplog):
    model = TorchModel(Large(), optimizer=SGD, precision="fp16", device="cpu")
    state = model.state_dict()
    model.load_state_dict({**state, "loss_scale": {"scale": 1.0, "growth_tracker": 0}})
    run(model, [{"x": [float("inf")]}, *BATCHES[:1]])
    assert "the scale of the loss has fallen to" not in caplog.text


def test_fp16_always_shows_the_count_and_other_precisions_only_if_there_is_one():
    for precision, expected in ((32, None), ("bf16", None), ("fp16", 0)):
        log = Log()
        model = TorchModel(Push(), optimizer=SGD, precision=precision, device="cpu")
        run(model, BATCHES, log)
        assert log.seen[-1] == expected
        assert ("skipped_updates" in model.writes) is (precision == "fp16")
