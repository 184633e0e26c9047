"""The state of an optimizer: groups that a hook adds, states that are refused."""

import pytest
import torch
from doubles import Normed
from torch import nn

from emrun import AbstractHook, Factory, TorchModel
from emrun.base.errors import StateError
from emrun.models.optimizers.build import build_optimizer
from emrun.models.optimizers.state import check_loadable, on_shapes


def sgd(groups=None):
    return Factory(torch.optim.SGD, options={"groups": groups}, lr=1.0, momentum=0.5)


class AddsGroup(AbstractHook):
    def __init__(self, model):
        super().__init__()
        model.module.register_parameter("more", nn.Parameter(torch.zeros(1)))
        model.optimizer.add_param_group({"params": [model.module.more], "lr": 0.25})


def stepped(model):
    for parameter in model.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.optimizer.step()
    return model.state_dict()


def test_a_group_that_a_hook_adds_where_it_is_built_is_resumed():
    model, again = (TorchModel(Normed(), optimizer=sgd()) for _ in range(2))
    AddsGroup(model), AddsGroup(again)
    again.load_state_dict(stepped(model))
    assert [group["lr"] for group in again.optimizer.param_groups] == [1.0, 0.25]
    assert torch.equal(again.optimizer.state[again.module.more]["momentum_buffer"], torch.ones(1))


def test_a_group_that_is_missing_on_a_resume_is_named():
    model, again = (TorchModel(Normed(), optimizer=sgd()) for _ in range(2))
    AddsGroup(model)
    message = "the optimizer of the checkpoint has 2 parameter groups, but that of the config has 1; a hook or model"
    with pytest.raises(StateError, match=message):
        again.load_state_dict(stepped(model))


class Picky(torch.optim.SGD):
    """Refuses every state."""

    def __setstate__(self, state):
        raise KeyError("nothing")


REFUSED = (
    r"optimizer is refused by Picky \(KeyError: 'nothing'\), but must be the state of the same model, arguments and"
)


def test_a_state_that_the_optimizer_refuses_is_an_error_with_what_differs_and_what_to_do():
    model, again = (TorchModel(Normed(), optimizer=Factory(Picky, lr=1.0)) for _ in range(2))
    with pytest.raises(StateError, match=REFUSED):
        again.load_state_dict(stepped(model))


def test_a_state_is_tried_on_shapes_without_the_weights_and_without_a_trace():
    optimizer = build_optimizer(Normed(), sgd([{"match": "bias", "lr": 0.1}]))
    empty = on_shapes(optimizer)
    parameters = [each for group in empty.param_groups for each in group["params"]]
    assert [each.shape for each in parameters] == [p.shape for g in optimizer.param_groups for p in g["params"]]
    assert {each.untyped_storage().nbytes() for each in parameters} == {4}
    for each in optimizer.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    optimizer.step()
    before = {id(key): {**value} for key, value in optimizer.state.items()}
    check_loadable(optimizer, empty)
    assert {id(key): value for key, value in optimizer.state.items()} == before
    with pytest.raises(StateError, match=REFUSED):
        check_loadable(picky := build_optimizer(Normed(), Factory(Picky, lr=1.0)), on_shapes(picky))
