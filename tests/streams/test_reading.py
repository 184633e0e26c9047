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


class Images:
    read_ahead = 4


@pytest.mark.parametrize(
    ("reading", "ahead"),
    [(Reading(), 4), (Reading(0), 0), (Reading(1), 1), (Reading(workers=1), 2), (Reading(0, 1), 2)],
)
def test_a_dataset_says_how_many_batches_are_read_ahead_unless_the_config_does(reading, ahead):
    assert reading.of(Images()).ahead == ahead
    assert reading.of(object()).ahead == (ahead if reading != Reading() else 0)


@pytest.mark.parametrize("value", ["4", -1, True, None])
def test_a_wrong_number_of_a_dataset_is_refused(value):
    dataset = Images()
    dataset.read_ahead = value
    with pytest.raises(ArgumentError, match=r"^read_ahead: .* is not a whole number of at least 0"):
        Reading().of(dataset)
