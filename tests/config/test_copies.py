"""Notes about copies, made by YAML anchors, that an override did not change."""

import pytest

from emrun.config.overrides import copies_left, override
from emrun.config.yaml_tree import node_of, parse
from emrun.errors import Position

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


def test_an_override_that_changes_nothing_gets_no_note():
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
def test_values_that_are_not_copied_or_never_used_get_no_note(text, override):
    assert [note for note in left_by(text, override) if "hooks.0" not in note] == []


def test_equal_values_in_a_mapping_without_a_file_are_not_copies():
    config = node_of({"a": {"n": 1}, "b": {"n": 1}}, Position("config"))
    assert copies_left(config, override(config, ["a.n=2"])) == []
