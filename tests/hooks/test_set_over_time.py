"""SetOverTime: each update has the number of its schedule, and evaluations have that of the last update."""

import pytest
import torch
from doubles import run
from torch import nn

from emrun import AbstractHook, Factory, MainLoop, TorchModel, create_training
from emrun.base.errors import ArgumentError, ConfigError, HookError
from emrun.hooks import SetOverTime, StopAfter
from emrun.models.schedules.built_in import Constant, Cosine, Linear

LINEAR = Factory(Linear)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.kind = "relu"
        self.is_on = True


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.w = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("temperature", torch.tensor(4.0))
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x):
        return {"value": x * self.w.sum() * self.scale, "other": x - self.w.sum()}


def mean(value):
    return value.mean()


def model_with(**arguments):
    losses = {
        "main": Factory(mean, options={"inputs": ["value"]}, is_import=True),
        "extra": Factory(mean, options={"inputs": ["other"], "scale": 2.0}, is_import=True),
    }
    arguments = {"optimizer": Factory(torch.optim.AdamW, lr=0.1, weight_decay=0.1), "loss": losses, **arguments}
    return TorchModel(Net(), device="cpu", **arguments)


class Watch(AbstractHook):
    """Keeps what a function returns for each batch."""

    def __init__(self, function):
        super().__init__()
        self.function, self.trained, self.evaluated = function, [], []

    def after_batch(self):
        values = self.trained if self.main_loop.training else self.evaluated
        values.append(self.function(self.main_loop.model))


class Data:
    num_batches = {"train": 4}  # noqa: RUF012 - is not changed

    def train_stream(self):
        return iter([{"x": [1.0]}] * 4)

    def valid_stream(self):
        return iter([{"x": [1.0]}])


def values(model, function, *hooks, epochs=1):
    watch = Watch(function)
    hooks = [*hooks, watch, StopAfter(epochs=epochs)]
    MainLoop(model, Data(), hooks, extra_streams=["valid"], on_unused_sources="ignore").run_training()
    return watch


def loss(model):
    return model.step_values()["loss"].item() if "loss" in model.step_values() else None


def test_a_number_of_the_module_follows_the_schedule_and_evaluations_change_nothing():
    hook = SetOverTime("module.blocks.1.dropout.p", LINEAR)
    model = model_with()
    watch = values(model, lambda model: model.module.blocks[1].dropout.p, hook)
    assert watch.trained == [0.5, 0.375, 0.25, 0.125]
    assert watch.evaluated == [0.5] * 5 + [0.125]  # of train and valid in the zeroth epoch, of valid in the first
    assert model.module.blocks[0].dropout.p == 0.5


def test_an_update_of_several_batches_has_one_value():
    hook = SetOverTime("module.blocks.0.dropout.p", LINEAR)
    watch = values(model_with(accumulate=3), lambda model: model.module.blocks[0].dropout.p, hook, epochs=2)
    assert watch.trained == [0.5, 0.5, 0.5, 0.375, 0.25, 0.25, 0.25, 0.125]


def test_a_warm_up_comes_from_the_end():
    hook = SetOverTime("module.blocks.0.dropout.p", Factory(Constant, warmup="4 updates"), end=1.0)
    watch = values(model_with(), lambda model: model.module.blocks[0].dropout.p, hook)
    assert watch.trained == [0.875, 0.75, 0.625, 0.5]


def test_a_buffer_is_set_in_place_and_keeps_its_value():
    model = model_with()
    buffer = model.module.temperature
    watch = values(
        model, lambda model: model.module.temperature.item(), SetOverTime("module.temperature", LINEAR, end=2.0)
    )
    assert watch.trained == [4.0, 3.5, 3.0, 2.5]
    assert watch.evaluated[-1] == 2.5
    assert model.module.temperature is buffer


GROUPS = {"groups": [{"match": "scale", "weight_decay": 0.2}, {"match": "w", "weight_decay": 0.0}]}


@pytest.mark.parametrize(
    ("arguments", "last"),
    [({}, (0.05, 0.0)), ({"value": 1.0}, (0.25, 0.0)), ({"end": 1.0}, (0.8, 0.0))],
    ids=["share of each group", "value", "end"],
)
def test_parameter_groups_without_weight_decay_keep_none(arguments, last):
    model = model_with(optimizer=Factory(torch.optim.AdamW, lr=0.1, weight_decay=0.1, options=GROUPS))
    watch = values(
        model,
        lambda model: [group["weight_decay"] for group in model.optimizer.param_groups],
        SetOverTime("optimizer.weight_decay", LINEAR, **arguments),
    )
    assert tuple(watch.trained[-1]) == last


def test_numbers_of_an_optimizer_change_its_updates():
    def weights(*hooks):
        model = model_with(optimizer=Factory(torch.optim.SGD, lr=0.1, momentum=0.9))
        run(model, [{"x": [1.0]}] * 4, *hooks, StopAfter(updates=4))
        return model.module.w.detach().clone()

    def by_hand():
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for update in range(4):
            optimizer.param_groups[0]["momentum"] = 0.9 * (1 - update / 4)
            optimizer.zero_grad()
            outputs = net(torch.ones(1))
            (outputs["value"].mean() + 2 * outputs["other"].mean()).backward()
            optimizer.step()
        return net.w.detach()

    assert torch.equal(weights(SetOverTime("optimizer.momentum", LINEAR)), by_hand())
    assert not torch.equal(weights(), by_hand())


def test_the_learning_rates_are_those_of_the_schedule_of_the_model():
    def rates(*hooks):
        model = model_with(scheduler=Factory(Cosine, warmup="2 updates"))
        return values(model, lambda model: model.optimizer.param_groups[0]["lr"], *hooks).trained

    assert rates(SetOverTime("optimizer.weight_decay", LINEAR)) == rates()


SEVERAL = {
    "first": Factory(torch.optim.SGD, lr=0.1, momentum=0.5, options={"match": "w"}),
    "last": Factory(torch.optim.SGD, lr=0.1, momentum=0.5, options={"match": "scale"}),
}


def test_a_number_of_one_of_several_optimizers():
    watch = values(
        model_with(optimizer=SEVERAL),
        lambda model: [each.param_groups[0]["momentum"] for each in model.optimizers.values()],
        SetOverTime("optimizer.last.momentum", LINEAR),
    )
    assert watch.trained == [[0.5, momentum] for momentum in (0.5, 0.375, 0.25, 0.125)]


WRONG = [
    ("module.blocks.0.dropot.p", "has no attribute 'dropot'; did you mean 'dropout'?"),
    ("module.blocks.7.dropout.p", "has no attribute '7'"),
    ("module.blocks.0.dropout", "is a Dropout; only a number, or a buffer with one, can be set"),
    ("module.blocks.0.kind", "is a str; only a number"),
    ("module.blocks.0.is_on", "is a bool; only a number"),
    ("module.scale", "is a Parameter; only a number"),
    ("module.table", "is a Tensor; only a number"),
    ("module", "write optimizer.weight_decay, or an attribute such as module.dropout.p"),
    ("loss.smoothing", "write optimizer.weight_decay, or an attribute such as module.dropout.p"),
    ("optimizer.weight_deca", "the optimizer has no number 'weight_deca'; did you mean 'weight_decay'?; it has eps,"),
    ("optimizer.amsgrad", "the optimizer has no number 'amsgrad'"),
    ("optimizer.lr", "model.scheduler sets the learning rate"),
    ("optimizer.last.eps", "the model has no optimizer 'last'; it has optimizer"),
]


@pytest.mark.parametrize(("target", "message"), WRONG, ids=[target for target, _ in WRONG])
def test_a_target_that_is_not_there_or_is_not_a_number_is_an_error(target, message):
    with pytest.raises(ArgumentError) as caught:
        SetOverTime(target, LINEAR, model=model_with())
    assert caught.value.argument == "target"
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"value": True}, "value", "True is not a number"),
        ({"end": float("nan")}, "end", "nan is not a number"),
        ({"target": 3}, "target", "3 is not a text"),
        ({"schedule": Factory(torch.optim.lr_scheduler.StepLR, step_size=1)}, "schedule", "is not a schedule of emrun"),
        ({"target": "optimizer.eps", "value": 0}, None, None),
    ],
)
def test_wrong_arguments(arguments, argument, message):
    arguments = {"target": "optimizer.weight_decay", "schedule": LINEAR, **arguments}
    if argument is None:
        assert SetOverTime(**arguments, model=model_with())
        return
    with pytest.raises(ArgumentError) as caught:
        SetOverTime(**arguments)
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_a_number_that_would_stay_0_is_an_error():
    model = model_with(optimizer=Factory(torch.optim.SGD, lr=0.1))
    with pytest.raises(ArgumentError, match="is 0, and so is end; give value or end"):
        SetOverTime("optimizer.weight_decay", LINEAR, model=model)


def test_two_hooks_for_one_number_are_an_error():
    hooks = [SetOverTime("module.blocks.1.dropout.p", LINEAR), SetOverTime("module.blocks.1.dropout.p", LINEAR)]
    with pytest.raises(HookError, match=r"another SetOverTime sets module\.blocks\.1\.dropout\.p too"):
        MainLoop(model_with(), Data(), hooks)


def test_compiled_code_has_the_numbers_too():
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.factor = 4.0

        def forward(self, x):
            return {"loss": x * self.w.sum() * self.factor * self.temperature}

    def losses(**arguments):
        model = TorchModel(Scaled(), optimizer=Factory(torch.optim.SGD, lr=0.0), device="cpu", **arguments)
        hooks = [SetOverTime("module.factor", LINEAR), SetOverTime("module.temperature", LINEAR)]
        return values(model, loss, *hooks).trained

    assert losses(compile={"backend": "eager"}) == losses() == [32.0, 18.0, 8.0, 2.0]


def test_in_a_config(train_digits, in_docstring, digits_config, tmp_path):
    training = train_digits(in_docstring(SetOverTime))
    assert 0.09 < training.model.optimizer.param_groups[0]["weight_decay"] < 0.1
    entry = {"SetOverTime": {"target": "optimizer.weight_decay", "value": 1, "schedule": {"class": "Linear"}}}
    entry["SetOverTime"]["schedule"]["warmup"] = "500 updates"
    with pytest.raises(ConfigError) as caught:
        create_training(digits_config([entry, {"StopAfter": {"epochs": 1}}]), output_root=tmp_path / "other")
    assert "SetOverTime.schedule.warmup: 500 updates: the run makes only" in str(caught.value)
