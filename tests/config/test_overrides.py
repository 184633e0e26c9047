"""Merging of configs, overrides, and notes about copies (of YAML anchors) that an override does not change."""

import shlex

import pytest
from campaign import thinned
from config.problems import problem_of
from hypothesis import given, settings, strategies as st

from emrun.base.errors import ConfigError, Position
from emrun.config.overrides import copies_left, hook_entry, in_name, merge, override, stream_of_eval, words_in
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import node_of, parse


def changed(text, *overrides):
    return override(parse(text, "c.yaml"), overrides).plain()


def override_problem(text, *overrides):
    return problem_of(override, parse(text, "c.yaml"), overrides)


@pytest.mark.parametrize(
    "base, over, merged",
    [
        ("{a: {x: 1, y: 2}}", "{a: {y: 3, z: 4}}", {"a": {"x": 1, "y": 3, "z": 4}}),
        ("{a: [1, 2]}", "{a: [3]}", {"a": [3]}),
        ("{a: {x: 1}}", "{a: 5}", {"a": 5}),
        ("{a: {x: 1}}", "{a: null}", {"a": None}),
        ("{a: 5}", "{a: {x: 1}}", {"a": {"x": 1}}),
        ("{class: A, x: 1}", "{class: B, y: 2}", {"class": "B", "y": 2}),
        ("{class: A, x: 1}", "{class: A, y: 2}", {"class": "A", "x": 1, "y": 2}),
        ("{class: A, x: 1}", "{y: 2}", {"class": "A", "x": 1, "y": 2}),
        ("{x: 1}", "{class: B, y: 2}", {"class": "B", "y": 2}),
        ("{class: A, x: 1}", "{import: f, inputs: [a]}", {"import": "f", "inputs": ["a"]}),
        ("{import: f, x: 1}", "{import: g}", {"import": "g"}),
    ],
)
def test_mappings_merge_lists_and_other_classes_replace(base, over, merged):
    assert merge(parse(base, "b"), parse(over, "o")).plain() == merged


MODEL = "model: {optimizer: {class: AdamW, lr: 1.0, betas: [1, 2]}}"


@pytest.mark.parametrize(
    "text, value",
    [
        ("5", 5),
        ("1e-3", 0.001),
        ("no", "no"),
        ("[a, {b: 1}]", ["a", {"b": 1}]),
        ("", None),
        ("'5'", "5"),
        ("a=b", "a=b"),
    ],
)
def test_values_of_overrides_are_yaml(text, value):
    assert changed("{}", f"a.b={text}") == {"a": {"b": value}}


OPTIMIZER = {"class": "AdamW", "lr": 1.0, "betas": [1, 2]}


@pytest.mark.parametrize(
    "overrides, result",
    [
        (["class=SGD"], OPTIMIZER | {"class": "SGD"}),
        (["class=SGD", "lr=0.1"], OPTIMIZER | {"class": "SGD", "lr": 0.1}),
        (["lr=0.1", "class=SGD"], OPTIMIZER | {"class": "SGD", "lr": 0.1}),
        (["class=SGD", "~betas"], {"class": "SGD", "lr": 1.0}),
        (["class=Adamw"], OPTIMIZER | {"class": "Adamw"}),
        (["import=my.optimizer"], {"import": "my.optimizer", "lr": 1.0, "betas": [1, 2]}),
    ],
)
def test_an_override_of_a_class_by_its_key_path_keeps_the_keys_beside_it(overrides, result):
    paths = [("~" if text[0] == "~" else "") + "model.optimizer." + text.removeprefix("~") for text in overrides]
    assert changed(MODEL, *paths) == {"model": {"optimizer": result}}


@pytest.mark.parametrize("name", ["AdamW", "Adamw", "adam_w", "torch.optim.AdamW"])
def test_a_mapping_given_as_a_whole_is_merged_where_its_class_is_the_same_however_it_is_written(name):
    over = f"{{class: {name}, lr: 2}}"
    assert changed(MODEL, f"model.optimizer={over}")["model"]["optimizer"] == OPTIMIZER | {"class": name, "lr": 2}
    merged = merge(parse(MODEL, "b"), parse(f"model: {{optimizer: {over}}}", "o"))
    assert merged.plain()["model"]["optimizer"] == OPTIMIZER | {"class": name, "lr": 2}


@pytest.mark.parametrize("name", ["SGD", "my_optimizers.AdamW", "torch.optim.SGD", "Adam"])
def test_a_mapping_given_as_a_whole_replaces_where_its_class_is_another(name):
    over = {"class": name, "lr": 2}
    assert changed(MODEL, f"model.optimizer={{class: {name}, lr: 2}}")["model"]["optimizer"] == over
    assert changed(MODEL, f"model={{optimizer: {{class: {name}, lr: 2}}}}")["model"]["optimizer"] == over
    merged = merge(parse(MODEL, "b"), parse(f"model: {{optimizer: {{class: {name}, lr: 2}}}}", "o"))
    assert merged.plain()["model"]["optimizer"] == over


def test_overrides_are_applied_from_left_to_right():
    whole, part = "model.optimizer={class: SGD, momentum: 1}", "model.optimizer.lr=0.1"
    assert changed(MODEL, whole, part) == {"model": {"optimizer": {"class": "SGD", "momentum": 1, "lr": 0.1}}}
    assert changed(MODEL, "~model.optimizer", "model.optimizer.class=SGD") == {"model": {"optimizer": {"class": "SGD"}}}
    assert changed("l: [1, 2]", "l=[3]", "l.0=4") == {"l": [4]}


def test_an_override_of_the_same_class_is_merged():
    assert changed(MODEL, "model.optimizer={class: AdamW, lr: 2}")["model"]["optimizer"] == {
        "class": "AdamW",
        "lr": 2,
        "betas": [1, 2],
    }


def test_the_last_of_two_overrides_of_a_key_wins():
    assert changed("a: 1", "a=2", "a=3") == {"a": 3}
    assert changed("a: 1", "a={class: A, x: 1}", "a={class: B}") == {"a": {"class": "B"}}


@pytest.mark.parametrize(
    "overrides",
    [
        *[["a=5", "a.b=1"], ["a.b=1", "a=5"], ["a.b=1", "a=[1]"], ["a.b.c=1", "a={b: 5}"]],
        *[["a.b=1", "a={class: B}"], ["hooks.A.x=1", "hooks=[B]"]],
    ],
)
def test_an_override_that_would_undo_an_earlier_one_is_an_error(overrides):
    problem = override_problem("a: {b: 1}", *overrides)
    assert problem.position.source == f"override {overrides[1]!r}"
    assert f"override {overrides[0]!r}" in problem.message


def test_an_override_may_set_a_key_of_an_earlier_one_again():
    assert changed("a: {b: 1}", "a.b=1", "a={class: A, b: 2}") == {"a": {"class": "A", "b": 2}}
    assert changed("a: {b: 1}", "a.c=1", "~a.c") == {"a": {"b": 1}}


def test_an_override_may_replace_a_value_by_a_mapping():
    assert changed("a: 1\nb:", "a.x=1", "b.x=1") == {"a": {"x": 1}, "b": {"x": 1}}


def test_values_under_one_alias_are_overridden_apart():
    assert changed("{}", "a={x: &q {y: 1}, z: *q}", "a.x.w=2") == {"a": {"x": {"y": 1, "w": 2}, "z": {"y": 1}}}
    assert changed("a: &q {y: 1}\nb: *q", "a.y=2") == {"a": {"y": 2}, "b": {"y": 1}}


def test_a_key_that_is_not_a_string_is_found_by_its_text():
    assert changed("a: {10: x, 20: y}", "a.10=z") == {"a": {10: "z", 20: "y"}}
    assert changed("a: {10: x, 20: y}", "~a.10") == {"a": {20: "y"}}


@pytest.mark.parametrize("text", ["a.layers.0=y", "~a.layers.0", "a.layers.0.b=y"])
def test_a_key_with_a_dot_is_set_by_a_mapping(text):
    message = override_problem("a: {layers.0: x}", text).message
    assert message.startswith("the key 'layers.0' has a dot, which separates keys; write a={\"layers.0\": VALUE}, or ")
    assert changed("a: {layers.0: x, layers: 2}", 'a={"layers.0": y}') == {"a": {"layers.0": "y", "layers": 2}}


def test_a_key_with_a_blank_is_found():
    assert changed("a: {c d: 1}", "a.c d=2") == {"a": {"c d": 2}}


@pytest.mark.parametrize("text", ["a.b =1", "a. b=1", " a.b=1", "~a.b "])
def test_a_key_with_blanks_around_a_part_is_an_error(text):
    assert "is not a key; write its parts with one dot" in override_problem("a: {b: 1}", text).message


@pytest.mark.parametrize(
    ("text", "stream"),
    [("eval.valid.n=1", "valid"), ("~eval.a-b", "a-b"), ("eval={}", ""), ("eval_2=1", None), ("model.eval=1", None)],
)
def test_an_override_may_be_of_the_evaluation_of_a_stream(text, stream):
    assert stream_of_eval(text) == stream


HOOKS = "hooks: [LogVariables, {StopAfter: {epochs: 3}}, my_hooks.Print]"


@pytest.mark.parametrize("name", ["StopAfter", "stop_after", "stopafter", "1"])
def test_a_hook_is_changed_by_its_name_or_index(name):
    hooks = changed(HOOKS, f"hooks.{name}.epochs=5", f"hooks.{name}.minutes=1")["hooks"]
    assert hooks == ["LogVariables", {"StopAfter": {"epochs": 5, "minutes": 1}}, "my_hooks.Print"]


@pytest.mark.parametrize("name, index", [("LogVariables", 0), ("Print", 2)])
def test_a_hook_listed_without_arguments_gets_some(name, index):
    entry = changed(HOOKS, f"hooks.{name}.x=[1]")["hooks"][index]
    assert list(entry.values()) == [{"x": [1]}]


@pytest.mark.parametrize("text", [HOOKS, "hooks: []", "hooks:", "{}"])
def test_a_hook_that_is_not_listed_is_added_at_the_end(text):
    config = changed(text, "hooks.SaveBest.variable=loss", "hooks.SaveBest.condition=max", "hooks.Other={}")
    assert config["hooks"][-2:] == [{"SaveBest": {"variable": "loss", "condition": "max"}}, {"Other": {}}]


def test_a_hook_that_is_listed_twice_needs_an_index():
    text = "hooks: [{A: {x: 1}}, B, A]"
    problem = override_problem(text, "hooks.A.x=2")
    assert problem.key == "hooks"
    assert "A is listed 2 times; use one of the indices [0, 2] instead" in problem.message
    assert changed(text, "hooks.2.x=2")["hooks"] == [{"A": {"x": 1}}, "B", {"A": {"x": 2}}]


@pytest.mark.parametrize("value", ["3", "[1]", "null", "Other"])
def test_a_hook_takes_a_mapping_of_arguments(value):
    problem = override_problem(HOOKS, f"hooks.StopAfter={value}")
    assert problem.key == "hooks.StopAfter"
    assert "must be a mapping of the hook's arguments, not " in problem.message
    assert problem.message.endswith("; write {ARGUMENT: VALUE}")


@pytest.mark.parametrize("text", ["a.b", "hooks.StopAfter", "other"])
def test_a_key_without_a_value_is_told_what_to_write(text):
    problem = override_problem("a: {b: 3}", text)
    assert problem.message == f"an override must be key=value, or ~key to delete a key: {text}=VALUE or ~{text}"


def test_the_whole_list_of_hooks_can_be_replaced():
    assert changed(HOOKS, "hooks=[A]") == {"hooks": ["A"]}


def test_items_of_other_lists_are_changed_by_index():
    text = "a: {args: [{x: 1}, 2, 3]}"
    assert changed(text, "a.args.0.x=5", "a.args.2=6") == {"a": {"args": [{"x": 5}, 2, 6]}}
    assert changed(text, "a.args={1: 7}") == {"a": {"args": [{"x": 1}, 7, 3]}}


@pytest.mark.parametrize("value", [{"x": "image"}, {"x": {"source": "image"}}, {"class": "A"}, {}])
def test_a_mapping_replaces_a_list_where_no_key_is_an_index(value):
    text = "model: {inputs: [x, y], outputs: [z]}"
    for whole in (f"model.inputs={value}", f"model={{inputs: {value}}}"):
        assert changed(text, whole) == {"model": {"inputs": value, "outputs": ["z"]}}
    assert "there is no item 'x'" in override_problem(text, "model.inputs={0: a, x: b}").message
    assert "would undo" in override_problem(text, "model.inputs.0=a", f"model.inputs={value}").message


@pytest.mark.parametrize(
    "key, message",
    [
        ("a.3", "there is no item '3'; the list has length 3, and indices begin at 0; to replace the list, "),
        ("a." + "9" * 5000, "there is no item '999"),
        ("a.-1", "there is no item '-1'; the list has length 3"),
        ("a.x", "there is no item 'x'; the list has length 3"),
        ("hooks.7.x", "there is no item '7'"),
    ],
)
def test_an_index_that_is_not_there_is_an_error(key, message):
    assert message in override_problem("a: [1, 2, 3]\nhooks: [A]", f"{key}=1").message
    assert override_problem("a: [1, 2, 3]\nhooks: [A]", f"~{key}").key == key[: key.index(".")]


@pytest.mark.parametrize(
    "overrides, result",
    [
        (["~a.x"], {"a": {"y": 2}, "l": [0, 1, 2]}),
        (["~a"], {"l": [0, 1, 2]}),
        (["~l.0", "~l.1"], {"a": {"x": 1, "y": 2}, "l": [1]}),
        (["~l.2", "~l.0"], {"a": {"x": 1, "y": 2}, "l": [1]}),
        (["~l.0", "l.1=9"], {"a": {"x": 1, "y": 2}, "l": [1, 9]}),
        (["~a.x", "a.z=3"], {"a": {"y": 2, "z": 3}, "l": [0, 1, 2]}),
        (["~a.x", "~a"], {"l": [0, 1, 2]}),
    ],
)
def test_deletions_are_applied_in_the_order_of_the_overrides(overrides, result):
    assert changed("a: {x: 1, y: 2}\nl: [0, 1, 2]", *overrides) == result


def test_hooks_and_their_arguments_are_deleted_by_name():
    assert changed(HOOKS, "~hooks.LogVariables", "~hooks.stop_after.epochs")["hooks"] == [
        {"StopAfter": {}},
        "my_hooks.Print",
    ]
    assert changed(HOOKS, "~hooks.1.epochs", "hooks.StopAfter.minutes=1")["hooks"][1] == {"StopAfter": {"minutes": 1}}


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["~modl"], "has no key 'modl' to delete; did you mean 'model'?"),
        (["~model.x.y"], "has no key 'x' to delete"),
        (["~hooks.StopAftr"], "there is no hook 'StopAftr' in the list; did you mean 'StopAfter'?"),
        (["~hooks.StopAfter.epoch"], "has no key 'epoch' to delete; did you mean 'epochs'?"),
        (["~model", "~model"], "has no key 'model' to delete"),
        (["~hooks.1", "~hooks.StopAfter"], "there is no hook 'StopAfter' in the list"),
        (["hooks=[A]", "~hooks.2"], "there is no item '2'; the list has length 1, and indices begin at 0"),
    ],
)
def test_what_cannot_be_deleted_is_an_error(overrides, message):
    problem = override_problem(MODEL + "\n" + HOOKS, *overrides)
    assert message in problem.message
    assert problem.position.source == f"override {overrides[-1]!r}"


@pytest.mark.parametrize(
    "text",
    [
        *["", "a", "=1", "a..b=1", ".a=1", "a.=1", "~", "~a..b", "a." * 200 + "a=1", "~" + "a." * 200 + "a"],
        *["a=[", "a=!x 1", "a=1\n---\n2", "a=\x07", "a={b: 1, b: 2}"],
    ],
)
def test_a_malformed_override_is_an_error_that_names_it(text):
    assert override_problem("a: 1", text).position.source == f"override {text!r}"


PARTS = st.sampled_from(["a", "b", "hooks", "0", "1", "9", "StopAfter", "x", "", "-1", "é"])


VALUES = st.sampled_from(["", "1", "[1]", "{x: 1}", "{class: A}", "{0: 1}", "null", "[", "*a", "!t", "{~: 1}"])


PATHS = st.lists(PARTS, max_size=4).map(".".join)


@pytest.mark.parametrize("count", thinned([20, 200], [20]))
def test_any_overrides_give_a_config_or_a_config_error(count):
    text = "a: {x: [1, {y: 2}], class: B}\nb: [1, 2]\nhooks: [A, {StopAfter: {x: 1}}, A, 3]"

    @settings(max_examples=count, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.one_of(PATHS.map("~".__add__), st.tuples(PATHS, VALUES).map("=".join)), max_size=5))
    def check(overrides):
        try:
            config = override(parse(text, "c.yaml"), overrides)
        except ConfigError as error:
            assert error.problems[0].position.source.startswith("override")
        else:
            dump(config)

    check()


@pytest.mark.parametrize(
    "text, name, arguments",
    [
        ("A", "A", None),
        ("{A: {x: 1}}", "A", {"x": 1}),
        ("3", None, None),
        ("{}", None, None),
        ("{A: 1, B: 2}", None, None),
        ("{1: {x: 1}}", None, None),
        ("[A]", None, None),
    ],
)
def test_an_entry_of_the_hooks_is_a_name_or_one_name_with_arguments(text, name, arguments):
    found, node = hook_entry(parse(text, "c.yaml"))
    assert found == name
    assert (node.plain() if node else None) == arguments


VARS = """\
vars: {width: 32, deep: {a: 1, b: [2]}, opt: {class: SGD}, n: &n 5}
model: {module: {hidden: "${vars.width}", all: "${vars.deep}"}, optimizer: "${vars.opt}"}
dataset: {n: *n, text: "x${vars.deep.a}"}
"""


@pytest.mark.parametrize(
    "text, override_, message",
    [
        (VARS, "vars.widht=64", "${vars.widht} is never used; did you mean 'width'?"),
        (VARS, "vars={widht: 64}", "${vars.widht} is never used; did you mean 'width'?"),
        (VARS, "vars.opt2.lr=64", "${vars.opt2.lr} is never used"),
        ("a: 1", "vars.a=64", "${vars.a} is never used"),
        (VARS, "eval.test.vars.widht=64", "${vars.widht} is never used"),
    ],
)
def test_an_override_of_a_free_value_that_is_never_used_is_an_error(text, override_, message):
    problem = override_problem(text, override_)
    assert problem.message == message
    assert problem.position.source == f"override {override_!r}"


@pytest.mark.parametrize("override_", ["vars.b=2", "~vars.a", "vars.a=3", "eval.test.vars.b=1"])
def test_a_free_value_that_is_read_may_come_from_an_override_alone(override_):
    override(parse("vars: {a: 1}\nx: ${vars.b}", "c.yaml"), [override_])


@pytest.mark.parametrize(
    ("override_", "hooks"),
    [
        ("hooks.own.Log.tag=x", [{"StopAfter": {"epochs": 1}}, {"own.Log": {"tag": "x"}}]),
        ("hooks.Log.tag=x", [{"StopAfter": {"epochs": 1}}, {"own.Log": {"tag": "x"}}]),
        ("hooks.1.own.Log.tag=x", [{"StopAfter": {"epochs": 1}}, {"own.Log": {"tag": "x"}}]),
        ("hooks.1.tag=x", [{"StopAfter": {"epochs": 1}}, {"own.Log": {"tag": "x"}}]),
        ("hooks[1].own.Log.tag=x", [{"StopAfter": {"epochs": 1}}, {"own.Log": {"tag": "x"}}]),
        ("hooks.own.Log={tag: x}", [{"StopAfter": {"epochs": 1}}, {"own.Log": {"tag": "x"}}]),
        ("hooks.0.StopAfter.epochs=2", [{"StopAfter": {"epochs": 2}}, {"own.Log": {"tag": "a"}}]),
        ("hooks.0.StopAfter={epochs: 2}", [{"StopAfter": {"epochs": 2}}, {"own.Log": {"tag": "a"}}]),
        ("~hooks.own.Log", [{"StopAfter": {"epochs": 1}}]),
        ("~hooks.1.own.Log", [{"StopAfter": {"epochs": 1}}]),
        ("~hooks.own.Log.tag", [{"StopAfter": {"epochs": 1}}, {"own.Log": {}}]),
        (
            "hooks.a.b.New.x.y=1",
            [{"StopAfter": {"epochs": 1}}, {"own.Log": {"tag": "a"}}, {"a.b.New": {"x": {"y": 1}}}],
        ),
        ("hooks.own.New={}", [{"StopAfter": {"epochs": 1}}, {"own.Log": {"tag": "a"}}, {"own.New": {}}]),
        ("hooks.savebest.keep=2", [{"StopAfter": {"epochs": 1}}, {"own.Log": {"tag": "a"}}, {"savebest": {"keep": 2}}]),
    ],
)
def test_a_hook_has_an_index_a_name_or_a_dotted_path(override_, hooks):
    text = "hooks: [{StopAfter: {epochs: 1}}, {own.Log: {tag: a}}]"
    assert override(parse(text, "c.yaml"), [override_]).plain()["hooks"] == hooks


def test_the_first_hook_may_be_added_by_its_dotted_path():
    assert override(parse("a: 1", "c.yaml"), ["hooks.own.Log.tag=x"]).plain()["hooks"] == [{"own.Log": {"tag": "x"}}]


# Copies


COPIED = """\
dataset: &d
  class: Table
  n: 5
  deep: {k: 1}
model: {a: &x 3, b: *x, c: [1, *x]}
hooks:
  - A: &s {variables: [loss]}
eval:
  valid:
    dataset:
      <<: *d
      class: Other
  test:
    dataset: *d
    hooks: [A: *s]
"""


def left_by(text, *overrides):
    config = parse(text, "c.yaml")
    return list(copies_left(config, override(config, overrides)))


def test_the_place_of_an_overridden_copy_is_that_of_the_copy():
    (note,) = left_by(COPIED, "model.b=4")
    assert note.startswith(
        "model.b (c.yaml:5:21) is overridden, but not model.a (c.yaml:5:12), model.c.1 (c.yaml:5:32)"
    )


def test_an_override_that_changes_nothing_gets_no_note():
    assert not [note for note in left_by(COPIED, "dataset={class: Table, n: 7}") if "dataset.class" in note]


def test_a_word_that_may_be_meant_as_a_boolean_gets_a_note():
    (note,) = words_in(["model.norm=No", "model.kind='no'", "model.n=1", "name=nobody", "~model.on"])
    assert note == "override 'model.norm=No': No is a text; for a boolean write model.norm=false"


def test_an_override_that_does_not_reach_a_copy_names_both_lines_and_what_to_add():
    (note,) = left_by(COPIED, "dataset.n=7")
    assert note.startswith("dataset.n (c.yaml:3:6) is overridden, but not ")
    assert "eval.valid.dataset.n (c.yaml:11:11), eval.test.dataset.n (c.yaml:14:14)" in note
    assert note.endswith("add eval.valid.dataset.n=7 eval.test.dataset.n=7")


@pytest.mark.parametrize(
    "overrides, copies",
    [
        (["dataset.deep.k=2"], "eval.valid.dataset.deep.k=2 eval.test.dataset.deep.k=2"),
        (["eval.valid.dataset.n=2"], "dataset.n=2 eval.test.dataset.n=2"),
        (["dataset.n=7", "eval.test.dataset.n=7"], "eval.valid.dataset.n=7"),
        (["dataset.class=B"], """'eval.test.dataset.class="B"'"""),
        (["~dataset.n"], "'~eval.valid.dataset.n' '~eval.test.dataset.n'"),
        (["model.a=x y"], """'model.b="x y"' 'model.c.1="x y"'"""),
        (["model.b=4"], "model.a=4 model.c.1=4"),
        (["hooks.A.variables=[x]"], """'eval.test.hooks.0.A.variables=["x"]'"""),
        (["dataset={class: B, n: 5}"], """'eval.test.dataset={"class": "B", "n": 5}'"""),
    ],
)
def test_the_copies_that_stay_are_named_as_overrides_write_them(overrides, copies):
    assert left_by(COPIED, *overrides)[0].endswith(f", add {copies}")


@pytest.mark.parametrize(
    "text, override",
    [
        (COPIED, "dataset.flat=true"),
        (COPIED, "eval.valid.dataset.class=B"),
        (COPIED, "~hooks.A"),
        ("a: {n: 5}\nb: {n: 5}", "a.n=7"),
        ("a: {n: &n 5}\nb: ${a.n}", "a.n=7"),
        ("vars: {n: &n 5}\nb: *n", "b=7"),
    ],
)
def test_values_that_are_not_copied_or_never_used_get_no_note(text, override):
    assert [note for note in left_by(text, override) if "hooks.0" not in note] == []


def test_equal_values_in_a_mapping_without_a_file_are_not_copies():
    config = node_of({"a": {"n": 1}, "b": {"n": 1}}, Position("config"))
    assert list(copies_left(config, override(config, ["a.n=2"]))) == []


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], ""),
        (["model.optimizer.lr=0.01"], "lr=0.01"),
        (["hooks.StopAfter.epochs=3", "~hooks.SaveBest", "seed=-1"], "epochs=3_no-SaveBest_seed=-1"),
        (["a.lr=1", "a.lr=2"], "lr=2"),
        (["name=mine", "hooks.WriteWandB.api_key=abc"], ""),
        (["dataset.root=/data/my images/"], "root=my-images"),
        (["model.loss={class: L1Loss, reduction: none}", "hooks=[{WriteMLflow: {uri: me:word@host}}]"], ""),
        (["hooks.WriteMLflow.uri=https://me:word@host/x", "a.user=me:word@host", "a.lr=1", "a.b=${env:PW}"], "lr=1"),
        (["a.x=" + "y" * 99, "a.much_longer_than_fits=1", "b.z=1"], "x=" + "y" * 22 + "_z=1"),
        (["a.naïve=1"], "na-ve=1"),
        (["a=../.."], "a="),
    ],
)
def test_overrides_name_a_file(overrides, name):
    assert in_name(overrides) == name


DROPPED = [
    "#tag", "#", "a #b", "x #", "&a x", "&a 5", "&a", "--- a", "--- 5", "5 #x", "null #x", "true # no", "[1, 2] #c",
    "{a: 1} # b", "'a' #b", " a", "a ", "a\nb", "- a #b", "[1, # two\n 3]", "a\n...",
]  # fmt: skip
MARKED = ["@x", "`x", "%x", "*a", "!t x"]


@pytest.mark.parametrize("text", DROPPED + MARKED)
def test_a_text_that_yaml_does_not_read_as_it_stands_is_refused_with_what_to_write(text):
    problem = problem_of(changed, "{}", f"a.b={text}")
    (argument,) = shlex.split(problem.message.rpartition("; for a text, write ")[2])
    assert changed("{}", argument) == {"a": {"b": text}}
    assert ("YAML drops a part of this text" in problem.message) == (text in DROPPED)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'#tag'", "#tag"), ('"a #b"', "a #b"), ("a#b", "a#b"), ("[a#b, 'c #d']", ["a#b", "c #d"]),
        ("a: b", {"a": "b"}),
        ("0x10", 16), ("1e3", 1000.0), ("007", 7), ("null", None), ("~", None), (" 5 ", 5), ("yes", "yes"),
        ("2020-01-01", "2020-01-01"), ("- a", ["a"]), ("{a: &x 1, b: *x}", {"a": 1, "b": 1}), ("a-b...", "a-b..."),
        ("|\n  a #b\n", "a #b\n"), ("http://a.b/#c", "http://a.b/#c"), ("a?b&c=*", "a?b&c=*"), ("100%", "100%"),
    ],
)  # fmt: skip
def test_what_is_typed_without_loss_is_read_as_yaml(text, value):
    assert changed("{}", f"a.b={text}") == {"a": {"b": value}}
