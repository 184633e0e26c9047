"""The trace: what it says, when it is written, how it is read."""

import errno
import os
import platform
import socket
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from storage.committing import trace_of, tree

import emrun
from emrun.base.errors import StorageError
from emrun.storage.run import Run
from emrun.storage.trace import mark_pruned, read_trace


def test_the_trace_tells_how_a_run_began(run):
    run.trace.begin()
    trace = trace_of(run)
    commit = trace.pop("git_commit")
    assert trace == {
        "train_begin": "2026-11-20T21:03:01+01:00",
        "train_end": None,
        "epochs_done": 0,
        "iterations_done": 0,
        "exit_status": None,
        "status": "running",
        "reason": None,
        "seed": 42,
        "threads": torch.get_num_threads(),
        "ranks": 1,
        "emrun": emrun.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": ["emrun", "train", "x.yaml"],
        "directory": str(run.directory),
        "files": [],
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    assert commit is None or len(commit) in (40, 64)


def test_the_trace_tells_how_far_a_run_is(run):
    run.trace.begin()
    run.trace.count(0, 0)
    run.trace.count(3, 120)
    trace = trace_of(run)
    assert (trace["epochs_done"], trace["iterations_done"], trace["status"]) == (3, 120, "running")


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        ("finished", 0, "StopAfter: 20 epochs"),
        ("interrupted", 130, "interrupted by SIGINT"),
        ("failed", 1, "KeyError: 'x'"),
        ("failed", 1, None),
    ],
)
def test_the_trace_tells_how_a_run_ended(run, status, code, reason):
    run.trace.begin()
    run.end(status, code, reason, 0, 77)
    trace = trace_of(run)
    assert (trace["status"], trace["exit_status"], trace["reason"]) == (status, code, reason)
    assert trace["iterations_done"] == 77
    assert (trace["train_begin"], trace["train_end"]) == ("2026-11-20T21:03:01+01:00", "2026-11-20T21:04:01+01:00")


@pytest.mark.parametrize("reason", ["a: b\n- c", "'\"", "é 漢 😀", "null", "12", "x" * 300, "\0\x1b[0m", "\udcff", "",
                                    "a\nepochs_done: 5\n- b\n#\n" + 30 * "word ", "a\u2028b"])  # fmt: skip
def test_any_reason_can_be_read_again(run, reason):
    run.trace.begin()
    run.end("failed", 1, reason)
    assert trace_of(run)["reason"] == reason


def test_the_trace_keeps_its_order(run):
    run.trace.begin()
    assert list(trace_of(run))[:3] == ["train_begin", "train_end", "epochs_done"]
    assert (run.directory / "trace.yaml").read_text().startswith("train_begin:")


def test_the_trace_is_rewritten_as_a_whole(run, monkeypatch):
    run.trace.begin()
    before = tree(run.directory)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageError, match=r"cannot write .*trace.yaml: the disk is full"):
            run.end("finished", 0, None)
    after = tree(run.directory)
    assert {**after, ".trace.yaml.json": None} == {**before, ".trace.yaml.json": None}
    assert read_trace(run.directory)["status"] == "running"  # the plain content of another text is not read


def test_the_git_commit_is_that_of_the_current_directory(tmp_path, monkeypatch):
    identity = {"NAME": "a", "EMAIL": "a@b.c"}
    for role in ("AUTHOR", "COMMITTER"):
        for key, value in identity.items():
            monkeypatch.setenv(f"GIT_{role}_{key}", value)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert trace_of(began(tmp_path))["git_commit"] is None
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *arguments], check=True, timeout=30)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True, timeout=30)
    assert trace_of(began(tmp_path))["git_commit"] == head.stdout.strip()


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trace_of(began(tmp_path))["git_commit"] is None


def began(directory):
    run = Run(directory)
    run.trace.begin()
    return run


def test_the_trace_of_a_resume_keeps_when_the_run_began_and_how_far_it_was(run):
    previous = {
        "train_begin": "2026-11-19T08:00:00+01:00",
        "epochs_done": 3,
        "iterations_done": 120,
        "status": "running",
        "reason": None,
        "command": ["emrun"],
        "directory": "/elsewhere",
        "host": "there",
        "pid": 5,
        "resumes": ["the first"],
    }
    run.trace.begin_again(previous, {"checkpoint": "latest"})
    trace = trace_of(run)
    kept = ("train_begin", "epochs_done", "iterations_done")
    assert {key: trace[key] for key in kept} == {key: previous[key] for key in kept}
    assert (trace["status"], trace["pid"]) == ("running", os.getpid())
    before = {"status": "killed", "reason": None, "command": ["emrun"], "directory": "/elsewhere"}
    before |= {"host": "there", "pid": 5}
    entry = {"time": "2026-11-20T21:03:01+01:00", "checkpoint": "latest", "before": before}
    assert trace["resumes"] == ["the first", entry]


@pytest.mark.parametrize("previous", [{}, {"train_begin": None, "resumes": "damaged"}], ids=str)
def test_a_trace_that_was_damaged_begins_with_the_resume(run, previous):
    run.trace.begin_again(previous, {})
    trace = trace_of(run)
    assert trace["train_begin"] == "2026-11-20T21:03:01+01:00"
    assert [entry["before"]["status"] for entry in trace["resumes"]] == ["unknown"]


def test_the_trace_and_its_name_are_flushed(run, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    for step in (run.trace.begin, lambda: run.trace.begin_again({}, {}), lambda: run.end("finished", 0, None)):
        flushed.clear()
        step()
        assert flushed[:2] == [run.directory / ".trace.yaml.tmp", run.directory]


class SetClock:
    """Returns the time that was set, in seconds after the beginning."""

    seconds = 0.0

    def __call__(self):
        return datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=self.seconds)


@pytest.fixture
def clock():
    return SetClock()


@pytest.fixture
def timed(tmp_path, clock):
    run = Run(tmp_path, clock=clock)
    run.trace.begin()
    return run


def epochs_in_traces(run, clock, times):
    """Return the number of epochs in the trace after epochs that ended at these times."""
    found = []
    for epoch, clock.seconds in enumerate(times, start=1):
        run.trace.count(epoch, 10 * epoch)
        found.append(trace_of(run)["epochs_done"])
    return found


def test_the_trace_is_written_at_most_every_ten_seconds_while_epochs_pass(timed, clock):
    assert epochs_in_traces(timed, clock, [1, 9.9, 10, 11, 19.9, 20, 300, 301]) == [0, 0, 3, 3, 3, 6, 7, 7]


def test_the_trace_is_written_when_the_clock_was_set_back(timed, clock):
    assert epochs_in_traces(timed, clock, [5, -3600, -3599, -3590]) == [0, 2, 2, 4]


def test_after_a_resume_the_trace_is_written_every_ten_seconds_too(timed, clock):
    clock.seconds = 100
    timed.trace.begin_again({"epochs_done": 2}, {})
    assert epochs_in_traces(timed, clock, [101, 109, 110]) == [2, 2, 3]


def test_the_end_of_a_run_and_that_it_has_checkpoints_are_in_the_trace_at_once(timed, clock):
    timed.trace.count(1, 10)
    timed.trace.write(has_checkpoints=True)
    trace = trace_of(timed)
    assert (trace["has_checkpoints"], trace["epochs_done"]) == (True, 1)
    timed.trace.count(2, 20)
    timed.end("interrupted", 130, None, 2, 25)
    trace = trace_of(timed)
    assert (trace["status"], trace["epochs_done"], trace["iterations_done"]) == ("interrupted", 2, 25)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("status: fini\nseed: 3\n", {"seed": 3}),
        ("seed: [3]\nepochs_done: -1\nreason: {}\npid: x\nhas_checkpoints: 1\n", {}),
        ("resumes: [3]\ncommand: emrun\nfiles: {}\n", {}),
        pytest.param("[" * 1100, {}, marks=pytest.mark.campaign),
        ("status: running\nmore: [1]\n", {"status": "running", "more": [1]}),
    ],
    ids=["status", "numbers", "lists", "deep", "unknown"],
)
def test_fields_of_a_trace_that_cannot_be_are_left_out(tmp_path, text, left):
    (tmp_path / "trace.yaml").write_text(text)
    assert read_trace(tmp_path) == left


def test_a_run_that_was_pruned_says_so_and_the_rest_stays(run):
    run.trace.begin()
    run.end("interrupted", 143, "interrupted by SIGTERM", 2, 10)
    before = trace_of(run)
    mark_pruned(run.directory, "pruned after epoch 2")
    assert trace_of(run) == {**before, "status": "pruned", "reason": "pruned after epoch 2"}
    assert read_trace(run.directory)["status"] == "pruned"
