"""`compile`: the module is compiled in place, for changing sizes."""

import copy
import functools
import random

import pytest
import torch
from campaign import thinned
from doubles import SGD, Streams, state_of
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from emrun import MainLoop, TorchModel
from emrun.base.errors import ArgumentError
from emrun.models.compilation import Compilation

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch
EAGER = {"backend": "eager"}  # compiles nothing after torch has traced the module, which takes tenths of a second


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def forward(self, x, y):
        return {"loss": functional.mse_loss(self.head(self.layers(x))[:, 0], y)}


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()
    counters.clear()


def batches(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(n, 3, generator=generator), "y": torch.randn(n, generator=generator)} for n in sizes]


def trained(model, *hooks, sizes=(4, 4, 3), epochs=1):
    data = Streams(train=batches(*sizes), valid=batches(5, 6))
    torch.manual_seed(2)
    with MainLoop(model, data, hooks) as loop:
        for _ in range(epochs):
            loop.epoch(["train"])
            loop.run_evaluation("valid")
    return state_of(model.module)


def model(compile=None, module=None, **arguments):
    return TorchModel(module or Net(), optimizer=SGD, device="cpu", compile=compile, **arguments)


def refused(value, module=None):
    with pytest.raises(ArgumentError) as caught:
        Compilation(value, module or Net(), torch.device("cpu"))
    return str(caught.value)


@pytest.fixture(scope="module")
def with_states():
    """Return a function that trains, compiled or not, and returns the weights, random states and number of graphs."""

    @functools.cache
    def found(backend=None):
        random.seed(3)
        weights = trained(model(backend and {"backend": backend}))
        states = torch.get_rng_state().tolist(), random.getstate()
        return weights, states, counters["stats"]["unique_graphs"]

    return found


def test_it_trains_to_the_same_weights_under_the_same_names(with_states):
    (plain, _, _), (compiled, _, graphs) = with_states(), with_states("eager")
    assert graphs > 0
    assert list(plain) == list(compiled) == ["layers.0.weight", "layers.0.bias", "head.weight", "head.bias"]
    assert all(torch.equal(each, compiled[name]) for name, each in plain.items())


def test_sizes_that_change_do_not_compile_again_and_again():
    trained(model(EAGER), sizes=(4, 3, 5, 6, 7, 9, 2, 8), epochs=2)
    assert counters["stats"]["unique_graphs"] <= 3  # one size, any size, evaluation
    assert not counters["graph_break"]


def test_the_second_training_of_a_process_is_compiled_too(caplog):
    calls = []

    def backend(graph, inputs):
        def called(*arguments):
            calls.append(len(arguments))
            return graph(*arguments)

        return called

    trained(model({"backend": backend}))
    first = len(calls)
    trained(model({"backend": backend}))
    assert len(calls) == 2 * first > 0
    assert "no effect" not in caplog.text


def test_false_compiles_nothing():
    trained(model(compile=False))
    assert not counters["stats"]


def test_an_error_of_the_compiler_says_how_to_go_on():
    def broken(graph, inputs):
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction") as caught:
        trained(model({"backend": broken}))
    assert any("with model.compile=false, the same runs without it" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "compile: 3 is neither true nor arguments of torch.compile, such as {dynamic: true}"),
        ({"dynamik": True}, "unexpected keyword argument 'dynamik'"),
        ({"mode": "fast"}, "compile: torch.compile refuses {'mode': 'fast'}: Unrecognized mode=fast"),
        ({"backend": "inducter"}, "Invalid backend: 'inducter'"),
        ({"options": {"foo": 1}}, "Unexpected optimization option foo"),
        ({"options": 3}, "compile: torch.compile refuses {'options': 3}: "),
    ],
)
def test_wrong_options_are_errors(value, message):
    assert message in refused(value)


def test_a_module_that_is_compiled_already_is_an_error():
    module = Net()
    module.layers = torch.compile(module.layers, backend="eager")
    assert refused(EAGER, module).startswith("compile: layers of Net is compiled already; give emrun the plain module")
    module = Net()
    module.compile(backend="eager")
    assert refused(EAGER, module).startswith("compile: Net is compiled already")


@pytest.mark.parametrize("backend", thinned(["eager", "aot_eager"], ["eager"]))
def test_random_states_are_those_of_the_plain_module(with_states, backend):
    assert with_states()[1] == with_states(backend)[1]


@pytest.mark.campaign  # compiling takes half a minute if nothing is in the caches of torch
def test_the_default_backend_trains_to_nearly_the_same_weights():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0))
    found = []
    for value in (None, True):
        own = TorchModel(copy.deepcopy(module), ["x"], ["loss"], optimizer=SGD, device="cpu", compile=value)
        found.append(trained(own, sizes=(4, 4)))
    assert all(torch.allclose(each, found[1][name], atol=1e-5) for name, each in found[0].items())
