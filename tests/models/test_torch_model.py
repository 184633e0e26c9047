"""TorchModel: the raw PyTorch loop's results, inputs, outputs, losses, updates and their events."""

import copy
import gc
import inspect
import re
import sys
import weakref
from contextlib import nullcontext
from typing import ClassVar

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from torch import nn
from torch.nn import functional

from emrun import AbstractHook, Factory, MainLoop, TorchModel, TrainingTerminated, create_training
from emrun.datasets import Digits
from emrun.errors import ArgumentError, StreamError
from emrun.hooks import ComputeStats, StopAfter
from emrun.metrics import accuracy
from emrun.streams.stream import StreamWrapper


class Streams:
    """A dataset whose streams are lists of batches."""

    def __init__(self, **streams):
        for name, batches in streams.items():
            setattr(self, f"{name}_stream", lambda batches=batches: iter(batches))


class Record(AbstractHook):
    """Keeps what the batches gave."""

    def __init__(self):
        super().__init__()
        self.trained = []
        self.evaluated = []

    def after_batch(self, batch_data):
        (self.trained if self.main_loop.training else self.evaluated).append(batch_data)


class Affine(nn.Module):
    """y = w x + b on vectors of length 1, with its squared error as the loss."""

    def __init__(self, w=1.0, b=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))
        self.b = nn.Parameter(torch.tensor(b))

    def forward(self, x, y):
        predicted = self.w * x + self.b
        return {"predicted": predicted, "loss": (predicted - y) ** 2}


SGD = Factory(torch.optim.SGD, lr=0.1)
XY = [{"x": [1.0, 2.0], "y": [3.0, 5.0]}, {"x": [0.0, -1.0], "y": [1.0, -1.0]}]


def run(model, batches=XY, *hooks, epochs=1, **arguments):
    """Train and return what the hook `Record` saw of the training."""
    record = Record()
    with MainLoop(model, Streams(train=batches), [*hooks, record], on_unused_sources="ignore", **arguments) as loop:
        for _ in range(epochs):
            loop.epoch(["train"])
    return record.trained


def evaluate(model, batches=XY):
    """Evaluate one pass and return the data of its batches."""
    record = Record()
    MainLoop(model, Streams(valid=batches), [record], on_unused_sources="ignore").run_evaluation("valid")
    return record.evaluated


def identity(**arguments):
    """Return a model whose forward returns its input `x` times a parameter."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.scale if x.is_floating_point() else x

    return TorchModel(Scale(), outputs=["same"], **arguments)


def state_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same_state(module, state):
    return all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


# --- the raw loop -----------------------------------------------------------------------------------------------------

ITERATIONS = 200


class Classifier(nn.Module):
    """A network with dropout; tells its loss when it gets labels."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 10))

    def forward(self, image, label=None):
        logits = self.body(image)
        if label is None:
            return {"logits": logits}
        return {"logits": logits, "loss": functional.cross_entropy(logits, label)}


def optimizers():
    return {
        "SGD": Factory(torch.optim.SGD, lr=0.05, momentum=0.9),
        "AdamW": Factory(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    }


@pytest.fixture(scope="module")
def digits():
    return Digits(flat=True)


@pytest.fixture(scope="module")
def start():
    torch.manual_seed(0)
    return Classifier()


@pytest.fixture(scope="module", params=["SGD", "AdamW"])
def raw(request, digits, start):
    """Train without emrun; return the optimizer's name, all losses and the final parameters."""
    module = copy.deepcopy(start)
    optimizer = optimizers()[request.param](module.parameters())
    torch.manual_seed(1)
    module.train()
    losses = []
    stream = StreamWrapper(digits.train_stream, name="train", seed=3)
    while True:
        for batch in stream:
            optimizer.zero_grad()
            logits = module(torch.from_numpy(batch["image"]))["logits"]
            loss = functional.cross_entropy(logits, torch.from_numpy(batch["label"]))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == ITERATIONS:
                return request.param, losses, module.state_dict()


@pytest.mark.parametrize("form", ["loss in forward", "loss form"])
@pytest.mark.parametrize("buffer", [0, 4])
def test_training_gives_the_losses_and_parameters_of_a_raw_loop_bit_for_bit(raw, digits, start, buffer, form):
    optimizer, losses, parameters = raw
    forms = {"inputs": ["image", "label"]}
    if form == "loss form":
        loss = Factory(nn.CrossEntropyLoss, options={"inputs": ["logits", "label"]})
        metrics = {"accuracy": Factory(accuracy, is_import=True, options={"inputs": ["logits", "label"]})}
        forms = {"inputs": ["image"], "loss": loss, "metrics": metrics}
    module = copy.deepcopy(start)
    model = TorchModel(module, optimizer=optimizers()[optimizer], device="cpu", **forms)
    record = Record()
    hooks = [ComputeStats([{"loss": ["mean", "std"]}]), record, StopAfter(iterations=ITERATIONS)]
    loop = MainLoop(model, digits, hooks, extra_streams=["valid"], buffer=buffer, seed=3)
    torch.manual_seed(1)
    loop.run_training()
    assert [data["loss"].item() for data in record.trained] == losses
    assert same_state(module, parameters)


# --- inputs -----------------------------------------------------------------------------------------------------------


class Keep(nn.Module):
    """Keeps the arguments of its last call; base of modules that tell what they are called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.called = None

    def keep(self, *arguments):
        self.called = arguments
        return {"out": torch.zeros(len(arguments[0]))}


class Two(Keep):
    def forward(self, a, b):
        return self.keep(a, b)


class Optional(Keep):
    def forward(self, a, mask=None):
        return self.keep(a, mask)


class Anything(Keep):
    def forward(self, *arguments):
        return self.keep(*arguments)


class Named(Keep):
    def forward(self, a, **others):
        return self.keep(a, *others.values())


AB = [{"a": [1.0], "b": [2.0]}]
ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])


@pytest.mark.parametrize(
    ("inputs", "batch", "expected"),
    [
        (None, {"a": [1.0], "b": [2.0]}, (ONE, TWO)),
        (["b", "a"], {"a": [1.0], "b": [2.0]}, (ONE, TWO)),  # by name, whatever the order
        (["b", "other"], {"b": [1.0], "other": [2.0]}, (ONE, TWO)),  # by position, as one is no parameter
        ({"a": "y", "b": "x"}, {"x": [2.0], "y": [1.0]}, (ONE, TWO)),
        ({"a": "x", "b": "x"}, {"x": [1.0]}, (ONE, ONE)),
        (["x", "x"], {"x": [1.0]}, (ONE, ONE)),
        (["a", "a"], {"a": [1.0]}, (ONE, ONE)),
    ],
)
def test_forward_gets_the_sources_that_inputs_names(inputs, batch, expected):
    module = Two()
    evaluate(TorchModel(module, inputs=inputs), [batch])
    assert module.called == expected


def test_sources_are_the_inputs_of_the_model_once_each():
    assert list(TorchModel(Two(), inputs={"a": "x", "b": "x"}).input_names) == ["x"]


@pytest.mark.parametrize(("batch", "mask"), [({"a": [1.0], "mask": [2.0]}, TWO), ({"a": [1.0]}, None)])
def test_a_parameter_with_a_default_is_passed_when_a_batch_has_it(batch, mask):
    module = Optional()
    model = TorchModel(module)
    evaluate(model, [batch])
    assert module.called == (ONE, mask)
    assert (list(model.input_names), list(model.optional_input_names)) == (["a"], ["mask"])


def test_a_parameter_with_a_default_is_not_passed_when_inputs_leaves_it_out():
    module = Optional()
    evaluate(TorchModel(module, inputs=["a"]), [{"a": [1.0], "mask": [2.0]}])
    assert module.called == (ONE, None)


def test_a_module_that_takes_any_arguments_gets_its_inputs_by_position():
    module = Anything()
    evaluate(TorchModel(module, inputs=["b", "a"]), AB)
    assert module.called == (TWO, ONE)


def test_a_module_that_takes_any_keywords_gets_a_mapping_by_name():
    module = Named()
    evaluate(TorchModel(module, inputs={"a": "a", "c": "b"}), AB)
    assert module.called == (ONE, TWO)


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (Anything(), None, "inputs: Anything.forward takes any arguments; list the sources that it gets"),
        (Two(), {"aa": "x"}, "no parameter 'aa'; did you mean 'a'? (it has a, b)"),
        (Two(), ["x", "y", "z"], "Two.forward takes 2 arguments, not 3"),
        (Two(), ["a"], "Two.forward: missing a required argument: 'b'"),
        (Two(), ["x"], "Two.forward: missing a required argument: 'b'"),
        (Two(), {"a": "x"}, "Two.forward: missing a required argument: 'b'"),
        (Two(), "a", "'a' is not a list of names"),
        (Two(), [1, 2], "is not a list of names"),
        (Two(), {"a": 1, "b": 2}, "inputs: a: 1 is not a source"),
    ],
)
def test_inputs_that_do_not_fit_forward_are_refused_at_once(module, inputs, message):
    with pytest.raises(ArgumentError, match=r"^inputs: ") as caught:
        TorchModel(module, inputs=inputs)
    assert message in str(caught.value)


def test_sources_of_loss_and_metrics_are_inputs():
    loss = Factory(nn.MSELoss, options={"inputs": ["same", "target"]})
    metrics = {"error": Factory(lambda: torch.sub, options={"inputs": ["same", "other"]})}
    model = identity(loss=loss, metrics=metrics)
    assert list(model.input_names) == ["x", "target", "other"]
    (data,) = evaluate(model, [{"x": [3.0], "target": [1.0], "other": [5.0]}])
    assert (data["loss"].item(), data["error"].item()) == (4.0, -2.0)


def test_a_missing_source_of_the_loss_is_reported_before_the_module_runs():
    loss = Factory(nn.MSELoss, options={"inputs": ["same", "label"]})
    with pytest.raises(
        StreamError, match=r"model.loss needs label, which the batch does not have; did you mean 'labels'"
    ):
        evaluate(identity(loss=loss), [{"x": [3.0], "labels": [1.0]}])


def test_a_source_that_only_the_loss_needs_does_not_reach_forward():
    class Strict(Keep):
        def forward(self, a):
            return {**self.keep(a), "extra": a * self.weight}

    module = Strict()
    model = TorchModel(module, loss=Factory(nn.L1Loss, options={"inputs": ["extra", "b"]}), optimizer=SGD)
    (data,) = run(model, AB)
    assert module.called == (ONE,)
    assert data["loss"].item() == 2.0


@pytest.mark.parametrize("module_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "values",
    [
        np.array([1.5, -2.0]),
        np.array([1.5, -2.0], dtype=np.float16),
        np.array([1.5, -2.0], dtype=np.float32),
        [1.5, -2.0],
        (1.5, -2.0),
        torch.tensor([1.5, -2.0]),
        torch.tensor([1.5, -2.0], dtype=torch.float64),
        [np.array(1.5), np.array(-2.0)],
        [np.float32(1.5), np.float64(-2.0)],
        [torch.tensor(1.5), torch.tensor(-2.0)],
    ],
)
def test_floating_point_sources_get_the_dtype_of_the_module(values, module_dtype):
    module = Keep()
    module.forward = lambda a: module.keep(a)
    evaluate(TorchModel(module.to(module_dtype)), [{"a": values}])
    assert module.called[0].dtype is module_dtype
    assert module.called[0].tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    "values",
    [np.array([3, 250], dtype=dtype) for dtype in (np.uint8, np.int16, np.int32, np.int64, np.uint16)]
    + [[3, 250], (3, 250), [np.int32(3), np.int32(250)], torch.tensor([3, 250], dtype=torch.int32), range(3, 251, 247)],
)
def test_integer_sources_become_int64(values):
    (data,) = evaluate(identity(), [{"x": values}])
    assert data["same"].dtype is torch.int64
    assert data["same"].tolist() == [3, 250]


@pytest.mark.parametrize("values", [np.array([True, False]), [True, False], [np.True_, np.False_]])
def test_booleans_stay_booleans(values):
    (data,) = evaluate(identity(), [{"x": values}])
    assert data["same"].dtype is torch.bool
    assert data["same"].tolist() == [True, False]


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "values",
    [
        read_only(np.array([[1.0, 2.0], [3.0, 4.0]])),
        np.array([[3.0, 4.0], [1.0, 2.0]])[::-1],
        np.array([[2.0, 1.0], [4.0, 3.0]])[:, ::-1],
        np.array([[1.0, 3.0], [2.0, 4.0]]).T,
        np.array([[1.0, 0.0, 2.0], [3.0, 0.0, 4.0]])[:, ::2],
        [np.array([1.0, 2.0]), np.array([3.0, 4.0])],
        [read_only(np.array([1.0, 2.0])), np.array([4.0, 3.0])[::-1]],
        [[np.array(1.0), np.array(2.0)], [np.array(3.0), np.array(4.0)]],
        (torch.tensor([1.0, 2.0]), np.array([3.0, 4.0])),
        [[1.0, 2.0], [3.0, 4.0]],
        [[1, 2.0], (3, 4)],
    ],
    ids=["read-only", "reversed", "mirrored", "transposed", "strided", "arrays", "odd arrays", "nested arrays",
         "mixed", "lists", "mixed numbers"],
)  # fmt: skip
def test_sources_of_any_layout_become_the_same_tensor(values):
    (data,) = evaluate(identity(), [{"x": values}])
    assert data["same"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_read_only_array_is_not_written_to():
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x.add_(1)

    array = read_only(np.zeros(2, dtype=np.float32))
    evaluate(TorchModel(Add(), outputs=["y"]), [{"x": array}])
    assert array.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "values",
    [
        [[1.0, 2.0], [3.0]],
        [np.array([1.0, 2.0]), np.array([3.0])],
        ["one", "two"],
        np.array(["one", "two"]),
        [None, None],
        [{}, {}],
        np.array([1, "a"], dtype=object),
    ],
    ids=["ragged lists", "ragged arrays", "strings", "array of strings", "nothing", "mappings", "objects"],
)
def test_a_source_that_cannot_become_a_tensor_is_named(values):
    with pytest.raises(StreamError, match=r"source 'x' cannot become a tensor: .*numbers of equal shape"):
        evaluate(identity(), [{"x": values}])


def test_a_source_that_is_not_an_input_is_unchanged():
    names = ["a", "b"]
    (data,) = evaluate(identity(), [{"x": [1.0, 2.0], "name": names}])
    assert data["name"] is names


def test_a_module_without_parameters_gets_the_default_dtype():
    (data,) = evaluate(TorchModel(nn.ReLU(), inputs=["x"], outputs=["y"]), [{"x": [1.0, -1.0]}])
    assert data["y"].dtype is torch.float32


def test_an_integer_parameter_before_the_others_does_not_decide_the_dtype():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.tensor([1]), requires_grad=False)
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            return {"y": x * self.scale}

    (data,) = evaluate(TorchModel(Quantised()), [{"x": np.array([1.5], dtype=np.float32)}])
    assert data["y"].dtype is torch.float64
    assert data["y"].item() == 3.0


# --- outputs ----------------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    """Returns what a function makes of x times a parameter."""

    def __init__(self, function):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x):
        return self.function(x * self.scale)


def outputs_of(function, outputs=None, **arguments):
    (data,) = evaluate(TorchModel(Returns(function), outputs=outputs, **arguments), [{"x": [1.0]}])
    return {name: value.tolist() for name, value in data.items() if name != "x"}


@pytest.mark.parametrize(
    ("function", "outputs", "expected"),
    [
        (lambda x: {"p": x, "q": x + 1}, None, {"p": [1.0], "q": [2.0]}),
        (lambda x: {"p": x, "q": x + 1}, ["q"], {"q": [2.0]}),
        (lambda x: x, ["p"], {"p": [1.0]}),
        (lambda x: (x, x + 1), ["p", "q"], {"p": [1.0], "q": [2.0]}),
        (lambda x: [x, x + 1], ["p", "q"], {"p": [1.0], "q": [2.0]}),
        (lambda x: (x,), ["p"], {"p": [1.0]}),
    ],
)
def test_outputs_names_what_forward_returns(function, outputs, expected):
    assert outputs_of(function, outputs) == expected


@pytest.mark.parametrize(
    ("function", "outputs", "message"),
    [
        (lambda x: (x, x), ["p"], "['p'] names 1 values, but forward returns 2"),
        (lambda x: x, ["p", "q"], "['p', 'q'] names 2 values, but forward returns 1"),
        (lambda x: x, None, "forward returns Tensor, not a mapping; name its values"),
        (lambda x: {"logits": x}, ["logit"], "forward returns no logit; did you mean 'logits'? (it returns logits)"),
    ],
)
def test_outputs_that_forward_does_not_return_are_an_error(function, outputs, message):
    with pytest.raises(ArgumentError, match=r"^outputs: ") as caught:
        outputs_of(function, outputs)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ("logits", "'logits' is not a list of names"),
        ([1], "not a list of names"),
        (["a", "a"], "names an output twice"),
    ],
)
def test_a_wrong_form_of_outputs_is_refused_at_once(outputs, message):
    with pytest.raises(ArgumentError, match=rf"^outputs: .*{message}"):
        TorchModel(Two(), outputs=outputs)


def test_an_output_with_the_name_of_a_source_is_an_error_before_any_update():
    module = Affine()
    module.forward = lambda x: {"x": module.w * x, "loss": module.w * x}
    before = state_of(module)
    with pytest.raises(StreamError, match=r"x: a source and an output have the same name; rename one") as caught:
        run(TorchModel(module, optimizer=SGD), [{"x": [1.0]}])
    assert caught.value.exit_status == 2
    assert same_state(module, before)


def test_metrics_may_not_take_the_name_of_an_output():
    metrics = {"same": Factory(lambda: torch.abs, options={"inputs": ["x"]})}
    with pytest.raises(ArgumentError, match=r"metrics: there is an output same already"):
        evaluate(identity(metrics=metrics), [{"x": [1.0]}])


def test_outputs_are_detached_and_on_the_device_of_the_model():
    (data,) = run(TorchModel(Affine(), optimizer=SGD, device="meta"), XY[:1])
    assert all(data[name].device.type == "meta" for name in ("predicted", "loss"))
    assert not any(data[name].requires_grad or data[name].grad_fn for name in ("predicted", "loss"))


def test_a_training_step_never_reads_a_value_from_the_device():
    # Tensors on the device `meta` have no values: whatever reads one fails.
    metrics = {"accuracy": Factory(accuracy, is_import=True, options={"inputs": ["logits", "label"]})}
    weight = torch.ones(10)
    loss = Factory(nn.CrossEntropyLoss, weight=weight, reduction="none", options={"inputs": ["logits", "label"]})
    scheduler = Factory(torch.optim.lr_scheduler.StepLR, step_size=1, options={"step_on": "update"})
    model = TorchModel(
        nn.Linear(64, 10),
        inputs=["image"],
        outputs=["logits"],
        loss=loss,
        metrics=metrics,
        optimizer=Factory(torch.optim.SGD, lr=0.1, momentum=0.9),
        scheduler=scheduler,
        device="meta",
    )
    loop = MainLoop(model, Digits(flat=True), [StopAfter(epochs=1)], extra_streams=["valid"])
    assert loop.run_training().status == "finished"


class Token:
    """Lives as long as what it is put into."""


class Track(torch.autograd.Function):
    """Puts a token into the graph of each batch."""

    tokens: ClassVar = []

    @staticmethod
    def forward(ctx, x):
        ctx.token = Token()
        Track.tokens.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_step_values_are_the_scalar_that_was_minimised_and_the_learning_rates():
    class Look(AbstractHook):
        seen: ClassVar = []

        def after_batch(self, batch_data):
            self.seen.append((self.main_loop.model.step_values(), batch_data["loss"]))

    model = TorchModel(Affine(), optimizer=SGD)
    assert model.step_values() == {"learning_rate": [0.1]}
    run(model, XY, Look())
    for values, per_example in Look.seen:
        assert values["learning_rate"] == [0.1]
        assert values["loss"] == per_example.mean()
        assert values["loss"].grad_fn is None


def test_step_values_have_the_loss_of_a_train_step_that_calls_backward_itself():
    class Own(TorchModel):
        def train_step(self, inputs):
            loss = self.forward(inputs)["loss"].mean()
            loss.backward()
            self.update(self.optimizer)
            return {"loss": loss}

    model = Own(Affine(), optimizer=SGD)
    (*_, last) = run(model, XY)
    assert model.step_values()["loss"] == last["loss"]


def test_no_graph_is_kept_when_a_training_step_is_over():
    class Tracked(Affine):
        def forward(self, x, y):
            outputs = super().forward(x, y)
            return {"tracked": Track.apply(outputs["predicted"]), "loss": Track.apply(outputs["loss"])}

    class Look(AbstractHook):
        def after_batch(self, batch_data):
            assert len(Track.tokens) == 2
            gc.collect()
            assert all(token() is None for token in Track.tokens)
            Track.tokens.clear()

    Track.tokens.clear()
    assert len(run(TorchModel(Tracked(), optimizer=SGD), XY, Look())) == 2


# --- losses and metrics -----------------------------------------------------------------------------------------------


def gradient(model, batch):
    """Return the gradient that an update was made of."""

    class Keep(AbstractHook):
        def before_update(self, model):
            self.kept = {name: parameter.grad.item() for name, parameter in model.module.named_parameters()}

    hook = Keep()
    run(model, [batch], hook)
    return hook.kept


class WithLoss(Affine):
    """Affine, whose loss is what a function makes of the squared errors, of shape (B,)."""

    def __init__(self, function):
        super().__init__(2.0, 1.0)
        self.function = function

    def forward(self, x, y):
        return self.function((self.w * x + self.b - y) ** 2)


X, Y = np.array([1.0, 2.0, -1.0]), np.array([2.0, 6.0, 0.0])
DW, DB = 2 * (2 * X + 1 - Y) * X, 2 * (2 * X + 1 - Y)  # the gradients of each example's squared error


@pytest.mark.parametrize(
    "function",
    [
        lambda errors: {"loss": errors},
        lambda errors: {"loss": errors.mean()},
        lambda errors: {"loss": errors[:, None]},
        lambda errors: {"loss": errors[:, None].expand(3, 4)},
        lambda errors: {"loss": errors[:, None, None].expand(3, 4, 2)},
    ],
)
def test_the_mean_loss_of_the_examples_is_minimised(function):
    found = gradient(TorchModel(WithLoss(function), optimizer=SGD), {"x": X, "y": Y})
    assert found == pytest.approx({"w": DW.mean(), "b": DB.mean()})


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 4)])
def test_example_weight_weights_the_loss(shape):
    weights = torch.tensor([1.0, 2.0, 5.0])
    extra = (slice(None),) + (None,) * (len(shape) - 1)
    module = WithLoss(lambda errors: {"loss": errors[extra].expand(shape), "example_weight": weights})
    found = gradient(TorchModel(module, optimizer=SGD), {"x": X, "y": Y})
    expected = {"w": np.average(DW, weights=weights), "b": np.average(DB, weights=weights)}
    assert found == pytest.approx(expected)


def test_example_weight_may_be_of_integers():
    module = WithLoss(lambda errors: {"loss": errors, "example_weight": torch.tensor([1, 0, 3])})
    found = gradient(TorchModel(module, optimizer=SGD), {"x": X, "y": Y})
    assert found["w"] == pytest.approx(np.average(DW, weights=[1, 0, 3]))


@pytest.mark.parametrize("shape", [(3, 1), (1,), (2,)])
def test_example_weight_of_another_shape_is_an_error(shape):
    module = WithLoss(lambda errors: {"loss": errors, "example_weight": torch.ones(shape)})
    with pytest.raises(StreamError, match=r"'example_weight' has shape .*: it must have one number per example"):
        run(TorchModel(module, optimizer=SGD), [{"x": X, "y": Y}])


def absolute(weight=1.0):
    return lambda predicted, y: weight * (predicted - y).abs()


def named_losses(**scales):
    squared = Factory(nn.MSELoss, options={"inputs": ["predicted", "y"], "scale": scales.get("squared", 1.0)})
    options = {"inputs": ["predicted", "y"]}
    if "linear" in scales:
        options["scale"] = scales["linear"]
    return {"squared": squared, "linear": Factory(absolute, options=options)}


class Predict(Affine):
    def forward(self, x):
        return self.w * x + self.b


def test_the_scaled_sum_of_named_losses_is_minimised():
    model = TorchModel(
        Predict(2.0, 1.0), outputs=["predicted"], loss=named_losses(squared=0.5, linear=3), optimizer=SGD
    )
    signs = np.sign(2 * X + 1 - Y)
    expected = {"w": (0.5 * DW + 3 * signs * X).mean(), "b": (0.5 * DB + 3 * signs).mean()}
    assert gradient(model, {"x": X, "y": Y}) == pytest.approx(expected)


def test_each_named_loss_and_their_sum_are_outputs():
    model = TorchModel(Predict(2.0, 1.0), outputs=["predicted"], loss=named_losses(squared=0.5), optimizer=SGD)
    (data,) = run(model, [{"x": X, "y": Y}])
    errors = 2 * X + 1 - Y
    assert data["squared"].item() == pytest.approx((errors**2).mean())
    assert data["linear"].tolist() == pytest.approx(np.abs(errors))
    assert data["loss"].item() == pytest.approx(0.5 * (errors**2).mean() + np.abs(errors).mean())
    assert set(model.output_names) == {"predicted", "squared", "linear", "loss"}


@pytest.mark.parametrize("train", [run, evaluate])
def test_a_loss_form_calculates_the_loss_in_training_and_evaluation(train):
    loss = Factory(nn.MSELoss, options={"inputs": ["predicted", "y"]})
    model = TorchModel(Predict(2.0, 1.0), outputs=["predicted"], loss=loss, optimizer=SGD)
    (data,) = train(model, [{"x": X, "y": Y}])
    assert data["loss"].item() == pytest.approx(((2 * X + 1 - Y) ** 2).mean())


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda loss: loss.mean().item(), "a float"),
        (lambda loss: loss.detach().numpy(), "a NumPy array"),
        (lambda loss: 3, "an int"),
        (lambda loss: None, "None"),
    ],
)
def test_a_loss_that_is_not_a_tensor_is_named_as_what_it_is(change, shown):
    class Wrong(Affine):
        def forward(self, x, y):
            outputs = super().forward(x, y)
            return {**outputs, "loss": change(outputs["loss"])}

    message = rf"the output 'loss' is {shown}, not a tensor: forward must return a tensor with gradients"
    with pytest.raises(StreamError, match=message) as caught:
        TorchModel(Wrong(), optimizer=SGD, device="cpu").run(XY[0], True, "train")
    assert caught.value.exit_status == 2


def test_a_missing_loss_is_reported_before_any_update():
    module = Predict()
    before = state_of(module)
    model = TorchModel(module, outputs=["predicted"], optimizer=SGD)
    with pytest.raises(
        StreamError, match=r"there is no output 'loss' \(there is predicted\); .* set model.loss"
    ) as caught:
        run(model, [{"x": X}])
    assert caught.value.exit_status == 2
    assert same_state(module, before)


def test_an_unknown_input_of_a_loss_is_reported_with_a_suggestion():
    loss = Factory(nn.MSELoss, options={"inputs": ["predicted", "target"]})
    module = Predict()
    module.forward = lambda x: {"predictions": module.w * x}
    batch = {"x": X, "target": Y}
    with pytest.raises(
        StreamError, match=r"model.loss needs 'predicted', which is neither .*; did you mean 'predictions'"
    ):
        run(TorchModel(module, loss=loss, optimizer=SGD), [batch])


def test_a_loss_that_depends_on_no_parameter_is_an_error():
    module = WithLoss(lambda errors: {"loss": errors.detach()})
    with pytest.raises(ArgumentError, match=r"loss: the loss does not depend on any parameter with requires_grad"):
        run(TorchModel(module, optimizer=SGD), [{"x": X, "y": Y}])


def test_a_loss_form_beside_an_output_loss_is_an_error():
    loss = Factory(nn.MSELoss, options={"inputs": ["predicted", "y"]})
    with pytest.raises(ArgumentError, match=r"forward returns an output 'loss' already; remove one of them"):
        run(TorchModel(Affine(), loss=loss, optimizer=SGD))


def cross_entropy(**arguments):
    return Factory(nn.CrossEntropyLoss, options={"inputs": ["same", "label"]}, **arguments)


def test_class_weights_of_a_loss_move_with_the_model():
    model = identity(loss=cross_entropy(weight=torch.tensor([1.0, 3.0])), optimizer=SGD, device="meta")
    (data,) = run(model, [{"x": [[1.0, 2.0]], "label": [1]}])
    assert data["loss"].device.type == "meta"


def test_class_weights_of_a_loss_count():
    logits, labels = torch.tensor([[1.0, 2.0], [0.5, 0.0]]), torch.tensor([1, 0])
    weight = torch.tensor([1.0, 3.0])
    (data,) = evaluate(identity(loss=cross_entropy(weight=weight)), [{"x": logits, "label": labels}])
    assert torch.equal(data["loss"], functional.cross_entropy(logits, labels, weight))


class LearnedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, a):
        return a * self.scale


@pytest.mark.parametrize("key", ["loss", "metrics"])
@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Factory(LearnedLoss, options={"inputs": ["same"]}), "it has parameters, which would not be trained or saved"),
        (Factory(nn.MSELoss), "set 'inputs' to the outputs and sources that it is called with"),
        (
            Factory(nn.MSELoss, options={"inputs": "same"}),
            "set 'inputs' to the outputs and sources that it is called with",
        ),
        (Factory(nn.MSELoss, options={"inputs": ["same"], "scale": "1"}), "scale '1' is not a number"),
        (Factory(int, options={"inputs": ["same"]}), "int cannot be called"),
        ("mse", "'mse' is not a class or function; write {class: ..., inputs: [...]}"),
    ],
)
def test_a_wrong_form_of_a_loss_or_metric_is_refused_at_once(key, form, message):
    with pytest.raises(ArgumentError) as caught:
        identity(**{key: {"other": form}})
    assert caught.value.argument == key
    assert message in str(caught.value)
    assert "other" in str(caught.value)


@pytest.mark.parametrize("key", ["loss", "metrics"])
def test_one_of_several_losses_or_metrics_cannot_be_called_loss(key):
    with pytest.raises(ArgumentError, match=rf"{key}: 'loss' is the name of the minimised sum"):
        identity(**{key: {"loss": Factory(nn.MSELoss, options={"inputs": ["same", "x"]})}})


def test_metrics_are_calculated_without_gradients():
    enabled = []

    def metric(predicted, y):
        enabled.append((torch.is_grad_enabled(), predicted.requires_grad and (predicted * 1).requires_grad))
        return (predicted - y).abs()

    metrics = {"error": Factory(metric, is_import=True, options={"inputs": ["predicted", "y"]})}
    (data,) = run(TorchModel(Affine(), metrics=metrics, optimizer=SGD), XY[:1])
    assert enabled == [(False, False)]
    assert data["error"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_gradients_are_enabled_after_the_metrics_as_before(enabled, fails):
    def metric(predicted):
        if fails:
            raise ZeroDivisionError("in the metric")
        return predicted

    metrics = {"same": Factory(metric, is_import=True, options={"inputs": ["predicted"]})}
    model = TorchModel(Affine(), metrics=metrics, device="cpu")
    with torch.set_grad_enabled(enabled):
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            model.forward({"x": torch.ones(2), "y": torch.ones(2)})
        assert torch.is_grad_enabled() is enabled


def test_metrics_may_use_the_losses():
    metrics = {"root": Factory(torch.sqrt, is_import=True, options={"inputs": ["loss"]})}
    (data,) = run(TorchModel(Affine(), metrics=metrics, optimizer=SGD), XY[:1])
    assert data["root"].tolist() == [2.0, 3.0]


# --- the model itself -------------------------------------------------------------------------------------------------


def test_an_object_that_is_not_a_module_is_refused():
    with pytest.raises(ArgumentError, match=r"module: type is not a torch.nn.Module; write module: "):
        TorchModel(Affine)


@pytest.mark.parametrize("device", ["gpu", "cuda:77", 5.5])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ArgumentError, match=rf"device: {device!r} cannot be used here"):
        TorchModel(Affine(), device=device)


def test_training_without_an_optimizer_is_an_error_before_any_batch():
    loop = MainLoop(TorchModel(Affine()), Streams(train=XY), [record := Record(), StopAfter(epochs=1)])
    with pytest.raises(ArgumentError, match=r"optimizer: training needs an optimizer"):
        loop.run_training()
    assert record.evaluated == []


def test_evaluation_needs_no_optimizer():
    assert len(evaluate(TorchModel(Affine()))) == 2


def test_evaluation_changes_no_parameter_and_no_random_state():
    module = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    loss = Factory(nn.MSELoss, options={"inputs": ["p", "p"]})
    model = TorchModel(module, inputs=["x"], outputs=["p"], loss=loss, optimizer=SGD)
    before, random_state = state_of(module), torch.get_rng_state()
    noise = Streams(valid=[{"x": torch.ones(4, 1)}] * 3)
    noise.valid_stream = lambda: ({"x": torch.randn(4, 1)} for _ in range(3))
    MainLoop(model, noise).run_evaluation("valid")
    assert same_state(module, before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_the_module_trains_in_training_mode_and_evaluates_in_evaluation_mode():
    modes = []

    class Tell(Affine):
        def forward(self, x, y):
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(x, y)

    hooks = [StopAfter(epochs=2)]
    model = TorchModel(Tell(), optimizer=SGD)
    MainLoop(model, Streams(train=XY[:1], valid=XY[:1]), hooks, extra_streams=["valid"]).run_training()
    evaluated, trained = (False, False), (True, True)
    assert modes == [evaluated, evaluated, trained, evaluated, trained, evaluated]


def test_dropout_is_applied_in_training_only():
    module = nn.Sequential(nn.Linear(1, 1), nn.Dropout(1.0))
    loss = Factory(nn.L1Loss, options={"inputs": ["p", "x"]})
    model = TorchModel(module, inputs=["x"], outputs=["p"], loss=loss, optimizer=SGD)
    (trained,) = run(model, [{"x": [[3.0]]}])
    (evaluated,) = evaluate(model, [{"x": [[3.0]]}])
    assert trained["p"].item() == 0.0
    assert evaluated["p"].item() == module[0](torch.tensor([[3.0]])).item() != 0.0


# --- updates and their events -----------------------------------------------------------------------------------------


class Clip(AbstractHook):
    """Scales the gradients so that their norm is at most `limit`."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.norms = []

    def before_update(self, model):
        self.norms.append(nn.utils.clip_grad_norm_(model.module.parameters(), self.limit).item())


def test_before_update_sees_complete_gradients_and_may_change_them():
    module = Affine(2.0, 1.0)
    clip = Clip(0.5)
    run(TorchModel(module, optimizer=SGD), [{"x": X, "y": Y}], clip)
    norm = np.hypot(DW.mean(), DB.mean())
    assert clip.norms == pytest.approx([norm])
    assert module.w.item() == pytest.approx(2.0 - 0.1 * 0.5 * DW.mean() / norm)
    assert module.b.item() == pytest.approx(1.0 - 0.1 * 0.5 * DB.mean() / norm)


def test_gradients_do_not_add_up_over_updates():
    clip = Clip(1e9)
    module = Affine(2.0, 1.0)
    model = TorchModel(module, optimizer=Factory(torch.optim.SGD, lr=0.0))
    run(model, [{"x": X, "y": Y}] * 3, clip)
    assert len(set(clip.norms)) == 1


class Watch(AbstractHook):
    """Keeps the order of events and the weight at each."""

    def __init__(self, *terminates_in):
        super().__init__()
        self.events = []
        self.terminates_in = terminates_in

    def note(self, event):
        self.events.append((event, round(self.main_loop.model.module.w.item(), 4)))
        if event in self.terminates_in:
            raise TrainingTerminated(f"in {event}")

    def before_batch(self):
        self.note("before_batch")

    def before_update(self, model):
        assert model is self.main_loop.model
        self.note("before_update")

    def after_update(self, model):
        assert model is self.main_loop.model
        assert model.module.w.grad is not None
        self.note("after_update")

    def after_batch(self):
        self.note("after_batch")


class Push(nn.Module):
    """Its loss is its weight: with a learning rate of 0.1 each update takes 0.1 away."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return {"loss": self.w * torch.ones_like(x)}


def test_after_update_sees_the_changed_weights():
    watch = Watch()
    run(TorchModel(Push(), optimizer=SGD), [{"x": [0.0]}] * 2, watch)
    assert watch.events == [
        ("before_batch", 1.0), ("before_update", 1.0), ("after_update", 0.9), ("after_batch", 0.9),
        ("before_batch", 0.9), ("before_update", 0.9), ("after_update", 0.8), ("after_batch", 0.8),
    ]  # fmt: skip


@pytest.mark.parametrize("event", ["before_update", "after_update"])
def test_a_termination_in_an_update_takes_effect_when_the_update_is_done(event):
    watch, later = Watch(event), Watch()
    loop = MainLoop(
        TorchModel(Push(), optimizer=SGD), Streams(train=[{"x": [0.0]}] * 3), [watch, later], skip_zeroth_epoch=True
    )
    outcome = loop.run_training()
    everything = [("before_batch", 1.0), ("before_update", 1.0), ("after_update", 0.9), ("after_batch", 0.9)]
    assert watch.events == later.events == everything
    assert (outcome.status, outcome.reason, loop.iterations_done) == ("finished", f"in {event}", 1)


def test_updates_are_not_announced_in_an_evaluation():
    watch = Watch()
    with MainLoop(TorchModel(Push(), optimizer=SGD), Streams(valid=[{"x": [0.0]}]), [watch]) as loop:
        loop.epoch([], ["valid"])
    assert watch.events == [("before_batch", 1.0), ("after_batch", 1.0)]


def test_a_model_in_a_second_loop_tells_the_hooks_of_that_loop():
    model, first, second = TorchModel(Push(), optimizer=SGD), Watch(), Watch()
    run(model, [{"x": [0.0]}], first)
    events = list(first.events)
    run(model, [{"x": [0.0]}])
    run(model, [{"x": [0.0]}], second)
    assert first.events == events
    assert [event for event, _ in second.events] == [event for event, _ in events]


def test_a_failure_of_a_hook_before_the_update_leaves_the_weights_alone():
    class Fail(AbstractHook):
        def before_update(self):
            raise RuntimeError("no")

    model = TorchModel(Push(), optimizer=SGD)
    with pytest.raises(RuntimeError, match=r"no"):
        run(model, [{"x": [0.0]}], Fail())
    assert model.module.w.item() == 1.0


def test_a_wrong_variable_of_a_hook_is_reported_before_any_update():
    module = Affine()
    before = state_of(module)
    with pytest.raises(StreamError, match=r"ComputeStats reads 'los', .* did you mean 'loss'"):
        run(TorchModel(module, optimizer=SGD), XY, ComputeStats(["los"]))
    assert same_state(module, before)


class Pixels(nn.Module):
    """Normalises on the device what it gets; notes the dtypes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.dtypes = []

    def forward(self, image, mask):
        self.dtypes.append((image.dtype, mask.dtype))
        return {"loss": (image.float() / 255 * self.scale - mask.float()) ** 2}


@pytest.mark.parametrize(
    ("inputs", "dtypes"),
    [
        (["image", "mask"], (torch.int64, torch.int64)),
        ({"image": "image", "mask": {}}, (torch.int64, torch.int64)),
        ({"image": {"dtype": "keep"}, "mask": "mask"}, (torch.uint8, torch.int64)),
        ({"image": {"source": "image", "dtype": "uint8"}, "mask": {"dtype": "keep"}}, (torch.uint8, torch.int8)),
        ({"image": {"dtype": "float16"}, "mask": {"dtype": torch.bool}}, (torch.float16, torch.bool)),
        ({"image": {"source": "mask", "dtype": "int8"}, "mask": {"dtype": "int8"}}, (torch.int8, torch.int8)),
    ],
)
@pytest.mark.parametrize("make", [lambda each: each, torch.from_numpy], ids=["array", "tensor"])
def test_a_source_has_the_dtype_that_inputs_says(inputs, dtypes, make):
    module = Pixels()
    model = TorchModel(module, inputs=inputs, optimizer=SGD, device="cpu")
    batch = {"image": make(np.array([0, 255], np.uint8)), "mask": make(np.array([1, 0], np.int8))}
    model.run(batch, True, "train")
    model.run(batch, False, "valid")
    assert module.dtypes == [dtypes] * 2


def test_a_dtype_of_its_own_reaches_the_module_from_a_config(tmp_path, monkeypatch, emrun):
    (tmp_path / "pixels.py").write_text(
        "import numpy as np, torch\n\n\n"
        "class Data:\n"
        "    def train_stream(self):\n"
        "        yield {'picture': np.array([[0, 255]] * 4, np.uint8)}\n\n\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, image):\n"
        "        assert image.dtype is torch.uint8, image.dtype\n"
        "        return {'loss': super().forward(image.float() / 255).mean(dim=1)}\n"
    )
    (tmp_path / "c.yaml").write_text(
        "dataset: {class: pixels.Data}\n"
        "model:\n"
        "  module: {class: pixels.Net, in_features: 2, out_features: 1}\n"
        "  inputs: {image: {source: picture, dtype: keep}}\n"
        "  optimizer: {class: SGD, lr: 0.1}\n"
        "main_loop: {buffer: 2}\n"
        "hooks: [StopAfter: {epochs: 1}]\n"
    )
    done = emrun("train", "-q", "c.yaml")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtyp": "keep"}, "image: unknown key 'dtyp'; did you mean 'dtype'? (allowed: source, dtype)"),
        ({"dtype": "uint9"}, "image: dtype 'uint9' is neither keep nor a dtype of torch, such as uint8; did you mean"),
        ({"dtype": "nn"}, "image: dtype <module 'torch.nn'"),
        ({"source": 3}, "image: source 3 is not a name"),
        (["image"], "image: ['image'] is not a source"),
        ({"source": "mask", "dtype": "uint8"}, "source 'mask' cannot have two dtypes"),
    ],
)
def test_a_wrong_source_of_inputs_is_refused(entry, message):
    with pytest.raises(ArgumentError) as caught:
        TorchModel(Pixels(), inputs={"image": entry, "mask": "mask"}, optimizer=SGD)
    assert caught.value.argument == "inputs"
    assert message in str(caught.value)


def test_the_attributes_that_its_docstring_explains_are_there():
    text = inspect.getdoc(TorchModel)
    named = re.findall(r"^    (\w+):", text.partition("Attributes:")[2].partition("Raises:")[0], re.MULTILINE)
    assert named == ["module", "optimizer", "scheduler", "device", "step_outputs"]
    model = TorchModel(Affine(), optimizer=SGD, device="cpu")
    assert all(hasattr(model, name) for name in named)


# --- a train_step of one's own ----------------------------------------------------------------------------------------


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(2, 1)
        self.discriminator = nn.Linear(1, 1)

    def forward(self, noise, real):
        return {"fake": self.generator(noise), "realness": self.discriminator(real)}


class GanModel(TorchModel):
    """Two optimizers, one for the discriminator and one for the generator."""

    def __init__(self, module, lr=0.1, **kwargs):
        super().__init__(module, **kwargs)
        self.judge = torch.optim.SGD(self.module.discriminator.parameters(), lr=lr)
        self.forge = torch.optim.SGD(self.module.generator.parameters(), lr=lr)

    def train_step(self, inputs):
        generator, discriminator = self.module.generator, self.module.discriminator
        self.judge.zero_grad()
        fake = generator(inputs["noise"])
        judged = (discriminator(fake.detach()) - discriminator(inputs["real"])).mean()
        self.backward(judged)
        self.update(self.judge)
        self.forge.zero_grad()
        forged = -discriminator(fake).mean()
        self.backward(forged)
        self.update(self.forge)
        return {"fake": fake, "judged": judged, "forged": forged}


class Count(AbstractHook):
    """Counts the updates."""

    def __init__(self):
        super().__init__()
        self.before = self.after = 0

    def before_update(self):
        self.before += 1

    def after_update(self):
        self.after += 1


def test_a_subclass_may_train_with_two_optimizers():
    torch.manual_seed(0)
    module = Gan()
    by_hand = copy.deepcopy(module)
    rng = np.random.default_rng(0)
    batches = [{"noise": rng.random((4, 2), np.float32), "real": rng.random((4, 1), np.float32)} for _ in range(5)]
    count = Count()
    data = run(GanModel(module), batches, count)
    judge = torch.optim.SGD(by_hand.discriminator.parameters(), lr=0.1)
    forge = torch.optim.SGD(by_hand.generator.parameters(), lr=0.1)
    for batch in batches:
        noise, real = torch.from_numpy(batch["noise"]), torch.from_numpy(batch["real"])
        judge.zero_grad()
        fake = by_hand.generator(noise)
        (by_hand.discriminator(fake.detach()) - by_hand.discriminator(real)).mean().backward()
        judge.step()
        forge.zero_grad()
        (-by_hand.discriminator(fake).mean()).backward()
        forge.step()
    assert same_state(module, by_hand.state_dict())
    assert (count.before, count.after) == (10, 10)
    assert not any(data[0][name].requires_grad for name in ("fake", "judged", "forged"))


class GanWithoutClearing(GanModel):
    """Relies on gradients that are None at the beginning of each step."""

    def train_step(self, inputs):
        generator, discriminator = self.module.generator, self.module.discriminator
        assert all(parameter.grad is None for parameter in self.module.parameters())
        fake = generator(inputs["noise"])
        judged = (discriminator(fake.detach()) - discriminator(inputs["real"])).mean()
        self.backward(judged)
        self.update(self.judge)
        forged = -discriminator(fake).mean()  # its gradients reach the discriminator too
        self.backward(forged)
        self.update(self.forge)
        return {"fake": fake, "judged": judged, "forged": forged}


@pytest.mark.parametrize("optimizer", [None, SGD])
def test_a_gan_without_any_zero_grad_trains_like_the_loop_by_hand(optimizer):
    torch.manual_seed(0)
    module = Gan()
    by_hand = copy.deepcopy(module)
    rng = np.random.default_rng(0)
    batches = [{"noise": rng.random((4, 2), np.float32), "real": rng.random((4, 1), np.float32)} for _ in range(5)]
    run(GanWithoutClearing(module, optimizer=optimizer), batches, epochs=2)
    judge = torch.optim.SGD(by_hand.discriminator.parameters(), lr=0.1)
    forge = torch.optim.SGD(by_hand.generator.parameters(), lr=0.1)
    for batch in batches * 2:
        noise, real = torch.from_numpy(batch["noise"]), torch.from_numpy(batch["real"])
        judge.zero_grad()
        fake = by_hand.generator(noise)
        (by_hand.discriminator(fake.detach()) - by_hand.discriminator(real)).mean().backward()
        judge.step()
        forge.zero_grad()
        (-by_hand.discriminator(fake).mean()).backward()
        forge.step()
    assert same_state(module, by_hand.state_dict())


def test_gradients_are_none_also_of_what_no_optimizer_holds_and_of_what_is_new():
    class Grows(TorchModel):
        def train_step(self, inputs):
            assert all(parameter.grad is None for parameter in self.module.parameters())
            outputs = super().train_step(inputs)
            for parameter in self.module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.module.add_module(f"new{len(self.module._modules)}", nn.Linear(1, 1))
            return outputs

    class Keeps(TorchModel):
        def train_step(self, inputs):
            assert all(parameter.grad is None for parameter in self.module.parameters())
            return {"loss": self.forward(inputs)["loss"].sum().backward()}

    run(Grows(Affine(), optimizer=SGD), XY)
    run(Keeps(Affine()), XY, epochs=2)

    module = Affine()
    module.extra = nn.Parameter(torch.zeros(()))
    module.extra.grad = torch.ones(())
    model = TorchModel(module, optimizer=Factory(lambda parameters: torch.optim.SGD(parameters[:2], lr=0.1)))
    run(model, XY)
    assert module.extra.grad is None


def test_a_subclass_with_an_own_train_step_evaluates_with_forward():
    (data,) = evaluate(GanModel(Gan()), [{"noise": [[1.0, 2.0]], "real": [[3.0]]}])
    assert data["realness"].shape == (1, 1)


def test_a_scheduler_on_update_follows_its_own_optimizer_only():
    scheduler = Factory(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5, options={"step_on": "update"})

    class WithOwn(GanModel):
        def train_step(self, inputs):
            outputs = super().train_step(inputs)
            self.update(self.optimizer)
            return outputs

    model = WithOwn(Gan(), optimizer=Factory(torch.optim.SGD, lr=1.0), scheduler=scheduler)
    run(model, [{"noise": [[1.0, 2.0]], "real": [[3.0]]}] * 2)
    assert model.optimizer.param_groups[0]["lr"] == 0.25


# --- the config -------------------------------------------------------------------------------------------------------


def test_the_yaml_in_its_docstring_trains(tmp_path, monkeypatch):
    section = next(part for part in inspect.getdoc(TorchModel).split("\n\n") if part.startswith("    "))
    section = YAML(typ="safe").load(section)["model"]
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def ConvNet(channels):\n"
        "    return nn.Sequential(nn.Conv2d(1, channels, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9 * channels, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    hooks = [{"ComputeStats": {"variables": ["loss", "accuracy"]}}, {"StopAfter": {"epochs": 1}}]
    config = {
        "dataset": {"class": "Digits"},
        "model": section,
        "main_loop": {"extra_streams": ["valid"]},
        "hooks": hooks,
    }
    training = create_training(config, output_root=tmp_path / "log")
    assert training.main_loop.run_training().status == "finished"
    assert training.main_loop.run_evaluation("test")["test"]["accuracy"]["mean"] > 0.5


class Look(AbstractHook):
    """Notes at each update what the model says of it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_update(self, model):
        self.seen.append((list(model.step_outputs), model.has_updated, self.main_loop.stream_name))

    def after_update(self, model):
        self.seen.append((list(model.step_outputs), model.has_updated, self.main_loop.stream_name))


def test_a_hook_sees_the_outputs_before_the_update_and_whether_it_was_made():
    look = Look()
    model = TorchModel(Affine(), optimizer=SGD, device="cpu")
    run(model, XY, look)
    outputs = ["predicted", "loss"]
    assert look.seen == [(outputs, False, "train"), (outputs, True, "train")] * 2
    assert model.step_outputs is None


def test_a_model_with_its_own_scheme_of_training_has_updated_only_when_it_did():
    class Own(TorchModel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.step = "nothing"

        def train_step(self, inputs):
            outputs = self.forward(inputs)
            self.backward(outputs["loss"].mean())
            if self.step == "update":
                self.update(self.optimizer)
            elif self.step == "step":
                self.optimizer.step()
            elif self.step == "weights":
                with torch.no_grad():
                    self.module.w.mul_(0.5)
            return outputs

    model = Own(Affine(), optimizer=SGD, device="cpu")
    assert model.has_updated is False
    for model.step in ("nothing", "update", "nothing", "step", "nothing", "weights"):
        model.run(XY[0], True, "train")
        assert model.has_updated is (model.step != "nothing")
    assert Own(Affine(), device="cpu").has_updated is None
    assert TorchModel(Affine(), optimizer=SGD, device="cpu").has_updated is False


def test_a_batch_that_cannot_become_tensors_comes_before_the_update():
    model = TorchModel(Affine(), optimizer=SGD, device="cpu")
    model.run(XY[0], True, "train")
    assert model.has_updated
    with pytest.raises(StreamError):
        model.run({"x": ["a"], "y": [1.0]}, True, "train")
    assert not model.has_updated


def test_parameters_that_go_by_name_only_are_passed_by_name():
    class Named(Affine):
        def forward(self, *, x, y):
            return super().forward(x, y)

    for module, inputs in ((Named(), None), (Named(), ["y", "x"]), (Named(), {"x": "x", "y": "y"})):
        outputs = TorchModel(module, inputs=inputs).run({"x": [1.0, 2.0], "y": [1.0, 3.0]}, False, "valid")
        assert outputs["loss"].tolist() == [0.0, 1.0]


def test_a_state_says_which_parts_are_in_which_mode():
    def model():
        return TorchModel(nn.Sequential(nn.Linear(1, 1), nn.Dropout()), inputs=["x"], outputs=["y"])

    one, other = model(), model()
    one.module.train(False)
    one.module[1].train(True)
    other.load_state_dict(one.state_dict())
    assert [part.training for part in other.module.modules()] == [False, False, True]
    state = one.state_dict()
    del state["modes"]
    other.module.train(True)
    other.load_state_dict(state)
    assert other.module.training
