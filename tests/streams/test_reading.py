"""How streams are read: invalid values, and how far ahead."""

import pytest

from emrun.base.errors import ArgumentError
from emrun.streams.reading import Reading


@pytest.mark.parametrize(
    ("argument", "values", "message"),
    [
        ("buffer", {"buffer": -1}, "-1 is not a whole number of at least 0"),
        ("workers", {"workers": True}, "True is not a whole number of at least 0"),
        ("start_method", {"start_method": "thread"}, "'thread' is not one of fork, forkserver, spawn"),
        ("stream_timeout", {"timeout": 0}, "must be a positive number of seconds, not 0"),
    ],
)
def test_a_value_that_cannot_be_used_is_an_error_under_the_name_in_main_loop(argument, values, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        Reading(**values)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("reading", "ahead", "of_each"),
    [(Reading(1, 3), 1, 1), (Reading(4, 3), 4, 2), (Reading(workers=3), 6, 2), (Reading(6, 3), 6, 2)],
)
def test_workers_share_the_buffer_or_have_two_batches_each(reading, ahead, of_each):
    assert (reading.ahead, reading.ahead_of_each) == (ahead, of_each)


def test_a_thread_reads_ahead_only_with_a_buffer():
    assert (Reading(4).ahead, Reading().ahead) == (4, 0)
