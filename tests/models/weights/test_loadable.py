"""Structures of modules: what is compared, and what a file of weights cannot hold."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from emrun import Factory, MainLoop, TorchModel
from emrun.base.errors import ArgumentError
from emrun.hooks import StopAfter
from emrun.models.weights.loadable import differences, structure, what_cannot_be_held
from emrun.storage.run import Run


@pytest.mark.parametrize(
    "tensor, reason",
    [
        (torch.zeros(1, dtype=torch.complex128), "'a' is complex128"),
        (torch.eye(2).to_sparse(), "'a' is sparse_coo"),
        (torch.ones(1).to("meta"), "'a' is on the device meta, without values"),
    ],
    ids=["complex128", "coo", "meta"],
)
def test_what_safetensors_cannot_hold_is_named(tensor, reason):
    assert what_cannot_be_held({"a": tensor, "b": torch.ones(1)}) == [reason]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int64]
)
def test_what_safetensors_can_hold_is_not_refused(dtype):
    assert what_cannot_be_held({"a": torch.zeros(2, dtype=dtype)}) == []


def test_structures_are_compared_by_name_shape_and_dtype():
    before = structure({name: torch.zeros(2) for name in "abcd"})
    now = structure({"a": torch.zeros(3), "b": torch.zeros(2).int(), "c": torch.zeros(2), "e": torch.zeros(2)})
    expected = ["'e' is new", "'d' is missing", "'a' had shape (2,), has (3,)", "'b' was float32, is int32"]
    assert differences(before, now) == expected
    assert differences(before, now, of_dtypes=False) == expected[:3]
    assert differences(before, before) == []


class Kinds(nn.Module):
    """Saves and loads itself in the way of its kind."""

    def __init__(self, kind="", frozen=False):
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.value = kind, 1
        self.body, self.norm, self.head = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("shift", torch.tensor([float("nan"), 1.0]))
        self.body.requires_grad_(not frozen)
        if kind == "weight norm":
            nn.utils.parametrizations.weight_norm(self.body)
        elif kind == "spectral norm":
            nn.utils.spectral_norm(self.body)
        elif kind == "tied":
            self.other = nn.Linear(2, 3)
            self.other.weight = self.body.weight
        elif kind == "not persistent":
            self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x):
        hidden = self.body(x) + (self.other(x) if self.kind == "tied" else 0)
        return self.head(self.norm(hidden))[:, 0] ** 2

    def state_dict(self, *arguments, **keywords):
        found = super().state_dict(*arguments, **keywords)
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        if self.kind in ("left out", "left out and taken"):
            return {name: value for name, value in found.items() if not name.startswith("body.")}
        if self.kind == "a number":
            return {**found, "version": 3}
        if self.kind == "other values":
            return {**found, **{name: 0.5 * value for name, value in tensors.items()}}
        if self.kind == "rounded":
            return {**found, **{name: value.bfloat16().to(value.dtype) for name, value in tensors.items()}}
        if self.kind == "another buffer":
            return {**found, "shift": found["shift"] + 1}
        if self.kind == "copies":
            return {**found, **{name: value.clone() for name, value in tensors.items()}}
        return found

    def load_state_dict(self, state, strict=True, assign=False):
        if self.kind == "loads nothing":
            return None
        if self.kind == "replaces":
            return super().load_state_dict(state, assign=True)
        if self.kind == "draws":
            torch.rand(3)
        return super().load_state_dict(state, strict=strict and self.kind != "left out and taken")

    def get_extra_state(self):
        return {"value": self.value}

    def set_extra_state(self, state):
        self.value = state["missing" if self.kind == "wrong extra state" else "value"]


class SavesNoParameter(TorchModel):
    """Trains a parameter beside those of the module."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.beside = nn.Parameter(torch.ones(1))
        self.second = torch.optim.SGD([self.beside], lr=0.1)


class SavesParameter(SavesNoParameter):
    def state_dict(self):
        return {**super().state_dict(), "beside": self.beside.detach()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.beside.data.copy_(state["beside"])


def train(module, run=None, cls=TorchModel, **more):
    """Train a module on three batches; return its model."""
    optimizer = Factory(torch.optim.Adam, lr=0.1)
    model = cls(module, inputs=["x"], outputs=["loss"], optimizer=optimizer, device="cpu", **more)
    batches = torch.arange(24.0).view(3, 4, 2) / 24
    data = SimpleNamespace(train_stream=lambda: iter([{"x": each} for each in batches]))
    torch.manual_seed(5)
    MainLoop(model, data, [StopAfter(epochs=1)], run=run, skip_zeroth_epoch=True).run_training()
    return model


@pytest.mark.parametrize(
    ("kind", "frozen", "reason"),
    [
        ("left out", False, r'load_state_dict\(\) fails: .* "body.weight", "body.bias"'),
        ("left out", True, r"load_state_dict\(\) fails: "),
        ("left out and taken", False, "trained, but not saved: 'body.weight', 'body.bias'; "),
        ("a number", False, r'load_state_dict\(\) fails: .* "version"'),
        ("other values", False, "of other values after a load: .*'body.weight'"),
        ("other values", True, "of other values after a load: .*'body.weight'"),
        ("rounded", False, "of other values after a load: .*'body.weight'"),
        ("another buffer", False, "of other values after a load: 'shift'; "),
        ("loads nothing", False, "of other values after a load: .*'body.weight'"),
        ("replaces", False, "of other values after a load: .*'body.weight'"),
        ("wrong extra state", False, r"load_state_dict\(\) fails: .*missing"),
    ],
)
def test_a_module_that_does_not_come_back_from_a_checkpoint_is_refused_before_its_first_batch(
    tmp_path, kind, frozen, reason
):
    module = Kinds(kind, frozen)
    before = [each.detach().clone() for each in module.parameters()]
    with pytest.raises(ArgumentError, match=reason) as caught:
        train(module, Run(tmp_path, seed=1, command=["emrun"]))
    assert "a resume could not load a checkpoint of Kinds: " in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()
    if kind != "replaces":
        assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize(
    ("kind", "frozen", "more"),
    [
        ("", False, {}),
        ("", True, {}),
        ("left out and taken", True, {}),
        ("copies", False, {}),
        ("draws", False, {}),
        ("tied", False, {}),
        ("weight norm", False, {}),
        ("spectral norm", False, {}),
        ("not persistent", False, {}),
        ("", False, {"cls": SavesParameter}),
    ],
)
def test_a_module_that_comes_back_trains_to_the_same_bits_as_without_checkpoints(tmp_path, kind, frozen, more):
    run = Run(tmp_path, seed=1, command=["emrun"])
    module = Kinds(kind, frozen)
    places = [each.data_ptr() for each in module.parameters()]
    saved, plain = train(module, run, **more).module, train(Kinds(kind, frozen), **more).module
    assert [each.data_ptr() for each in module.parameters()] == places
    for one, other in zip(saved.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(saved.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert (tmp_path / "checkpoints" / "latest").exists()


def test_a_trained_parameter_that_the_module_does_not_have_needs_a_state_dict_of_the_model(tmp_path):
    with pytest.raises(ArgumentError, match="an optimizer trains parameters that the module does not have"):
        train(Kinds(), Run(tmp_path, seed=1, command=["emrun"]), SavesNoParameter)


class FakeQuantized(nn.Module):
    """Quantizes the weight per channel; the first forward gives buffers their shapes."""

    def __init__(self, runs=False):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.fake = torch.ao.quantization.default_per_channel_weight_fake_quant()
        if runs:
            self.fake(self.linear.weight)

    def forward(self, x):
        return nn.functional.linear(x, self.fake(self.linear.weight)).sum(1) ** 2


@pytest.mark.filterwarnings("ignore")
def test_fake_quantization_per_channel_trains_in_the_way_that_the_error_names(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    with pytest.raises(ArgumentError, match=r"'fake.scale' had shape .*run the part once in __init__"):
        train(FakeQuantized(), Run(tmp_path / "a", seed=1, command=["emrun"]))
    train(FakeQuantized(runs=True), Run(tmp_path / "b", seed=1, command=["emrun"]))
    assert (tmp_path / "b" / "checkpoints" / "latest").exists()
