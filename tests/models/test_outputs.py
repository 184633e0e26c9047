"""The outputs of a module: what forward returns, losses, metrics, and what remains of a step."""

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import ClassVar

import numpy as np
import pytest
import torch
from doubles import (
    DB,
    DW,
    SGD,
    XY,
    Affine,
    Two,
    X,
    Y,
    evaluate,
    identity,
    run,
    same_state,
    state_of,
)
from torch import nn
from torch.nn import functional

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.base.errors import ArgumentError, StreamError
from emrun.datasets import Digits
from emrun.hooks import StopAfter
from emrun.metrics import accuracy
from emrun.models.outputs import Calculation


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
    loop = MainLoop(model, Digits(flat=True, batch_size=300), [StopAfter(epochs=1)], extra_streams=["valid"])
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


def test_the_learning_rates_are_those_of_the_last_update_whoever_changes_them_after_it():
    class Change(AbstractHook):
        def __init__(self, event):
            super().__init__()
            setattr(self, event, self.change)
            self.seen = []

        def change(self, **_):
            self.seen.append(self.main_loop.model.step_values()["learning_rate"])
            self.main_loop.model.optimizer.param_groups[0]["lr"] /= 2

    class AfterUpdate(Change):
        def after_update(self):
            """Changed by the constructor."""

    class AfterBatch(Change):
        def after_batch(self):
            """Changed by the constructor."""

    for hook in (AfterUpdate("after_update"), AfterBatch("after_batch")):
        model = TorchModel(Affine(), optimizer=SGD)
        run(model, XY, hook)
        assert hook.seen == [[0.1], [0.05]]
    again = TorchModel(Affine(), optimizer=SGD)
    again.load_state_dict(model.state_dict())
    assert again.step_values()["learning_rate"] == [0.05]
    assert again.optimizer.param_groups[0]["lr"] == 0.025


def test_the_learning_rate_of_a_scheduler_that_steps_after_each_update_is_that_of_the_update():
    seen = []

    class Look(AbstractHook):
        def after_batch(self):
            seen.extend(self.main_loop.model.step_values()["learning_rate"])

    scheduler = Factory(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5, options={"step_on": "update"})
    run(TorchModel(Affine(), optimizer=SGD, scheduler=scheduler), XY, Look())
    assert seen == [0.1, 0.05]


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
        (lambda loss: loss.detach().numpy(), "array"),
        (lambda loss: 3, "3"),
        (lambda loss: None, "None"),
    ],
)
def test_a_loss_that_is_not_a_tensor_is_named_as_what_it_is(change, shown):
    class Wrong(Affine):
        def forward(self, x, y):
            outputs = super().forward(x, y)
            return {**outputs, "loss": change(outputs["loss"])}

    message = rf"the output 'loss' is not a tensor, but {shown}.*: forward must return a tensor with gradients"
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


def test_gradients_that_the_users_code_has_disabled_are_an_error_that_says_so():
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"loss: your code has called torch\.set_grad_enabled"):
        run(TorchModel(Affine(), optimizer=SGD), [{"x": X, "y": Y}])


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


def penalty(module):
    return module.scale**2 / 2


class Weighted(nn.Module):
    def forward(self, values, *, module):
        return values * module.scale


def test_a_loss_with_a_parameter_module_gets_it_after_its_inputs():
    forms = {
        "plain": Factory(penalty, is_import=True),
        "weighted": Factory(Weighted, options={"inputs": ["same"], "scale": 0.5}),
    }
    model = identity(loss=forms, optimizer=SGD, device="cpu")
    (found,) = run(model, [{"x": torch.tensor([2.0, 4.0])}])
    assert found["plain"] == 0.5
    assert found["weighted"].tolist() == [2.0, 4.0]
    assert found["loss"] == 0.5 + 0.5 * 3
    assert model.module.scale.item() == pytest.approx(1 - 0.1 * (1 + 0.5 * 2 * 3))  # `same` has the scale too
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.module.scale.fill_(4.0)
    (found,) = evaluate(other, [{"x": torch.tensor([2.0, 4.0])}])
    assert found["plain"] == 8


def test_the_parameter_module_of_a_loss_must_come_after_its_inputs():
    form = Factory(lambda module, values: values, is_import=True, options={"inputs": ["same"]})
    with pytest.raises(ArgumentError, match="its parameter 'module' must come after those of its 'inputs'"):
        identity(loss={"first": form})


@pytest.mark.parametrize("key", ["loss", "metrics"])
@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Factory(LearnedLoss, options={"inputs": ["same"]}), "it has parameters, which would not be trained or saved"),
        (Factory(nn.MSELoss), "set 'inputs' to the outputs and sources that it is called with"),
        (Factory(nn.MSELoss, options={"inputs": "same"}), "inputs: 'same' is not a list of names"),
        (Factory(nn.MSELoss, options={"inputs": ["same", 1]}), "inputs: ['same', 1] is not a list of names"),
        (Factory(nn.MSELoss, options={"inputs": [["same"]]}), "inputs: [['same']] is not a list of names"),
        (Factory(nn.MSELoss, options={"inputs": ["same"], "scale": "1"}), "scale: '1' is not a number"),
        (Factory(nn.MSELoss, options={"inputs": ["same"], "scale": float("nan")}), "scale: nan is not a number"),
        (Factory(int, options={"inputs": ["same"]}), "int cannot be called"),
        ("mse", "'mse' is not a class or function; write {class: ..., inputs: [...]}"),
    ],
)
def test_a_wrong_form_of_a_loss_or_metric_is_refused_at_once(key, form, message):
    with pytest.raises(ArgumentError) as caught:
        identity(**{key: {"other": form}})
    assert caught.value.argument.startswith(f"{key}.other")
    assert message in str(caught.value)


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


def calculated(one, other, function=functional.mse_loss, key="loss"):
    """Return what a loss of two inputs of these shapes is."""
    form = Factory(function, options={"inputs": ["a", "b"]}, is_import=True)
    return Calculation(key, form, torch.device("cpu"))({"a": torch.ones(one)}, {"b": torch.ones(other)})


def each_with_each(one, other):
    """Return a loss that makes the shapes for pairs itself."""
    return (one[:, None] - other[None]).square().mean()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("function", [functional.mse_loss, functional.l1_loss, lambda a, b: ((a - b) ** 2).mean()])
@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ((4, 1), (4,), "(4, 4)"),
        ((4,), (4, 1), "(4, 4)"),
        ((4, 1), (1, 4), "(4, 4)"),
        ((4, 1, 3), (4, 3), "(4, 4, 3)"),
        ((4, 3, 1), (4, 1, 5), "(4, 3, 5)"),
    ],
)
def test_a_loss_that_would_compare_each_with_each_is_an_error_with_the_way_out(one, other, both, function):
    with pytest.raises(ArgumentError, match=r"compare each with each, .*\.squeeze\(1\) in forward") as caught:
        calculated(one, other, function, "loss.part")
    assert caught.value.argument == "loss.part"
    assert f"'a' is {one} and 'b' is {other}" in str(caught.value)
    assert both in str(caught.value)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: ((torch.sigmoid(a) - b) ** 2).mean(),
        lambda a, b: (a - b.double()).abs().mean(),
        lambda a, b: functional.mse_loss(a.exp(), b.log()),
        lambda a, b: functional.relu(1 - (2 * a) * (2 * b - 1)).mean(),
        lambda a, b: torch.where(a.abs() > 1, a.abs(), b.abs()).mean(),
        lambda a, b: functional.huber_loss(input=a + 1, target=b + 1),
    ],
)
def test_so_is_a_loss_that_compares_what_it_has_calculated_of_its_inputs(function):
    with pytest.raises(ArgumentError, match=r"compare each with each, .*\.squeeze\(1\) in forward"):
        calculated((4, 1), (4,), function)
    calculated((4,), (4,), function)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("one", "other", "function"),
    [
        ((4,), (4,), functional.mse_loss),
        ((4, 1), (4,), lambda a, b: ((a.exp() - a.T.exp()) * (b[:, None] - b)).mean()),  # pairs, as it says
        ((4, 1), (4,), lambda a, b: (a.exp().squeeze(1) - b.double()).mean()),
        ((4, 1), (4,), lambda a, b: a.exp().sum() - b.log().sum()),
        ((4, 1), (4, 1), functional.mse_loss),
        ((4, 3), (4, 1), lambda a, b: (a * b).sum()),  # a mask
        ((4, 3), (3,), lambda a, b: (a * b).sum()),  # weights of columns
        ((4, 3), (), lambda a, b: (a * b).sum()),
        ((1, 1), (1,), functional.mse_loss),
        ((4, 5), (4, 3), lambda a, b: a.sum() + b.sum()),
        ((4,), (4,), each_with_each),
        ((4, 1), (4,), lambda a, b: (a[:, 0] - b).mean()),  # makes one shape itself
        ((4, 1), (4,), lambda a, b: functional.mse_loss(a.flatten(), b)),
        ((4, 1), (4,), lambda a, b: functional.mse_loss(a, b[:, None])),
        ((4, 1), (4,), lambda a, b: (a[:, 0, None] - b[None]).mean()),  # each with each, as it says
        ((4, 2), (4, 2), lambda a, b: torch.cdist(a, b).mean()),
    ],
)
def test_other_shapes_of_the_inputs_of_a_loss_are_left_to_it(one, other, function):
    assert calculated(one, other, function).dim() == 0


def test_a_metric_may_compare_each_with_each():
    assert calculated((4, 1), (4,), lambda a, b: (a - b).mean(), "metrics.m").dim() == 0
