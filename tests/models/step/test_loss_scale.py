"""The scale of the loss in float16: its state, several updates of an optimizer, its misuse."""

import pytest
import torch
from doubles import Affine, run

from emrun import Factory, TorchModel
from emrun.base.errors import ArgumentError
from emrun.models.step.loss_scale import LossScale

SGD = Factory(torch.optim.SGD, lr=0.1)


def optimizer_of(gradient, scale):
    parameter = torch.nn.Parameter(torch.ones(()))
    scale.scaled(parameter * gradient).backward()
    return torch.optim.SGD([parameter], lr=0.1)


def test_the_scale_is_reduced_once_for_a_window_with_an_infinite_gradient():
    scale = LossScale(torch.device("cpu"))
    first, second = optimizer_of(1.0, scale), optimizer_of(float("inf"), scale)
    assert scale.unscale(first)
    assert first.param_groups[0]["params"][0].grad == 1
    assert not scale.unscale(second)
    scale.end()
    assert scale.value == 2**15


def test_an_optimizer_may_make_several_updates_in_a_window():
    scale = LossScale(torch.device("cpu"))
    optimizer = optimizer_of(float("inf"), scale)
    parameter = optimizer.param_groups[0]["params"][0]
    assert not scale.unscale(optimizer)
    parameter.grad = None
    scale.scaled(parameter * 2.0).backward()
    assert scale.unscale(optimizer)
    assert parameter.grad == 2
    scale.end()
    assert scale.value == 2**15  # because of the first one


def test_a_window_without_gradients_changes_nothing():
    scale = LossScale(torch.device("cpu"))
    scale.scaled(torch.ones(()))
    assert scale.unscale(torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1))
    scale.end()
    assert scale.state_dict() == {"scale": 2.0**16, "growth_tracker": 0}


def test_the_state_is_restored():
    scale, other = (LossScale(torch.device("cpu")) for _ in range(2))
    scale.unscale(optimizer_of(float("inf"), scale))
    scale.end()
    scale.unscale(optimizer_of(1.0, scale))
    scale.end()
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict() == {"scale": 2.0**15, "growth_tracker": 1}


def model(cls=TorchModel):
    return cls(Affine(), optimizer=SGD, precision="fp16", device="cpu")


def test_a_checkpoint_of_another_precision_has_no_scale_which_is_a_warning(caplog):
    state = TorchModel(Affine(), optimizer=SGD, device="cpu").state_dict()
    model().load_state_dict(state)
    assert "the checkpoint has no scale of the loss, which fp16 needs" in caplog.text


class OwnBackward(TorchModel):
    def train_step(self, inputs):
        outputs = self.forward(inputs)
        outputs["loss"].mean().backward()
        self.update(self.optimizer)
        return outputs


def test_gradients_that_are_not_scaled_are_an_error():
    with pytest.raises(ArgumentError, match="fp16 scales the loss: train_step must call ") as caught:
        run(model(OwnBackward))
    assert "self.backward(loss)" in str(caught.value)
