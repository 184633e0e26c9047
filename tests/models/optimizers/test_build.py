"""An optimizer is built from its form, with groups by regular expression; updates with a closure."""

import math
import re

import pytest
import torch
from doubles import XY, Affine, Normed, run, same_state, state_of
from in_ranks import Failed, results_of
from torch import nn

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.base.errors import ArgumentError
from emrun.hooks import ClipGradients
from emrun.models.optimizers.build import build_optimizer
from emrun.ranks.group import join

NAMES = [name for name, _ in Normed().named_parameters()]


def sgd(groups=None, **arguments):
    options = {} if groups is None else {"groups": groups}
    return Factory(torch.optim.SGD, options=options, **{"lr": 1.0, "momentum": 0.5, **arguments})


def grouped(groups, **arguments):
    """Return parameter name -> the group of the optimizer that holds it; no group is empty."""
    net = Normed()
    optimizer = build_optimizer(net, sgd(groups, **arguments))
    assert all(group["params"] for group in optimizer.param_groups)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("groups", [None, []])
def test_without_groups_all_parameters_have_the_defaults(groups):
    optimizer = build_optimizer(Normed(), sgd(groups))
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.param_groups[0]["params"]) == len(NAMES)


def test_a_group_gets_its_own_arguments_and_the_rest_the_defaults():
    found = grouped([{"match": "bias$", "lr": 0.1}])
    for name in NAMES:
        assert found[name]["lr"] == (0.1 if name.endswith("bias") else 1.0)
        assert found[name]["momentum"] == 0.5


def test_several_groups_partition_the_parameters():
    found = grouped([{"match": "^first", "lr": 0.1}, {"match": "norm", "momentum": 0.0}])
    settings = {name: (group["lr"], group["momentum"]) for name, group in found.items()}
    expected = {"first": (0.1, 0.5), "norm": (1.0, 0.0), "second": (1.0, 0.5)}
    assert settings == {name: expected[name.partition(".")[0]] for name in NAMES}


def test_groups_may_cover_everything():
    found = grouped([{"match": "first", "lr": 0.1}, {"match": "^(norm|second)", "lr": 0.2}])
    assert sorted(found) == sorted(NAMES)
    assert len({id(group) for group in found.values()}) == 2
    assert found["first.bias"]["lr"] == 0.1
    assert found["second.bias"]["lr"] == 0.2


class Streams:
    def train_stream(self):
        return iter([{"x": torch.full((2, 2), float(i))} for i in range(3)])


def test_groups_change_what_is_learned():
    net = Normed()
    before = {name: parameter.clone() for name, parameter in net.named_parameters()}
    model = TorchModel(net, optimizer=sgd([{"match": "first", "lr": 0.0}]))
    with MainLoop(model, Streams()) as loop:
        loop.epoch(["train"])
    changed = {name for name, parameter in net.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in NAMES if not name.startswith("first")}


def test_tied_parameters_are_trained_once():
    net = Normed()
    net.again = net.first
    assert len(build_optimizer(net, sgd()).param_groups[0]["params"]) == len(NAMES)


@pytest.mark.parametrize("name", ["first", "again"])
def test_a_tied_parameter_is_selected_by_any_of_its_names(name):
    net = Normed()
    net.again = net.first
    rest, own = build_optimizer(net, sgd([{"match": f"^{name}", "lr": 0.0}])).param_groups
    assert {id(each) for each in own["params"]} == {id(each) for each in net.first.parameters()}
    assert len(rest["params"]) == len(NAMES) - 2
    (only,) = build_optimizer(net, Factory(torch.optim.SGD, options={"match": f"^{name}"}, lr=1.0)).param_groups
    assert len(only["params"]) == 2
    with pytest.raises(ArgumentError, match=r"parameter 'again.weight', as group 0 has; it can be in one group"):
        build_optimizer(net, sgd([{"match": "^first"}, {"match": "^again"}]))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "first"}, {"match": "bias"}], "groups[1]: has parameter 'first.bias', as group 0 has; it can"),
        ([{"match": "third"}], "groups[0].match: 'third' matches none of the parameters first.weight, first.bias,"),
        ([{"match": "bias", "learning_rate": 0.1}], "groups: unknown argument 'learning_rate'; allowed: dampening,"),
        ([{"match": "bias", "lr": -1}], "groups: lr -1 is not a finite number of at least 0"),
        ([{"match": "bias", "lr": math.nan}], "groups: lr nan is not a finite number of at least 0"),
        ([{"match": "bias", "weight_decay": "1e-4"}], "groups: weight_decay '1e-4' is not a finite number"),
        ([{"match": "bias["}], "groups[0].match: 'bias[' is not a regular expression"),
        ([{"lr": 0.1}], "is neither a list of {match: REGEX, argument: value} nor a callable"),
        ([{"match": 3}], "groups[0].match: 3 is neither a regular expression nor a list of them"),
        ([{"match": ["bias", "third"]}], "groups[0].match[1]: 'third' matches none of the parameters"),
        (["bias"], "is neither a list of {match"),
        ({"match": "bias"}, "is neither a list of {match"),
    ],
)
def test_wrong_groups_are_refused(groups, message):
    with pytest.raises(ArgumentError) as caught:
        build_optimizer(Normed(), sgd(groups))
    assert caught.value.argument.partition(".")[0] == "optimizer"
    assert message in str(caught.value)


def test_a_module_without_parameters_has_nothing_to_optimize():
    with pytest.raises(ArgumentError, match=r"optimizer: module ReLU has no parameters to train"):
        build_optimizer(nn.ReLU(), sgd())


@pytest.mark.parametrize("options", [{}, {"groups": [{"match": "bias", "lr": 1.0}]}])
def test_an_object_that_is_not_an_optimizer_is_refused(options):
    with pytest.raises(ArgumentError, match=r"optimizer: list is not a torch.optim.Optimizer"):
        build_optimizer(Normed(), Factory(list, options=options))


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"lr": -1}, "optimizer.lr", "Invalid learning rate: -1"),
        ({"lr": 0.1, "weight_decay": -0.5}, "optimizer.weight_decay", "Invalid weight_decay value: -0.5"),
        ({"lr": 0.1, "nesterov": True}, "optimizer", "Nesterov momentum requires"),
        ({"lr": 0.1, "fused": True, "foreach": True}, "optimizer.fused", "cannot be `True` together"),
    ],
)
def test_a_value_that_torch_refuses_is_an_error_of_its_argument(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        build_optimizer(Normed(), Factory(torch.optim.SGD, **arguments))
    assert caught.value.argument == argument
    assert message in caught.value.message


def test_a_capturable_optimizer_on_the_cpu_is_refused_when_it_is_built():
    with pytest.raises(ArgumentError, match=r"optimizer.capturable: Adam cannot capture parameters on the CPU"):
        build_optimizer(Normed(), Factory(torch.optim.Adam, capturable=True))


@pytest.mark.parametrize("arguments", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_how_torch_computes_an_update_is_passed_on(arguments):
    group = build_optimizer(Normed(), Factory(torch.optim.AdamW, **arguments)).param_groups[0]
    assert {name: group[name] for name in arguments} == arguments


def test_an_error_in_an_optimizer_of_ones_own_is_a_failure():
    def own(parameters):
        raise ValueError("own")

    with pytest.raises(ValueError, match=r"^own$"):
        build_optimizer(Normed(), own)


class Closed(TorchModel):
    """Gives its optimizer a function that calculates the loss."""

    def train_step(self, inputs):
        def closure():
            loss = self.forward(inputs)["loss"].mean()
            self.backward(loss)
            return loss.detach()

        self.update(self.optimizer, closure)
        return self.forward(inputs)


LBFGS = Factory(torch.optim.LBFGS, lr=0.1, max_iter=5, line_search_fn="strong_wolfe")


def test_an_optimizer_that_needs_a_closure_is_refused_unless_a_subclass_calls_it():
    with pytest.raises(ArgumentError, match="LBFGS calculates the loss several times for an update; derive a class"):
        TorchModel(Affine(), optimizer=LBFGS).before_training()
    model = Closed(Affine(), optimizer=LBFGS)
    run(model)
    assert model.module.w != 1.0


@pytest.mark.parametrize("norm", [None, 0.5])
def test_an_update_with_a_closure_is_that_of_torch_in_float64_and_hooks_change_the_gradients_of_its_first_call(norm):
    class Norms(AbstractHook):
        norms, updates = [], 0

        def before_update(self, model):
            self.norms.append(float(torch.stack([each.grad.norm() for each in model.module.parameters()]).norm()))

        def after_update(self):
            self.updates += 1

    model, hook = Closed(Affine().double(), optimizer=LBFGS), Norms()
    hook.norms = []
    run(model, XY, *([ClipGradients(norm=norm)] if norm else []), hook, epochs=2)

    module = Affine().double()
    optimizer = LBFGS(module.parameters())
    norms = []
    for batch in XY * 2:
        inputs = {name: torch.tensor(values, dtype=torch.float64) for name, values in batch.items()}
        calls = 0

        def closure(inputs=inputs):
            nonlocal calls
            optimizer.zero_grad()
            loss = module(**inputs)["loss"].mean()
            loss.backward()
            calls += 1
            if calls == 1:
                found = nn.utils.clip_grad_norm_(module.parameters(), norm or float("inf"))
                norms.append(min(float(found), norm or float("inf")))
            return loss

        optimizer.step(closure)
    assert same_state(model.module, state_of(module))
    assert hook.norms == pytest.approx(norms, rel=1e-5)
    assert hook.updates == len(norms) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accumulate": 2}, "accumulate: update(optimizer, closure) calculates the loss several times"),
        ({"micro_batch_size": 1}, "micro_batch_size: update(optimizer, closure) calculates"),
        ({"precision": "fp16"}, "precision: update(optimizer, closure) calculates"),
    ],
)
def test_a_closure_is_refused_where_the_gradients_are_needed_before_the_optimizer_steps(arguments, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        run(Closed(Affine(), optimizer=LBFGS, device="cpu", **arguments))


def test_a_closure_runs_in_the_precision_of_the_model():
    model = Closed(Affine(), optimizer=LBFGS, device="cpu", precision="bf16")
    run(model)
    assert model.module.w != 1.0


def closed():
    join()
    run(Closed(Affine(), optimizer=LBFGS, device="cpu"))


def test_several_ranks_refuse_a_closure():
    found = results_of(2, closed)
    assert all(isinstance(each, Failed) and "which cannot be used with several ranks" in each.message for each in found)
