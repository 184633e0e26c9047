"""Calls in a config are checked against signatures."""

from emrun.config.calls import check_call
from emrun.config.signatures import parameters_of
from emrun.config.yaml_tree import parse


def call_problems(target, text, positional=0, supplied=()):
    node = parse(text, "c.yaml")
    parameters = parameters_of(target)
    found = check_call(parameters, node.value, key="it", node=node, first=positional, supplied=supplied)
    return [str(problem) for problem in found]


def test_what_is_supplied_is_neither_missing_nor_suggested():
    def target(dataset, x):
        pass

    assert call_problems(target, "{x: 1}", supplied=("dataset",)) == []
    assert call_problems(target, "{x: 1, q: 1}", supplied=("dataset",)) == [
        "c.yaml:1:8: it: unknown argument 'q'; allowed: x"
    ]


def test_an_argument_that_is_positional_only_cannot_be_named():
    def target(x, /, y=0):
        pass

    assert call_problems(target, "{y: 1}", positional=1) == []
    assert call_problems(target, "{x: 1}", positional=1) == [
        "c.yaml:1:2: it: argument 'x' is already given by position; remove it"
    ]
    assert "c.yaml:1:2: it: unknown argument 'x'; allowed: y" in call_problems(target, "{x: 1}")
    assert "c.yaml:1:1: it: missing argument 'x'" in call_problems(target, "{y: 1}")


def test_a_target_with_variable_arguments_takes_any_number():
    def target(x, *rest):
        pass

    assert call_problems(target, "{}", positional=5) == []


def test_a_target_without_a_signature_is_not_checked():
    assert call_problems(dict, "{anything: 1}") == []
