"""Windows: several batches that make one update, beside the same by hand."""

import copy
import itertools
import os
import signal

import numpy as np
import pytest
import torch
from doubles import SGD, Affine, Push, Streams, run
from torch import nn
from windows import Net, batches, weights

from emrun import AbstractHook, Factory, MainLoop, TorchModel, TrainingTerminated
from emrun.base.errors import ArgumentError
from emrun.hooks import AverageWeights, ComputeStats, StopAfter


def by_hand(module, found, windows):
    """Train with SGD with momentum: the sum of the weighted losses of a window, divided by its weight."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    found = iter([{name: torch.as_tensor(each) for name, each in batch.items()} for batch in found])
    for window in windows:
        optimizer.zero_grad()
        total = 0.0
        for batch in itertools.islice(found, window):
            tokens = batch["tokens"] if module.kind == "tokens" else None
            outputs = module(**batch)
            losses = outputs["loss"]
            weight = float(len(batch["x"])) if tokens is None else tokens.sum()
            mean = losses.mean() if tokens is None else (losses * tokens).sum() / tokens.sum()
            (mean * weight).backward()
            total = total + weight
        for parameter in module.parameters():
            parameter.grad.div_(total)
        optimizer.step()


def trained(module, found, accumulate, *hooks, epochs=1, **arguments):
    optimizer = Factory(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = TorchModel(module, optimizer=optimizer, accumulate=accumulate, device="cpu", **arguments)
    with MainLoop(model, Streams(train=found), hooks, on_unused_sources="ignore") as loop:
        for _ in range(epochs):
            loop.epoch(["train"])
    return loop


@pytest.mark.parametrize("kind", ["examples", "mean", "tokens"])
@pytest.mark.parametrize(
    ("sizes", "accumulate", "windows"), [([8] * 8, 4, [4, 4]), ([8, 8, 8, 3, 8], 3, [3, 2]), ([8, 5], 4, [2])]
)
def test_the_updates_equal_those_by_hand_to_the_last_bit(kind, sizes, accumulate, windows):
    torch.manual_seed(1)
    module = Net(kind)
    hand = copy.deepcopy(module)
    loop = trained(module, batches(sizes), accumulate)
    by_hand(hand, batches(sizes), windows)
    assert torch.equal(weights(module), weights(hand))
    assert (loop.iterations_done, loop.updates_done) == (len(sizes), len(windows))


def test_hooks_see_the_same_count_in_each_update_also_in_the_last_of_an_epoch():
    class Look(AbstractHook):
        def before_update(self):
            seen.append((self.main_loop.iterations_done, self.main_loop.updates_done))

        after_update = before_update

    seen = []
    trained(Net("mean"), batches([8] * 5), 2, Look())
    assert seen == [(1, 0)] * 2 + [(3, 1)] * 2 + [(4, 2)] * 2


@pytest.mark.parametrize(("keys", "key"), [({"accumulate": 2}, "accumulate"), ({"micro_batch_size": 4}, "micro_batch")])
def test_a_second_update_for_the_same_batch_is_refused(keys, key):
    class Twice(TorchModel):
        def train_step(self, inputs):
            outputs = self.forward(inputs)
            self.backward(outputs["loss"].mean())
            self.update("first")
            self.update("first")
            return outputs

    forms = {"first": Factory(torch.optim.SGD, lr=0.1)}
    forms["first"].options = {"match": "."}
    model = Twice(Net("mean"), optimizer=forms, device="cpu", **keys)
    with pytest.raises(ArgumentError, match=r"update\('first'\) twice for a batch") as caught:
        model.run(batches([8])[0], True, "train")
    assert caught.value.argument.startswith(key)


@pytest.mark.parametrize("kind", ["examples", "mean", "tokens"])
def test_four_batches_of_eight_are_as_one_of_thirty_two(kind):
    """Not to the last bit: the gradients are added up in another order."""
    torch.manual_seed(1)
    parts, module = batches([8, 8, 8, 8]), Net(kind).double()
    whole = copy.deepcopy(module)
    trained(module, parts, 4)
    trained(whole, [{name: np.concatenate([each[name] for each in parts]) for name in parts[0]}], 1)
    assert weights(module) == pytest.approx(weights(whole), abs=1e-7)


def test_the_weights_do_not_change_within_a_window_and_hooks_see_the_gradients_at_its_end():
    class Watch(AbstractHook):
        def __init__(self):
            super().__init__()
            self.seen = []

        def before_update(self, model, optimizer):
            assert optimizer is model.optimizer
            self.seen.append(round(model.module.w.grad.item(), 6))

        def after_batch(self):
            loop = self.main_loop
            self.seen.append((round(loop.model.module.w.item(), 6), loop.model.is_accumulating, loop.updates_done))

    watch = Watch()
    run(TorchModel(Push(), optimizer=SGD, accumulate=2), [{"x": [0.0, 0.0]}, {"x": [0.0]}, {"x": [0.0]}], watch)
    assert watch.seen == [(1.0, True, 0), 1.0, (0.9, False, 1), (0.9, True, 1), 1.0]


def test_gradients_of_a_window_that_was_left_do_not_reach_the_next_epoch():
    model = TorchModel(Push(), optimizer=SGD, accumulate=3)
    with pytest.raises(RuntimeError, match="no"):
        run(model, [{"x": [0.0]}] * 3, FailAt(2))
    assert model.is_accumulating
    run(model, [{"x": [0.0]}] * 3)
    assert model.module.w.item() == pytest.approx(0.9)
    assert not model.is_accumulating


class FailAt(AbstractHook):
    def __init__(self, iteration):
        super().__init__()
        self.iteration = iteration

    def after_batch(self):
        if self.main_loop.iterations_done == self.iteration:
            raise RuntimeError("no")


class EndAt(AbstractHook):
    """Ends the run at the n-th batch, by a termination or a signal, or requests a checkpoint there."""

    def __init__(self, iteration, how):
        super().__init__()
        self.iteration, self.how = iteration, how

    def after_batch(self):
        if self.main_loop.iterations_done == self.iteration:
            if self.how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise TrainingTerminated("enough")


@pytest.mark.parametrize("how", ["signal", "termination"])
@pytest.mark.parametrize(("at", "ends"), [(1, 4), (4, 4), (5, 8), (9, 10)])
def test_the_run_ends_with_the_window(how, at, ends, caplog):
    caplog.set_level("INFO")
    model = TorchModel(Push(), optimizer=SGD, accumulate=4)
    loop = MainLoop(model, Streams(train=[{"x": [0.0]}] * 10), [EndAt(at, how)], skip_zeroth_epoch=True)
    loop.run_training()
    assert (loop.iterations_done, loop.updates_done) == (ends, -(-ends // 4))
    said = [text for text in caplog.messages if "the run ends with the last batch of this update" in text]
    assert len(said) == (at not in (4,))


@pytest.mark.parametrize(
    ("limits", "iterations", "updates"),
    [
        ({"iterations": 6}, 8, 2),
        ({"iterations": 10}, 10, 3),
        ({"updates": 2}, 8, 2),
        ({"updates": 3}, 10, 3),
        ({"updates": 4}, 14, 4),
        ({"epochs": 2}, 20, 6),
        ({"passes": 2}, 20, 6),
    ],
)
def test_limits_count_windows_and_the_horizon_knows_where_the_run_ends(limits, iterations, updates):
    model = TorchModel(Push(), optimizer=SGD, accumulate=4)
    loop = MainLoop(model, Streams(train=[{"x": [0.0]}] * 10), [StopAfter(**limits)])
    loop.run_training()
    assert (loop.iterations_done, loop.updates_done, loop.horizon.updates) == (iterations, updates, updates)
    assert loop.horizon.updates_per_pass == 3


def test_a_schedule_counts_windows():
    class Rates(AbstractHook):
        def __init__(self):
            super().__init__()
            self.seen = []

        def before_update(self, optimizer):
            self.seen.append(optimizer.param_groups[0]["lr"])

    from emrun.models.schedules.built_in import Linear

    rates = Rates()
    model = TorchModel(Push(), optimizer=SGD, scheduler=Factory(Linear), accumulate=2)
    MainLoop(model, Streams(train=[{"x": [0.0]}] * 5), [rates, StopAfter(epochs=2)]).run_training()
    assert rates.seen == pytest.approx([0.1 * (1 - done / 6) for done in range(6)])


def test_an_epoch_of_a_number_of_updates():
    model = TorchModel(Push(), optimizer=SGD, accumulate=3)
    loop = MainLoop(model, Streams(train=[{"x": [0.0]}] * 5), [StopAfter(epochs=2)], fixed_epoch_size="2 updates")
    loop.run_training()
    assert (loop.fixed_epoch_size, loop.iterations_done, loop.updates_done) == (6, 12, 4)


def test_a_train_step_of_ones_own_with_two_optimizers_makes_its_updates_at_the_end_of_the_window():
    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.judge = nn.Linear(2, 1), nn.Linear(1, 1)

        def forward(self, noise, real):
            return self.judge(self.generator(noise)), self.judge(real)

    class GanModel(TorchModel):
        def __init__(self, module, **kwargs):
            super().__init__(module, **kwargs)
            self.of_judge = torch.optim.SGD(module.judge.parameters(), lr=0.1)
            self.of_generator = torch.optim.SGD(module.generator.parameters(), lr=0.1)

        def train_step(self, inputs):
            fake = self.module.generator(inputs["noise"])
            judged = (self.module.judge(fake.detach()) - self.module.judge(inputs["real"])).mean()
            self.backward(judged)
            self.update(self.of_judge)
            return {"judged": judged}

    torch.manual_seed(0)
    module = Gan()
    hand = copy.deepcopy(module)
    rng = np.random.default_rng(0)
    found = [{"noise": rng.random((n, 2), np.float32), "real": rng.random((n, 1), np.float32)} for n in (4, 2, 4)]
    run(GanModel(module, accumulate=2, device="cpu"), found)
    optimizer = torch.optim.SGD(hand.judge.parameters(), lr=0.1)
    for window in (found[:2], found[2:]):
        optimizer.zero_grad()
        for batch in window:
            fake = hand.generator(torch.as_tensor(batch["noise"]))
            judged = (hand.judge(fake.detach()) - hand.judge(torch.as_tensor(batch["real"]))).mean()
            (judged * len(fake)).backward()
        for parameter in hand.judge.parameters():
            parameter.grad.div_(sum(len(batch["noise"]) for batch in window))
        optimizer.step()
    assert torch.equal(weights(module), weights(hand))


def test_the_statistics_of_an_epoch_are_those_without_windows():
    def mean(accumulate):
        torch.manual_seed(1)
        found = {}

        class See(AbstractHook):
            def after_epoch(self, epoch_data):
                found.update(epoch_data["train"]["loss"])

        model = TorchModel(Affine(), optimizer=Factory(torch.optim.SGD, lr=0.0), accumulate=accumulate)
        run(model, [{"x": [1.0, 2.0], "y": [3.0, 5.0]}, {"x": [0.0], "y": [1.0]}], ComputeStats(["loss"]), See())
        return found["mean"]

    assert mean(2) == mean(1)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4", True, None])
def test_a_wrong_number_of_batches_is_an_error(wrong):
    with pytest.raises(ArgumentError) as caught:
        TorchModel(Push(), optimizer=SGD, accumulate=wrong)
    assert caught.value.argument == "accumulate"
    assert repr(wrong) in str(caught.value)


class Evaluates(AbstractHook):
    """Runs the model on a batch of its own after each train batch."""

    def after_batch(self):
        if self.main_loop.training:
            self.main_loop.model.run({"x": [5.0]}, train=False, stream="own")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_hook_that_evaluates_between_batches_leaves_the_training_its_weights(accumulate):
    modules = []
    for hooks in ([], [Evaluates()]):
        torch.manual_seed(0)
        model = TorchModel(Push(), optimizer=SGD, accumulate=accumulate)
        run(model, [{"x": [0.0]}] * 3, AverageWeights(decay=0.5), *hooks, epochs=2)
        modules.append((model.module.w.item(), model.evaluation_weights["w"].item()))
    assert modules[0] == modules[1]
