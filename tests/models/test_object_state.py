"""What a checkpoint stores of an object that keeps numbers, and that it comes back exactly."""

import io
import re
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from emrun.base.encoding import decode, digest, encode
from emrun.base.errors import StateError
from emrun.models.object_state import ObjectState

CPU = torch.device("cpu")


def read_back(value):
    """Return a value as `torch.load` reads it from a checkpoint."""
    file = io.BytesIO()
    torch.save(encode(value, "state"), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Sum:
    """Sums up numbers and remembers all of them."""

    def __init__(self, scale=1.0):
        self.scale = scale
        self.function = abs
        self.reset()

    def update(self, x):
        self.total = self.total + self.scale * self.function(x).sum()
        self.seen.append(x)

    def compute(self):
        return float(self.total) + len(self.seen)

    def reset(self):
        self.total, self.seen = np.float32(0), []


class OfOthers:
    """Hands its batches on to a metric and a module inside."""

    def __init__(self):
        self.sum = Sum()
        self.norm = torch.nn.BatchNorm1d(2, affine=False)

    def update(self, x):
        self.sum.update(x)
        self.norm(torch.as_tensor(x))

    def compute(self):
        return self.sum.compute() + float(self.norm.running_mean.sum())

    def reset(self):
        self.sum.reset()
        self.norm.reset_running_stats()


class OwnState(Sum):
    """Saves and loads its state itself; a set is not in it."""

    def __init__(self):
        super().__init__()
        self.names = {"a"}

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class Kept(torch.nn.Module):
    """A module with a buffer that its state dict leaves out, and a plain list."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2), persistent=False)
        self.reset()

    def update(self, x):
        self.total += torch.as_tensor(x).sum(0)
        self.counts.append(len(x))

    def compute(self):
        return float(self.total.sum()) / sum(self.counts)

    def reset(self):
        self.total.zero_()
        self.counts = []


BATCHES = [np.random.default_rng(index).normal(size=(3, 2)).astype(np.float32) for index in range(4)]


def kinds_of(value):
    if isinstance(value, dict):
        return type(value), [(kinds_of(key), kinds_of(each)) for key, each in value.items()]
    return (type(value), [*map(kinds_of, value)]) if isinstance(value, list | tuple) else type(value)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 2.5, "text", b"bytes", [], (), {}),
        [1, (2, [3.0]), {"a": {1: None, ("b", 2): [torch.ones(2)]}}],
        *(np.float32(0.1), np.int64(3), np.bool_(True), np.arange(6).reshape(2, 3)[:, ::-1], np.float64("nan")),
        *(
            torch.arange(4, dtype=torch.uint8),
            torch.tensor(1.0),
            torch.empty(0, 2),
            torch.ones(1, dtype=torch.bfloat16),
        ),
        np.array(["text", "t"], "<U9")[1:],
        *(Counter("abca"), OrderedDict(b=1, a=2)),
    ],
)
def test_a_value_comes_back_with_its_types(value):
    again = decode(read_back(encode(value, "it", exact=True)))
    for found in (again, decode(again)):
        assert kinds_of(found) == kinds_of(value)
        assert digest(found) == digest(value)


@pytest.mark.parametrize(
    "value", [{1, 2}, [object()], {"a": np.array([b"text"])}, 1 + 2j, np.ma.ones(2), torch.Size([1])]
)
def test_a_value_that_would_come_back_changed_is_refused(value):
    with pytest.raises(StateError, match=r"^it.* is .*, which cannot be saved"):
        encode(value, "it", exact=True)


def test_a_tensor_of_a_device_goes_back_to_the_device_and_one_of_the_cpu_does_not():
    thing = Sum()
    thing.seen = [torch.ones(1), torch.ones(2)]
    state = ObjectState("it", thing, torch.device("meta"))
    taken = state.take()
    taken[""]["of_cpu"] = [True, False]
    state.restore(taken)
    assert [each.device.type for each in thing.seen] == ["cpu", "meta"]


@pytest.mark.parametrize("build", [Sum, OfOthers, OwnState, Kept])
def test_an_object_restored_between_two_batches_gives_the_same_result(build):
    straight, other = build(), build()
    state, again = (ObjectState("it", each, CPU) for each in (straight, other))
    for batch in BATCHES[:2]:
        straight.update(batch)
    taken = state.take()
    saved = read_back(taken)
    for batch in BATCHES[2:]:
        straight.update(batch)
    expected = straight.compute()
    assert digest(read_back(taken)) == digest(saved)  # a copy, which later batches do not change
    other.update(BATCHES[3])
    assert again.fits(saved)
    again.restore(saved)
    state.restore(saved)
    for each in (straight, other):
        if build is OwnState:
            each.seen = BATCHES[:2]  # it leaves this out of its state
        for batch in BATCHES[2:]:
            each.update(batch)
        assert each.compute() == expected


def test_an_attribute_that_appeared_later_is_gone_again():
    thing = Sum()
    state = ObjectState("it", thing, CPU)
    before = state.take()
    thing.late = 1
    state.restore(before)
    assert not hasattr(thing, "late")


def test_an_object_built_with_other_arguments_or_of_another_class_does_not_fit():
    saved = ObjectState("it", Sum(scale=2.0), CPU).take()
    assert ObjectState("it", Sum(scale=2.0), CPU).fits(saved)
    assert not ObjectState("it", Sum(scale=3.0), CPU).fits(saved)
    assert not ObjectState("it", Kept(), CPU).fits(saved)


def test_attributes_that_cannot_be_saved_are_named_unless_they_do_not_change():
    thing = Sum()
    thing.pattern, thing.table = re.compile("a"), {"a": [np.add, torch.float32]}
    state = ObjectState("metrics.it", thing, CPU)
    state.take()
    thing.table = {"a": [np.subtract]}
    with pytest.raises(StateError, match=r"metrics.it: attribute 'table'.a\[0\] is ufunc, which cannot be saved"):
        state.take()
    nested = OfOthers()
    nested.sum.seen = {1}
    message = r"metrics.it.sum: attribute 'seen' is set, .*or define state_dict\(\) and load_state_dict\(\) in Sum"
    with pytest.raises(StateError, match=message):
        ObjectState("metrics.it", nested, CPU).take()


def test_an_object_with_slots_is_refused_when_it_is_built():
    class Slotted:
        __slots__ = ("total",)

    with pytest.raises(StateError, match=r"Slotted has slots, which cannot be saved; define state_dict"):
        ObjectState("it", Slotted(), CPU)
