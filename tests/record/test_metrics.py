"""The lines of metrics.jsonl: numbers of any kind, damage, cutting back."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from storage.committing import tree

from emrun.base.errors import StorageError
from emrun.record.metrics_log import MetricsLog
from emrun.storage.files import write_atomically
from emrun.storage.run import METRICS


def lines_of(run):
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    text = (run.directory / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_epoch_is_a_line(run):
    record = MetricsLog(run.directory)
    record.add_epoch(0, 0, 0, 0.25, {"train": {"loss": {"mean": 2.5}}})
    record.add_epoch(1, 40, 40, 1.23456789, {"train": {"loss": {"mean": 0.5, "std": 1}}, "valid": {"accuracy": 0.75}})
    expected = [
        {"epoch": 0, "iteration": 0, "seconds": 0.25, "streams": {"train": {"loss": {"mean": 2.5}}}},
        {
            "epoch": 1,
            "iteration": 40,
            "seconds": 1.234568,
            "streams": {"train": {"loss": {"mean": 0.5, "std": 1}}, "valid": {"accuracy": 0.75}},
        },
    ]
    assert lines_of(run) == record.epochs == expected


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1, 1),
        (0.5, 0.5),
        (True, 1),
        (10**30, 10**30),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.float16("nan"), "NaN"),
        (np.int64(3), 3),
        (np.bool_(True), 1),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(3), 3),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(float("inf")), "Infinity"),
        (torch.tensor(0.5, requires_grad=True), 0.5),
    ],
    ids=repr,
)
def test_a_number_of_any_kind_is_a_number(run, value, written):
    record = MetricsLog(run.directory)
    record.add_epoch(1, 1, 1, 0.1, {"train": {"plain": value, "loss": {"mean": value}}})
    (line,) = lines_of(run)
    assert line["streams"]["train"] == {"plain": written, "loss": {"mean": written}}
    assert type(line["streams"]["train"]["plain"]) is type(written)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        [1, 2],
        np.zeros(0),
        np.zeros((2, 2)),
        torch.zeros(0),
        torch.zeros(3),
        np.str_("a"),
        np.datetime64("2026-01-01"),
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_a_number_is_left_out(run, value):
    record = MetricsLog(run.directory)
    record.add_epoch(1, 1, 1, 0.1, {"train": {"matrix": value, "loss": {"all": value, "mean": 1.0}}})
    assert lines_of(run)[0]["streams"] == {"train": {"loss": {"mean": 1.0}}}


def test_a_stream_without_numbers_is_there(run):
    record = MetricsLog(run.directory)
    record.add_epoch(1, 1, 1, 0.1, {"train": {}, "valid": {"x": [1]}})
    assert lines_of(run)[0]["streams"] == {"train": {}, "valid": {}}


def test_a_damaged_line_is_left_out_of_the_metrics_that_are_read(run, caplog):
    record = MetricsLog(run.directory)
    content = b'{"epoch": 0, "streams": {}}\n{"epo\n{"epoch": 2, "streams": {}}\n'
    write_atomically(run.directory / METRICS, content)
    record.load_state_dict({**record.state_dict(), "metrics": [len(content), None]}, 0, 0)
    assert record.epochs == [{"epoch": 0, "streams": {}}, {"epoch": 2, "streams": {}}]
    assert "line 2 is damaged" in caplog.text


def test_an_epoch_that_cannot_be_written_is_not_counted(run):
    record = MetricsLog(run.directory)
    run.trace.begin()
    record.add_epoch(1, 10, 10, 0.1, {})
    before = tree(run.directory)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (record.state_dict()["metrics"][0], limit[1]))  # as on a full disk
    try:
        with pytest.raises(StorageError):
            record.add_epoch(2, 20, 20, 0.1, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert tree(run.directory) == before
    assert len(record.epochs) == 1


def test_the_lines_of_the_epochs_are_flushed_at_the_end_before_the_trace_says_that_it_ended(run, monkeypatch):
    record = MetricsLog(run.directory)
    flushed = []
    run.trace.begin()
    record.add_epoch(1, 10, 10, 0.1, {})
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    run.end("finished", 0, None)
    assert flushed.index(run.directory / METRICS) < flushed.index(run.directory / ".trace.yaml.tmp")


@pytest.mark.parametrize(
    ("harm", "epochs", "said"),
    [
        (lambda lines: lines[:2], [0, 1], "missing epochs: 2, 3."),
        (lambda lines: [*lines[:1], *lines[2:]], [0, 2, 3], "missing epochs: 1."),
        (lambda lines: [*lines[:3], lines[3][:-9]], [0, 1, 2], "missing epochs: 3."),
        (lambda lines: [*lines[:3], lines[3][:-1]], [0, 1, 2, 3], "was changed since the checkpoint was saved"),
        (lambda lines: [], [], "missing epochs: 0, 1, 2, 3."),
        (lambda lines: [lines[0].replace(b"0.5", b"0.7"), *lines[1:]], [0, 1, 2, 3], "was changed since"),
        (
            lambda lines: [lines[0].replace(b": ", b":  "), *lines[1:], lines[3].replace(b"3", b"4", 1)],
            [0, 1, 2, 3],
            "was",
        ),
    ],
    ids=["short", "in the middle", "half a line", "no end of line", "emptied", "edited", "longer and later"],
)
def test_metrics_that_a_checkpoint_counts_on_and_that_are_lost_are_named(run, caplog, harm, epochs, said):
    record = MetricsLog(run.directory)
    for epoch in range(4):
        record.add_epoch(epoch, epoch, epoch, 0.5, {"train": {"loss": {"mean": 0.25}}})
    position, path = record.state_dict(), run.directory / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(harm(lines)))
    record.load_state_dict(position, 3, 3)
    assert said in caplog.text
    assert [line["epoch"] for line in record.epochs] == epochs
    record.add_epoch(4, 4, 4, 0.5, {"train": {}})
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [*epochs, 4]


def test_metrics_that_did_not_change_are_cut_back_without_a_warning(run, caplog):
    record = MetricsLog(run.directory)
    record.add_epoch(0, 0, 0, 0.5, {"train": {}})
    position = record.state_dict()
    record.add_epoch(1, 1, 1, 0.5, {"train": {}})
    record.load_state_dict(position, 0, 0)
    assert [line["epoch"] for line in lines_of(run)] == [0]
    assert "metrics" not in caplog.text
