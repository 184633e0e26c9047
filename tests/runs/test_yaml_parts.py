"""Reading single values of a YAML text: what is read is what the parser of configs reads."""

from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emrun.base.errors import ConfigError, Position
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import node_of, parse
from emrun.runs import yaml_parts
from emrun.runs.yaml_parts import MISSING, Unclear, split_text

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "sample_configs").rglob("*.yaml"))
CONFIG = """\
# a comment
seed: 42
name: 'digits'    # quoted
dataset: {class: Digits, batch_size: 32}
model:
  module:
    class: my_model.Net
    channels: 32
    rate: 1.0e-3
    text: "channels: 64"
  inputs:
  - image
  - "label"
hooks:
  - ComputeStats: {variables: [loss]}
  - LogVariables
  - SaveBest:
      variable: accuracy
      condition: max
"""


def places(value, path=()):
    """Yield each path in a plain tree, with the value at it."""
    yield path, value
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in entries:
        yield from places(child, (*path, str(key)))


def check_all(text):
    """Check each value that is read against the parser's; return whether the text was split."""
    parts = split_text(text)
    try:
        tree = parse(text, "").plain()
    except ConfigError:
        return parts is not None
    if parts is not None:
        for path, value in islice(dict(reversed([*places(tree)])).items(), 200):
            with suppress(Unclear):
                assert repr(parts.get(*path)) == repr(value), path
    return parts is not None


def test_each_value_is_read_as_the_parser_reads_it():
    assert check_all(CONFIG)
    assert split_text(CONFIG).get("model", "module", "channels") == 32
    assert split_text(CONFIG).get("model", "module", "depth") is MISSING
    assert split_text(CONFIG).get("model", "module", "channels", "x") is MISSING
    assert split_text(CONFIG).get("hooks", "2", "SaveBest", "condition") == "max"


def test_only_the_part_with_the_value_is_parsed(monkeypatch):
    seen = []
    monkeypatch.setattr(yaml_parts, "_parsed", seen.append)
    split_text(CONFIG).get("model", "module", "channels")
    split_text(CONFIG).get("name")
    assert seen == []
    split_text(CONFIG).get("dataset", "class")
    assert seen == []
    split_text(CONFIG).get("hooks", "0", "ComputeStats", "variables")
    assert seen == ["value: {variables: [loss]}"]


@pytest.mark.parametrize("text", [
    "base: &base {a: 1}\nmodel:\n  <<: *base\n",
    "a: 'x\nseed: 1'\n",
    'a: "x\nseed: 1"\n',
    "a: {b: 1,\nseed: 2}\n",
    "seed: 1\nseed: 2\n",
    "a:\tb\n",
    "[1, 2]\n",
    "--- \nseed: 1\n",
    "a: |\n    x\n",
    "true: 1\n",
    "",
])  # fmt: skip
def test_what_is_not_simple_is_left_to_the_parser(text):
    parts = split_text(text)
    if parts is not None:
        with pytest.raises(Unclear):
            parts.get("a")


def test_the_samples_are_read_right():
    for path in SAMPLES:
        text = path.read_text(encoding="utf-8")
        assert check_all(text) or "<<" in text, path


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.from_regex(r"[a-z_][\w.-]{0,6}", fullmatch=True), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["seed", "model", "on", "a-b", "x.y", "hooks"]), TREES, min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_whatever_emrun_writes_is_read_right(tree):
    check_all(dump(node_of(tree, Position(""))))


@given(st.lists(st.sampled_from([
    "a: 1", "b:", "  c: 2", "  - x", "- y", "  d: {e: 1,", "    f: 2}", "'q'", "  g: 'open", "  h: |", "    # text",
    "# note", "", "  i: >-", "   j: [1, 2] # end", 'k: "a # b"', "  - l: 1", "    m: 2", "n: it's", "  o: *a",
    "p: &a 1", "q: {a: 1, b: x-y, c: 'z'}", "  r: {a: 1, a: 2}", "s: {a: 1 , b: on}",
]), max_size=8))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_whatever_lines_there_are_they_are_read_right_or_not_at_all(lines):
    check_all("\n".join(lines))
