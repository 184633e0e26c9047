"""What contracts, configs and hooks share: choices, counts, intervals, factories."""

from typing import Literal

import pytest

from emrun.arguments import check_choice, check_count
from emrun.errors import ArgumentError
from emrun.types import Factory, Interval

UNITS = ("epochs", "iterations", "minutes")


@pytest.mark.parametrize("value", ["a", "b"])
def test_a_choice_is_one_of_a_literal(value):
    check_choice("x", value, Literal["a", "b"])


@pytest.mark.parametrize("value", ["c", "", None, 1, ["a"]])
def test_any_other_choice_is_an_error(value):
    with pytest.raises(ArgumentError, match="is not one of a, b") as caught:
        check_choice("x", value, Literal["a", "b"])
    assert caught.value.argument == "x"


@pytest.mark.parametrize("value", [2, 3, 10**20])
def test_a_count_is_a_whole_number(value):
    check_count("n", value, minimum=2)


@pytest.mark.parametrize("value", [1, -1, 2.0, True, "2", None, [2]])
def test_any_other_count_is_an_error(value):
    with pytest.raises(ArgumentError, match="is not a whole number of at least 2"):
        check_count("n", value, minimum=2)


@pytest.mark.parametrize(
    "value, count, unit",
    [
        ("5 epochs", 5, "epochs"),
        ("1 epoch", 1, "epochs"),
        (" 500iterations ", 500, "iterations"),
        ("30 minutes", 30, "minutes"),
        ("0.5 minutes", 0.5, "minutes"),
        ("7", 7, "epochs"),
        (7, 7, "epochs"),
        ("2.0 epochs", 2, "epochs"),
    ],
)
def test_an_interval_is_a_number_and_a_unit(value, count, unit):
    assert Interval.parse("every", value, UNITS) == Interval(count, unit)


@pytest.mark.parametrize(
    "value",
    ["", "epochs", "-1 epochs", "0 epochs", "1.5 epochs", "5 apples", "5 5", True, None, [5], "1e3", "5 Epochs"],
)
def test_any_other_interval_is_an_error_with_an_example(value):
    with pytest.raises(ArgumentError, match="is no interval; write for example '5 epochs'"):
        Interval.parse("every", value, UNITS)


def test_a_unit_must_make_sense_where_it_stands():
    with pytest.raises(ArgumentError, match="'5 minutes' is no interval"):
        Interval.parse("every", "5 minutes", ("epochs",))


def target(*args, **kwargs):
    return args, kwargs


def test_a_factory_puts_the_owners_arguments_first():
    assert Factory(target, 3, lr=0.1)(1, 2) == ((1, 2, 3), {"lr": 0.1})


def test_a_factory_can_be_called_again():
    factory = Factory(target, x=[])
    assert factory(1) == factory(1)


def test_a_factory_keeps_the_owners_options_apart():
    factory = Factory(target, options={"inputs": ["a"]}, lr=1)
    assert factory.options == {"inputs": ["a"]}
    assert factory() == ((), {"lr": 1})


def test_an_argument_named_target_is_the_targets():
    assert Factory(target, target=5)() == ((), {"target": 5})


def test_a_factory_of_an_import_returns_the_target_uncalled():
    assert Factory(target, is_import=True)(1, 2) is target


def test_a_factory_shows_what_it_makes():
    assert repr(Factory(target)) == "Factory(target)"
    assert repr(Factory(5)) == "Factory(5)"
