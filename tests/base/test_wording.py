"""What messages suggest and list."""

import pytest

from emrun.base.wording import counted, did_you_mean, duration, in_one_line, listed, progress, span


@pytest.mark.parametrize(
    "name, allowed, hint",
    [
        ("epoch", ["epochs", "minutes"], "; did you mean 'epochs'?"),
        ("stop_after", ["StopAfter"], "; did you mean 'StopAfter'?"),
        ("LR", ["lr"], "; did you mean 'lr'?"),
        ("bfp16", ["fp16", "bf16"], "; did you mean 'bf16'?"),  # both are as near
        ("zzz", ["epochs"], ""),
        ("", ["epochs"], ""),
        ("epochs", [], ""),
    ],
)
def test_the_nearest_name_is_suggested(name, allowed, hint):
    assert did_you_mean(name, allowed) == hint


def test_names_are_listed_in_a_message():
    assert listed(["a", "b"]) == "a, b"
    assert listed([]) == "nothing"


def test_a_count_has_the_right_number_of_its_noun():
    assert [counted(count, "batch", "es") for count in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]
    assert progress(1, 20) == "1 epoch, 20 iterations done"


def test_the_only_name_with_this_beginning_is_suggested():
    assert did_you_mean("acc", ["accuracy", "errors"]) == "; did you mean 'accuracy'?"
    assert did_you_mean("top", ["top_one_error", "top_five_errors"]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 second"), (40.4, "40 seconds"), (89, "89 seconds"), (90, "2 minutes")]
)
def test_a_time_is_written_in_seconds_or_minutes(seconds, text):
    assert duration(seconds) == text


def test_times_and_texts_of_a_table_are_short():
    assert [span(each) for each in (0, 40, 90, 7200, 86400 * 250)] == ["0 s", "40 s", "1.5 min", "2 h", "250 d"]
    assert in_one_line("größer") == "größer"
    assert in_one_line("a\n\x1b[31m\u202e\udcff") == r"a\n\x1b[31m\u202e\udcff"
    assert in_one_line("x" * 10, 4) == "xxxx..."
