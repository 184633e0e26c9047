"""Gradients are taken from the step of the model, which leaves nothing behind; and how far two of them are apart."""

import copy

import pytest
import torch
from faulty_models import HALVES, row_of

from emrun.base.encoding import random_state
from emrun.diagnosis.numerics.gradients import Catch, Step, difference, without_dropout
from emrun.loop.main_loop import MainLoop
from emrun.models.torch_model import TorchModel


@pytest.mark.parametrize(("module", "text"), [("Noisy", "random numbers"), ("FunctionalDropout", "random numbers")])
def test_noise_is_random(module, text):
    result, _, said = row_of({"module": {"class": f"faulty_models.{module}"}}, HALVES)
    assert result == "random"
    assert text in said


@pytest.mark.parametrize("module", ["OwnNoise", "Counting"])
def test_a_module_that_gives_other_gradients_each_time_is_random(module):
    result, _, text = row_of({"module": {"class": f"faulty_models.{module}"}}, HALVES)
    assert result == "random"
    assert "a step repeated with the same random states" in text


def test_a_loss_without_gradients_is_left_out():
    loss = {"import": "torch.nn.functional.mse_loss", "inputs": ["x", "x"]}
    result, _, text = row_of({"module": {"class": "faulty_models.Net"}, "loss": loss}, HALVES)
    assert result == "not applicable"
    assert "the loss does not depend on any parameter" in text


def test_nothing_is_left_behind():
    norm = torch.nn.BatchNorm1d(2)
    model = TorchModel(
        torch.nn.Sequential(norm, torch.nn.Dropout(0.5), torch.nn.Flatten(0)),
        inputs=["x"],
        outputs=["loss"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )
    MainLoop(model, object(), [catch := Catch()]).notify("before_training")
    step, batch = Step(model, catch, "train"), {"x": torch.arange(8.0).reshape(4, 2)}
    before = copy.deepcopy(model.module.state_dict()), repr(random_state()), batch["x"].clone()
    found = step.measure(batch, dropout=True)
    assert {*found.gradients} == {"0.weight", "0.bias"}
    assert found.weight == 4
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, before[0][name]), name
    assert repr(random_state()) == before[1]
    assert torch.equal(batch["x"], before[2])
    assert norm.weight.grad is None


def test_dropout_comes_back():
    part = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.MultiheadAttention(4, 2, dropout=0.25))
    with without_dropout(part):
        assert not part[0].training
        assert (part[1].training, part[1].dropout) == (True, 0.0)
    assert part[0].training
    assert part[1].dropout == 0.25


def test_rounding_is_no_difference_and_the_worst_parameter_is_named():
    one = {"a": torch.ones(3), "b": torch.full((3,), 1e-9), "c": torch.ones(2)}
    assert difference(one, {**one, "a": one["a"] + 1e-6, "b": torch.zeros(3)}) is None
    assert difference(one, {"a": one["a"] * 1.5, "b": one["b"], "c": one["c"] * 1.1}) == ("a", pytest.approx(1 / 3))
    assert difference(one, {"a": one["a"], "b": one["b"]}) == ("c", 1)
    assert difference(one, {**one, "a": one["a"] + 0.1}, {"a": 1, "b": 1, "c": 1}) is None
