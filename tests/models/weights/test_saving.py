"""Weights in a safetensors file: bit for bit, each once, equal bytes for equal states, and errors that name them."""

from types import SimpleNamespace

import pytest
import torch
from doubles import Buffers
from safetensors import safe_open
from torch import nn

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.base.errors import ArgumentError, StateError
from emrun.hooks import StopAfter
from emrun.models.weights.saving import collect_weights, extra_state, load_weights, own_memory
from emrun.storage.checkpoints.state_file import save_state
from emrun.storage.checkpoints.weights import FILE, write_weights
from emrun.storage.run import Run


def save_weights(module, directory):
    write_weights(*collect_weights(module), directory)


def cleared(module):
    """Return a module of the same structure with other values."""
    zeros = {name: torch.zeros_like(tensor.contiguous()) for name, tensor in module.state_dict().items()}
    return Buffers(**zeros)


def round_trip(module, directory):
    """Save a module and return what a cleared one has after loading."""
    save_weights(module, directory)
    loaded = cleared(module)
    load_weights(loaded, directory)
    return loaded.state_dict()


def names_in(directory):
    with safe_open(directory / FILE, framework="pt") as file:
        return sorted(file.keys())


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


SHAPES = [(), (3,), (2, 3, 4), (0,), (2, 0)]
SHAPES_AND_DTYPES = [*((SHAPES[2], dtype) for dtype in DTYPES), *((shape, torch.float32) for shape in SHAPES)]


@pytest.mark.parametrize(("shape", "dtype"), [*SHAPES_AND_DTYPES, ((), torch.bool), ((), torch.bfloat16)], ids=str)
def test_weights_come_back_bit_for_bit(tmp_path, dtype, shape):
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    found = round_trip(Buffers(a=tensor), tmp_path)["a"]
    assert (found.dtype, found.shape) == (dtype, shape)
    assert bits(found) == bits(tensor)


def test_values_that_are_not_finite_come_back_bit_for_bit(tmp_path):
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 5e-324], dtype=torch.float64)
    assert bits(round_trip(Buffers(a=tensor), tmp_path)["a"]) == bits(tensor)


def test_a_model_comes_back_with_the_same_outputs(tmp_path):
    def network(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 3)).eval()

    x = torch.rand(5, 2, 8)
    saved, loaded = network(0), network(1)
    TorchModel(saved, inputs=["x"], device="cpu").save(tmp_path)
    assert not torch.equal(saved(x), loaded(x))
    TorchModel(loaded, inputs=["x"], device="cpu").load(tmp_path)
    assert torch.equal(saved(x), loaded(x))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).T,
        torch.arange(12.0).view(3, 4)[:, ::2],
        torch.arange(12.0)[3:7],
        torch.arange(3.0).expand(4, 3),
        torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "part", "expanded", "channels last"],
)
def test_a_tensor_of_any_layout_is_saved(tmp_path, tensor):
    found = round_trip(Buffers(a=tensor), tmp_path)["a"]
    assert torch.equal(found, tensor)


def test_only_the_part_that_a_view_shows_is_written(tmp_path):
    save_weights(Buffers(a=torch.zeros(100_000)[:2]), tmp_path)
    assert (tmp_path / FILE).stat().st_size < 1000


def views():
    base = torch.arange(6.0)
    return {"base": base, "shaped": base.view(2, 3), "part": base[2:4], "turned": base.view(2, 3).T}


def test_views_of_one_tensor_are_saved_each_by_itself(tmp_path):
    found = round_trip(Buffers(**views()), tmp_path)
    for name, tensor in views().items():
        assert torch.equal(found[name], tensor)


class Tied(nn.Module):
    def __init__(self, tie=True):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        if tie:
            self.output.weight = self.embedding.weight


def test_tied_weights_are_written_once(tmp_path):
    save_weights(Tied(), tmp_path)
    assert names_in(tmp_path) == ["embedding.weight"]


@pytest.mark.parametrize("tie", [True, False])
def test_tied_weights_come_back_under_all_their_names(tmp_path, tie):
    saved, loaded = Tied(), Tied(tie)
    save_weights(saved, tmp_path)
    load_weights(loaded, tmp_path)
    assert torch.equal(loaded.embedding.weight, saved.embedding.weight)
    assert torch.equal(loaded.output.weight, saved.embedding.weight)
    assert (loaded.output.weight is loaded.embedding.weight) is tie


def test_empty_tensors_are_not_taken_for_tied(tmp_path):
    save_weights(Buffers(a=torch.empty(0), b=torch.empty(0)), tmp_path)
    assert names_in(tmp_path) == ["a", "b"]


def test_equal_states_give_equal_bytes(tmp_path):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.tied = nn.ModuleList([Tied(), Tied(), Tied()])
            self.more = nn.ModuleList([nn.Linear(3, 3) for _ in range(5)])

    torch.manual_seed(0)
    first = Several()
    contents = set()
    for number in range(12):
        torch.manual_seed(0)
        directory = tmp_path / str(number)
        directory.mkdir()
        save_weights(first if number % 2 else Several(), directory)
        contents.add((directory / FILE).read_bytes())
    assert len(contents) == 1


def test_a_tensor_that_is_saved_is_not_changed(tmp_path):
    module = Tied()
    state = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in module.state_dict().items()}
    save_weights(module, tmp_path)
    for name, tensor in module.state_dict().items():
        assert tensor.data_ptr() == state[name][0]
        assert torch.equal(tensor, state[name][1])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Buffers(a=torch.ones(2)), "only in the checkpoint: b."),
        (Buffers(a=torch.ones(2), b=torch.ones(1), c=torch.ones(1)), "only in the module: c."),
        (Buffers(a=torch.ones(3), b=torch.ones(1)), ": a is (2,) in the checkpoint, (3,) in the module."),
        (
            Buffers(a=torch.ones(2, 1), b=torch.ones(())),
            "a is (2,) in the checkpoint, (2, 1) in the module, b is (1,) in the checkpoint, () in the module",
        ),
        (Buffers(A=torch.ones(2), b=torch.ones(1)), "only in the module: A; only in the checkpoint: a."),
    ],
)
def test_weights_of_another_module_are_refused_and_nothing_is_loaded(tmp_path, other, message):
    save_weights(Buffers(a=torch.zeros(2), b=torch.zeros(1)), tmp_path)
    with pytest.raises(StateError, match=r"model.safetensors does not fit the module") as caught:
        load_weights(other, tmp_path)
    assert message in str(caught.value)
    assert caught.value.exit_status == 2
    assert all(bool((tensor == 1).all()) for tensor in other.state_dict().values())


def test_extra_state_that_is_not_a_tensor_is_not_in_the_weights(tmp_path):
    class Extra(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.step = 3

        def get_extra_state(self):
            return {"step": self.step}

        def set_extra_state(self, state):
            self.step = state["step"]

        def forward(self, x):
            return {"loss": (x * self.weight).sum()}

    model = TorchModel(Extra(), device="cpu")
    model.save(tmp_path)
    save_state({"model": model.state_dict()}, tmp_path)
    model.module.step = 5
    model.load(tmp_path)
    assert model.module.step == 3


def test_extra_state_that_is_a_tensor_may_change_its_shape(tmp_path):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.seen = torch.zeros(1)

        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state):
            self.seen = state

    module, other = Growing(), Growing()
    module.seen = torch.arange(7.0)
    save_weights(module, tmp_path)
    load_weights(other, tmp_path)
    assert extra_state(module)["_extra_state"].tolist() == list(range(7))


@pytest.mark.parametrize(
    "expanded", [torch.zeros(1).expand(4), torch.zeros(2, 1).expand(2, 3), torch.zeros(()).expand(2, 2)]
)
def test_an_expanded_buffer_comes_back(tmp_path, expanded):
    save_weights(Buffers(a=expanded + 3), tmp_path)
    module = Buffers(a=expanded)
    load_weights(module, tmp_path)
    assert torch.equal(module.a, torch.full(expanded.shape, 3.0))


def test_an_expanded_parameter_keeps_its_identity_for_the_optimizer():
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(1).expand(3))
    parameter = module.weight
    own_memory(module)
    with torch.no_grad():
        parameter[0] = 2
    assert module.weight is parameter
    assert parameter.tolist() == [2, 1, 1]


def test_an_expanded_buffer_that_is_not_saved_stays_as_it_is():
    module = nn.Module()
    module.register_buffer("mask", torch.zeros(1).expand(1000), persistent=False)
    own_memory(module)
    assert module.mask.stride() == (0,)


class Replaces(AbstractHook):
    """Puts another module in the place of the model's."""

    def before_training(self):
        self.main_loop.model.module = nn.Sequential(self.main_loop.model.module, nn.Linear(1, 1))


def test_a_module_that_a_hook_replaces_is_the_one_that_a_resume_could_not_load(tmp_path):
    optimizer = Factory(torch.optim.SGD, lr=0.1)
    model = TorchModel(nn.Linear(2, 1), inputs=["x"], outputs=["loss"], optimizer=optimizer)
    data = SimpleNamespace(train_stream=lambda: iter([{"x": torch.ones(1, 2)}]))
    loop = MainLoop(model, data, [Replaces(), StopAfter(epochs=1)], run=Run(tmp_path, seed=1, command=["emrun"]))
    with pytest.raises(ArgumentError, match="a resume could not load a checkpoint of Sequential"):
        loop.run_training()
    assert loop.iterations_done == 0
