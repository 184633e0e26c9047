"""The rule that builds objects from a config, and the errors of their constructors."""

import sys
from collections.abc import Mapping
from typing import Annotated

import pytest

from emrun.base.errors import ConfigError
from emrun.base.types import Factory, Form
from emrun.config.recipe import build

# class, import, args


def test_a_class_is_called_with_the_other_keys(make):
    assert make("it: {class: mine.Point, x: 1, z: 3}").at == (1, 0, 3)


def test_positional_arguments_come_first(make):
    assert make("it: {class: mine.Point, args: [1, 2], z: 3}").at == (1, 2, 3)


def test_a_function_is_called_too(make):
    assert make("it: {class: mine.double, x: 4}") == 8


def test_import_names_an_object_that_is_not_called(make, user):
    assert make("it: {import: mine.double}") is sys.modules["mine"].double
    assert make("it: {import: mine.NUMBER}") == 7


def test_a_name_inside_a_class_is_found(make):
    assert type(make("it: {class: mine.Outer.Inner}")).__qualname__ == "Outer.Inner"


def test_objects_are_built_within_lists_mappings_and_arguments(make):
    thing = make(
        "it: {class: mine.Thing, args: [{class: mine.double, x: 1}], "
        "a: {b: [{class: mine.double, x: 2}, 5]}, c: {import: mine.NUMBER}}"
    )
    assert thing.args == (2,)
    assert thing.kwargs == {"a": {"b": [4, 5]}, "c": 7}


def test_a_list_or_mapping_without_a_class_stays_one(make):
    assert make("it: {a: [1, {b: {class: mine.double, x: 2}}], 3: c}") == {"a": [1, {"b": 4}], 3: "c"}


def test_each_build_makes_new_objects(prepare):
    recipe, _ = prepare("it: {class: mine.Thing, a: [1]}")
    first, second = build(recipe, {}), build(recipe, {})
    assert first is not second
    assert first.kwargs["a"] is not second.kwargs["a"]


def test_preparing_calls_nothing(prepare):
    _, problems = prepare("it: {class: mine.Point, x: 1, y: broken}")
    assert problems == []


def test_values_reach_user_code_in_plain_types(make, monkeypatch):
    monkeypatch.setenv("EMRUN_TEST_VALUE", "2.5")
    text = """
base: &base {f: 1.0e-3, i: 0x1F, b: true}
it:
  class: mine.Thing
  <<: *base
  s: 'x'
  t: |
    text
  n: null
  l: [1.5, {k: 1e-3}]
  r: ${base.f}
  e: ${env:EMRUN_TEST_VALUE}
  x: a${base.i}
"""
    found = make(text).kwargs
    types = {name: type(value) for name, value in found.items()}
    expected = {"f": float, "i": int, "b": bool, "s": str, "t": str, "n": type(None), "l": list, "r": float}
    assert types == {**expected, "e": float, "x": str}
    assert [type(value) for value in found["l"]] == [float, dict]
    assert [(type(key), type(value)) for key, value in found["l"][1].items()] == [(str, float)]


def test_arguments_may_have_any_name(make):
    assert make("it: {class: mine.Thing, target: 1, options: 2, supplied: 3, key: 4}").kwargs == {
        "target": 1,
        "options": 2,
        "supplied": 3,
        "key": 4,
    }


def test_a_class_written_in_c_is_built(make):
    assert make("it: {class: builtins.complex, real: 1, imag: 2}") == 1 + 2j
    assert make("it: {class: builtins.dict, a: 1}") == {"a": 1}


# Supplied arguments


def test_supplied_arguments_go_where_there_are_parameters_of_that_name(make):
    thing = make(
        "it: {class: mine.Thing, a: {class: mine.Takes}, b: [{class: mine.Point, x: 1}]}", dataset="D", output_dir="O"
    )
    assert thing.kwargs.keys() == {"a", "b"}
    assert (thing.kwargs["a"].dataset, thing.kwargs["a"].output_dir) == ("D", "O")


@pytest.mark.parametrize("arguments", ["dataset: 5", "args: [5]"])
def test_an_argument_of_the_config_wins_over_a_supplied_one(make, arguments):
    takes = make(f"it: {{class: mine.Takes, {arguments}}}", dataset="D", output_dir="O")
    assert (takes.dataset, takes.output_dir) == (5, "O")


# Factories

MADE = Annotated[Factory, Form(keys=("inputs",), supplied=1)]


def test_a_factory_is_not_built_but_keeps_arguments_and_options(make):
    owner = make("it: {class: mine.Owner, made: {class: mine.Thing, a: {class: mine.double, x: 1}, inputs: [i]}}")
    assert isinstance(owner.made, Factory)
    assert owner.made.options == {"inputs": ["i"]}
    thing = owner.made("supplied")
    assert (thing.args, thing.kwargs) == (("supplied",), {"a": 2})
    assert owner.made("again") is not thing


def test_positional_arguments_of_a_factory_follow_those_of_its_owner(make):
    assert make("it: {class: mine.Thing, args: [2, 3]}", hint=MADE)(1).args == (1, 2, 3)


def test_a_factory_of_an_import_keeps_its_options(make, user):
    factory = make("it: {import: mine.double, inputs: [a]}", hint=MADE)
    assert factory.options == {"inputs": ["a"]}
    assert factory() is sys.modules["mine"].double


def test_arguments_of_a_factory_may_have_any_name(make):
    arguments = {"options": 1, "is_import": 2, "target": 3, "first": 4}
    text = ", ".join(f"{name}: {value}" for name, value in arguments.items())
    assert make(f"it: {{class: mine.Thing, {text}}}", hint=MADE)().kwargs == arguments


def test_factories_by_name_are_a_mapping_where_the_hint_allows_it(make):
    owner = make("it: {class: mine.Owner, several: {a: {class: mine.Thing}, b: {class: mine.double, inputs: [x]}}}")
    assert list(owner.several) == ["a", "b"]
    assert owner.several["b"](4) == 8
    assert isinstance(make("it: {class: mine.Owner, several: {class: mine.Thing}}").several, Factory)


def test_a_factory_that_is_null_is_null(make):
    assert make("it: {class: mine.Owner, made: null}").made is None


def test_parameters_without_a_factory_hint_are_built(make):
    assert make("it: {class: mine.Owner, other: {class: mine.double, x: 1}}").other == 2


def test_a_hint_that_cannot_be_resolved_does_not_hide_the_others(make):
    owner = make("it: {class: mine.UnknownHint, something: 1, made: {class: mine.Thing}}")
    assert isinstance(owner.made, Factory)


def test_hints_of_a_base_count_where_keyword_arguments_are_handed_on(make):
    assert isinstance(make("it: {class: mine.Inherits, made: {class: mine.Thing}}").made, Factory)


def test_a_hint_of_the_class_itself_counts_before_that_of_a_base(make):
    assert make("it: {class: mine.Redefines, made: {class: mine.double, x: 1}}").made == 2


@pytest.mark.parametrize("text", ["3", "SGD", "[{class: mine.Thing}]", "{lr: 1}", "{a: {class: mine.Thing}}"])
def test_a_value_that_is_not_a_form_is_an_error(prepare, text):
    _, problems = prepare(f"it: {{class: mine.Owner, made: {text}}}")
    (problem,) = problems
    assert "it.made: " in problem
    assert "is not a mapping with 'class'; write {class: NAME, inputs: [NAME, ...]}" in problem


def test_short_names_are_looked_up_in_the_package_of_the_form(make):
    hint = Annotated[Factory, Form(package="torch.optim", supplied=1)]
    parameter = pytest.importorskip("torch").nn.Parameter(pytest.importorskip("torch").zeros(1))
    optimizer = make("it: {class: sgd, lr: 0.5}", hint=hint)([parameter])
    assert (type(optimizer).__name__, optimizer.defaults["lr"]) == ("SGD", 0.5)


def test_the_package_of_a_form_has_only_classes_of_its_own(prepare):
    _, (problem,) = prepare("it: {class: Counter}", hint=Annotated[Factory, Form(package="torch.optim.lr_scheduler")])
    assert "unknown class 'Counter'; there are ChainedScheduler, " in problem
    assert "Optimizer" not in problem


@pytest.mark.parametrize("hint", [Factory, Factory | None, Mapping[str, Factory], list[int] | Factory])
def test_a_plain_factory_hint_has_a_form_too(prepare, hint):
    value, problems = prepare("it: {class: mine.Thing, a: 1}", hint=hint)
    assert problems == []
    assert build(value, {})().kwargs == {"a": 1}


# Errors of constructors


def test_an_argument_error_of_a_constructor_is_reported_at_the_arguments_line(make):
    with pytest.raises(ConfigError) as caught:
        make("it:\n  class: mine.Thing\n  a:\n    class: mine.Point\n    x: 1\n    y: wrong\n")
    assert str(caught.value.problems[0]) == "c.yaml:6:8: it.a.y: 'wrong' is no number"


def test_an_argument_error_in_a_factory_is_reported_there_too(make):
    factory = make("it:\n  class: mine.Point\n  y: wrong\n", hint=Annotated[Factory, Form(supplied=1)])
    with pytest.raises(ConfigError) as caught:
        factory(1)
    assert str(caught.value.problems[0]) == "c.yaml:3:6: it.y: 'wrong' is no number"


def test_any_other_error_of_a_constructor_keeps_its_type_and_tells_the_position(make):
    with pytest.raises(ZeroDivisionError, match="out of my control") as caught:
        make("it: {class: mine.Thing, a: {class: mine.Point, x: 1, y: broken}}")
    assert caught.value.__notes__[0].startswith("while building it.a (c.yaml:1:")
