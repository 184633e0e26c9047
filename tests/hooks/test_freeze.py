"""Freeze: what is frozen does not change in a bit, and is trained from the right update on."""

import pytest
import torch
from campaign import thinned
from doubles import SGD, Streams, run, state_of, vectors
from torch import nn

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import Freeze


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x):
        return {"loss": self.head(self.body(x)).squeeze(1) ** 2}


class States(AbstractHook):
    """Keeps the state of the module after each update."""

    def __init__(self):
        super().__init__()
        self.states = []

    def after_update(self, model):
        self.states.append(state_of(model.module))


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "foreach": False}),
]


@pytest.mark.parametrize(("optimizer", "arguments"), OPTIMIZERS, ids=["SGD", "AdamW", "Adam"])
def test_frozen_parameters_do_not_change_and_thaw_as_in_a_loop_by_hand(optimizer, arguments):
    torch.manual_seed(0)
    states, model = States(), TorchModel(Net(), optimizer=Factory(optimizer, **arguments), device="cpu")
    before = state_of(model.module)
    run(model, vectors(), Freeze("^body", until="3 updates"), states, epochs=1)
    for state in states.states[:3]:
        assert all(torch.equal(value, before[name]) for name, value in state.items() if name.startswith("body"))
        assert not torch.equal(state["head.1.running_mean"], before["head.1.running_mean"])
    after = states.states[3]
    assert not any(torch.equal(after[name], before[name]) for name in ("body.0.weight", "body.1.running_mean"))

    torch.manual_seed(0)
    net = Net()
    own = optimizer(net.parameters(), **arguments)
    for index, batch in enumerate(vectors()):
        net.train()
        net.body.requires_grad_(index >= 3)
        net.body[1].train(index >= 3)
        own.zero_grad()
        net(torch.from_numpy(batch["x"]))["loss"].mean().backward()
        own.step()
        assert all(torch.equal(value, net.state_dict()[name]) for name, value in states.states[index].items()), index


@pytest.mark.parametrize(
    ("until", "text"), [(8, "for the first 8 epochs"), ("1 updates", "for the first 1 update"), (None, "always")]
)
def test_the_log_says_how_long_it_is(until, text, caplog):
    caplog.set_level("INFO")
    run(TorchModel(Net(), optimizer=SGD, device="cpu"), vectors(1), Freeze("^body.0", until=until))
    assert f"Freeze: 2 parameters frozen {text}" in caplog.messages


def test_what_an_optimizer_has_learnt_of_a_parameter_is_kept():
    torch.manual_seed(0)
    model = TorchModel(Net(), optimizer=Factory(torch.optim.Adam, lr=0.1), device="cpu")
    run(model, vectors(2))
    weight = model.module.body[0].weight
    known = {name: value.clone() for name, value in model.optimizer.state[weight].items()}
    before = weight.detach().clone()
    run(model, vectors(2), Freeze("^body"))
    assert torch.equal(weight, before)
    assert all(torch.equal(value, known[name]) for name, value in model.optimizer.state[weight].items())


LENGTHS = [
    ("3 updates", {}, 3),
    ("2 epochs", {}, 8),
    ("1 epochs", {"accumulate": 3}, 2),  # of 4 batches: 3 and 1
    ("1 pass", {}, 4),
    ("1 passes", {"fixed_epoch_size": 3}, 4),
    ("1 passes", {"fixed_epoch_size": 8, "accumulate": 3}, 2),  # a window of both passes
    (None, {}, 12),
]


@pytest.mark.parametrize(
    ("until", "main_loop", "frozen"), thinned(LENGTHS, [LENGTHS[0], LENGTHS[2], LENGTHS[5], LENGTHS[6]])
)
def test_until(until, main_loop, frozen):
    data = Streams(num_batches={"train": 4}, train=vectors(4))
    main_loop = {**main_loop}
    accumulate = main_loop.pop("accumulate", 1)
    model, states = TorchModel(Net(), optimizer=SGD, accumulate=accumulate), States()
    before = state_of(model.module)
    with MainLoop(model, data, [Freeze("^body.0", until=until), states], **main_loop) as loop:
        for _ in range(3):
            loop.epoch(["train"])
    is_frozen = [torch.equal(each["body.0.weight"], before["body.0.weight"]) for each in states.states]
    assert is_frozen == [True] * frozen + [False] * (len(is_frozen) - frozen)


def test_a_parameter_that_needed_no_gradient_does_not_get_one_when_it_thaws():
    model = TorchModel(Net(), optimizer=SGD)
    model.module.body[0].bias.requires_grad_(False)
    run(model, vectors(4), Freeze("^body", until="2 updates"))
    assert not model.module.body[0].bias.requires_grad
    assert model.module.body[0].weight.requires_grad


@pytest.mark.parametrize("is_turned", [False, True])
def test_what_two_of_them_freeze_thaws_with_the_last(is_turned):
    model, states = TorchModel(Net(), optimizer=SGD), States()
    before = state_of(model.module)
    hooks = [Freeze(["^body", "head.0"], until="2 updates"), Freeze(["^head.0.weight", "^body.1"], until="4 updates")]
    run(model, vectors(), *(hooks[::-1] if is_turned else hooks), states)
    for name, frozen in (
        ("body.0.weight", 2),
        ("head.0.weight", 4),
        ("body.1.running_mean", 4),
    ):
        is_frozen = [torch.equal(each[name], before[name]) for each in states.states]
        assert is_frozen == [True] * frozen + [False] * (6 - frozen), name


def test_a_second_run_of_the_loop_thaws_too():
    model, states = TorchModel(Net(), optimizer=SGD), States()
    before = state_of(model.module)
    loop = MainLoop(model, Streams(train=vectors(2)), [Freeze("^body.0", until="3 updates"), states])
    for _ in range(2):
        with loop:
            loop.epoch(["train"])
    is_frozen = [torch.equal(each["body.0.weight"], before["body.0.weight"]) for each in states.states]
    assert is_frozen == [True, True, True, False]


def test_evaluations_between_do_not_end_it():
    model = TorchModel(Net(), optimizer=SGD)
    before = state_of(model.module)
    with MainLoop(model, Streams(train=vectors(2), valid=vectors(2)), [Freeze("^body")]) as loop:
        for _ in range(2):
            loop.epoch(["train"], ["valid"])
            assert not model.module.training
    assert all(torch.equal(v, before[n]) for n, v in model.module.state_dict().items() if n.startswith("body"))
    assert not torch.equal(model.module.head[1].running_mean, before["head.1.running_mean"])


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"match": "^boddy"}, "match", r"'^boddy' matches none of the parameters body.0.weight, body.0.bias"),
        ({"match": ["^body", "tail"]}, "match", "'tail' matches none"),
        ({"match": "."}, "match", "nothing is left to train"),
        ({"match": []}, "match", "is neither a regular expression nor a list"),
        ({"match": None}, "match", "give a regular expression"),
        ({"match": 5}, "match", "5 is neither"),
        ({"match": "("}, "match", "'(' is not a regular expression"),
        ({"match": "body", "until": "5 minutes"}, "until", "'5 minutes' is not an interval"),
    ],
)
def test_wrong_arguments(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        Freeze(**arguments, model=TorchModel(Net(), optimizer=SGD))
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_passes_of_unknown_length_are_an_error():
    with pytest.raises(ArgumentError, match="the length of a pass is not known"):
        run(TorchModel(Net(), optimizer=SGD), vectors(), Freeze("body", until="1 passes"), fixed_epoch_size=3)


def test_a_model_without_a_module_is_an_error(scripted):
    with pytest.raises(HookError, match="Freeze needs a TorchModel, not Scripted"):
        Freeze("body", model=scripted())


def test_the_yaml_of_the_docstring(in_docstring, train_digits):
    train_digits([*in_docstring(Freeze), {"StopAfter": {"updates": 30}}])
