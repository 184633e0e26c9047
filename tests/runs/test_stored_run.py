"""A run as its directory describes it, also where the directory is damaged or somebody else's."""

import math
import os

import pytest

from emrun.base.errors import StorageError
from emrun.record.steps import Chunk
from emrun.runs.stored_run import MISSING, StoredRun, number, size_below, statistic

ACCURACIES = (0.1, 0.7, 0.6)


@pytest.fixture
def stored(make_run):
    return StoredRun(make_run("one", ACCURACIES).directory)


def test_a_run_says_how_it_stands(stored):
    assert (stored.status, stored.reason) == ("finished", "finished here")
    assert (stored.epochs_done, stored.iterations_done) == (2, 20)
    assert (stored.end - stored.begin).total_seconds() == 120
    assert stored.size == sum(path.stat().st_size for path in stored.directory.rglob("*") if path.is_file())
    assert stored.problems == []


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed", "killed", "running"])
def test_the_status_is_that_of_the_trace_and_the_lock(make_run, status):
    run = make_run("one", ACCURACIES, status=status)
    stored = StoredRun(run.directory)
    assert stored.status == status
    assert (stored.epochs_done, stored.iterations_done) == (2, 20)  # the trace is older where the run has no end
    assert (stored.end is None) is (status == "running")
    run.release()


def test_looking_at_a_run_changes_nothing_in_it(make_run):
    run = make_run("one", ACCURACIES, status="killed")
    before = {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")}
    stored = StoredRun(run.directory)
    _ = stored.status, stored.epochs_done, stored.size, stored.value("seed"), list(stored.steps())
    assert {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")} == before


def test_epochs_and_steps_are_read(make_run):
    chunks = [Chunk(1, 1, {"loss": [0.5, float("nan")]}), Chunk(3, 1, {"loss": [0.25]})]
    stored = StoredRun(make_run("one", ACCURACIES, steps=chunks).directory)
    assert [statistic(epoch, "valid/accuracy") for epoch in stored.epochs()] == list(ACCURACIES)
    assert [statistic(epoch, "valid/accuracy/std") for epoch in stored.epochs()] == [0.5] * 3
    assert [chunk.first for chunk in stored.steps()] == [1, 3]


@pytest.mark.parametrize(("key", "value"), [
    ("seed", 42), ("model.optimizer.lr", 0.003), ("model.module.channels", 32), ("model.module.width", 32),
    ("hooks.StopAfter.epochs", 3), ("hooks.stop_after.epochs", 3), ("hooks.2.condition", "max"),
    ("hooks.2", {"variable": "accuracy", "condition": "max"}), ("hooks.LogVariables", "LogVariables"),
    ("hooks.Missing.epochs", MISSING), ("hooks.9", MISSING), ("model.module.depth", MISSING), ("seed.x", MISSING),
])  # fmt: skip
def test_a_value_of_the_config_is_found_by_its_key(stored, key, value):
    assert stored.value(key) == value


def test_a_config_that_was_edited_is_read_again(stored):
    assert stored.value("model.optimizer.lr") == 0.003
    path = stored.directory / "config.yaml"
    path.write_text(path.read_text().replace("0.003   # low", "0.1"))
    edited = StoredRun(stored.directory)
    assert [edited.value(key) for key in ("model.optimizer.lr", "model.module.width")] == [0.1, 32]


def test_values_of_the_environment_are_not_read(make_run, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    config = "a: ${env:TOKEN}\nb: x-${env:TOKEN}-${c}\nc: ${d}\nd: 7\n"
    stored = StoredRun(make_run("one", config=config).directory)
    assert [stored.value(key) for key in "abc"] == ["${env:TOKEN}", "x-${env:TOKEN}-7", 7]


def test_references_in_a_circle_are_a_problem(make_run):
    stored = StoredRun(make_run("one", config="a: ${b}\nb: ${a}\n").directory)
    assert stored.value("a") is MISSING
    assert "refers to itself" in stored.problems[0]


def test_other_files_that_a_config_extends_are_not_read(make_run, tmp_path):
    (tmp_path / "other.yaml").write_text("model: {secret: 1}\n")
    stored = StoredRun(make_run("one", config=f"extends: {tmp_path / 'other.yaml'}\nseed: 1\n").directory)
    assert stored.value("model.secret") is MISSING
    assert "model" not in stored.config


@pytest.mark.parametrize(("content", "problem"), [
    (b"", "status is missing"),
    (b"status: finished\nepochs_done: -1\nseed: 1\n", "epochs_done is -1"),
    (b"status: sleeping\nseed: 1\n", "status is 'sleeping'"),
    (b"status: &a [*a]\n", "contains itself"),
    (b"\xff\xfe", "not encoded in UTF-8"),
    (b"a: {\n", "trace.yaml:"),
    (b"x" * 1_000_001, "larger than"),
])  # fmt: skip
def test_a_damaged_trace_is_a_problem_and_no_error(make_run, content, problem):
    directory = make_run("one", ACCURACIES).directory
    (directory / "trace.yaml").write_bytes(content)
    stored = StoredRun(directory)
    assert stored.status == ("finished" if b"finished" in content else "damaged")
    assert problem in " ".join(stored.problems)
    assert (stored.epochs_done, stored.end is None, stored.reason) == (2, False, None)


@pytest.mark.parametrize("name", ["trace.yaml", "config.yaml", "metrics.jsonl", "steps.jsonl"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(make_run, name):
    directory = make_run("one", ACCURACIES, status="killed").directory
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    stored = StoredRun(directory)
    assert stored.status == ("damaged" if name == "trace.yaml" else "killed")
    assert stored.epochs_done == (0 if name == "metrics.jsonl" else 2)
    for read in (lambda: list(stored.epochs()), lambda: list(stored.steps()), lambda: stored.value("seed")):
        try:
            read()
        except StorageError as error:
            assert "not a regular file" in str(error)


def test_damaged_lines_are_counted(make_run):
    directory = make_run("one", ACCURACIES).directory
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "streams"\n[]\n{"epoch": 4, "streams": {"valid": {"loss": "x"}}}\n')
    (directory / "steps.jsonl").write_text('{"format": 2, "from": 1, "every": 1}\nnothing\n')
    stored = StoredRun(directory)
    assert [epoch["epoch"] for epoch in stored.epochs()] == [0, 1, 2, 4]
    assert list(stored.steps()) == []
    assert stored.problems == [
        "metrics.jsonl: line 4 is damaged or not of an epoch; it is ignored, and 1 more",
        "steps.jsonl: line 1 has format 2, but this emrun reads 1; ignored, and 1 more",
    ]


def test_a_statistic_is_a_number_or_none():
    streams = {"valid": {"loss": {"mean": "NaN", "max": True}, "f1": 0.5, "a/b": {"mean": 2, "std": 1e400}, "x": "y"}}
    found = {
        address: statistic({"streams": streams}, address)
        for address in ("valid/f1", "valid/f1/mean", "valid/f1/std", "valid/a/b", "valid/a/b/mean", "valid/a/b/std")
    }
    assert list(found.values()) == [0.5, 0.5, None, 2.0, 2.0, float("inf")]
    assert repr(statistic({"streams": streams}, "valid/loss")) == "nan"
    for address in ("valid/loss/max", "valid/x", "test/loss", "valid", "", "//"):
        assert statistic({"streams": streams}, address) is None
    assert [number(10**400), number(-(10**400)), number(2**63)] == [math.inf, -math.inf, 2.0**63]


def test_the_size_does_not_count_what_links_lead_to(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "large").write_bytes(b"x" * 10_000)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "large")
    (tmp_path / "run" / "up").symlink_to(tmp_path)
    assert size_below(tmp_path / "run") < 1000


def test_the_size_counts_a_file_with_several_names_once(tmp_path):
    (tmp_path / "first").write_bytes(b"x" * 1000)
    (tmp_path / "second").hardlink_to(tmp_path / "first")
    assert size_below(tmp_path) == 1000
