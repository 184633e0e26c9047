"""What a docstring says to those who write a config; tests/cli/test_looking.py explains classes of one's own."""

import inspect

import pytest

from emrun.config.docstrings import explained, with_defaults


def described(text, function):
    return with_defaults(text, inspect.signature(function).parameters)


def test_defaults_stand_beside_the_names_and_raises_is_left_out():
    text = (
        "Does.\n\nArgs:\n    a: the first,\n        in two lines.\n    b (int): the second.\n\nRaises:\n    No: no.\n"
    )
    assert described(text, lambda a, b=3: None) == (
        "Does.\n\nArgs:\n    a: the first,\n        in two lines.\n    b (default 3) (int): the second."
    )


def test_what_stands_behind_raises_is_kept():
    assert with_defaults("Does.\n\nRaises:\n    ValueError: no.\n\nSee elsewhere.", {}) == "Does.\n\nSee elsewhere."


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("best", " (default best)"),
        ("", ' (default "")'),
        ("null", ' (default "null")'),
        (True, " (default true)"),
        (1e-8, " (default 1e-08)"),
        ((0.9, 0.999), " (default [0.9, 0.999])"),
        (None, ""),
        (float("inf"), ""),
        (print, ""),
    ],
    ids=repr,
)
def test_a_default_is_written_as_yaml_if_that_is_possible(value, written):
    assert described("Does.\n\nArgs:\n    a: it.", lambda a=value: None) == f"Does.\n\nArgs:\n    a{written}: it."


def test_a_default_that_the_text_names_is_not_added():
    text = "Does.\n\nArgs:\n    a: it. Default: 3."
    assert described(text, lambda a=3: None) == text


def test_an_object_without_a_use_in_a_config_has_its_docstring_alone():
    assert explained("inspect.cleandoc", inspect.cleandoc) == inspect.getdoc(inspect.cleandoc)
