"""What a sweep varies: choices, ranges, several keys at once."""

import math

import pytest

from emrun.base.errors import ConfigError
from emrun.config.yaml_tree import parse
from emrun.launch.parameters import read_parameters, text_of

CONFIG = """
model:
  optimizer: {lr: 0.1}
sweep:
  parameters:
    model.width: [32, 64]
    model.optimizer.lr: {lo: 1, high: 2}
"""


def read(*given, text="a: 1"):
    return read_parameters(parse(text, "c.yaml"), given)


def overrides(parameter):
    return [list(parameter.overrides(value)) for value in parameter.values]


def test_a_list_has_choices_of_any_kind():
    (found,) = read("model.optimizer=[{class: SGD, lr: 1e-4}, null, 'a b', '${vars.x}']")
    assert [each[0].removeprefix("model.optimizer=") for each in overrides(found)] == [
        "{class: SGD, lr: 0.0001}",
        "null",
        '"a b"',
        '"${vars.x}"',
    ]


def test_a_list_of_mappings_sets_several_keys():
    (found,) = read("size=[{model.width: 32, main_loop.buffer: 2}, {model.width: 64}]")
    assert overrides(found) == [["model.width=32", "main_loop.buffer=2"], ["model.width=64"]]
    assert found.keys == ("model.width", "main_loop.buffer")
    assert found.shown(0) == "width=32, buffer=2"


def test_a_range_with_steps_has_values_for_a_grid():
    (found,) = read("a.b={low: 1, high: 6, step: 2}")
    assert list(found.values) == [1, 3, 5]
    (found,) = read("a.b={low: 0.1, high: 0.3, step: 0.1}")
    assert list(found.values) == [0.1, 0.2, 0.3]
    assert found.span.nearest(0.1 + 2 * 0.1) == 0.3
    (found,) = read("a.b={low: 0, high: 1.0e-5, step: 1.0e-6}")
    assert [each[0] for each in overrides(found)][3:] == [f"a.b={n}e-06" for n in (3, 4, 5, 6, 7, 8, 9)] + ["a.b=1e-05"]


def test_values_are_found_again_in_a_config():
    choices, several, span = read("a.b=[1, 1.0, true]", "x=[{c.d: 1, c.e: 2}]", "f.g={low: 1.0, high: 2.0}")
    assert [choices.value_in({"a.b": value}) for value in (1, 1.0, True, 2)] == [0, 1, 2, None]
    assert [several.value_in({"c.d": 1, "c.e": value}) for value in (2, 3)] == [0, None]
    assert [span.value_in({"f.g": value}) for value in (1.5, 3.0, True, "1.5")] == [1.5, None, None, None]


def test_an_option_replaces_the_parameter_of_the_same_name():
    first, second = read("model.optimizer.lr=[0.5]", text=CONFIG)
    assert first.name == "model.width"
    assert overrides(second) == [["model.optimizer.lr=0.5"]]


def test_problems_have_the_position_in_the_config():
    with pytest.raises(ConfigError) as raised:
        read("model.width=[]", text=CONFIG)
    assert [str(each) for each in raised.value.problems] == [
        "-p 'model.width=[]': model.width: the list of values is empty",
        "c.yaml:7:26: model.optimizer.lr: unknown key 'lo' of a range; did you mean 'low'? "
        "(it has low, high, log, step)",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("seed=[1, 2]", "seed: is not a parameter: repeats trains each combination with several seeds"),
        ("x=[{seed: 1}]", "seed: is not a parameter: repeats"),
        ("lr=0.1", "lr: is not a key, such as model.optimizer.lr; a name for several"),
        ("lr=[1]", "lr: is not a key, such as model.optimizer.lr; a name for several"),
        ("lr={low: 1, high: 2}", "lr: is not a key, such as model.optimizer.lr; a name for several"),
        ("a.b={low: 3, high: 1}", "low: 3 must be less than high, 1"),
        ("a.b={low: 0, high: 1, log: true}", "low: 0 must be greater than 0 in a range with log"),
        ("a.b={low: 1, high: 2, step: 3}", "step: must be greater than 0 and at most high - low"),
        ("a.b={low: 1.0e-5, high: 1, step: 1.0e-300}", "step: must be greater than 0 and at most high - low"),
        ("a.b={low: -1.0e+308, high: 1.0e+308}", "high - low is too large for a number"),
        ("a.b={low: 1}", "high: None is not a number; a range needs low and high"),
        (f"a.b={{low: 1, high: {10**400}}}", "high: 10*0 is not a number; a range needs low and high"),
        ("a.b={low: 1, high: 2, log: 3}", "log: 3 is neither true nor false"),
        ("a.b=3", "3 is neither a list of values nor a range"),
        ("a.b=[1, 2, 1]", "the list has this value twice"),
        ("a.b", "must be KEY=VALUES"),
        ("y=[{a.c: 1}, {a.b: 1}]", "a.b: is set by two parameters: a.b and y"),
    ],
)
def test_a_wrong_parameter_is_an_error(given, message):
    with pytest.raises(ConfigError, match=message):
        read("a.b=[5]", given, text="model: {optimizer: {lr: 1}}")


@pytest.mark.parametrize(
    "value",
    [
        1e-5,
        3,
        True,
        None,
        "word",
        "true",
        "1e-4",
        "",
        "a=b",
        "~",
        "a, b",
        {"class": "SGD", "a b": [1, {}]},
        math.inf,
        "é",
        "a\x85b\u2028c\x7f\ufeff",
    ],
)
def test_a_value_is_written_so_that_it_is_read_again(value):
    found = parse(text_of(value), "").plain()
    assert (found, type(found)) == (value, type(value))
