"""`recompute`: parts compute their activations again; everything is as without, except for the memory."""

import copy
from types import MethodType

import pytest
import torch
from campaign import thinned
from doubles import SGD, Streams, state_of
from torch import nn

from emrun import MainLoop, TorchModel
from emrun.base.errors import ArgumentError
from emrun.models.recomputation import recompute


class Block(nn.Module):
    """A layer with dropout."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return x + self.dropout(torch.tanh(self.norm(self.linear(x)))) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=2.0)
        return {"loss": x.square().mean(1)}


BATCHES = [{"x": torch.linspace(-1, 1, 12).view(4, 3)}, {"x": torch.linspace(-2, 1, 9).view(3, 3)}]


def test_a_forward_that_was_set_on_a_part_is_kept():
    net, x = nn.Sequential(nn.Linear(3, 3)), BATCHES[0]["x"]
    net[0].forward = MethodType(lambda self, x: x * self.weight.sum(), net[0])
    expected = net(x)
    for module in (net, copy.deepcopy(net)):
        recompute(module, "0")
        recompute(module, "0")  # as for a second model with the same module
        assert torch.equal(module(x), expected)
        module(x).sum().backward()
        assert torch.equal(module[0].weight.grad, x.sum().expand(3, 3))


def train(value, epochs=2, **arguments):
    """Train; return the weights, the random state, and the model."""
    model = TorchModel(Net(), optimizer=SGD, device="cpu", recompute=value, **arguments)
    torch.manual_seed(1)
    with MainLoop(model, Streams(train=BATCHES)) as loop:
        for _ in range(epochs):
            loop.epoch(["train"])
    return state_of(model.module), torch.get_rng_state().tolist(), model


def kept_bytes(module):
    """Return the bytes that a forward keeps for the gradients."""
    found = []

    def pack(tensor):
        found.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(torch.randn(64, 3))
    return sum(found)


@pytest.mark.parametrize("value", [r"^blocks\.\d+$", {"match": [r"blocks\.0$", "blocks.2"]}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_and_the_random_state_are_the_same_to_the_last_bit(value, accumulate):
    plain, random_state, _ = train(None, accumulate=accumulate)
    state, own_random_state, model = train(value, accumulate=accumulate)
    assert list(plain) == list(state)
    assert all(torch.equal(each, state[name]) for name, each in plain.items())
    assert random_state == own_random_state
    assert model.module.blocks[0].calls == 2 * 2 * 2


class Replaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.last = x.mean().detach()
        return x


@pytest.mark.parametrize(("part", "name"), [(nn.BatchNorm1d(8), "running_mean"), (Replaces(), "last")])
def test_a_part_that_changes_a_buffer_is_an_error_before_the_first_update(part, name):
    net = Net()
    net.blocks[0].norm = part
    weights = net.first.weight.clone()
    model = TorchModel(net, optimizer=SGD, device="cpu", recompute="blocks")
    with MainLoop(model, Streams(train=BATCHES)) as loop, pytest.raises(ArgumentError) as caught:
        loop.epoch(["train"])
    message = f"recompute: the forward of Block changes its buffer 'norm.{name}', and would change it once more"
    assert str(caught.value).startswith(message)
    assert torch.equal(net.first.weight, weights)


def test_fewer_activations_are_kept():
    module, other = Net(), Net()
    assert recompute(other, "blocks") == ["blocks.0", "blocks.1", "blocks.2"]  # not the list, nor parts of the blocks
    assert kept_bytes(other) < kept_bytes(module) / 3


def test_evaluations_compute_once():
    module = Net()
    recompute(module, r"blocks\.1")
    module.eval()
    module(BATCHES[0]["x"])["loss"].sum().backward()
    assert [block.calls for block in module.blocks] == [1, 1, 1]


def test_a_copy_uses_its_own_weights():
    module = Net().train()
    recompute(module, r"blocks\.1")
    other = copy.deepcopy(module)
    with torch.no_grad():
        module.blocks[1].norm.weight.zero_()
    other(BATCHES[0]["x"])["loss"].sum().backward()
    assert module.blocks[1].norm.weight.grad is None
    assert other.blocks[1].norm.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("layers", "recompute: 'layers' matches none of the parts of Net, first, blocks.0, blocks.0.linear, "),
        (["block", "layers"], "recompute[1]: 'layers' matches none of the parts of Net"),
        ({"match": ["block", "("]}, "recompute.match[1]: '(' is not a regular expression"),
        ({"mach": "block"}, "recompute.mach: unknown key 'mach'; did you mean 'match'?; allowed: match"),
        ({}, "recompute.match: a regular expression is missing"),
        (True, "recompute: True is neither a regular expression nor a list of them"),
        (r"^blocks$", "recompute: '^blocks$' matches none of the parts of Net"),
    ],
)
def test_wrong_values_are_errors(value, message):
    with pytest.raises(ArgumentError) as caught:
        recompute(Net(), value)
    assert str(caught.value).startswith(message)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch 2.15 itself
@pytest.mark.parametrize("backend", thinned(["eager", "aot_eager"], ["eager"]))
def test_it_goes_together_with_compile(backend):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh()) for _ in "ab"])

        def forward(self, x):
            return {"loss": self.blocks(x).square().mean(1)}

    found = []
    for arguments in ({}, {"recompute": r"blocks\.\d$", "compile": {"backend": backend}}):
        model = TorchModel(Plain(), optimizer=SGD, device="cpu", **arguments)
        with MainLoop(model, Streams(train=BATCHES)) as loop:
            loop.epoch(["train"])
        found.append(state_of(model.module))
    assert list(found[0]) == list(found[1])
    assert all(torch.allclose(each, found[1][name]) for name, each in found[0].items())
