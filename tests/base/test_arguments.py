"""Checks of arguments, and paths."""

from pathlib import Path
from typing import Literal

import pytest

from emrun.base.arguments import check_choice, check_count, check_number, check_seconds, expanded, safe_component
from emrun.base.errors import ArgumentError


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("digits_convnet", "digits_convnet"),
        ("epoch-10", "epoch-10"),
        ("v1.2", "v1.2"),
        ("größe", "größe"),
        ("a b/c", "a_b_c"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("..\\x", "_x"),
        (".hidden", "hidden"),
        ("a\0b\nc", "a_b_c"),
        ("~/x", "__x"),
        ("$(rm -rf)", "__rm_-rf_"),
        ("a" * 100, "a" * 100),
    ],
)
def test_a_name_becomes_one_component_of_a_path(tmp_path, name, safe):
    assert safe_component("name", name) == safe
    assert (tmp_path / safe).parent == tmp_path


@pytest.mark.parametrize("name", ["", ".", "..", "...", "a" * 101])
def test_a_name_without_usable_characters_or_too_long_is_an_error(name):
    with pytest.raises(ArgumentError, match=r"^stream: .* cannot name a file or a directory") as raised:
        safe_component("stream", name)
    assert raised.value.exit_status == 2


@pytest.mark.parametrize(
    "path, name",
    [
        ("~/a b", "HOME/a b"),
        ("~", "HOME"),
        ("a/~", "a/~"),
        ("/x/~/y", "/x/~/y"),
        ("~nobody-of-that-name/x", None),
        ("", ""),
    ],
)
def test_a_home_directory_is_expanded_at_the_beginning_only(monkeypatch, tmp_path, path, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded(path) == Path((path if name is None else name).replace("HOME", str(tmp_path)))


@pytest.mark.parametrize("value", ["a", "b"])
def test_a_choice_is_one_of_a_literal(value):
    check_choice("x", value, Literal["a", "b"])


@pytest.mark.parametrize("value", ["c", "", None, 1, ["a"]])
def test_any_other_choice_is_an_error(value):
    with pytest.raises(ArgumentError, match="is not one of a, b") as caught:
        check_choice("x", value, Literal["a", "b"])
    assert caught.value.argument == "x"


@pytest.mark.parametrize("value", [2, 3, 10**20])
def test_a_count_is_a_whole_number(value):
    check_count("n", value, minimum=2)


@pytest.mark.parametrize("value", [1, -1, 2.0, True, "2", None, [2]])
def test_any_other_count_is_an_error(value):
    with pytest.raises(ArgumentError, match="is not a whole number of at least 2"):
        check_count("n", value, minimum=2)


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), -float("inf"), 0, 1, -1])
def test_a_value_that_is_not_a_finite_number_within_the_limits_is_an_error(value):
    with pytest.raises(ArgumentError, match=r"^decay: .* is not a number between 0 and 1$"):
        check_number("decay", value, "a number between 0 and 1", above=0, below=1)


def test_numbers_within_the_limits_are_accepted():
    check_number("decay", 0.5, above=0, below=1)
    check_number("alpha", 0, least=0)
    check_number("end", -(10**300))


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_whole_numbers_that_no_float_can_hold_are_an_error(value):
    with pytest.raises(ArgumentError, match=r"0 is not a number$"):
        check_number("end", value)
    with pytest.raises(ArgumentError, match=r"must be a positive number of seconds, not -?10"):
        check_seconds("timeout", value)
