"""YAML to a tree with positions."""

import math
import re

import pytest
from hypothesis import example, given, settings, strategies as st

from emrun.base.errors import ConfigError, Position
from emrun.config.yaml_tree import MAX_DEPTH, MAX_NODES, Node, node_of, parse, read_scalar

BOUNDED = settings(max_examples=60, derandomize=True, deadline=None, database=None)


def problem_of(text):
    with pytest.raises(ConfigError) as caught:
        parse(text, "c.yaml")
    (problem,) = caught.value.problems
    return problem


def place(position):
    return position.line, position.column


# Positions


def test_a_value_and_its_key_know_their_line_and_column():
    node = parse("a: 1\nmodel:\n  lr:  0.5\n", "c.yaml").get("model", "lr")
    assert place(node.key) == (3, 3)
    assert place(node.position) == (3, 8)
    assert node.position.source == "c.yaml"
    assert node.position.text == "  lr:  0.5"


def test_items_of_a_list_have_positions():
    items = parse("hooks:\n  - A\n  - B: {x: 1}\n", "c.yaml").get("hooks").value
    assert [place(item.position) for item in items] == [(2, 5), (3, 5)]
    assert place(items[1].get("B", "x").key_position) == (3, 9)


def test_an_aliased_value_has_the_position_of_the_anchor_and_the_key_of_the_alias():
    node = parse("a: &x\n  lr: 1\nb: *x\n", "c.yaml").get("b")
    assert place(node.key) == (3, 1)
    assert place(node.get("lr").position) == (2, 7)


def test_a_merged_value_keeps_its_position():
    tree = parse("base: &base {lr: 1, k: 2}\nmodel:\n  <<: *base\n  k: 3\n", "c.yaml")
    assert tree.get("model").plain() == {"lr": 1, "k": 3}
    assert place(tree.get("model", "lr").key) == (1, 14)
    assert place(tree.get("model", "k").key) == (4, 3)


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"])
def test_positions_count_every_kind_of_line_break_of_yaml(line_break):
    node = parse(f"a: 1{line_break}b: 2{line_break}", "c.yaml").get("b")
    assert place(node.key) == (2, 1)
    assert node.key.text == "b: 2"


def test_unicode_line_separators_do_not_end_a_line():
    assert problem_of("a: x\u2028y\nb: [").position.text == "b: ["


# What a text can be


def test_of_several_mappings_under_one_merge_key_the_first_wins():
    tree = parse("x: &x {a: 1}\ny: &y {a: 2, b: 2}\nz:\n  <<: [*x, *y]\n  c: 3\n", "c.yaml")
    assert tree.get("z").plain() == {"a": 1, "b": 2, "c": 3}


def test_a_merge_key_in_quotes_is_an_ordinary_key():
    assert parse("'<<': {a: 1}", "c.yaml").plain() == {"<<": {"a": 1}}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~"])
def test_an_empty_document_is_null(text):
    node = parse(text, "c.yaml")
    assert node.value is None
    assert node.position.line == 1 or text == "---\n"


@pytest.mark.parametrize("text, value", [("[1, 2]", [1, 2]), ("word", "word"), ("5", 5)])
def test_a_document_need_not_be_a_mapping(text, value):
    assert parse(text, "c.yaml").plain() == value


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-3", 0.001),
        ("1.0e-3", 0.001),
        (".5", 0.5),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),
        ("+1", 1),
        ("true", True),
        ("null", None),
        ("~", None),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("2020-01-01", "2020-01-01"),
        ("12:30:45", "12:30:45"),
        ("1.2.3", "1.2.3"),
        ("'5'", "5"),
        ('"true"', "true"),
        ("|\n  5\n", "5\n"),
    ],
)
def test_scalars_are_those_of_yaml_1_2_in_plain_types(text, value):
    found = parse(f"a: {text}", "c.yaml").plain()["a"]
    assert found == value
    assert type(found) is type(value)


def test_infinity_and_nan_are_floats():
    assert parse("[.inf, -.inf]", "c.yaml").plain() == [math.inf, -math.inf]
    assert math.isnan(parse(".nan", "c.yaml").plain())


# Errors


@pytest.mark.parametrize(
    "text, line, column, message",
    [
        ("a: 1\nb: !!python/object/apply:os.system [id]", 2, 4, "tag .*os.system is not allowed"),
        ("a: !!str 1", 1, 4, "tag .* is not allowed"),
        ("!x\na: 1", 1, 1, "tag !x is not allowed"),
        ("a: ! 1", 1, 4, "tag ! is not allowed"),
        ("? !x a\n: b", 1, 3, "tag !x is not allowed"),
        ("a: &x\n  b: *x", 2, 6, r"alias \*x contains itself"),
        ("a: 1\nb: *x", 2, 4, r"alias \*x has no anchor &x before it"),
        ("a: 1\nb: 2\na: 3", 3, 1, "key 'a' appears twice; the first is at c.yaml:1:1"),
        ("a: {b: 1, b: 2}", 1, 11, "key 'b' appears twice"),
        ("1: a\ntrue: b", 2, 1, "appears twice"),
        ("a:\n  <<: {x: 1}\n  <<: {y: 1}", 3, 3, "key '<<' appears twice; the first is at c.yaml:2:3"),
        ("<<: 3", 1, 5, "the value of '<<' must be a mapping or a list of mappings"),
        ("<<: [{a: 1}, 3]", 1, 5, "the value of '<<' must be a mapping or a list of mappings"),
        ("? [a]\n: b", 1, 3, "a key must be a single value"),
        ("? {a: 1}\n: b", 1, 3, "a key must be a single value"),
        ("a: 1\n---\nb: 2", 3, 1, "a second YAML document"),
        ("a: b: c", 1, 5, "this line has a second ':'"),
        ("a: [1, 2", 1, 4, r"this '\[' is never closed"),
        ("a: {b: ${c}}", 1, 9, r"a string with \${...} needs quotes inside \[\] and {}"),
        ("a: 1\n\tb: 2", 2, 1, "a tab is not allowed here; indent with spaces"),
        ("a: 'x", 1, 4, "this quote is never closed"),
        ("a: 1\nbell: x\x07y", 2, 8, r"character U\+0007 is not allowed"),
        ("a: \x00", 1, 4, r"character U\+0000 is not allowed"),
        ("a: \ud800", 1, 4, r"character U\+D800 is not allowed"),
        ("%YAML 1.1\n---\na: no", 2, 1, "a config must be YAML 1.2"),
        ("a: 1\nb: 0x_", 2, 4, "'0x_' is not a number; for a string"),
        ("a: ._", 1, 4, "'._' is not a number"),
        ("a: " + "9" * 5000, 1, 4, "is not a number"),
    ],
)
def test_invalid_yaml_is_an_error_at_its_line_and_column(text, line, column, message):
    problem = problem_of(text)
    assert place(problem.position) == (line, column)
    assert problem.position.source == "c.yaml"
    assert re.search(message, problem.message)


@pytest.mark.parametrize(
    "text, line, column, message",
    [
        ("seed:1\nmodel: {a: 1}", 1, 5, "write a space after the colon: seed: 1"),
        ("a: 1\nseed:1\nmodel: {a: 1}", 2, 5, "write a space after the colon: seed: 1"),
        ("a: 1\nseed:1\n", 2, 5, "write a space after the colon: seed: 1"),
        ("a:\n  n: 3\n  class:X  \nb: 3", 3, 8, "write a space after the colon: class: X"),
        ("b: 1\na {b: [c]}\n", 2, 2, "a colon is missing: a: {b: [c]}"),
        ("a: {class:X, n: 3}", 1, 5, "write a space after the colon: class: X"),
        ("dataset\n  class: X", 1, 8, "a colon is missing: dataset:"),
        ("a: 3\ndataset\n\n  # why\n  class: X", 2, 8, "a colon is missing: dataset:"),
        ("a:\n  optimizer\n    class: X", 2, 12, "a colon is missing: optimizer:"),
        ("a:\n  class X\n  n: 3", 2, 8, "a colon is missing: class: X"),
        ("hooks:\n  - StopAfter\n      epochs: 3", 2, 14, "a colon is missing: StopAfter:"),
        ("a: 3\nlr = 3\nb: 1", 2, 3, "write a colon after a key, not '=': lr: 3"),
        ("hooks:\n  - A\n  B: {x: 3}", 3, 3, "this list entry has no dash; write - B: {x: 3}"),
        ("hooks:\n  A\n  B: {x: 3}", 2, 3, "'A' is neither a key nor a list entry; write A: VALUE or - A"),
        ("hooks:\n  A\n  - B: {x: 3}", 2, 3, "'A' is neither a key nor a list entry; write A: VALUE or - A"),
        ("hooks:\n  -A\n  -B: {x: 3}", 2, 4, "write a space after the dash: - A"),
        ("hooks:\n  - A\n  -B: {x: 3}", 3, 4, "write a space after the dash: - B: {x: 3}"),
        ("x: - 3", 1, 4, "a list must begin on a new line, or be written as [a, b]"),
        ("x: 3\n- y", 2, 1, "this list entry is among keys; write all entries of a list with a dash, in one column"),
        ("a:\n  n: 3\n\tm: 3", 3, 1, "a tab is not allowed here; indent with spaces"),
        ("a:\n  class: X\n   n: 3", 3, 4, "'n' is indented further than the key above, which already has a value"),
        ("a: 3\n b: 3", 2, 2, "'b' is indented further than the key above, which already has a value"),
        (
            "a:\n  b: X\n c: 3",
            3,
            2,
            "is indented by 1, the line above by 2; lines that belong together must begin in the same column",
        ),
        (
            "h:\n  - A\n - B",
            3,
            2,
            "is indented by 1, the line above by 2; lines that belong together must begin in the same column",
        ),
        (" a: 3\nb: 3", 1, 2, "is indented, but a line below is not; all top-level keys must begin in one column"),
        ("a: *bias", 1, 4, "alias *bias has no anchor &bias before it; for a string, use quotes: '*bias'"),
        ("a: @home # x", 1, 4, "a string that begins with '@' needs quotes: '@home'"),
        ("a: [`x`, y]", 1, 5, "a string that begins with '`' needs quotes: '`x`'"),
        ("a: %d", 1, 4, "a string that begins with '%' needs quotes: '%d'"),
        ("a: 'it's'", 1, 8, "text follows a closing quote; quote the whole value, and write '' for a ' "),
        ('a: 1\nb: "abc\nc: 3\n', 2, 4, "this quote is never closed"),
        (
            "a:\n  b: [c\n  d: 3",
            3,
            4,
            "a comma or a colon is missing here, a string with ': ' needs quotes, or the '[' of",
        ),
        (
            "a: {b: c, d: 3 # }\ne: 3",
            2,
            1,
            "a comma or a colon is missing here, a string with ': ' needs quotes, or the '{' of",
        ),
        ("a: [b, # c]\n", 2, 1, "the text ends before the brackets are closed"),
        ("a: [b]]", 1, 7, "this ']' has no opening '['"),
        ("a: {b: 1}}\nc: 3", 1, 10, "this '}' has no opening '{'"),
        ("a: {b: 'c]' d: 3}", 1, 13, "a comma or a colon is missing here"),
        ("a: {b: c d: 3}", 1, 11, "a comma or a colon is missing here, a string with ': ' needs quotes, or"),
        ("a: ,", 1, 4, "a value cannot begin with ','; put a string in quotes"),
        ('a: "x\\.y"', 1, 6, "\\. is not an escape sequence that YAML allows in double quotes; use single quotes"),
        (
            'a: "C:\\Users"',
            1,
            7,
            "\\U is not an escape sequence that YAML allows in double quotes; use single quotes",
        ),
    ],
)
def test_a_slip_is_explained_at_its_position(text, line, column, message):
    problem = problem_of(text)
    assert place(problem.position) == (line, column)
    assert problem.message.startswith(message)


def test_a_line_with_unprintable_characters_is_not_shown():
    assert problem_of("a: \x1b[31m").block() == "c.yaml:1:4: character U+001B is not allowed"


def test_an_alias_bomb_is_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20)]
    problem = problem_of("\n".join(lines))
    assert f"more than {MAX_NODES} values after its aliases are expanded" in problem.message
    assert problem.position.line == 6


def test_the_same_alias_may_be_used_many_times():
    tree = parse("a: &a {x: 1}\nb: [" + "*a, " * 1000 + "]", "c.yaml")
    assert tree.plain()["b"] == [{"x": 1}] * 1000


@pytest.mark.parametrize("opening, closing", [("[", "]"), ("{a: ", "}")])
def test_nesting_has_a_limit(opening, closing):
    parse(opening * (MAX_DEPTH - 1) + "1" + closing * (MAX_DEPTH - 1), "c.yaml")
    problem = problem_of(opening * 1000)
    assert f"nested more than {MAX_DEPTH} levels deep" in problem.message
    assert problem.position.column > len(opening) * (MAX_DEPTH - 1)


def test_nesting_through_aliases_counts():
    deep = "[" * (MAX_DEPTH // 2), "]" * (MAX_DEPTH // 2)
    text = f"a: &a {deep[0]}1{deep[1]}\nb: {deep[0]}*a{deep[1]}"
    assert f"nested more than {MAX_DEPTH} levels deep" in problem_of(text).message


def test_a_huge_text_is_refused():
    assert "is larger than" in problem_of("# " + "x" * 10_000_000).message


PIECES = [
    *["a", "b", "1", ".5", "-", "_", "0x", "+", "e", ": ", ":", "- ", "? ", "\n", "\n  ", "\n- ", "{", "}", "[", "]"],
    *[",", "#", " #", "&a ", "*a", "!", "!!str ", "|", ">", "'", '"', "\\", "\\x", "%", "%YAML 1.1\n", "---\n", "..."],
    *["<<: ", "<<", ".inf", "~", "null", "\t", " ", "\u2028", "\x85", "\ufeff", "\r", "\x07", "\U0001f600", "@", "`"],
]


@BOUNDED
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60))
@example("%YAML 1.1\n---\n[+_")
@example("0o!?\x07\t")
def test_any_text_is_a_tree_or_a_config_error_with_a_line(text):
    try:
        node = parse(text, "c.yaml")
    except ConfigError as error:
        assert error.problems[0].position.line > 0
    else:
        assert isinstance(node, Node)


# Back to YAML


# Nodes


def test_get_finds_what_is_below_or_nothing():
    tree = parse("a: {b: 1}\nc: [1]", "c.yaml")
    assert tree.get("a", "b").value == 1
    assert tree.get("a", "x") is None
    assert tree.get("c", "0").value == tree.get("c", 0).value == 1
    assert tree.get("c", "1") is None
    assert tree.get("a", "b", "c") is None


def test_a_tree_of_plain_values_has_one_position():
    position = Position("here")
    node = node_of({"a": [1, (2,)]}, position)
    assert node.plain() == {"a": [1, [2]]}
    assert node.get("a").value[0].position is position


def test_a_spelling_is_shown_instead_of_the_value():
    secret = Node("hunter2", Position("c.yaml"), spelling="${env:PW}")
    number = Node(5, Position("c.yaml"), spelling="${env:N}")
    tree = Node({"a": secret, "b": Node([number], Position("c.yaml"))}, Position("c.yaml"))
    assert tree.plain() == {"a": "hunter2", "b": [5]}
    assert tree.shown() == {"a": "${env:PW}", "b": ["${env:N}"]}


@pytest.mark.parametrize(
    "text, value",
    [
        ("5", 5),
        (" 1e-3 ", 0.001),
        ("true", True),
        ("", None),
        ("null", None),
        ("'5'", "5"),
        ('"a # b"', "a # b"),
        ("007", 7),
        ("p#ss #1", "p#ss #1"),
        ("# x", "# x"),
        ("&pw", "&pw"),
        ("*pw", "*pw"),
        ("!pw", "!pw"),
        ("a: b", "a: b"),
        ("[1, 2]", "[1, 2]"),
        ("'a': b", "'a': b"),
        ("'open", "'open"),
        ("two\nlines", "two\nlines"),
        ("0x_", "0x_"),
        ("\x07", "\x07"),
    ],
)
def test_a_scalar_is_read_without_comments_anchors_or_structure(text, value):
    found = read_scalar(text)
    assert found == value
    assert type(found) is type(value)
