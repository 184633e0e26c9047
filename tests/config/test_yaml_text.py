"""A tree written as YAML: read back it is the same, and an earlier text stays if parts were only added."""

import math
import string
from dataclasses import replace

import pytest
from campaign import thinned
from hypothesis import example, given, settings, strategies as st

from emrun.base.errors import Position
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import node_of, parse

COUNTS = thinned([20, 200], [20])  # of trees
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


def bounded(count):
    return settings(max_examples=count, derandomize=True, deadline=None, database=None)


@pytest.mark.parametrize("count", COUNTS)
def test_a_dumped_tree_is_read_back_the_same(count):
    @bounded(count)
    @given(TREES)
    @example({"\x85": "\u2028 \ufeff"})
    def check(value):
        assert typed(parse(dump(node_of(value, Position("x"))), "c.yaml").plain()) == typed(value)

    check()


@pytest.mark.parametrize("count", COUNTS)
def test_a_tree_dumped_like_another_text_is_read_back_the_same(count):
    @bounded(count)
    @given(TREES, TREES)
    @example({"a": 1}, {"a": 1.0})
    @example({"a": 1}, {"a": True})
    @example({"a": math.nan}, {"a": math.nan})
    @example({"a": 0.0}, {"a": -0.0})
    def check(old, new):
        template = dump(node_of(old, Position("x")))
        assert typed(parse(dump(node_of(new, Position("x")), template), "c.yaml").plain()) == typed(new)

    check()


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
        (with_a_key, "{a: {b: 1}}  # one", "a:\n  b: 1\nseed: 3\n"),
        (
            with_an_item,
            "a:\n  # two\n  -   x: 1  # one\n  -   y\nb: 2",
            "a:\n  # two\n  -   z\n  -   x: 1  # one\n  -   y\nb: 2\n",
        ),
        (with_an_item, "a:\n- x\n", "a:\n- z\n- x\n"),
        (with_an_item, "a: [x]  # one\n", "a:\n  - z\n  - x\n"),
        (with_an_item, "a:\n  - x\n  - &b y\n  - *b\n", "a:\n  - z\n  - x\n  - &b y\n  - *b\n"),
    ],
)
def test_what_is_added_leaves_the_rest_of_the_text_as_it_is(add, template, dumped):
    assert dump(add(parse(template, "c.yaml")), template) == dumped


@pytest.mark.parametrize("changed", [TEMPLATE.replace("1.0e-3", "0.5"), TEMPLATE.replace("  - A\n", "")])
def test_a_text_of_which_a_value_has_changed_is_written_anew(changed):
    tree = parse(changed, "c.yaml")
    assert parse(dump(tree, TEMPLATE), "c.yaml").plain() == tree.plain()
    assert "#" not in dump(tree, TEMPLATE)


def test_an_anchor_may_be_defined_twice_in_the_template():
    template = "a: &x 1\nb: &x 2\nc: 2  # note\n"
    assert dump(parse(template, "c.yaml"), template) == template


@pytest.mark.parametrize("template", ["", "- a\n", "{", "a: 1\n---\nb: 2\n"])
def test_a_template_that_cannot_be_used_is_ignored(template):
    assert parse(dump(parse("a: 1", "c.yaml"), template), "c.yaml").plain() == {"a": 1}


def test_values_that_share_an_anchor_are_dumped_without_it():
    assert dump(parse("a: &x {b: 1}\nc: *x\n", "c.yaml")) == "a:\n  b: 1\nc:\n  b: 1\n"
