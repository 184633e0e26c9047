"""bf16, fp16 and tf32, beside the same by hand."""

import copy

import numpy as np
import pytest
import torch
from doubles import XY, Affine, Streams, evaluate, run
from torch import nn
from torch.nn.functional import mse_loss
from windows import weights

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.base.errors import ArgumentError
from emrun.models import precision as precision_module

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Keeps the dtype that it has calculated in."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.dtype = None

    def forward(self, x):
        found = self.layers(x).squeeze(1)
        self.dtype = found.dtype
        return {"found": found, "all": {"found": (found, x)}}


def loss(found, y):
    """So large that the first gradients in float16 are not finite."""
    assert found.dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    return 20 * mse_loss(found, y)


BATCHES = [
    {"x": each.random((8, 3), np.float32), "y": each.random(8, np.float32)}
    for each in [np.random.default_rng(0)]
    for _ in range(24)
]
SGD = Factory(torch.optim.SGD, lr=1e-4, momentum=0.9)
LOSS = Factory(lambda: loss)
LOSS.options = {"inputs": ["found", "y"]}


def model_of(module, precision, cls=TorchModel, **arguments):
    arguments = {"optimizer": SGD, "loss": LOSS, "device": "cpu", **arguments}
    return cls(module, outputs=["found"], precision=precision, **arguments)


def by_hand(module, precision, window=1):
    """Train as torch's documentation of `torch.amp` shows; return the scaler and the number of skipped updates."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    skipped = 0
    for number, batch in enumerate(BATCHES):
        if number % window == 0:
            optimizer.zero_grad()
        x, y = torch.as_tensor(batch["x"]), torch.as_tensor(batch["y"])
        with torch.autocast("cpu", DTYPES[precision]):
            found = module(x)["found"]
        value = loss(found.float(), y)
        scaler.scale(value).backward()
        if number % window == window - 1:
            scaler.unscale_(optimizer)
            if window > 1:
                torch._foreach_div_([each.grad for each in module.parameters()], float(window))
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
    return scaler, skipped


def two_of(seed=1):
    torch.manual_seed(seed)
    module = Net()
    return module, copy.deepcopy(module)


@pytest.mark.parametrize(("precision", "window"), [("bf16", 1), ("fp16", 1), ("bf16", 3), ("fp16", 3)])
def test_the_updates_equal_those_by_hand_to_the_last_bit(precision, window):
    module, hand = two_of()
    begin = weights(module)
    model = model_of(module, precision, accumulate=window)
    run(model, BATCHES)
    scaler, skipped = by_hand(hand, precision, window)
    assert torch.equal(weights(module), weights(hand))
    assert not torch.equal(weights(module), begin)
    assert all(parameter.dtype is torch.float32 for parameter in module.parameters())
    if precision == "fp16":
        state = model.state_dict()
        assert state["loss_scale"]["scale"] == scaler.get_scale() < 2**16
        assert state["loss_scale"]["growth_tracker"] == scaler.state_dict()["_growth_tracker"]
        assert state["skipped_updates"] == {"total": skipped, "count": skipped, "stream": "train"}
        assert skipped > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_evaluation_has_the_precision_and_float32_outputs(precision):
    module, hand = two_of()
    model = TorchModel(module, loss=LOSS, precision=precision, device="cpu")
    outputs = evaluate(model, BATCHES[:1])[0]
    with torch.autocast("cpu", DTYPES[precision]):
        expected = hand(torch.as_tensor(BATCHES[0]["x"]))["found"]
    assert module.dtype is DTYPES[precision]
    assert outputs["found"].dtype is outputs["all"]["found"][0].dtype is torch.float32
    assert torch.equal(outputs["found"], expected.float())
    assert not torch.is_autocast_enabled("cpu")


def test_inputs_stay_in_float32_and_a_loss_of_the_module_becomes_float32():
    class OwnLoss(Net):
        def forward(self, x, y):
            assert x.dtype is torch.float32
            return {"loss": (super().forward(x)["found"] - y.to(self.dtype)).abs().mean()}

    model = TorchModel(OwnLoss(), optimizer=SGD, precision="bf16", device="cpu")
    assert run(model, BATCHES[:2])[0]["loss"].dtype is torch.float32
    assert model.step_values()["loss"].dtype is torch.float32


class Own(TorchModel):
    """Calls the module directly, and makes an update of each half."""

    def train_step(self, inputs):
        losses = []
        for optimizer in self.halves:
            found = self.module.layers(inputs["x"]).squeeze(1)
            assert found.dtype is DTYPES[self.precision]
            value = 20 * mse_loss(found.float(), inputs["y"])
            self.backward(value)
            self.update(optimizer)
            losses.append(value)
        return {"loss": sum(losses), "found": found}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_train_step_with_two_optimizers_equals_one_by_hand(precision):
    module, hand = two_of()
    model = model_of(module, precision, Own, loss=None, inputs=["x"])
    model._forward_pass.inputs.required.append("y")
    model.halves = [torch.optim.SGD(module.layers[at].parameters(), lr=1e-4) for at in (0, 2)]
    seen = run(model, BATCHES)
    assert seen[0]["found"].dtype is torch.float32

    halves = [torch.optim.SGD(hand.layers[at].parameters(), lr=1e-4) for at in (0, 2)]
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for batch in BATCHES:
        hand.zero_grad()
        for optimizer in halves:
            with torch.autocast("cpu", DTYPES[precision]):
                found = hand.layers(torch.as_tensor(batch["x"])).squeeze(1)
            scaler.scale(20 * mse_loss(found.float(), torch.as_tensor(batch["y"]))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
    assert torch.equal(weights(module), weights(hand))


def test_a_forward_of_a_subclass_runs_in_the_precision():
    class Direct(TorchModel):
        def forward(self, inputs):
            found = self.module(inputs["x"])["found"]
            return {"found": found, "loss": found.mean()}

    model = Direct(Net(), inputs=["x"], outputs=["found"], optimizer=SGD, precision="bf16", device="cpu")
    seen = run(model, BATCHES[:1])[0]
    assert model.module.dtype is torch.bfloat16
    assert seen["found"].dtype is seen["loss"].dtype is torch.float32
    assert evaluate(model, BATCHES[:1])[0]["found"].dtype is torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": 16}, "precision: 16 is not one of 32, tf32, bf16, fp16"),
        ({"precision": "bf16", "device": "meta"}, "bf16 cannot be used on the device 'meta': .*; use 32"),
        ({"precision": "fp16", "module": nn.Linear(1, 1).half()}, "fp16 needs a module with weights of float32, .*16"),
        ({"precision": "bf16", "module": nn.Linear(1, 1).double()}, "bf16 needs a module with .* of float64"),
    ],
)
def test_a_precision_that_cannot_be_had_is_an_error(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        TorchModel(**{"module": nn.Linear(1, 1), "device": "cpu", "outputs": ["y"], **arguments})


def test_tf32_is_set_during_a_run_and_restored(monkeypatch):
    monkeypatch.setattr(precision_module, "has_tf32", lambda device: True)

    class See(AbstractHook):
        def after_batch(self):
            seen.append(torch.get_float32_matmul_precision())

    seen, before = [], torch.get_float32_matmul_precision()
    model = TorchModel(Affine(), optimizer=SGD, precision="tf32", device="cpu")
    with MainLoop(model, Streams(train=XY), [See()]) as loop:
        loop.epoch(["train"])
    evaluate(model)
    assert seen == ["high"] * len(XY)
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_tf32_without_such_a_gpu_is_a_warning(caplog):
    run(TorchModel(Affine(), optimizer=SGD, precision="tf32", device="cpu"))
    assert "precision: tf32 has no effect on the device 'cpu'" in caplog.text
