"""Parameter groups: without weight decay, made by a callable, of selected parameters."""

import pytest
import torch
from torch import nn

from emrun import Factory
from emrun.base.errors import ArgumentError
from emrun.models.optimizers.build import build_optimizer


class ScaleNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.norm = nn.RMSNorm(3)
        self.own = ScaleNorm()
        self.rnn = nn.GRU(3, 2)
        self.head = nn.Linear(2, 1)


UNDECAYED = {"body.bias", "norm.weight", "own.scale", "rnn.bias_ih_l0", "rnn.bias_hh_l0", "head.bias"}
NAMES = [name for name, _ in Net().named_parameters()]


def built(*, target=torch.optim.AdamW, weight_decay=0.5, **options):
    """Return the groups of an optimizer, with names instead of parameters."""
    net = Net()
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    optimizer = build_optimizer(net, Factory(target, lr=1.0, weight_decay=weight_decay, options=options))
    return [{**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]


def summary(groups, *keys):
    return [(set(group["params"]), *(group[key] for key in keys)) for group in groups]


def test_biases_and_norms_get_no_decay():
    found = summary(built(no_decay="biases_and_norms"), "weight_decay")
    assert found == [(set(NAMES) - UNDECAYED, 0.5), (UNDECAYED, 0.0)]


def test_groups_keep_their_order_and_their_own_decay():
    groups = [{"match": "^body", "lr": 0.1}, {"match": "^rnn", "weight_decay": 0.25}, {"match": "bias$|norm|own"}]
    groups[2]["match"] = ["^norm", "^own", r"^head\.bias"]
    found = summary(built(no_decay="biases_and_norms", groups=groups), "lr", "weight_decay")
    rnn = {name for name in NAMES if name.startswith("rnn")}
    assert found == [
        ({"head.weight"}, 1.0, 0.5),
        ({"body.weight"}, 0.1, 0.5),
        (rnn, 1.0, 0.25),
        ({"body.bias"}, 0.1, 0.0),
        ({"norm.weight", "own.scale", "head.bias"}, 1.0, 0.0),
    ]


def test_a_callable_makes_groups_and_the_rest_gets_the_defaults():
    def groups(net):
        return [{"params": net.head.parameters(), "lr": 0.1}, {"params": net.norm.named_parameters()}]

    found = summary(built(groups=groups), "lr")
    head, norm = {"head.weight", "head.bias"}, {"norm.weight"}
    assert found == [(set(NAMES) - head - norm, 1.0), (head, 0.1), (norm, 1.0)]


def test_match_selects_the_parameters_to_train():
    assert summary(built(match=["^head", "^norm"])) == [({"head.weight", "head.bias", "norm.weight"},)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda net: net.head, "groups: returned Linear("),
        (lambda net: [net.head.weight], "groups: returned a tensor of shape (1, 2) as a group, which is not {'params'"),
        (lambda net: [{"params": []}], "groups[0]: has no parameters"),
        (lambda net: [{"params": ["head.weight"]}], "groups[0]: has 'head.weight', which is not one of the parameters"),
        (lambda net: [{"params": net.body.parameters()}], "groups[0]: has a tensor of shape (3, 2), which is not one "
         "of the parameters to train: head.weight, head.bias"),
        (lambda net: [{"params": net.head.parameters()}, {"params": [net.head.weight]}],
         "groups[1]: has parameter 'head.weight', as group 0 has; it can be in one group"),
        (lambda net: [{"params": net.head.parameters(), "rate": 1}], "groups: unknown argument 'rate'; allowed: "),
    ],
)  # fmt: skip
def test_wrong_groups_of_a_callable_are_refused(groups, message):
    with pytest.raises(ArgumentError) as caught:
        built(groups=groups, match="^head")
    assert str(caught.value).startswith("optimizer.groups")
    assert message in str(caught.value)


def test_an_error_of_the_callable_is_a_failure():
    def groups(net):
        raise ValueError("own")

    with pytest.raises(ValueError, match=r"^own$"):
        built(groups=groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_decay": "norms"}, "no_decay: 'norms' is not biases_and_norms; for other parameters, use groups"),
        ({"no_decay": True}, "no_decay: True is not biases_and_norms"),
        ({"no_decay": "biases_and_norms", "match": r"body\.weight"}, "no_decay: matches nothing: there are neither"),
        ({"no_decay": "biases_and_norms", "target": torch.optim.Rprop, "weight_decay": None}, "Rprop has no argument"),
        ({"match": "tail"}, "match: 'tail' matches none of the parameters body.weight,"),
        ({"match": ["head", 3]}, "match[1]: 3 is not a regular expression"),
    ],
)
def test_wrong_options_are_refused(options, message):
    if options.get("weight_decay", 0) is None:
        options = {**options, "target": lambda groups, lr, weight_decay: torch.optim.Rprop(groups, lr=lr)}
    with pytest.raises(ArgumentError) as caught:
        built(**options)
    assert message in str(caught.value)
