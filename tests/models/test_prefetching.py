"""Batches that are copied to the device ahead of their turn.

Where torch has an accelerator with streams, the training runs on it. Elsewhere its streams are stand-ins that write
down what is asked of them, and its memory is the CPU's, as nothing here has another one.
"""

import copy
import logging
import pickle
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from campaign import thinned

from emrun import AbstractHook, MainLoop
from emrun.hooks import StopAfter
from emrun.models.inputs import InputNames, Inputs
from emrun.models.prefetching import Prefetcher, can_prefetch
from emrun.models.torch_model import TorchModel

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
ERRORS = [torch.OutOfMemoryError, RuntimeError]
if hasattr(torch, "AcceleratorError"):  # torch 2.6 has none
    ERRORS.append(torch.AcceleratorError)


class Event:
    """Something on a stream that is waited for."""

    def __init__(self, log):
        self.log = log

    def synchronize(self):
        self.log.append(("the loop waits", self))


class Stream:
    """A stream of the device; what is asked of it goes to `log`."""

    def __init__(self, log, name):
        self.log = log
        self.name = name

    def __enter__(self):
        self.log.append(("copies on", self.name))
        return self

    def __exit__(self, *error):
        pass

    def record_event(self):
        self.log.append(("event " + self.name, event := Event(self.log)))
        return event

    def wait_event(self, event):
        self.log.append(("waits", event))


class Device:
    """A stand-in for an accelerator in the CPU's memory.

    Attributes:
        log: what was asked of its streams, in order.
        pinned: the tensors that were pinned.
        indices: the devices that were the current one while something was pinned.
    """

    def __init__(self, monkeypatch):
        self.log = []
        self.pinned = []
        self.indices = []
        self.device = torch.device("cpu")
        current = Stream(self.log, "of the model")
        monkeypatch.setattr(torch, "Stream", lambda device: Stream(self.log, "of its own"))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: current)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "device_index", self._of_the_device)
        monkeypatch.setattr(torch, "empty_like", self._pinning(torch.empty_like))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.log.append(("keeps", tensor)))
        monkeypatch.setattr("emrun.models.forward_pass.can_prefetch", lambda device: True)

    @contextmanager
    def _of_the_device(self, index):
        self.indices.append(index)
        yield

    def _pinning(self, empty_like):
        def pinning(tensor, dtype=None, pin_memory=False, device=None):
            if pin_memory:
                tensor = empty_like(tensor, dtype=dtype)
                self.pinned.append(tensor)
            return empty_like(tensor, dtype=dtype, device=device)

        return pinning

    @property
    def used(self):
        """How many copies a model waited for."""
        return sum(what == "waits" for what, _ in self.log)


@pytest.fixture
def device(monkeypatch):
    if not hasattr(torch.accelerator, "device_index"):
        pytest.skip("torch before 2.8 cannot copy ahead")
    return Device(monkeypatch)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x, y, weight=None):
        loss = (self.linear(x.float()).squeeze(1) - y) ** 2
        return {"loss": loss if weight is None else loss * weight}


def inputs_of(module=None, inputs=None):
    module = module or Net()
    return Inputs(module, InputNames.read(module, inputs), ((), ()), torch.device("cpu"))


SOURCES = {
    "float32": np.arange(3, dtype=np.float32),
    "float64": np.array([1 / 3, 1e30, -0.0]),
    "float16": np.array([1.5, 65504, 0], dtype=np.float16),
    "int8": np.array([-128, 127, 0], dtype=np.int8),
    "int64": np.array([2**62, -1, 0]),
    "uint8": np.array([255, 0, 1], dtype=np.uint8),
    "uint16": np.array([65535, 0, 1], dtype=np.uint16),
    "uint64": np.array([2**63 - 1, 0, 1], dtype=np.uint64),
    "bool": np.array([True, False, True]),
    "complex64": np.array([1j, 2, 3], dtype=np.complex64),
    "not writable": np.broadcast_to(np.float32(2), (3,)),
    "backwards": np.arange(3.0)[::-1],
    "list": [1, 2, 3],
    "list of arrays": [np.zeros(2), np.ones(2), np.ones(2)],
    "tensor": torch.tensor([1.0, 2.0, 3.0]),
    "bfloat16 tensor": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "strided tensor": torch.arange(12.0).reshape(3, 4)[:, ::2],
    "tensor with gradient": torch.ones(3, requires_grad=True),
    "expanded tensor": torch.ones(1).expand(3),
    "view with gaps": torch.arange(300.0)[::100],
    "nothing in it": np.zeros((0, 3)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_what_was_copied_ahead_is_what_the_model_would_have_made_of_it(device, kind):
    inputs = inputs_of()
    batch = {"x": SOURCES[kind], "y": torch.ones(3), "other": "not for the model"}
    prefetcher = Prefetcher(inputs, device.device)
    prefetcher.pin(batch)()
    expected, found = inputs.tensors(batch), prefetcher.tensors(batch)
    assert list(found) == list(expected) == ["x", "y"]
    for name in expected:
        assert found[name].dtype is expected[name].dtype
        assert torch.equal(found[name], expected[name])
        assert found[name].requires_grad is expected[name].requires_grad
    assert device.used == 1
    assert all(tensor.is_contiguous() for tensor in device.pinned if tensor.dim() == 1)


def test_the_parts_of_a_mapping_are_copied_ahead(device):
    inputs = inputs_of()
    mapping = {"ids": np.arange(3), "inner": {"w": np.ones(3), "sparse": torch.ones(3).to_sparse()}}
    batch = {"x": mapping, "y": torch.ones(3)}
    prefetcher = Prefetcher(inputs, device.device)
    prefetcher.pin(batch)()
    found = prefetcher.tensors(batch)
    assert device.used == 1
    assert len(device.pinned) == 3
    assert batch["x"] is mapping
    assert found["x"]["ids"].tolist() == [0, 1, 2]
    assert (found["x"]["inner"]["w"].dtype, found["x"]["inner"]["w"].tolist()) == (torch.float32, [1.0, 1.0, 1.0])
    assert found["x"]["inner"]["sparse"] is mapping["inner"]["sparse"]


def test_nested_tensors_are_left_to_the_model(device):
    batch = {"x": torch.nested.nested_tensor([[1.0], [1.0, 2.0]], layout=torch.jagged), "y": [1, 2]}
    prefetcher = Prefetcher(inputs_of(), device.device)
    prefetcher.pin(batch)()
    assert prefetcher.tensors(batch)["x"].is_nested
    assert len(device.pinned) == 1


KINDS_AND_DTYPES = [
    *((kind, "keep") for kind in SOURCES),
    *(("tensor", "float16"), ("list", "uint8"), ("uint8", "float64"), ("bool", "float16"), ("list", "float64")),
    *(("not writable", "float64"), ("tensor", "float64"), ("bfloat16 tensor", "float16"), ("view with gaps", "uint8")),
]


@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_a_dtype_of_its_own_is_the_same_when_copied_ahead(device, kind, dtype):
    inputs = inputs_of(inputs={"x": {"dtype": dtype}, "y": "y"})
    source = SOURCES[kind]
    if (dtype == "uint8" and "float" in kind) or kind == "complex64":
        source = SOURCES["int8"]  # what is out of range is nobody's
    batch = {"x": source, "y": torch.ones(3)}
    prefetcher = Prefetcher(inputs, device.device)
    prefetcher.pin(batch)()
    expected, found = inputs.tensors(batch), prefetcher.tensors(batch)
    own = inputs.read("x", source)[0].dtype
    assert found["x"].dtype is expected["x"].dtype is (own if dtype == "keep" else getattr(torch, dtype))
    assert torch.equal(found["x"], expected["x"])
    assert found["y"].dtype is torch.float32
    assert device.used == 1


def test_a_source_is_copied_ahead_as_it_is_and_scaled_once(device):
    inputs = inputs_of(inputs={"x": {"source": "x", "scale": 255, "mean": 0.5, "std": 0.25}, "y": "y"})
    batch = {"x": np.array([0, 100, 255], np.uint8), "y": torch.ones(3)}
    prefetcher = Prefetcher(inputs, device.device)
    prefetcher.pin(batch)()
    expected, found = inputs.tensors(batch), prefetcher.tensors(batch)
    assert expected["x"].dtype is torch.float32
    assert torch.equal(found["x"], expected["x"])
    assert torch.uint8 in [each.dtype for each in device.pinned]


def test_the_model_waits_for_the_copy_and_keeps_its_memory(device):
    batch = {"x": torch.ones(2, 3), "y": torch.ones(2)}
    prefetcher = Prefetcher(inputs_of(), device.device)
    begin = prefetcher.pin(batch)
    assert [tensor.shape for tensor in device.pinned] == [(2, 3), (2,)]
    assert device.log == []  # the copy is started by the loop
    begin()
    tensors = prefetcher.tensors(batch)
    copied, step = device.log[1][1], device.log[2][1]
    assert device.log[:4] == [
        ("copies on", "of its own"),
        ("event of its own", copied),
        ("event of the model", step),
        ("waits", copied),
    ]
    kept = [tensor for what, tensor in device.log[4:] if what == "keeps"]
    assert [id(each) for each in kept] == [id(each) for each in tensors.values()]


def test_values_keep_the_size_that_is_least_to_copy(device):
    batch = {"x": np.zeros((2, 3)), "y": np.zeros(2, dtype=np.uint8)}
    Prefetcher(inputs_of(), device.device).pin(batch)
    assert [tensor.dtype for tensor in device.pinned] == [torch.float32, torch.uint8]


def test_values_of_a_type_that_devices_do_not_know_are_widened_before(device):
    batch = {"x": torch.ones(2, 3), "y": np.zeros(2, dtype=np.uint16)}
    Prefetcher(inputs_of(), device.device).pin(batch)
    assert [tensor.dtype for tensor in device.pinned] == [torch.float32, torch.int64]


@pytest.mark.parametrize(("place", "index"), [(torch.device("cpu"), 0), (torch.device("cpu", 3), 3)], ids=str)
def test_memory_is_pinned_for_the_device_of_the_model(device, place, index):
    Prefetcher(inputs_of(), place).pin({"x": torch.ones(2, 3), "y": torch.ones(2)})
    assert device.indices == [index]


def test_optional_sources_are_copied_when_they_are_there(device):
    prefetcher = Prefetcher(inputs_of(), device.device)
    batch = {"x": torch.ones(2, 3), "y": torch.ones(2), "weight": torch.ones(2)}
    prefetcher.pin(batch)()
    assert list(prefetcher.tensors(batch)) == ["x", "y", "weight"]
    assert len(device.pinned) == 3


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(2, 3)},
        {"x": "text", "y": torch.ones(2)},
        {"x": [[1], [2, 3]], "y": torch.ones(2)},
        {"x": None, "y": None},
        ["no", "batch"],
        None,
        {"x": torch.ones(2, 3).to_sparse(), "y": torch.ones(2).to_sparse()},
        {"x": torch.empty(2, 3, device="meta"), "y": torch.empty(2, device="meta")},
    ],
    ids=["source missing", "text", "ragged", "none", "list", "no batch", "sparse", "elsewhere"],
)
def test_what_cannot_be_copied_ahead_is_left_to_the_model(device, batch):
    assert Prefetcher(inputs_of(), device.device).pin(batch) is None


def test_a_source_that_lies_elsewhere_is_left_to_the_model_and_the_others_are_copied(device):
    batch = {"x": torch.ones(2, 3), "y": torch.ones(2).to_sparse()}
    prefetcher = Prefetcher(inputs_of(), device.device)
    prefetcher.pin(batch)()
    tensors = prefetcher.tensors(batch)
    assert list(tensors) == ["x", "y"]
    assert tensors["y"] is batch["y"]
    assert len(device.pinned) == 1


def test_batches_that_are_not_run_are_forgotten(device):
    prefetcher = Prefetcher(inputs_of(), device.device)
    batches = [{"x": torch.full((2, 3), float(number)), "y": torch.ones(2)} for number in range(5)]
    for batch in batches:
        prefetcher.pin(batch)()
    assert len(prefetcher._copies) == 2
    for number in (4, 0):  # the one before it is dropped; one that was forgotten is copied now
        assert torch.equal(prefetcher.tensors(batches[number])["x"], batches[number]["x"])
    assert device.used == 1
    assert not prefetcher._copies


def test_the_loop_is_not_further_ahead_of_the_device_than_two_batches(device):
    prefetcher = Prefetcher(inputs_of(), device.device)
    for number in range(5):
        batch = {"x": torch.ones(2, 3), "y": torch.ones(2)}
        begin = prefetcher.pin(batch)
        begin()
        steps = [event for what, event in device.log if what == "event of the model"]
        waits = [event for what, event in device.log if what == "the loop waits"]
        assert len(steps) == number
        assert waits == steps[: max(0, number - 1)]  # for what the model's stream had done two batches before
        prefetcher.tensors(batch)


def test_a_batch_of_somebody_else_leaves_what_was_copied(device):
    prefetcher = Prefetcher(inputs_of(), device.device)
    batch, other = ({"x": torch.full((2, 3), value), "y": torch.ones(2)} for value in (1.0, 2.0))
    prefetcher.pin(batch)()
    assert prefetcher.tensors(other)["x"] is other["x"]
    assert prefetcher.tensors(batch)["x"] is not batch["x"]
    assert device.used == 1


@pytest.mark.parametrize("failing", ["pin", "copy"])
@pytest.mark.parametrize("error", ERRORS)
def test_after_a_failure_the_training_continues_without_it_and_warns_once(device, monkeypatch, caplog, failing, error):
    prefetcher = Prefetcher(inputs_of(), device.device)
    batches = [{"x": torch.ones(2, 3), "y": torch.ones(2)} for _ in range(4)]
    before = [prefetcher.pin(batch) for batch in batches[:2]]

    def fail(*arguments, **options):
        raise error("cannot allocate\nmuch more")

    with monkeypatch.context() as patch:
        if failing == "pin":
            patch.setattr(torch, "empty_like", fail)
            assert prefetcher.pin(batches[2]) is None
        else:
            patch.setattr(torch.Tensor, "to", fail)
            before[0]()
    before[1]()
    assert prefetcher.pin(batches[3]) is None
    for batch in batches:
        assert torch.equal(prefetcher.tensors(batch)["x"], batch["x"])
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["batches are no longer copied to the device ahead of time: cannot allocate"]
    assert device.used == 0


def test_a_cpu_has_nothing_to_be_copied_to():
    assert not can_prefetch(torch.device("cpu"))
    assert not can_prefetch(torch.device("mps"))
    assert TorchModel(Net(), device="cpu").prefetcher() is None


def test_a_model_that_runs_batches_in_its_own_way_gets_none(device):
    class Own(TorchModel):
        def run(self, batch, train, stream):
            return super().run(batch, train, stream)

    assert Own(Net(), device="cpu").prefetcher() is None
    assert TorchModel(Net(), device="cpu").prefetcher() is not None


def test_a_model_can_be_copied_and_pickled_with_it(device):
    model = TorchModel(Net(), device="cpu")
    batch = {"x": torch.ones(2, 3), "y": torch.ones(2)}
    model.prefetcher()(batch)()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.run(batch, False, "valid")["loss"], model.run(batch, False, "valid")["loss"])
        other.prefetcher()(batch)()


def test_nothing_is_kept_on_the_device_after_the_training(device):
    _, model = trained([StopAfter(iterations=7)], buffer=4)
    assert model._forward_pass._prefetcher is not None
    assert not model._forward_pass._prefetcher._copies
    assert not model._forward_pass._prefetcher._steps


class Data:
    """Ten train batches of arrays and three valid batches of tensors."""

    def train_stream(self, ctx):
        for rows in ctx.batches(40, 4, shuffle=True):
            numbers = np.random.default_rng(rows.tolist())
            yield {"x": numbers.random((len(rows), 3)), "y": rows}

    def valid_stream(self, ctx):
        for rows in ctx.batches(12, 4):
            yield {"x": torch.ones(len(rows), 3, dtype=torch.uint8), "y": torch.tensor(rows)}


class Looker(AbstractHook):
    """Looks at the batches, and at what came of them."""

    changes_batches = False

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_batch(self, stream_name, batch):
        self.seen.append({name: type(value) for name, value in batch.items()})

    def after_batch(self, stream_name, batch_data):
        self.seen.append({name: type(value) for name, value in batch_data.items()})


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def trained(hooks=(), kind="cpu", **options):
    """Train two epochs; return the weights and the model."""
    torch.manual_seed(3)
    model = TorchModel(Net(), optimizer=sgd, device=kind)
    MainLoop(model, Data(), [*hooks, StopAfter(epochs=2)], extra_streams=["valid"], **options).run_training()
    return {name: value.cpu() for name, value in model.module.state_dict().items()}, model


READERS = [{"buffer": 1}, {"buffer": 2}, {"buffer": 8}, {"workers": 2}, {"workers": 1, "buffer": 4}]
READ = 13 + 2 * 13  # batches: the zeroth epoch and two epochs


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("options", thinned(READERS, READERS[-1:]), ids=str)
def test_a_training_is_the_same_with_batches_that_were_copied_ahead(device, options):
    expected, model = trained()
    assert model._forward_pass._prefetcher is None  # nothing is read ahead
    without, _ = trained(prefetch_to_device=False, **options)
    assert device.log == []
    looker = Looker()
    weights, _ = trained([looker], **options)
    assert device.used == READ
    assert same(weights, expected) and same(without, expected)
    assert [each["x"] for each in looker.seen] == ([np.ndarray] * 20 + [torch.Tensor] * 6) * 3  # twice each


class Doubles(AbstractHook):
    """Changes what the model gets, in place."""

    def before_batch(self, stream_name, batch):
        batch["x"] *= 2


def test_a_hook_that_may_change_batches_is_heeded(device, caplog):
    caplog.set_level(logging.INFO)
    expected, _ = trained([Doubles()])
    assert not same(expected, trained()[0])
    weights, _ = trained([Doubles()], buffer=4)
    assert same(weights, expected)
    assert device.used == 0
    messages = [record.getMessage() for record in caplog.records]
    assert (
        "batches are not copied to the device ahead of their turn, because Doubles.before_batch may change them; a "
        "hook that only looks at batches can set `changes_batches = False`"
    ) in messages


def test_batches_of_another_size_are_dropped_with_their_copies(device):
    class Uneven(Data):
        def train_stream(self, ctx):
            for rows in ctx.batches(38, 4):
                yield {"x": np.ones((len(rows), 3)), "y": rows}

    torch.manual_seed(3)
    model = TorchModel(Net(), optimizer=sgd, device="cpu")
    loop = MainLoop(model, Uneven(), [StopAfter(epochs=2)], buffer=3, fixed_batch_size=4)
    loop.run_training()
    assert loop.iterations_done == 18
    assert device.used == 27


@pytest.mark.skipif(ACCELERATOR is None or not can_prefetch(ACCELERATOR), reason="torch has no accelerator here")
class TestOnAnAccelerator:
    @pytest.mark.parametrize("options", READERS, ids=str)
    def test_a_training_is_the_same_with_batches_that_were_copied_ahead(self, options):
        kind = ACCELERATOR.type
        expected, _ = trained(kind=kind)
        without, _ = trained(kind=kind, prefetch_to_device=False, **options)
        weights, model = trained(kind=kind, **options)
        assert same(weights, expected) and same(without, expected)
        assert model._forward_pass._prefetcher is not None

    def test_many_large_batches_arrive_whole_though_their_memory_is_used_again(self):
        """Copies run beside a model that is far behind them."""

        class Large:
            def train_stream(self, ctx):
                for rows in ctx.batches(100, 1):
                    yield {"x": torch.full((512, 512), float(rows[0])), "y": torch.full((512,), float(rows[0]))}

        class Slow(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(()))
                self.wrong = []

            def forward(self, x, y):
                product = x
                for _ in range(20):
                    product = product @ x / (512 * x[0, 0] + 1)
                self.wrong.append(((x != y[0]).sum() + (y != x[0, 0]).sum()).detach())
                return {"loss": self.weight * product.sum()}

        module = Slow()
        model = TorchModel(module, optimizer=sgd, device=ACCELERATOR.type)
        MainLoop(model, Large(), [StopAfter(epochs=2)], buffer=8, skip_zeroth_epoch=True).run_training()
        assert len(module.wrong) == 200
        assert int(sum(module.wrong)) == 0
