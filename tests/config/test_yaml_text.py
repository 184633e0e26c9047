"""A tree written as YAML: read back it is the same, and an earlier text keeps its comments and formatting."""

import math
import string
from dataclasses import replace

import pytest
from hypothesis import example, given, settings, strategies as st

from emrun.base.errors import Position
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import node_of, parse

BOUNDED = settings(max_examples=60, derandomize=True, deadline=None, database=None)
KEYS = st.text(max_size=8) | st.integers()
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.text(string.printable + "\x85\u2028\ufeff", max_size=8)
    | st.sampled_from(["no", "1e3", "2020-01-01", "~", "<<", " x ", "a: b", "# c", "'", "${x}", "\n", "*a", "0x_"])
)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


def typed(value):
    """Return a value in which 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return {(type(key), key): typed(child) for key, child in value.items()}
    if isinstance(value, list):
        return [typed(child) for child in value]
    return type(value), repr(value)


@BOUNDED
@given(TREES)
@example({"\x85": "\u2028 \ufeff"})
def test_a_dumped_tree_is_read_back_the_same(value):
    assert typed(parse(dump(node_of(value, Position("x"))), "c.yaml").plain()) == typed(value)


@BOUNDED
@given(TREES, TREES)
@example({"a": 1}, {"a": 1.0})
@example({"a": 1}, {"a": True})
@example({"a": math.nan}, {"a": math.nan})
@example({"a": 0.0}, {"a": -0.0})
def test_a_tree_dumped_like_another_text_is_read_back_the_same(old, new):
    template = dump(node_of(old, Position("x")))
    assert typed(parse(dump(node_of(new, Position("x")), template), "c.yaml").plain()) == typed(new)


TEMPLATE = """\
# what this is about
model:
  lr: 1.0e-3          # small
  betas: [0.9, 0.999]
  # a word on the class
  class: 'Net'
hooks:                # in this order
  - A
  - B: {x: 1}         # second
"""


def test_dumping_like_the_text_itself_changes_nothing():
    assert dump(parse(TEMPLATE, "c.yaml"), TEMPLATE) == TEMPLATE


def with_a_key(tree):
    return replace(tree, value={**tree.value, "seed": node_of(3, Position("default"))})


def with_an_item(tree):
    items = replace(tree.get("a"), value=[node_of("z", Position("default")), *tree.get("a").value])
    return replace(tree, value={**tree.value, "a": items})


@pytest.mark.parametrize(
    ("add", "template", "dumped"),
    [
        (with_a_key, "a: {b: 1}  # as it is\n# the end", "a: {b: 1}  # as it is\n# the end\nseed: 3\n"),
        (with_a_key, "a: {b: 1}  # as it is\n...\n", "a: {b: 1}  # as it is\nseed: 3\n"),
        (with_a_key, "{a: {b: 1}}", "{a: {b: 1}, seed: 3}\n"),
        (with_a_key, "a: |+\n  1\n\n", "a: |+\n  1\n\nseed: 3\n"),
        (
            with_an_item,
            "a:\n  # two\n  -   x: 1  # one\n  -   y\nb: 2",
            "a:\n  # two\n  -   z\n  -   x: 1  # one\n  -   y\nb: 2\n",
        ),
        (with_an_item, "a:\n- x\n", "a:\n- z\n- x\n"),
        (with_an_item, "a: [x]  # one\n", "a: [z, x] # one\n"),
        (with_an_item, "a:\n  - x\n  - &b y\n  - *b\n", "a:\n  - z\n  - x\n  - &b y\n  - *b\n"),
    ],
)
def test_what_is_added_leaves_the_rest_of_the_text_as_it_is(add, template, dumped):
    assert dump(add(parse(template, "c.yaml")), template) == dumped


def test_dumping_like_a_text_keeps_its_comments_where_values_change():
    tree = parse(
        TEMPLATE.replace("1.0e-3", "0.5").replace("x: 1", "x: 2, y: 3").replace("'Net'", "'Net'\nseed: 7"), "c.yaml"
    )
    text = dump(tree, TEMPLATE)
    for comment in ("# what this is about", "# small", "# a word on the class", "# in this order", "# second"):
        assert comment in text
    assert parse(text, "c.yaml").plain() == tree.plain()


def test_dumping_like_a_text_keeps_its_comments_where_a_list_has_an_item_more_in_front():
    text = dump(parse(TEMPLATE.replace("- A", "- C\n  - A"), "c.yaml"), TEMPLATE)
    assert text == TEMPLATE.replace("- A", "- C\n  - A")


def test_dumping_like_a_text_drops_keys_that_the_tree_no_longer_has():
    text = dump(parse("model: {lr: 1}", "c.yaml"), "# kept\nmodel: {lr: 1, old: 2}\nseed: 4\n")
    assert text == "# kept\nmodel: {lr: 1}\n"


@pytest.mark.parametrize(
    "template, changed",
    [
        ("a: &x {lr: 1}  # note\nb: *x\n", {"a": {"lr": 2}, "b": {"lr": 1}}),
        ("a: &x {lr: 1}  # note\nb: {<<: *x, k: 1}\n", {"a": {"lr": 1}, "b": {"k": 1}}),
        ("a: &x {lr: 1}  # note\nb: {<<: *x, k: 1}\n", {"a": {"lr": 5}, "b": {"lr": 1, "k": 1}}),
    ],
)
def test_comments_are_dropped_where_anchors_would_change_values(template, changed):
    text = dump(node_of(changed, Position("x")), template)
    assert parse(text, "c.yaml").plain() == changed
    assert "# note" not in text


def test_an_anchor_may_be_defined_twice_in_the_template():
    template = "a: &x 1\nb: &x 2\nc: 2  # note\n"
    assert dump(parse(template, "c.yaml"), template) == template


@pytest.mark.parametrize("template", ["", "- a\n", "{", "a: 1\n---\nb: 2\n"])
def test_a_template_that_cannot_be_used_is_ignored(template):
    assert parse(dump(parse("a: 1", "c.yaml"), template), "c.yaml").plain() == {"a": 1}


def test_values_that_share_an_anchor_are_dumped_without_it():
    assert dump(parse("a: &x {b: 1}\nc: *x\n", "c.yaml")) == "a:\n  b: 1\nc:\n  b: 1\n"
