"""The state of a model that is saved in no checkpoint."""

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from emrun.diagnosis.differences import NOT_PERSISTENT, varying
from emrun.diagnosis.private_state import private_state, unsaved_state

KINDS = {
    "number": (0, 1),
    "text": ("a", "b"),
    "none": (None, 1.5),
    "tensor": (torch.zeros(2), torch.ones(2)),
    "array": (np.zeros(2), np.ones(2)),
    "NumPy scalar": (np.float32(1), np.float32(2)),
    "list": ([1, torch.ones(1)], [1, torch.zeros(1)]),
    "mapping": ({"a": 1}, {"a": 2}),
    "deque": (deque([1]), deque([1, 2])),
    "set": ({1}, {1, 2}),
    "generator": (np.random.default_rng(1), np.random.default_rng(2)),
    "Python generator": (random.Random(1), random.Random(2)),
    "old NumPy generator": (np.random.RandomState(1), np.random.RandomState(2)),
    "torch generator": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "conjugate": (torch.tensor([1j]).conj(), torch.tensor([2j]).conj()),
}


class Net(nn.Module):
    def __init__(self, value=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("lost", torch.zeros(2), persistent=False)
        self.register_buffer("none", None, persistent=False)
        self.value = value


def state(module, **more):
    return unsaved_state(SimpleNamespace(module=module, **more))


@pytest.mark.parametrize("kind", KINDS)
def test_an_attribute_that_differs_is_named_with_its_module(kind):
    before, after = (state(nn.Sequential(nn.Identity(), Net(value))) for value in KINDS[kind])
    assert varying(before, after) == ["module '1' (Net), attribute 'value'"]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_are_equal(kind):
    assert state(Net(KINDS[kind][0])) == state(Net(KINDS[kind][0]))


def test_only_buffers_that_are_not_persistent_are_there():
    module = Net()
    before = state(module)
    for tensor in (module.weight.data, module.saved, module.lost):
        tensor.add_(1)
    assert varying(before, state(module)) == [f"module Net, buffer 'lost' {NOT_PERSISTENT}"]


def test_a_loss_is_looked_at_with_all_its_buffers():
    loss = nn.BCELoss(weight=torch.ones(2))
    before = state(Net(), losses={"loss": loss})
    loss.weight.add_(1)
    assert varying(before, state(Net(), losses={"loss": loss})) == ["loss BCELoss, buffer 'weight'"]


def test_values_that_cannot_be_compared_are_left_out():
    for value in (object(), lambda: None, [object()], nn.Identity):
        assert not [name for name in state(Net(value)) if "value" in name]


class AnyAttribute:
    def __init__(self):
        vars(self)["entries"] = {"a": 1}

    def __getattr__(self, name):
        return vars(self)["entries"][name]


class Store:
    def get_state(self, key):
        return key


class Broken(list):
    def __iter__(self):
        raise OSError


def test_values_that_cannot_be_read_are_left_out_and_others_are_not():
    own = {}
    own["self"] = own
    sparse = torch.eye(2).to_sparse()
    objects = np.array([object()])
    for value in (AnyAttribute(), Store(), own, Broken(), sparse, objects, [AnyAttribute()]):
        module = Net(value)
        module.other = 1
        module.register_buffer("lost", sparse, persistent=False)
        assert [name for name in state(module) if "Net" in name] == ["module Net, attribute 'other'"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_read():
    module = Net(0)
    module.register_buffer("lost", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), persistent=False)
    assert "module Net, buffer 'lost' (persistent=False)" in state(module)


def test_a_parameter_that_replaces_one_of_the_optimizer_is_named():
    net = Net()
    model = SimpleNamespace(module=net, optimizers={"optimizer": torch.optim.SGD(net.parameters(), 0.1)})
    assert private_state(model, [], None)["parameters that no optimizer trains"] == "none"
    net.weight = nn.Parameter(net.weight.detach().clone())
    assert private_state(model, [], None)["parameters that no optimizer trains"] == "weight"
