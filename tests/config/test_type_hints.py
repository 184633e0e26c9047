"""Values of a config are checked against type hints: only values that can never be right are reported."""

import enum
import functools
import operator
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from projects import linear_on_digits

from emrun import create_training
from emrun.base.errors import ConfigError, Position, Problem
from emrun.base.wording import did_you_mean
from emrun.config.config import load_config
from emrun.config.type_hints import mismatch

Number = int | float
Shape = typing.Union[int, tuple[int, int]]  # noqa: UP007 - as torch writes it


class Colour(enum.Enum):
    RED = 1


def node(value):
    return load_config({"x": value}).root.get("x")


RIGHT = [
    (3, int), (3, float), (0.5, float), ("a", str), (True, bool), (None, None), (None, type(None)), (3, int | None),
     ("a", Any), ([1, 2], list), ([1, 2], list[int]), ([1, 2], tuple[int, int]),
    ([1, 2], tuple[int, ...]), ([1, 0.5], Sequence[float]), ([[1], []], list[list[int]]), ({"a": 1}, dict),
    ({"a": 1}, Mapping[str, int]), ({"a": [1]}, dict[str, list[int]]), ("x/y", Path), ("min", Literal["min", "max"]),
    (3, Shape), ([3, 3], Shape), ("cuda", torch.device), ("float32", torch.dtype), (1, Colour), ("red", Colour),
    (0.1, float | torch.Tensor), (3, torch.Tensor), ([1], np.ndarray), (3, Annotated[int, "x"]),
    ("abc", Sequence[str]),
    ("abc", Iterable[Any]), ({"a": 1}, Iterable[str]), (3, Callable[[], int]), (3, typing.TypeVar("T")),
    ([1], set[int]),
    ({"class": "a.B"}, int), ([{"import": "a.b"}], list[int]), (3, "not a type"), ([], tuple), (5, object),
]  # fmt: skip
WRONG = [
    ("ten", int, "'ten' is not a whole number"),
    (1.5, int, "1.5 is not a whole number"),
    (True, int, "True is not a whole number"),
    (True, float, "True is not a number"),
    ("0.1", float, "'0.1' is not a number; write the number without quotes"),
    ("1e-3", float | None, "'1e-3' is not a number or null; write the number without quotes"),
    (3, str, "3 is not a string; write it in quotes"),
    ("yes", bool, "'yes' is a text, not true or false; write true"),
    (1, bool, "1 is not true or false"),
    (None, int, "None is not a whole number"),
    ("mim", Literal["min", "max"], "'mim' is not one of min, max; did you mean 'min'?"),
    (1, Literal[True], "1 is not one of True"),
    (3, list[int], "3 is not a list of whole numbers"),
    (["a"], list[int], "this list is not a list of whole numbers"),
    ("loss", list[str], "'loss' is not a list of strings"),
    ([1, 2, 3], tuple[int, int], "this list is not a list of 2 values: a whole number, a whole number"),
    ([1, "a"], Shape, "this list is not a whole number or a list of 2 values: a whole number, a whole number"),
    ({"a": "b"}, dict[str, int], "this mapping is not a mapping whose values are whole numbers"),
    ([1], dict, "this list is not a mapping"),
    ([1], Mapping[str, Any], "this list is not a mapping"),
    (3, list[str | dict[str, Any]], "3 is not a list of strings or mappings"),
    (
        {"a": 1, "b": 2},
        Sequence[str | Mapping[str, Any]],
        "this mapping is not a list of strings or mappings; write a list: [a: ..., b: ...]",
    ),
    ({"a": 1}, Sequence[int], "this mapping is not a list of whole numbers"),
    (3, Path, "3 is not a path"),
    ("abc", float | torch.Tensor, "'abc' is not a number"),
    ("relu", torch.nn.Module, "'relu' is not a Module, written as {class: NAME, ...}"),
    ([], int, "this list is not a whole number"),
]


@pytest.mark.parametrize(("value", "hint"), RIGHT, ids=str)
def test_a_value_that_may_be_right_is_accepted(value, hint):
    assert mismatch(node(value), hint) is None


@pytest.mark.parametrize(("value", "hint", "message"), WRONG, ids=str)
def test_a_value_of_the_wrong_type_is_reported(value, hint, message):
    assert mismatch(node(value), hint) == message


@pytest.mark.parametrize(
    ("value", "hint", "default"), [("relu", int, "gelu"), (None, int, None), ([1, 2], int, (3, 4))]
)
def test_a_hint_that_contradicts_its_own_default_is_ignored(value, hint, default):
    assert mismatch(node(value), hint, default) is None


@pytest.mark.parametrize("hint", [None, Any, bool, bool | None, int | bool])
@pytest.mark.parametrize(("word", "meant"), [("no", "false"), ("Off", "false"), ("ON", "true")])
def test_a_word_for_a_boolean_is_not_taken_for_a_text_that_is_true(word, meant, hint):
    assert mismatch(node(word), hint, False) == f"{word!r} is a text, not true or false; write {meant}"


def test_a_word_for_a_boolean_may_be_a_text():
    assert mismatch(node("no"), str | bool, False) is None
    assert mismatch(node("on"), Literal["on", "off"] | bool, False) is None
    assert mismatch(node("no"), Any, "yes") is None


def test_a_good_default_does_not_excuse_a_wrong_value():
    assert mismatch(node("a"), int, 3) is not None
    assert mismatch(node("a"), float | torch.Tensor, 1e-3) is not None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def annotation_of(value):
    """Return a precise hint of a value."""
    if not isinstance(value, list | dict):
        return type(value)
    kinds = [annotation_of(each) for each in (value.values() if isinstance(value, dict) else value)]
    inner = functools.reduce(operator.or_, kinds) if kinds else Any
    return dict[str, inner] if isinstance(value, dict) else list[inner]


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_a_value_is_of_its_own_type(value):
    assert mismatch(node(value), annotation_of(value)) is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.optimizer.lr=abc", r"model.optimizer.lr: 'abc' is not a number"),
        ("model.optimizer.lr='0.1'", r"model.optimizer.lr: '0.1' is not .*; write the number without quotes"),
        ("dataset.batch_size=many", r"dataset.batch_size: 'many' is not a whole number"),
        ("model.module.in_features=64.5", r"model.module.in_features: 64.5 is not a whole number"),
        ("hooks.StopAfter.epochs=ten", r"hooks\[0\].StopAfter.epochs: 'ten' is not a"),
    ],
)
def test_a_wrong_type_is_an_error_of_the_config_before_a_run_directory_is_made(tmp_path, override, message):
    config = linear_on_digits(hooks=[{"StopAfter": {"epochs": 1}}])
    with pytest.raises(ConfigError, match=message):
        create_training(config, tmp_path / "log", overrides=[override])
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("name", "allowed", "hint"),
    [
        ("learning_rate", ["params", "lr", "momentum"], "; did you mean 'lr'?"),
        ("callbacks", ["dataset", "hooks", "seed"], "; did you mean 'hooks'?"),
        ("trainer", ["dataset", "main_loop"], "; did you mean 'main_loop'?"),
        ("dropout_rate", ["p", "inplace"], "; did you mean 'p'?"),
        ("learning_rate", ["momentum"], ""),
        ("xyz", ["lr"], ""),
    ],
)
def test_another_common_word_for_the_same_thing_is_understood(name, allowed, hint):
    assert did_you_mean(name, allowed) == hint


def test_problems_are_reported_in_the_order_of_the_file():
    places = [(9, 1), (3, 7), (3, 2)]
    problems = [Problem(Position("a.yaml", *place), f"{place}", "wrong") for place in places]
    told = ConfigError([Problem(None, "nowhere", "wrong"), *problems]).problems
    assert [problem.key for problem in told] == ["(3, 2)", "(3, 7)", "(9, 1)", "nowhere"]
