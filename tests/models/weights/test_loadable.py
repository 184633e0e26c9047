"""Structures of modules: what is compared, and what a file of weights cannot hold."""

from types import SimpleNamespace

import pytest
import torch
from campaign import thinned
from safetensors.torch import _TYPES
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
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        pytest.param(
            torch.complex64,
            marks=pytest.mark.skipif("C64" not in _TYPES, reason="this safetensors has no complex numbers"),
        ),
        torch.bool,
        torch.uint8,
        torch.int64,
    ],
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
        ("left out", False, r'the load fails: .* "body.weight", "body.bias"'),
        ("left out", True, r"the load fails: "),
        ("left out and taken", False, "trained, but not saved: 'body.weight', 'body.bias'; "),
        ("a number", False, r'the load fails: .* "version"'),
        ("other values", False, "of other values after a load: .*'body.weight'"),
        ("other values", True, "of other values after a load: .*'body.weight'"),
        ("rounded", False, "of other values after a load: .*'body.weight'"),
        ("another buffer", False, "of other values after a load: 'shift'; "),
        ("loads nothing", False, "of other values after a load: .*'body.weight'"),
        ("replaces", False, "of other values after a load: .*'body.weight'"),
        ("wrong extra state", False, r"the load fails: .*missing"),
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


RIGHT = [
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
]


@pytest.mark.parametrize(("kind", "frozen", "more"), thinned(RIGHT, RIGHT[2::2]))
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


class Counts(nn.Module):
    """Has buffers that its load leaves out, or that its state dict leaves out."""

    def __init__(self, kind="", changes=True, persistent=True):
        super().__init__()
        self.kind, self.changes = kind, changes
        self.backbone, self.head = nn.BatchNorm1d(2).requires_grad_(False), nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=persistent)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.train(mode and self.changes)
        return self

    def forward(self, x):
        if self.kind.endswith("one"):
            self.seen += self.training and self.changes
        else:
            self.seen = self.seen + (self.training and self.changes)
        return self.head(self.backbone(x))[:, 0] ** 2

    def state_dict(self, *arguments, **keywords):
        found = super().state_dict(*arguments, **keywords)
        left_out = {
            "state leaves out": "backbone.",
            "state leaves out one": "seen",
            "state leaves out another": "seen",
        }.get(self.kind, "-")
        return {name: value for name, value in found.items() if not name.startswith(left_out)}

    def load_state_dict(self, state, strict=True, assign=False):
        left_out = {"load leaves out": "backbone.", "load leaves out one": "seen"}.get(self.kind, "-")
        taken = {name: value for name, value in state.items() if not name.startswith(left_out)}
        return super().load_state_dict(taken, strict=False)


BUFFERS = {
    "load leaves out": "backbone.running_mean",
    "load leaves out one": "seen",
    "state leaves out": "backbone.running_mean",
    "state leaves out one": "seen",
    "state leaves out another": "seen",
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_that_a_load_does_not_bring_back_may_not_change(tmp_path, kind):
    with pytest.raises(ArgumentError, match=f"a load does not bring back the buffer '{BUFFERS[kind]}', which changes"):
        train(Counts(kind), Run(tmp_path, seed=1, command=["emrun"]))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "persistent"),
    [
        *((kind, False, True) for kind in BUFFERS),
        ("load leaves out one", True, False),  # as the error advises
        ("state leaves out one", True, False),
        ("", True, True),  # as the error advises
    ],
)
def test_a_buffer_that_does_not_change_or_is_saved_trains_to_the_same_bits(tmp_path, kind, changes, persistent):
    saved = train(Counts(kind, changes, persistent), Run(tmp_path, seed=1, command=["emrun"])).module
    plain = train(Counts(kind, changes, persistent)).module
    tensors = zip((*saved.parameters(), *saved.buffers()), (*plain.parameters(), *plain.buffers()), strict=True)
    assert all(torch.equal(one, other) for one, other in tensors)
    assert (tmp_path / "checkpoints" / "latest").exists()


class SavesAll(TorchModel):
    """Saves and loads in its own way."""

    file, only = "weights.pt", ""

    def save(self, directory):
        found = {name: each for name, each in self.module.state_dict().items() if name.startswith(self.only)}
        torch.save({name: self.written(each) for name, each in found.items()}, directory / self.file)

    def load(self, directory):
        found = torch.load(directory / "weights.pt", weights_only=True)
        found = {name: each for name, each in found.items() if name.startswith(self.only)}
        self.module.load_state_dict(found, strict=not self.only)
        self.module.eval()
        self.loaded_from = directory

    def written(self, value):
        return value


class SavesHead(SavesAll):
    only = "head."


class SavesRounded(SavesAll):
    def written(self, value):
        return value.half() if isinstance(value, torch.Tensor) else value


class SavesElsewhere(SavesAll):
    file = "other.pt"


class LoadsNothing(SavesAll):
    def load(self, directory):
        pass


class SavesMore(TorchModel):
    def save(self, directory):
        super().save(directory)
        (directory / "note.txt").write_text("more")

    def load(self, directory):
        assert (directory / "note.txt").read_text() == "more"
        super().load(directory)


class SavesWhatTrainingMakes(SavesAll):
    def train_step(self, inputs):
        self.made = True
        return super().train_step(inputs)

    def save(self, directory):
        assert self.made
        super().save(directory)


class SavesInItsState(LoadsNothing):
    def state_dict(self):
        return {**super().state_dict(), "module": self.module.state_dict()}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["module"])
        super().load_state_dict(state)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (SavesHead, "of other values after a load: 'body.weight'"),
        (SavesRounded, "of other values after a load: .*'body.weight'"),
        (SavesElsewhere, "the load fails: .*weights.pt"),
        (LoadsNothing, "of other values after a load: .*'body.weight'"),
    ],
)
def test_a_save_and_a_load_of_a_model_must_bring_back_what_is_trained(tmp_path, cls, reason):
    module = Kinds()
    before = [each.detach().clone() for each in module.parameters()]
    with pytest.raises(ArgumentError, match=reason):
        train(module, Run(tmp_path, seed=1, command=["emrun"]), cls)
    assert not (tmp_path / "checkpoints").exists()
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize(
    ("cls", "frozen"),
    [
        (SavesAll, False),
        (SavesHead, True),
        (SavesMore, False),
        (SavesWhatTrainingMakes, False),
        (SavesInItsState, False),
    ],
)
def test_a_save_and_a_load_of_a_model_that_are_right_train_to_the_same_bits(tmp_path, cls, frozen):
    def kinds():
        module = Kinds(frozen=frozen)
        module.norm = nn.Identity() if frozen else module.norm
        return module

    saved = train(kinds(), Run(tmp_path, seed=1, command=["emrun"]), cls)
    plain = train(kinds(), cls=cls)
    assert all(map(torch.equal, saved.module.parameters(), plain.module.parameters()))
    assert "loaded_from" not in vars(saved)
    assert saved.module.training
    assert (tmp_path / "checkpoints" / "latest").exists()


@pytest.mark.parametrize(("cls", "is_refused"), [(SavesHead, True), (SavesAll, False)])
def test_what_init_from_has_loaded_must_come_back_from_a_checkpoint(tmp_path, cls, is_refused):
    module = Kinds(frozen=True)
    module.norm = nn.Identity()
    path, run = tmp_path / "begin.pt", tmp_path / "run"
    run.mkdir()
    torch.save(module.state_dict(), path)
    if is_refused:
        with pytest.raises(ArgumentError, match=r"of other values after a load: 'body.weight', .*init_from"):
            train(module, Run(run, seed=1, command=["emrun"]), cls, init_from=str(path))
    else:
        train(module, Run(run, seed=1, command=["emrun"]), cls, init_from=str(path))
    assert (run / "checkpoints").exists() is not is_refused


class OnBackbone(Kinds):
    """Leaves its frozen backbone out of its state dict, and reads it in `__init__`, as the error advises."""

    def __init__(self, path):
        super().__init__("left out and taken", frozen=True)
        self.body.load_state_dict(torch.load(path, weights_only=True))


def test_a_frozen_backbone_that_is_read_in_init_is_the_same_after_a_resume(tmp_path):
    path = tmp_path / "backbone.pt"
    torch.save(nn.Linear(2, 3).state_dict(), path)
    run = tmp_path / "run"
    run.mkdir()
    trained = train(OnBackbone(path), Run(run, seed=1, command=["emrun"]))
    again = TorchModel(OnBackbone(path), inputs=["x"], outputs=["loss"], device="cpu")
    again.load(run / "checkpoints" / "latest")
    x = torch.ones(2, 2)
    assert torch.equal(trained.module.eval()(x), again.module.eval()(x))
    saved = trained.module.state_dict()
    assert not any(name.startswith("body.") for name in saved)


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
