"""How the entries of `extra_streams` are read."""

import pytest

from emrun.base.errors import ArgumentError
from emrun.extra_streams import ExtraStream, read_extra_streams


def read(*entries):
    return read_extra_streams(entries, "train", "train_eval")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("valid", ExtraStream()),
        ({"valid": None}, ExtraStream()),
        ({"valid": 2}, ExtraStream(every=2)),
        ({"valid": "5 epochs"}, ExtraStream(every=5)),
        ({"valid": {"batches": 20}}, ExtraStream(batches=20)),
        ({"valid": {"every": "5 epochs", "batches": 20}}, ExtraStream(5, 20)),
    ],
    ids=str,
)
def test_an_entry_says_how_often_and_how_much(entry, expected):
    assert read(entry) == {"valid": expected}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            {"valid": {"batch": 20}},
            r"valid: unknown key 'batch'; did you mean 'batches'\? \(it may have every, batches\)",
        ),
        ({"valid": {"batches": 0}}, "valid: batches is 0, not a whole number of at least 1"),
        ({"valid": {"batches": "all"}}, "valid: batches is 'all', not a whole number"),
        ({"valid": {"batches": True}}, "valid: batches is True, not a whole number"),
        (
            {"valid": "200 updates"},
            "valid: '200 updates' is not a number of epochs; extra streams are evaluated after an epoch. For an epoch "
            "of that many updates, set main_loop.fixed_epoch_size: 200 updates",
        ),
        ({"valid": {"every": "1 iteration"}}, "For an epoch of that many iterations, set main_loop.fixed_epoch_size"),
        ({"valid": "often"}, "'often' is not an interval; write for example '5 epochs'"),
        ({"valid": 1, "test": 2}, "is not a stream; write a name"),
    ],
    ids=str,
)
def test_an_entry_that_cannot_be_read_is_an_error_that_says_what_to_write(entry, expected):
    with pytest.raises(ArgumentError, match=expected):
        read(entry)
