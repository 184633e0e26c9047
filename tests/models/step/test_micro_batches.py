"""Micro batches: a batch in several parts, beside the same by hand and beside the whole batch."""

import copy

import numpy as np
import pytest
import torch
from campaign import thinned
from doubles import SGD, Affine, Push, Record, Streams, run
from in_ranks import all_in_ranks
from torch import nn
from windows import Net, batches, weights

from emrun import AbstractHook, Factory, MainLoop, TorchModel, TrainingAborted
from emrun.base.errors import ArgumentError, StreamError
from emrun.hooks import ComputeStats, StopOnNaN
from emrun.ranks.group import join
from emrun.ranks.parts import Joined, split

MOMENTUM = Factory(torch.optim.SGD, lr=0.1, momentum=0.9)


def by_hand(module, found, accumulate, most):
    """Train on `most` examples at once: the sum of the weighted losses of a window, divided by its weight."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for first in range(0, len(found), accumulate):
        optimizer.zero_grad()
        total = 0.0
        for batch in found[first : first + accumulate]:
            number = -(-len(batch["x"]) // most)
            for rows in np.array_split(np.arange(len(batch["x"])), number):
                outputs = module(**{name: torch.as_tensor(each[rows]) for name, each in batch.items()})
                tokens = outputs.get("example_weight")
                weight = float(len(rows)) if tokens is None else tokens.sum()
                loss = outputs["loss"]
                loss = loss.mean() if tokens is None else (loss * tokens).sum() / weight
                (loss * weight).backward()
                total = total + weight
        for parameter in module.parameters():
            parameter.grad.div_(total)
        optimizer.step()


def trained(module, found, size, accumulate=1, *hooks, **arguments):
    """Return the data of the train batches."""
    more = {"micro_batch_size": size, "accumulate": accumulate, "device": "cpu", **arguments}
    return run(TorchModel(module, optimizer=MOMENTUM, **more), found, *hooks)


@pytest.mark.parametrize("kind", ["examples", "mean", "tokens"])
@pytest.mark.parametrize(("accumulate", "size"), [(1, 3), (2, 4)])
def test_the_updates_equal_those_by_hand_to_the_last_bit_and_those_of_whole_batches(kind, accumulate, size):
    torch.manual_seed(1)
    found = batches([8, 8, 5])
    module = Net(kind)
    hand, whole = copy.deepcopy(module), copy.deepcopy(module)
    in_parts = trained(module, found, size, accumulate)
    by_hand(hand, found, accumulate, size)
    assert torch.equal(weights(module), weights(hand))
    outputs = trained(whole, found, None, accumulate)
    assert weights(module) == pytest.approx(weights(whole), abs=1e-6)
    for ours, theirs in zip(in_parts, outputs, strict=True):
        assert ours["loss"].tolist() == pytest.approx(theirs["loss"].tolist(), abs=1e-6)
        assert ours["loss"].requires_grad is False


def test_several_losses_and_a_part_whose_examples_all_have_the_weight_zero():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x, tokens):
            return {"predicted": self.layer(x).squeeze(1), "example_weight": tokens}

    def model(module, size):
        losses = {
            name: Factory(each, reduction="none", options={"inputs": ["predicted", "y"], "scale": scale})
            for name, each, scale in (("square", nn.MSELoss, 1.0), ("linear", nn.L1Loss, 0.5))
        }
        return TorchModel(module, loss=losses, optimizer=SGD, micro_batch_size=size, device="cpu")

    torch.manual_seed(1)
    module, found = Two(), batches([6])
    found[0]["tokens"][:2] = 0.0
    whole = copy.deepcopy(module)
    (ours,), (theirs,) = run(model(module, 2), found), run(model(whole, None), found)
    assert weights(module) == pytest.approx(weights(whole), abs=1e-6)
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item())
    assert ours["square"].tolist() == pytest.approx(theirs["square"].tolist())


def test_hooks_and_metrics_see_each_batch_once_and_the_step_record_its_loss():
    class Count:
        def __init__(self):
            self.reset()

        def update(self, loss):
            self.found.append(len(loss))

        def compute(self):
            return float(self.found[0]) + 100 * len(self.found)

        def reset(self):
            self.found = []

    class See(AbstractHook):
        def __init__(self):
            super().__init__()
            self.seen = []

        def before_update(self, model):
            self.seen.append(model.step_outputs["loss"].tolist())

        def after_batch(self):
            model = self.main_loop.model
            self.seen.append((round(model.step_values()["loss"].item(), 4), model.is_accumulating))

        def after_epoch(self, epoch_data):
            self.seen.append((epoch_data["train"]["loss"]["count"], epoch_data["train"]["count"]))

    see, stats = See(), ComputeStats([{"loss": ["count"]}])
    metrics = {"count": Factory(Count, options={"inputs": ["loss"]})}
    model = TorchModel(Push(), optimizer=SGD, micro_batch_size=2, metrics=metrics, device="cpu")
    run(model, [{"x": [0.0] * 5}, {"x": [0.0] * 2}], stats, see)
    second = pytest.approx([0.9] * 2)
    assert see.seen == [[1.0] * 5, (1.0, False), second, (0.9, False), (7, 205.0)]


def test_a_nan_in_the_first_part_is_found_before_the_update():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return {"loss": self.w * torch.ones_like(x), "seen": x}

    model = TorchModel(Bad(), optimizer=SGD, micro_batch_size=1, device="cpu")
    with pytest.raises(TrainingAborted, match="train/seen is NaN at iteration 1"):
        run(model, [{"x": [float("nan"), 0.0, 0.0]}], StopOnNaN(after_batch=True))
    assert model.module.w.item() == 1.0


def test_a_train_step_of_ones_own_runs_once_for_each_part():
    class Own(TorchModel):
        def train_step(self, inputs):
            outputs = self.forward(inputs)
            for _ in range(2):
                self.backward(outputs["loss"].mean())
                outputs = self.forward(inputs)
            self.update(self.optimizer)
            return outputs

    module, size = Affine(), 2
    model = Own(module, optimizer=SGD, micro_batch_size=size, device="cpu")
    whole = Own(Affine(), optimizer=SGD, device="cpu")
    found = [{"x": [1.0, 2.0, 4.0], "y": [3.0, 5.0, 0.0]}]
    run(model, found)
    run(whole, found)
    assert weights(module) == pytest.approx(weights(whole.module))
    assert model.has_updated


def test_batches_are_split_evenly_whatever_their_sources_are():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3), torch.ones(1)], layout=torch.jagged)
    inputs = {"a": torch.arange(3), "b": {"c": torch.arange(3)}, "d": ["x", "y", "z"], "e": None, "f": nested}
    (one, first), (two, second) = split(inputs, 3, 2)
    assert (first, second) == (2, 1)
    assert (one["a"].tolist(), one["b"]["c"].tolist(), one["d"], one["e"]) == ([0, 1], [0, 1], ["x", "y"], None)
    assert [each.tolist() for each in two["f"].unbind()] == [[1.0]]
    assert [count for _, count in split({"a": torch.arange(9)}, 9, 4)] == [3, 3, 3]
    joined = Joined("micro_batch_size", "parts of batches")
    for part, count in ((one, first), (two, second)):
        joined.counts.append(count)
        numbers = {"g": float(count), "h": np.float32(count), "i": torch.tensor(count), "j": np.arange(count)}
        joined.add({**part, **numbers}, float(count))
    found = joined.outputs()
    assert (found["a"].tolist(), found["b"]["c"].tolist(), found["d"]) == ([0, 1, 2], [0, 1, 2], ["x", "y", "z"])
    assert [each.tolist() for each in found["f"].unbind()] == [[1.0] * 2, [1.0] * 3, [1.0]]
    assert found["e"] is None
    assert (found["g"], found["h"], found["i"].item()) == pytest.approx((5 / 3,) * 3)
    assert found["j"].tolist() == [0, 1, 0]


def test_an_output_that_cannot_be_joined_is_an_error():
    class Square(Push):
        def forward(self, x):
            return {**super().forward(x), "square": torch.ones(7, 7)}

    with pytest.raises(StreamError, match=r"'square' is a Tensor of shape \(7, 7\) for a part of 2 examples"):
        trained(Square(), [{"x": [0.0] * 4}], 2)


def test_batch_norm_is_named_once(caplog):
    class Norm(Push):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

    trained(Norm(), [{"x": [0.0] * 4}] * 3, 2)
    assert len([text for text in caplog.messages if "norm (BatchNorm) normalises each part" in text]) == 1
    caplog.clear()
    trained(Norm(), [{"x": [0.0] * 4}] * 3, 4)
    assert not any("BatchNorm" in text for text in caplog.messages)


def test_an_evaluation_is_not_split():
    record, push = Record(), Push()
    model = TorchModel(push, micro_batch_size=1, device="cpu")
    calls = []
    push.register_forward_pre_hook(lambda module, inputs: calls.append(len(inputs[0])))
    MainLoop(model, Streams(valid=[{"x": [0.0] * 4}]), [record]).run_evaluation("valid")
    assert calls == [4]


class Small(nn.Module):
    """Has memory for a number of rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.calls = rows, []
        self.layer = nn.Linear(3, 4)
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        self.calls.append(len(x))
        if len(x) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"loss": self.dropout(self.norm(self.layer(x))).sum(dim=1)}


@pytest.mark.parametrize("accumulate", thinned([1, 2], [2]))
def test_auto_halves_the_size_and_trains_as_with_the_number(accumulate):
    class Seen(AbstractHook):
        def __init__(self):
            super().__init__()
            self.updates = 0

        def before_update(self):
            self.updates += 1

    def result(size):
        torch.manual_seed(3)
        module, seen, written = Small(5), Seen(), []
        adam = Factory(torch.optim.Adam, lr=0.1)
        model = TorchModel(module, optimizer=adam, micro_batch_size=size, accumulate=accumulate, device="cpu")
        model.write_setting = lambda name, value: written.append((name, value))
        run(model, [{"x": np.ones((16, 3)) * i} for i in range(2)], seen)
        state = {name: each.tolist() for name, each in module.state_dict().items()}
        return state, seen.updates, str(model.optimizer.state_dict()), torch.rand(1).item(), module.calls, written

    *auto, calls, written = result("auto")
    *given, others, nothing = result(4)
    assert auto == given
    assert calls == [16, 8, *others]
    assert (written, nothing) == ([("micro_batch_size", 4)], [])


def test_auto_halves_the_size_once_more_after_the_first_update():
    class Less(Small):
        def forward(self, x):
            self.rows = 5 if self.norm.num_batches_tracked < 2 else 2
            return super().forward(x)

    written, module = [], Less(5)
    model = TorchModel(module, optimizer=SGD, micro_batch_size="auto", device="cpu")
    model.write_setting = lambda name, value: written.append(value)
    run(model, [{"x": np.ones((8, 3))}] * 3)
    assert written == [4, 2]
    assert module.calls == [8, 4, 4, 4, *[2] * 4, *[2] * 4]


def test_auto_does_not_run_a_batch_again_whose_update_has_begun():
    class Full(AbstractHook):
        def after_update(self):
            raise torch.OutOfMemoryError("CUDA out of memory")

    module = Small(5)
    with pytest.raises(torch.OutOfMemoryError):
        run(TorchModel(module, optimizer=SGD, micro_batch_size="auto", device="cpu"), [{"x": np.ones((4, 3))}], Full())
    assert module.calls == [4]


class Rows(nn.Linear):
    """Has memory for a number of rows."""

    def __init__(self, rows):
        torch.manual_seed(0)
        super().__init__(3, 1)
        self.rows, self.calls = rows, []

    def forward(self, x):
        self.calls.append(len(x))
        if self.training and len(x) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"loss": super().forward(x).squeeze(1) ** 2}


def on_rank(size):
    """Return the parts of a rank, of which the first has less memory, and the weights."""
    module = Rows((3, 100)[join().rank] if size == "auto" else 100)
    run(TorchModel(module, optimizer=MOMENTUM, micro_batch_size=size, device="cpu"), batches([16, 16]))
    return module.calls[3:], module.weight.flatten().tolist()  # without the comparison of halves


def test_each_rank_finds_its_own_size():
    found = all_in_ranks(2, {"auto": lambda: on_rank("auto"), "whole": lambda: on_rank(None)})
    (first, one), (second, other) = found["auto"]
    assert first == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert second == [8, 8]
    assert one == other == pytest.approx(found["whole"][0][1])


def test_not_even_one_example():
    with pytest.raises(ArgumentError, match="auto: not even one example fits") as caught:
        trained(Small(0), batches([4]), "auto")
    assert caught.value.argument == "micro_batch_size"


@pytest.mark.parametrize(("size", "larger", "note"), [(None, 8, "=4"), (6, 8, "=2"), (6, 4, "=2"), (1, 4, "not even")])
def test_an_error_for_want_of_memory_names_the_size_to_set(size, larger, note):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trained(Small(0), [{"x": np.ones((larger, 3))}], size)
    assert any(note in each for each in caught.value.__notes__)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "automatic", True])
def test_a_wrong_size_is_an_error(wrong):
    with pytest.raises(ArgumentError) as caught:
        TorchModel(Push(), optimizer=SGD, micro_batch_size=wrong)
    assert caught.value.argument == "micro_batch_size"
    assert repr(wrong) in str(caught.value)
    assert ("did you mean 'auto'" in str(caught.value)) is (wrong == "automatic")
