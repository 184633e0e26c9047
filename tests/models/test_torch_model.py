"""TorchModel: the results of the raw PyTorch loop, its modes, its errors, its config."""

import copy
import inspect
import itertools
import re
import sys

import pytest
import torch
from campaign import thinned
from doubles import (
    SGD,
    XY,
    Affine,
    Record,
    Streams,
    evaluate,
    run,
    same_state,
    state_of,
)
from ruamel.yaml import YAML
from torch import nn
from torch.nn import functional

from emrun import Factory, MainLoop, TorchModel, create_training
from emrun.base.errors import ArgumentError
from emrun.datasets import Digits
from emrun.hooks import ComputeStats, StopAfter
from emrun.metrics import accuracy
from emrun.streams.stream import StreamWrapper

# --- the raw loop -----------------------------------------------------------------------------------------------------

ITERATIONS = 80


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


@pytest.mark.parametrize(
    ("buffer", "form"),
    thinned(itertools.product((0, 4), ("loss in forward", "loss form")), [(4, "loss form")]),
)
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


def test_the_attributes_that_its_docstring_explains_are_there():
    text = inspect.getdoc(TorchModel)
    named = re.findall(r"^    (\w+):", text.partition("Attributes:")[2].partition("Raises:")[0], re.MULTILINE)
    assert named == ["module", "optimizer", "optimizers", "scheduler", "schedulers", "device", "step_outputs"]
    model = TorchModel(Affine(), optimizer=SGD, device="cpu")
    assert all(hasattr(model, name) for name in named)


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
    hooks = [{"ComputeStats": {"variables": ["loss", "accuracy"]}}, {"StopAfter": {"epochs": 2}}]
    config = {
        "seed": 1,
        "dataset": {"class": "Digits"},
        "model": section,
        "main_loop": {"extra_streams": ["valid"], "report": False},
        "hooks": hooks,
    }
    training = create_training(config, output_root=tmp_path / "log")
    assert training.main_loop.run_training().status == "finished"
    assert training.main_loop.run_evaluation("test")["test"]["accuracy"]["mean"] > 0.5


def test_a_state_says_which_parts_are_in_which_mode():
    def model():
        return TorchModel(nn.Sequential(nn.Linear(1, 1), nn.Dropout()), inputs=["x"], outputs=["y"])

    one, other = model(), model()
    one.module.train(False)
    one.module[1].train(True)
    other.load_state_dict(one.state_dict())
    assert [part.training for part in other.module.modules()] == [False, False, True]


def test_a_copy_of_a_model_evaluates_with_weights_of_its_own():
    model = TorchModel(Affine(), optimizer=SGD, device="cpu")
    model.run(XY[0], True, "train")
    before = state_of(model.module)
    model.evaluation_weights = {name: torch.zeros_like(each) for name, each in model.module.named_parameters()}
    twin = copy.deepcopy(model)
    assert (twin.run(XY[0], False, "valid")["loss"] == torch.tensor(XY[0]["y"]) ** 2).all()
    assert same_state(model.module, before)
    twin.run(XY[0], True, "train")
    assert same_state(model.module, before)
    assert not same_state(twin.module, before)


def test_a_lazy_module_is_an_error_until_it_has_its_shapes():
    module = nn.Sequential(nn.LazyConv2d(2, 3), nn.Flatten(), nn.LazyLinear(1))
    message = (
        "module: 0 is a LazyConv2d, which has no shapes before its first batch; in __init__, write Conv2d with its "
        "sizes, or run the module once on zeros of the shape of a batch"
    )
    with pytest.raises(ArgumentError) as caught:
        TorchModel(module, optimizer=SGD)
    assert str(caught.value) == message
    module(torch.zeros(1, 3, 8, 8))
    assert TorchModel(module, optimizer=SGD).optimizer is not None
