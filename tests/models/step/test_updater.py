"""Updates: their events, cleared gradients, steps of one's own, and whether a step made an update."""

import copy
import functools

import numpy as np
import pytest
import torch
from doubles import (
    DB,
    DW,
    SGD,
    XY,
    Affine,
    Push,
    Streams,
    X,
    Y,
    evaluate,
    run,
    same_state,
    state_of,
)
from projects import linear_on_majority
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from emrun import AbstractHook, Factory, MainLoop, TorchModel, TrainingTerminated, create_training
from emrun.base.errors import StreamError
from emrun.hooks import ComputeStats
from emrun.models.step.gradients import clear_gradients


def test_gradients_are_cleared_and_an_optimizer_that_overrides_zero_grad_clears_its_own():
    class Keeps(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none=True):
            self.cleared += 1

    module = torch.nn.Linear(2, 1)
    plain, keeps = torch.optim.SGD(module.parameters(), lr=1.0), Keeps(module.parameters(), lr=1.0)
    patched = torch.optim.SGD(module.parameters(), lr=1.0)
    patched.zero_grad = lambda: None
    module(torch.ones(1, 2)).sum().backward()
    clear_gradients(keeps)
    clear_gradients(patched)
    assert keeps.cleared == 1
    assert all(parameter.grad is not None for parameter in module.parameters())
    clear_gradients(plain)
    assert all(parameter.grad is None for parameter in module.parameters())


def weight_after_three_updates(hook):
    """Return it; a hook gets the optimizer before the second update."""

    class Second(AbstractHook):
        def before_update(self, optimizer):
            if self.main_loop.iterations_done == 1:
                hook(optimizer)

    module = Push()
    run(TorchModel(module, optimizer=SGD), [{"x": [0.0]}] * 3, Second())
    return module.w.item()


def test_a_step_gets_a_name_only_from_the_update_on_before_which_a_profiler_begins(monkeypatch, no_hooks_of_steps):
    class Named(torch.autograd.profiler.record_function):
        def __init__(self, name, args=None):
            names.append(name)
            super().__init__(name, args)

    names = []
    monkeypatch.setattr("torch.autograd.profiler.record_function", Named)
    assert weight_after_three_updates(lambda optimizer: None) == pytest.approx(0.7)
    assert names == []
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    try:
        assert weight_after_three_updates(lambda optimizer: profiler.start()) == pytest.approx(0.7)
    finally:
        profiler.stop()
    assert names == ["Optimizer.step#SGD.step"] * 2
    assert {each.key: each.count for each in profiler.key_averages()}["Optimizer.step#SGD.step"] == 2


@pytest.mark.parametrize(
    "register",
    [
        torch.optim.Optimizer.register_step_pre_hook,
        torch.optim.Optimizer.register_step_post_hook,
        lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
        lambda optimizer, hook: register_optimizer_step_post_hook(hook),
    ],
)
def test_hooks_of_steps_are_called_from_the_update_on_before_which_they_are_registered(no_hooks_of_steps, register):
    seen, handles = [], []
    try:
        weight_after_three_updates(
            lambda optimizer: handles.append(register(optimizer, lambda its, args, kwargs: seen.append(its)))
        )
    finally:
        handles[0].remove()
    assert [type(each) for each in seen] == [torch.optim.SGD] * 2


@pytest.mark.parametrize("of_class", [True, False])
def test_a_step_that_somebody_has_replaced_is_called(no_hooks_of_steps, of_class):
    class Twice(torch.optim.SGD):
        pass

    model = TorchModel(Push(), optimizer=Factory(Twice, lr=0.1))
    owner = Twice if of_class else model.optimizer
    step = owner.step

    @functools.wraps(step)
    def both(*args):
        step(*args)
        return step(*args)

    owner.step = both
    run(model, [{"x": [0.0]}] * 2)
    assert model.module.w.item() == pytest.approx(0.6)


# --- updates and their events -----------------------------------------------------------------------------------------


class Clip(AbstractHook):
    """Scales the gradients so that their norm is at most `limit`."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.norms = []

    def before_update(self, model):
        self.norms.append(nn.utils.clip_grad_norm_(model.module.parameters(), self.limit).item())


def test_before_update_sees_complete_gradients_and_may_change_them():
    module = Affine(2.0, 1.0)
    clip = Clip(0.5)
    run(TorchModel(module, optimizer=SGD), [{"x": X, "y": Y}], clip)
    norm = np.hypot(DW.mean(), DB.mean())
    assert clip.norms == pytest.approx([norm])
    assert module.w.item() == pytest.approx(2.0 - 0.1 * 0.5 * DW.mean() / norm)
    assert module.b.item() == pytest.approx(1.0 - 0.1 * 0.5 * DB.mean() / norm)


def test_gradients_do_not_add_up_over_updates():
    clip = Clip(1e9)
    module = Affine(2.0, 1.0)
    model = TorchModel(module, optimizer=Factory(torch.optim.SGD, lr=0.0))
    run(model, [{"x": X, "y": Y}] * 3, clip)
    assert len(set(clip.norms)) == 1


class Watch(AbstractHook):
    """Keeps the order of events and the weight at each."""

    def __init__(self, *terminates_in):
        super().__init__()
        self.events = []
        self.terminates_in = terminates_in

    def note(self, event):
        self.events.append((event, round(self.main_loop.model.module.w.item(), 4)))
        if event in self.terminates_in:
            raise TrainingTerminated(f"in {event}")

    def before_batch(self):
        self.note("before_batch")

    def before_update(self, model):
        assert model is self.main_loop.model
        self.note("before_update")

    def after_update(self, model):
        assert model is self.main_loop.model
        assert model.module.w.grad is not None
        self.note("after_update")

    def after_batch(self):
        self.note("after_batch")


def test_after_update_sees_the_changed_weights():
    watch = Watch()
    run(TorchModel(Push(), optimizer=SGD), [{"x": [0.0]}] * 2, watch)
    assert watch.events == [
        ("before_batch", 1.0), ("before_update", 1.0), ("after_update", 0.9), ("after_batch", 0.9),
        ("before_batch", 0.9), ("before_update", 0.9), ("after_update", 0.8), ("after_batch", 0.8),
    ]  # fmt: skip


def test_a_hook_that_is_added_later_gets_the_events_of_updates():
    watch = Watch()
    with MainLoop(TorchModel(Push(), optimizer=SGD), Streams(train=[{"x": [0.0]}]), []) as loop:
        loop.epoch(["train"])
        loop.change_hooks([watch])
        loop.epoch(["train"])
    assert [event for event, _ in watch.events] == ["before_batch", "before_update", "after_update", "after_batch"]


@pytest.mark.parametrize("event", ["before_update", "after_update"])
def test_a_termination_in_an_update_takes_effect_when_the_update_is_done(event):
    watch, later = Watch(event), Watch()
    loop = MainLoop(
        TorchModel(Push(), optimizer=SGD), Streams(train=[{"x": [0.0]}] * 3), [watch, later], skip_zeroth_epoch=True
    )
    outcome = loop.run_training()
    everything = [("before_batch", 1.0), ("before_update", 1.0), ("after_update", 0.9), ("after_batch", 0.9)]
    assert watch.events == later.events == everything
    assert (outcome.status, outcome.reason, loop.iterations_done) == ("finished", f"in {event}", 1)


def test_a_hook_may_copy_the_model_whose_copy_nobody_listens_to():
    class Copies(Watch):
        def after_epoch(self):
            copy.deepcopy(self.main_loop.model).run({"x": [0.0]}, True, "train")

    watch = Copies()
    model = TorchModel(Push(), optimizer=SGD)
    run(model, [{"x": [0.0]}], watch)
    assert len(watch.events) == 4
    assert model.module.w.item() == pytest.approx(0.9)


def test_updates_are_not_announced_in_an_evaluation():
    watch = Watch()
    with MainLoop(TorchModel(Push(), optimizer=SGD), Streams(valid=[{"x": [0.0]}]), [watch]) as loop:
        loop.epoch([], ["valid"])
    assert watch.events == [("before_batch", 1.0), ("after_batch", 1.0)]


def test_a_model_in_a_second_loop_tells_the_hooks_of_that_loop():
    model, first, second = TorchModel(Push(), optimizer=SGD), Watch(), Watch()
    run(model, [{"x": [0.0]}], first)
    events = list(first.events)
    run(model, [{"x": [0.0]}])
    run(model, [{"x": [0.0]}], second)
    assert first.events == events
    assert [event for event, _ in second.events] == [event for event, _ in events]


def test_a_failure_of_a_hook_before_the_update_leaves_the_weights_alone():
    class Fail(AbstractHook):
        def before_update(self):
            raise RuntimeError("no")

    model = TorchModel(Push(), optimizer=SGD)
    with pytest.raises(RuntimeError, match=r"no"):
        run(model, [{"x": [0.0]}], Fail())
    assert model.module.w.item() == 1.0


def test_a_wrong_variable_of_a_hook_is_reported_before_any_update():
    module = Affine()
    before = state_of(module)
    with pytest.raises(StreamError, match=r"ComputeStats reads 'los', .* did you mean 'loss'"):
        run(TorchModel(module, optimizer=SGD), XY, ComputeStats(["los"]))
    assert same_state(module, before)


# --- a train_step of one's own ----------------------------------------------------------------------------------------


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(2, 1)
        self.discriminator = nn.Linear(1, 1)

    def forward(self, noise, real):
        return {"fake": self.generator(noise), "realness": self.discriminator(real)}


class GanModel(TorchModel):
    """Two optimizers, one for the discriminator and one for the generator."""

    def __init__(self, module, lr=0.1, **kwargs):
        super().__init__(module, **kwargs)
        self.judge = torch.optim.SGD(self.module.discriminator.parameters(), lr=lr)
        self.forge = torch.optim.SGD(self.module.generator.parameters(), lr=lr)

    def train_step(self, inputs):
        generator, discriminator = self.module.generator, self.module.discriminator
        self.judge.zero_grad()
        fake = generator(inputs["noise"])
        judged = (discriminator(fake.detach()) - discriminator(inputs["real"])).mean()
        self.backward(judged)
        self.update(self.judge)
        self.forge.zero_grad()
        forged = -discriminator(fake).mean()
        self.backward(forged)
        self.update(self.forge)
        return {"fake": fake, "judged": judged, "forged": forged}


class Count(AbstractHook):
    """Counts the updates."""

    def __init__(self):
        super().__init__()
        self.before = self.after = 0

    def before_update(self):
        self.before += 1

    def after_update(self):
        self.after += 1


def train_gan_by_hand(module, batches):
    judge = torch.optim.SGD(module.discriminator.parameters(), lr=0.1)
    forge = torch.optim.SGD(module.generator.parameters(), lr=0.1)
    for batch in batches:
        noise, real = torch.from_numpy(batch["noise"]), torch.from_numpy(batch["real"])
        judge.zero_grad()
        fake = module.generator(noise)
        (module.discriminator(fake.detach()) - module.discriminator(real)).mean().backward()
        judge.step()
        forge.zero_grad()
        (-module.discriminator(fake).mean()).backward()
        forge.step()


def test_a_subclass_may_train_with_two_optimizers():
    torch.manual_seed(0)
    module = Gan()
    by_hand = copy.deepcopy(module)
    rng = np.random.default_rng(0)
    batches = [{"noise": rng.random((4, 2), np.float32), "real": rng.random((4, 1), np.float32)} for _ in range(5)]
    count = Count()
    data = run(GanModel(module), batches, count)
    train_gan_by_hand(by_hand, batches)
    assert same_state(module, by_hand.state_dict())
    assert (count.before, count.after) == (10, 10)
    assert not any(data[0][name].requires_grad for name in ("fake", "judged", "forged"))


class GanWithoutClearing(GanModel):
    """Relies on gradients that are None at the beginning of each step."""

    def train_step(self, inputs):
        generator, discriminator = self.module.generator, self.module.discriminator
        assert all(parameter.grad is None for parameter in self.module.parameters())
        fake = generator(inputs["noise"])
        judged = (discriminator(fake.detach()) - discriminator(inputs["real"])).mean()
        self.backward(judged)
        self.update(self.judge)
        forged = -discriminator(fake).mean()  # its gradients reach the discriminator too
        self.backward(forged)
        self.update(self.forge)
        return {"fake": fake, "judged": judged, "forged": forged}


@pytest.mark.parametrize("optimizer", [None, SGD])
def test_a_gan_without_any_zero_grad_trains_like_the_loop_by_hand(optimizer):
    torch.manual_seed(0)
    module = Gan()
    by_hand = copy.deepcopy(module)
    rng = np.random.default_rng(0)
    batches = [{"noise": rng.random((4, 2), np.float32), "real": rng.random((4, 1), np.float32)} for _ in range(5)]
    run(GanWithoutClearing(module, optimizer=optimizer), batches, epochs=2)
    train_gan_by_hand(by_hand, batches * 2)
    assert same_state(module, by_hand.state_dict())


def test_gradients_are_none_also_of_what_no_optimizer_holds_and_of_what_is_new():
    class Grows(TorchModel):
        def train_step(self, inputs):
            assert all(parameter.grad is None for parameter in self.module.parameters())
            outputs = super().train_step(inputs)
            for parameter in self.module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.module.add_module(f"new{len(self.module._modules)}", nn.Linear(1, 1))
            return outputs

    class Keeps(TorchModel):
        def train_step(self, inputs):
            assert all(parameter.grad is None for parameter in self.module.parameters())
            return {"loss": self.forward(inputs)["loss"].sum().backward()}

    run(Grows(Affine(), optimizer=SGD), XY)
    run(Keeps(Affine()), XY, epochs=2)

    module = Affine()
    module.extra = nn.Parameter(torch.zeros(()))
    module.extra.grad = torch.ones(())
    model = TorchModel(module, optimizer=Factory(lambda parameters: torch.optim.SGD(parameters[:2], lr=0.1)))
    run(model, XY)
    assert module.extra.grad is None


def test_a_subclass_with_an_own_train_step_evaluates_with_forward():
    (data,) = evaluate(GanModel(Gan()), [{"noise": [[1.0, 2.0]], "real": [[3.0]]}])
    assert data["realness"].shape == (1, 1)


def test_a_scheduler_on_update_follows_its_own_optimizer_only():
    scheduler = Factory(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5, options={"step_on": "update"})

    class WithOwn(GanModel):
        def train_step(self, inputs):
            outputs = super().train_step(inputs)
            self.update(self.optimizer)
            return outputs

    model = WithOwn(Gan(), optimizer=Factory(torch.optim.SGD, lr=1.0), scheduler=scheduler)
    run(model, [{"noise": [[1.0, 2.0]], "real": [[3.0]]}] * 2)
    assert model.optimizer.param_groups[0]["lr"] == 0.25


class Look(AbstractHook):
    """Notes at each update what the model says of it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_update(self, model):
        self.seen.append((list(model.step_outputs), model.has_updated, self.main_loop.stream_name))

    def after_update(self, model):
        self.seen.append((list(model.step_outputs), model.has_updated, self.main_loop.stream_name))


def test_a_hook_sees_the_outputs_before_the_update_and_whether_it_was_made():
    look = Look()
    model = TorchModel(Affine(), optimizer=SGD, device="cpu")
    run(model, XY, look)
    outputs = ["predicted", "loss"]
    assert look.seen == [(outputs, False, "train"), (outputs, True, "train")] * 2
    assert model.step_outputs is None


def test_a_model_with_its_own_scheme_of_training_has_updated_only_when_it_did():
    class Own(TorchModel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.step = "nothing"

        def train_step(self, inputs):
            outputs = self.forward(inputs)
            self.backward(outputs["loss"].mean())
            if self.step == "update":
                self.update(self.optimizer)
            return outputs

    model = Own(Affine(), optimizer=SGD, device="cpu")
    assert model.has_updated is False
    for model.step in ("update", "nothing", "update"):
        model.run(XY[0], True, "train")
        assert model.has_updated is (model.step != "nothing")
    assert Own(Affine(), device="cpu").has_updated is None
    assert TorchModel(Affine(), optimizer=SGD, device="cpu").has_updated is False


class Grows(torch.nn.Module):
    """Has the weights 0.0, of which it may get more."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(()))])

    def forward(self, x):
        return {"loss": (x * sum(self.weights)).mean()}


def test_gradients_of_a_group_that_is_added_within_an_epoch_are_cleared():
    model = TorchModel(Grows(), optimizer=SGD, device="cpu")
    model.run({"x": [1.0]}, True, "train")
    added = torch.nn.Parameter(torch.zeros(()))
    model.module.weights.append(added)
    model.optimizer.add_param_group({"params": [added]})
    for _ in range(3):
        model.run({"x": [1.0]}, True, "train")
        assert added.grad == 1


def test_the_most_memory_of_a_gpu_is_logged_once_after_the_first_update(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**9)
    caplog.set_level("INFO")
    config = linear_on_majority(hooks=[{"StopAfter": {"updates": 3}}])
    create_training(config, tmp_path).main_loop.run_training()
    told = [each for each in caplog.messages if "used on the GPU" in each]
    assert told == ["most memory used on the GPU by the first update: 3 GB"]
