"""From files and overrides to one merged config, and its interpolation."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emrun.config.config import (
    copies_left,
    escaped,
    hook_entry,
    interpolate,
    load_config,
    merge,
    overlay,
    override,
    read_config,
    unread_vars,
    with_defaults,
)
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import MAX_DEPTH, node_of, parse
from emrun.errors import ConfigError, Position


@pytest.fixture
def write(tmp_path):
    """Write files below tmp_path, text by name; return the path of the first."""

    def put(**texts):
        paths = [tmp_path / f"{name}.yaml" for name in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text)
        return paths[0]

    return put


def changed(text, *overrides):
    return override(parse(text, "c.yaml"), overrides).plain()


def problem_of(function, *arguments):
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    (problem,) = caught.value.problems
    return problem


def override_problem(text, *overrides):
    return problem_of(override, parse(text, "c.yaml"), overrides)


# Files


def test_a_directory_stands_for_its_config_file(write):
    path = write(config="a: 1")
    assert read_config(path.parent).plain() == {"a": 1}


def test_a_mapping_is_a_config_too():
    assert load_config({"a": {"b": (1, 2)}}, ["a.c=3"]) == {"a": {"b": [1, 2], "c": 3}}


def test_a_byte_order_mark_is_no_part_of_the_config(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfa: 1")
    config = read_config(tmp_path / "c.yaml")
    assert config.plain() == {"a": 1}
    assert (config.get("a").key.column, config.get("a").key.text) == (1, "a: 1")


@pytest.mark.parametrize(
    "content, line, column",
    [(b"\xff", 1, 1), ("a: é".encode() + b"\xff", 1, 5), ("é: 1\né: é".encode() + b"\xc3(", 2, 5)],
)
def test_bytes_that_are_not_utf_8_are_an_error_at_their_line_and_character(tmp_path, content, line, column):
    (tmp_path / "c.yaml").write_bytes(content)
    problem = problem_of(read_config, tmp_path / "c.yaml")
    assert str(problem) == f"{tmp_path}/c.yaml:{line}:{column}: is not UTF-8"


@pytest.mark.parametrize("text", ["", "# only a comment", "[]", "word"])
def test_a_config_that_is_no_mapping_is_an_error(write, text):
    problem = problem_of(read_config, write(c=text))
    assert "a config is a mapping" in problem.message
    assert problem.position.line == 1


@pytest.mark.parametrize("name", ["missing.yaml", "x" * 5000, "c.yaml/below"])
def test_a_file_that_cannot_be_read_is_a_config_error(write, name):
    problem = problem_of(read_config, write(c="a: 1").parent / name)
    assert "cannot be read" in problem.message
    assert name in problem.position.source


# extends


def test_a_config_wins_over_what_it_extends(write):
    path = write(c="extends: base.yaml\nm: {lr: 2}\nhooks: [B]", base="m: {lr: 1, k: 1}\nhooks: [A, C]\nseed: 3")
    assert read_config(path).plain() == {"m": {"lr": 2, "k": 1}, "hooks": ["B"], "seed": 3}


def test_of_several_files_the_later_wins(write):
    path = write(c="extends: [x.yaml, y.yaml]\nc: 3", x="a: 1\nb: 1\nc: 1", y="b: 2\nc: 2")
    assert read_config(path).plain() == {"a": 1, "b": 2, "c": 3}


def test_extending_an_empty_list_changes_nothing(write):
    assert read_config(write(c="extends: []\na: 1")).plain() == {"a": 1}


def test_a_file_may_be_extended_along_two_ways(write):
    path = write(c="extends: [x.yaml, y.yaml]", x="extends: z.yaml", y="extends: z.yaml", z="a: 1")
    assert read_config(path).plain() == {"a": 1}


def test_extended_files_are_looked_for_beside_the_file_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "c.yaml").write_text("extends: deep/middle.yaml")
    (tmp_path / "deep" / "middle.yaml").write_text("extends: er/base.yaml\nb: 2")
    (tmp_path / "deep" / "er" / "base.yaml").write_text("a: 1")
    monkeypatch.chdir("/")
    assert read_config(tmp_path / "c.yaml").plain() == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "files",
    [
        {"c": "extends: c.yaml"},
        {"c": "extends: x.yaml", "x": "extends: y.yaml", "y": "extends: c.yaml"},
        {"config": "extends: ."},
        {"config": "extends: ''"},
    ],
)
def test_a_circle_of_extends_is_an_error(write, files):
    problem = problem_of(read_config, write(**files))
    assert problem.key == "extends"
    assert "extends itself" in problem.message
    assert problem.position.line == 1


@pytest.mark.parametrize("name", ["nope.yaml", '"a\\0b"', "x" * 5000, "loop", "c.yaml/below"])
def test_extending_what_is_not_there_is_an_error_where_it_is_named(write, name):
    path = write(c=f"a: 1\nextends: {name}")
    (path.parent / "loop").symlink_to("loop")
    problem = problem_of(read_config, path)
    assert "there is no file" in problem.message
    assert (problem.position.line, problem.position.column) == (2, 10)


@pytest.mark.parametrize("value, shown", [("3", "3"), ("[[a]]", "['a']"), ("{a: 1}", "{'a': 1}"), ("true", "True")])
def test_extends_takes_names_of_files(write, value, shown):
    assert f"{shown} is no file name" in problem_of(read_config, write(c=f"extends: {value}")).message


def test_an_error_in_an_extended_file_is_reported_there(write):
    path = write(c="extends: base.yaml", base="a: 1\nb: [")
    position = problem_of(read_config, path).position
    assert position.source == str(path.with_name("base.yaml"))
    assert position.line == 2


def test_values_know_which_file_they_come_from(write):
    path = write(c="extends: base.yaml\nm: {k: 1}", base="m: {lr: 1}")
    config = read_config(path, ["m.x=1"])
    sources = [config.get("m", key).position.source for key in ("k", "lr", "x")]
    assert sources == [str(path), str(path.with_name("base.yaml")), "override 'm.x=1'"]


# Merging


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


# Overrides


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


def test_a_key_that_is_no_text_is_found_by_its_text():
    assert changed("a: {10: x, 20: y}", "a.10=z") == {"a": {10: "z", 20: "y"}}
    assert changed("a: {10: x, 20: y}", "~a.10") == {"a": {20: "y"}}


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
    assert "A is listed 2 times; use an index of [0, 2]" in problem.message
    assert changed(text, "hooks.2.x=2")["hooks"] == [{"A": {"x": 1}}, "B", {"A": {"x": 2}}]


@pytest.mark.parametrize("value", ["3", "[1]", "null", "Other"])
def test_a_hook_takes_a_mapping_of_arguments(value):
    problem = override_problem(HOOKS, f"hooks.StopAfter={value}")
    assert problem.key == "hooks.StopAfter"
    assert "is no mapping of the hook's arguments" in problem.message


def test_the_whole_list_of_hooks_can_be_replaced():
    assert changed(HOOKS, "hooks=[A]") == {"hooks": ["A"]}


def test_items_of_other_lists_are_changed_by_index():
    text = "a: {args: [{x: 1}, 2, 3]}"
    assert changed(text, "a.args.0.x=5", "a.args.2=6") == {"a": {"args": [{"x": 5}, 2, 6]}}
    assert changed(text, "a.args={1: 7}") == {"a": {"args": [{"x": 1}, 7, 3]}}


@pytest.mark.parametrize(
    "key, message",
    [
        ("a.3", "has no item 3; it has 3, counted from 0"),
        ("a." + "9" * 5000, "has no item 999"),
        ("a.-1", "is a list of 3: '-1' is no index"),
        ("a.x", "is a list of 3: 'x' is no index"),
        ("hooks.7.x", "has no item 7"),
    ],
)
def test_an_index_that_is_not_there_is_an_error(key, message):
    assert message in override_problem("a: [1, 2, 3]\nhooks: [A]", f"{key}=1").message
    assert override_problem("a: [1, 2, 3]\nhooks: [A]", f"~{key}").key == key[: key.index(".")]


# Copies that YAML makes by anchors


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
    return copies_left(config, override(config, overrides))


def test_the_place_of_an_overridden_copy_is_that_of_the_copy():
    (note,) = left_by(COPIED, "model.b=4")
    assert note.startswith(
        "model.b (c.yaml:5:21) is overridden, but not model.a (c.yaml:5:12), model.c.1 (c.yaml:5:32)"
    )


def test_what_an_override_leaves_as_it_was_is_not_noted():
    assert not [note for note in left_by(COPIED, "dataset={class: Table, n: 7}") if "dataset.class" in note]


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
        (["dataset.class=B"], "eval.test.dataset.class=B"),
        (["~dataset.n"], "'~eval.valid.dataset.n' '~eval.test.dataset.n'"),
        (["model.a=x y"], "'model.b=x y' 'model.c.1=x y'"),
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
def test_what_no_anchor_copied_or_nothing_reads_is_not_warned_of(text, override):
    assert [note for note in left_by(text, override) if "hooks.0" not in note] == []


def test_values_that_are_equal_in_a_mapping_without_a_file_are_no_copies():
    config = node_of({"a": {"n": 1}, "b": {"n": 1}}, Position("config"))
    assert copies_left(config, override(config, ["a.n=2"])) == []


# Deletions


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
def test_deletions_take_their_turn_among_the_overrides(overrides, result):
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
        (["~hooks.StopAftr"], "no hook 'StopAftr' is listed; did you mean 'StopAfter'?"),
        (["~hooks.StopAfter.epoch"], "has no key 'epoch' to delete; did you mean 'epochs'?"),
        (["~model", "~model"], "has no key 'model' to delete"),
        (["~hooks.1", "~hooks.StopAfter"], "no hook 'StopAfter' is listed"),
        (["hooks=[A]", "~hooks.2"], "has no item 2; it has 1, counted from 0"),
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


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.lists(st.one_of(PATHS.map("~".__add__), st.tuples(PATHS, VALUES).map("=".join)), max_size=5))
def test_any_overrides_give_a_config_or_a_config_error(overrides):
    text = "a: {x: [1, {y: 2}], class: B}\nb: [1, 2]\nhooks: [A, {StopAfter: {x: 1}}, A, 3]"
    try:
        config = override(parse(text, "c.yaml"), overrides)
    except ConfigError as error:
        assert error.problems[0].position.source.startswith("override")
    else:
        dump(config)


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


# Overlays


def test_an_overlay_is_merged_but_its_hooks_replace():
    config = parse("a: {x: 1, y: 1}\nhooks: [A, B]\neval: {test: {a: {y: 2}, hooks: [C]}}", "c.yaml")
    found = overlay(config, "test").plain()
    assert found["a"] == {"x": 1, "y": 2}
    assert found["hooks"] == ["C"]


def test_an_overlay_without_hooks_keeps_them():
    assert overlay(parse("hooks: [A]\neval: {test: {seed: 1}}", "c.yaml"), "test").plain()["hooks"] == ["A"]


@pytest.mark.parametrize(
    "text", ["a: 1", "a: 1\neval:", "a: 1\neval: {valid: {a: 2}}", "a: 1\neval: {test: }", "a: 1\neval: {test: 3}"]
)
def test_a_stream_without_an_overlay_has_the_config_as_it_is(text):
    config = parse(text, "c.yaml")
    assert overlay(config, "test") is config


# Interpolation


def interpolated(text, *overrides):
    return interpolate(override(parse(text, "c.yaml"), overrides)).plain()


def interpolation_problem(text):
    return problem_of(interpolate, parse(text, "c.yaml"))


@pytest.mark.parametrize("value", [3, 0.001, True, None, "x", [1, {"b": 2}], {"c": [1.5]}])
def test_one_interpolation_gets_the_type_of_what_it_names(value):
    found = interpolate(node_of({"a": "${b}", "b": value}, Position("x"))).plain()["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text, value",
    [
        ("x${n}", "x3"),
        ("${n}${s}", "3t"),
        ("${n} ", "3 "),
        ("$${n}", "${n}"),
        ("x$${n}${n}", "x${n}3"),
        ("$${", "${"),
        ("$${${n}}", "${3}"),
        ("$n {n} $", "$n {n} $"),
        ("${l.1.k}", 7),
        ("${r.k}", 7),
        ("${m}", {"k": 7}),
        ("${10}", "ten"),
    ],
)
def test_interpolation(text, value):
    config = {"a": text, "n": 3, "s": "t", "l": [0, {"k": 7}], "m": {"k": 7}, "r": "${m}", 10: "ten"}
    assert interpolate(node_of(config, Position("x"))).plain()["a"] == value


def test_interpolations_are_followed():
    assert interpolated("a: ${b}\nb: x${c}\nc: ${d.e}\nd: {e: 1}")["a"] == "x1"


def test_an_override_is_seen_by_every_interpolation():
    assert interpolated("a: ${m.k}\nb: [ 'x${m.k}' ]\nm: {k: 1}", "m.k=5") == {"a": 5, "b": ["x5"], "m": {"k": 5}}


def test_an_override_may_be_an_interpolation():
    assert interpolated("a: 1\nb: 2", "a=${b}") == {"a": 2, "b": 2}


def test_interpolation_leaves_the_merged_config_as_it_was(monkeypatch):
    monkeypatch.setenv("EMRUN_TEST_PW", "hunter2")
    text = "a: ${b}\nb: {c: 1}\nd: x${b.c}\npw: ${env:EMRUN_TEST_PW}\n"
    config = parse(text, "c.yaml")
    assert interpolate(config).plain()["pw"] == "hunter2"
    assert dump(config, text) == text


def test_an_interpolated_value_has_the_position_of_the_interpolation():
    position = interpolate(parse("a: 1\nb:\n  c: ${a}", "c.yaml")).get("b", "c").position
    assert (position.line, position.column) == (3, 6)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: ${modl.lr}\nmodel: {lr: 1}", "${modl.lr}: the config has no 'modl' there; did you mean 'model'?"),
        ("a: ${model.l_r}\nmodel: {lr: 1}", "has no 'l_r' there; did you mean 'lr'?"),
        ("a: ${l.5}\nl: [1]", "has no '5' there"),
        ("a: ${n.x}\nn: 1", "has no 'x' there"),
        ("a: ${}", "has no '' there"),
        ("a: ${a}", "${a} refers to itself: a -> a"),
        ("a: x${b}\nb: ${c}\nc: ${b}", "refers to itself: b -> c -> b"),
        ("a: {b: '${a}'}", "refers to itself: a -> a"),
        ("a: x${b}\nb: [1]", "${b} is no single value, so it cannot be part of a text"),
        ("a: x${b", "'${' without '}'; '$${' stands for a plain '${'"),
        ("a: '${b${c}}'\nc: 1", "'${' without '}'"),
        ("a: ${env:EMRUN_TEST_NOT_SET}", "the environment has no EMRUN_TEST_NOT_SET; set it"),
    ],
)
def test_an_interpolation_that_cannot_be_followed_is_an_error_where_it_stands(text, message):
    problem = interpolation_problem(text)
    assert message in problem.message
    assert problem.position.line > 0


def test_interpolations_cannot_multiply_without_end():
    doubled = "".join(f"a{i}: ['${{a{i - 1}}}', '${{a{i - 1}}}']\n" for i in range(1, 40))
    assert "more than 200000 values" in interpolation_problem("a0: [x, x]\n" + doubled).message
    doubled = "".join(f"a{i}: '${{a{i - 1}}}${{a{i - 1}}}'\n" for i in range(1, 40))
    assert "more than 200000 values" in interpolation_problem("a0: x\n" + doubled).message


def test_interpolations_cannot_go_deeper_without_end():
    chain = "".join(f"a{i}: '${{a{i + 1}}}'\n" for i in range(2000))
    assert "levels" in interpolation_problem(chain + "a2000: x").message
    nested = "".join(f"a{i}: {'[' * 80}'${{a{i + 1}}}'{']' * 80}\n" for i in range(30))
    assert "levels" in interpolation_problem(nested + "a30: x").message


def test_an_override_cannot_make_a_config_too_deep():
    config = override(parse("a: 1", "c.yaml"), [".".join("b" * 99) + "=" + "[" * 99 + "]" * 99])
    assert f"more than {MAX_DEPTH} levels" in problem_of(interpolate, config).message


# Free values


VARS = """\
vars: {width: 32, deep: {a: 1, b: [2]}, opt: {class: SGD}, n: &n 5}
model: {module: {hidden: "${vars.width}", all: "${vars.deep}"}, optimizer: "${vars.opt}"}
dataset: {n: *n, text: "x${vars.deep.a}"}
"""


def test_a_free_value_is_read_by_interpolations_and_overridden():
    found = interpolated(VARS, "vars.width=64", "vars.deep.b.0=3", "vars.deep.new=4")
    assert found["model"]["module"] == {"hidden": 64, "all": {"a": 1, "b": [3], "new": 4}}
    assert found["model"]["optimizer"] == {"class": "SGD"}


@pytest.mark.parametrize(
    "text, override_, message",
    [
        (VARS, "vars.widht=64", "nothing reads ${vars.widht}; did you mean 'width'?"),
        (VARS, "vars={widht: 64}", "nothing reads ${vars.widht}; did you mean 'width'?"),
        (VARS, "vars.opt2.lr=64", "nothing reads ${vars.opt2.lr}"),
        ("a: 1", "vars.a=64", "nothing reads ${vars.a}"),
        (VARS, "eval.test.vars.widht=64", "nothing reads ${vars.widht}"),
    ],
)
def test_an_override_of_a_free_value_that_nothing_reads_is_an_error(text, override_, message):
    problem = override_problem(text, override_)
    assert problem.message == message
    assert problem.position.source == f"override {override_!r}"


@pytest.mark.parametrize("override_", ["vars.b=2", "~vars.a", "vars.a=3", "eval.test.vars.b=1"])
def test_a_free_value_that_is_read_may_come_from_an_override_alone(override_):
    override(parse("vars: {a: 1}\nx: ${vars.b}", "c.yaml"), [override_])


def test_free_values_that_nothing_reads_are_noted():
    text = VARS + "eval: {test: {vars: {width: 1, nothing: 2}}}"
    assert unread_vars(parse(text, "c.yaml")) == ["nothing reads ${vars.nothing} (c.yaml:4:32)"]
    assert unread_vars(parse("vars: {a: {b: 1, c: 2}, d: [1]}\nx: ${vars.a.b}", "c.yaml")) == [
        "nothing reads ${vars.a.c} (c.yaml:1:18)",
        "nothing reads ${vars.d} (c.yaml:1:25)",
    ]


def test_an_overlay_has_free_values_of_its_own():
    config = parse(VARS + "eval: {test: {vars: {width: 1}}}", "c.yaml")
    assert interpolate(overlay(config, "test")).plain()["model"]["module"]["hidden"] == 1


# The environment


@pytest.mark.parametrize(
    "value, whole, in_text",
    [
        ("5", 5, "x5"),
        ("1e-3", 0.001, "x1e-3"),
        ("007", 7, "x007"),
        ("true", True, "xtrue"),
        ("no", "no", "xno"),
        ("word", "word", "xword"),
        ("", None, "x"),
        ("'5'", "5", "x'5'"),
        ("p#ss #1", "p#ss #1", "xp#ss #1"),
        ("&pw", "&pw", "x&pw"),
        ("[1]", "[1]", "x[1]"),
        ("a: b", "a: b", "xa: b"),
        ("${b}", "${b}", "x${b}"),
    ],
)
def test_a_value_of_the_environment_is_a_scalar_of_yaml_and_a_part_of_a_text_as_it_is(
    monkeypatch, value, whole, in_text
):
    monkeypatch.setenv("EMRUN_TEST_VALUE", value)
    found = interpolated("a: ${env:EMRUN_TEST_VALUE}\nb: x${env:EMRUN_TEST_VALUE}")
    assert found == {"a": whole, "b": in_text}
    assert type(found["a"]) is type(whole)


@pytest.mark.parametrize("text, value", [("3", 3), ("", None), ("a,b", "a,b"), ("/data/x", "/data/x"), ("'3'", "3")])
def test_a_default_stands_for_what_the_environment_does_not_have(monkeypatch, text, value):
    monkeypatch.delenv("EMRUN_TEST_VALUE", raising=False)
    assert interpolated(f"a: ${{env:EMRUN_TEST_VALUE,{text}}}") == {"a": value}
    monkeypatch.setenv("EMRUN_TEST_VALUE", "set")
    assert interpolated(f"a: ${{env:EMRUN_TEST_VALUE,{text}}}") == {"a": "set"}


def test_the_environment_is_read_as_often_as_it_is_asked_for(monkeypatch):
    config = parse("a: ${env:EMRUN_TEST_VALUE}", "c.yaml")
    for value in ("one", "two"):
        monkeypatch.setitem(os.environ, "EMRUN_TEST_VALUE", value)
        assert interpolate(config).plain() == {"a": value}


@pytest.mark.parametrize(
    "text",
    [
        "a: ${env:EMRUN_TEST_PW}\nb: ${a.x}",
        "a: ${env:EMRUN_TEST_PW}\nb: x${a}${c}",
        "a: ${env:EMRUN_TEST_PW}\nb: x${l}\nl: ['${a}']",
        "a: x${env:EMRUN_TEST_PW}${env:EMRUN_TEST_NOT_SET}",
    ],
)
def test_what_came_from_the_environment_is_in_no_message(monkeypatch, text):
    monkeypatch.setenv("EMRUN_TEST_PW", "hunter2")
    with pytest.raises(ConfigError) as caught:
        interpolate(parse(text, "c.yaml"))
    assert "hunter2" not in str(caught.value)


def test_what_came_from_the_environment_is_shown_as_the_config_says_it(monkeypatch):
    monkeypatch.setenv("EMRUN_TEST_PW", "hunter2")
    text = "a: ${env:EMRUN_TEST_PW}\nb: x${env:EMRUN_TEST_PW}\nc: ${b}\nd: y${a}\ne: ${env:EMRUN_TEST_NO,7}"
    config = interpolate(parse(text, "c.yaml"))
    assert config.plain() == {"a": "hunter2", "b": "xhunter2", "c": "xhunter2", "d": "yhunter2", "e": 7}
    shown = {"a": "${env:EMRUN_TEST_PW}", "b": "x${env:EMRUN_TEST_PW}", "c": "x${env:EMRUN_TEST_PW}", "d": "y${a}"}
    assert config.shown() == {**shown, "e": 7}


# Defaults


def test_defaults_are_added_where_the_config_has_nothing():
    config = with_defaults(parse("a: 1\nb:", "c.yaml"), {"a": 5, "b": 6, "c": 7})
    assert config.plain() == {"a": 1, "b": 6, "c": 7}


def test_a_file_that_many_extend_is_read_once(tmp_path, monkeypatch):
    for index in range(20):
        (tmp_path / f"{index}.yaml").write_text(f"extends: [{index + 1}.yaml, {index + 1}.yaml]")
    (tmp_path / "20.yaml").write_text("seed: 3")
    assert read_config(tmp_path / "0.yaml").plain() == {"seed": 3}


def test_a_chain_of_files_has_an_end(tmp_path):
    for index in range(101):
        (tmp_path / f"{index}.yaml").write_text(f"extends: {index + 1}.yaml")
    (tmp_path / "101.yaml").write_text("seed: 3")
    assert read_config(tmp_path / "1.yaml").plain() == {"seed": 3}
    with pytest.raises(ConfigError, match=r"100\.yaml:1:10: extends: more than 100 files in a row.*101\.yaml"):
        read_config(tmp_path / "0.yaml")


def test_only_regular_files_are_extended(tmp_path):
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "c.yaml").write_text("extends: fifo.yaml")
    with pytest.raises(ConfigError, match=r"fifo\.yaml: is not a regular file"):
        read_config(tmp_path / "c.yaml")


def test_an_escaped_text_is_not_interpolated():
    for text in ("/a/${x}", "${", "$${x}", "$$$${", "a $ {", "}${a.b}${c}"):
        config = node_of({"path": escaped(text)}, Position("c.yaml"))
        assert interpolate(config).plain() == {"path": text}
