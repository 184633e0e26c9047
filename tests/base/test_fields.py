"""The kinds of fields: which values fit, and the messages for other values."""

import pytest

from emrun.base.errors import StateError, StorageError
from emrun.base.fields import (
    ANYTHING,
    FILES,
    FLAG,
    SHA256,
    TEXT,
    FieldError,
    choice,
    fitting,
    mapping_of,
    optional,
    reading,
    record,
    sequence_of,
    shown,
    whole,
)

FILE = {"sha256": "0" * 64, "size": 0}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (whole(), 0),
        (whole(-3, 5), -3),
        (choice("a", 1), 1),
        (optional(TEXT), None),
        (optional(record({"a": TEXT})), {"a": "b"}),
        (sequence_of(whole()), (1, 2)),
        (mapping_of(FLAG), {"a": True}),
        (mapping_of(TEXT, names=whole()), {0: ""}),
        (record({"a": whole(), "b": TEXT}, may_lack=["b"]), {"a": 1, "more": None}),
        (SHA256, "0af9" * 16),
        (FILES, {"model.safetensors": FILE, ".hidden": FILE, "with space": FILE}),
        (ANYTHING, object()),
    ],
)
def test_values_of_a_kind_fit(kind, value):
    kind.check(value, "key")


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (whole(), -1, "key is -1, but must be a whole number from 0 to 2**63 - 1"),
        (whole(), True, "key is True, but"),
        (whole(), 1.0, "key is 1.0, but"),
        (whole(), 2**63, "key is 9223372036854775808, but"),
        (whole(most=3), 4, "key is 4, but must be a whole number from 0 to 3"),
        (choice("a", 1), True, "key is True, but must be one of 'a', 1"),
        (optional(TEXT), 3, "key is 3, but must be a string, or None"),
        (optional(record({"a": TEXT})), {"a": 1}, "key.a is 1, but must be a string"),
        (sequence_of(TEXT), "ab", "key is 'ab', but must be a list"),
        (sequence_of(TEXT), ["a", None], "key[1] is None, but must be a string"),
        (mapping_of(FLAG), {3: True}, "a key of key is 3, but must be a string"),
        (mapping_of(FLAG), {"a b": 3}, "key.'a b' is 3, but must be true or false"),
        (
            record({"a": whole()}),
            {},
            "key.a is missing (an earlier version may have made the file), but must be a whole number",
        ),
        (record({"a": whole()}), [], "key is [], but must be a mapping with a"),
        (SHA256, "0" * 63, "key is '000"),
        (SHA256, 3, "key is 3, but must be 64 hexadecimal digits"),
        (
            FILES,
            {"../x": FILE},
            "a key of key is '../x', but must be the name of a file in the same directory, not a path",
        ),
        (FILES, {"/etc/x": FILE}, "a key of key is '/etc/x', but"),
        (FILES, {"..": FILE}, "a key of key is '..', but"),
        (FILES, {"x" * 256: FILE}, "but must be the name of a file"),
        (FILES, {"\udc80\0": FILE}, "but must be the name of a file"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 99 and value.isprintable() else "",
)
def test_what_does_not_fit_is_named_with_its_key_its_value_and_what_was_allowed(kind, value, message):
    with pytest.raises(FieldError) as caught:
        kind.check(value, "key")
    assert message in str(caught.value)
    assert not fitting(value, kind)


def test_the_file_and_what_to_do_are_added_to_the_error_of_a_field():
    with (
        pytest.raises(StateError, match=r"^state.pt: loop is 3, but must be a string; do this$"),
        reading("state.pt", "do this"),
    ):
        TEXT.check(3, "loop")


def test_an_error_of_reading_a_wrong_content_is_a_state_error_with_its_kind():
    said = r"^hook X: its content cannot be used \(KeyError: 'best'\); do this$"
    with pytest.raises(StateError, match=said), reading("hook X", "do this"):
        {}["best"]


def test_an_error_of_a_users_function_that_reads_is_raised_as_it_is_with_a_note():
    def load_state_dict(state):
        return state["best"]

    with pytest.raises(KeyError) as caught, reading("hook X", "do this", load_state_dict):
        load_state_dict({})
    assert caught.value.__notes__[0].endswith("load_state_dict loaded hook X")
    with pytest.raises(StateError, match="hook X: loop is 3"), reading("hook X", "do this", load_state_dict):
        TEXT.check(3, "loop")


@pytest.mark.parametrize(
    "error", [StorageError("x"), OSError("x"), MemoryError(), StateError("x"), KeyboardInterrupt()]
)
def test_errors_that_say_more_pass(error):
    with pytest.raises(type(error)) as caught, reading("state.pt", "do this"):
        raise error
    assert caught.value is error


def test_a_value_is_shown_in_a_few_words_however_large_and_deep_it_is():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    itself = []
    itself.append(itself)
    for value in (deep, itself, 10**6000, "x" * 10**6, {"a": [10**6000] * 1000}):
        assert len(shown(value)) < 300
    while deep:
        deep = deep[0]
