"""How long an example takes."""

import logging
from array import array

import pytest

from emrun.base.errors import ArgumentError
from emrun.hooks import Benchmark


def lines(caplog):
    return [each.getMessage() for each in caplog.records if each.name == "emrun.hooks.benchmark"]


@pytest.mark.parametrize(("arguments", "line"), [
    ({}, "train: 15 ms an example (median 10 ms)"),
    ({"batch_size": 5}, "train: 10 ms an example (median 6 ms)"),
])  # fmt: skip
def test_the_last_batch_is_left_out(arguments, line, caplog):
    caplog.set_level(logging.INFO)
    profile = {
        "eval_batch_train": array("d", [0.02, 0.03, 0.1, 99.0]),
        "batch_length_train": array("d", [2, 3, 4, 1]),
        "eval_batch_valid": array("d", [1.0]),
        "batch_length_valid": array("d", [4]),
    }
    Benchmark(**arguments).after_epoch_profile(1, profile, ["train", "valid"])
    assert lines(caplog) == [line]


def test_a_run_logs_a_line_for_each_stream_of_each_epoch(train_digits, in_docstring, caplog):
    caplog.set_level(logging.INFO)
    train_digits(in_docstring(Benchmark))
    assert [line.split(":")[0] for line in lines(caplog)] == ["train", "valid", "train", "valid"]


def test_a_batch_size_of_0_is_an_error():
    with pytest.raises(ArgumentError, match="batch_size"):
        Benchmark(batch_size=0)
