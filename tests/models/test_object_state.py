"""What a checkpoint stores of a metric, and that it comes back exactly."""

import io

import numpy as np
import pytest
import torch

from emrun.base.encoding import digest, encode
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

    def __init__(self):
        self.reset()

    def update(self, x):
        self.total = self.total + x.sum()
        self.seen.append(x)

    def compute(self):
        return float(self.total) + len(self.seen)

    def reset(self):
        self.total, self.seen = np.float32(0), []

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


class Kept(torch.nn.Module):
    """A module with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def update(self, x):
        self.total += torch.as_tensor(x).sum(0)

    def compute(self):
        return float(self.total.sum())

    def reset(self):
        self.total.zero_()


class Forgetful:
    """Has no state."""


BATCHES = [np.random.default_rng(index).normal(size=(3, 2)).astype(np.float32) for index in range(4)]


def test_a_tensor_of_a_device_goes_back_to_the_device_and_one_of_the_cpu_does_not():
    thing = Sum()
    thing.seen = [torch.ones(1), torch.ones(2)]
    state = ObjectState("it", thing, torch.device("meta"))
    taken = state.take()
    taken["of_cpu"] = [True, False]
    state.restore(taken)
    assert [each.device.type for each in thing.seen] == ["cpu", "meta"]


@pytest.mark.parametrize("build", [Sum, Kept])
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
        for batch in BATCHES[2:]:
            each.update(batch)
        assert each.compute() == expected


def test_an_object_of_another_class_or_without_a_state_does_not_fit():
    saved = ObjectState("it", Sum(), CPU).take()
    assert ObjectState("it", Sum(), CPU).fits(saved)
    assert not ObjectState("it", Kept(), CPU).fits(saved)
    assert not ObjectState("it", Sum(), CPU).fits(ObjectState("it", Forgetful(), CPU).take())
