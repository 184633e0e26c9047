"""The run directory: made, written and described by one process."""

import errno
import json
import logging
import multiprocessing
import os
import platform
import resource
import socket
import subprocess
import sys
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML

import emrun
from emrun.errors import ArgumentError, RunInUse, StorageError, UsageError, exit_status
from emrun.storage import run as run_dir
from emrun.storage.files import flush_lines
from emrun.storage.lock import RunLock
from emrun.storage.run import METRICS, Run, create_evaluation, create_run, holds_run, read_trace

TIME = datetime(2026, 11, 20, 21, 3, 1, 987_654, tzinfo=timezone(timedelta(hours=1)))


class Clock:
    """Tells a time that moves by a minute with every look."""

    def __init__(self):
        self.now = TIME

    def __call__(self):
        now, self.now = self.now, self.now + timedelta(minutes=1)
        return now


@pytest.fixture(autouse=True)
def default_format(monkeypatch):
    monkeypatch.delenv("EMRUN_OUTPUT_DIR_FORMAT", raising=False)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, seed=42, command=["emrun", "train", "x.yaml"], clock=Clock())


def create(tmp_path, name="digits", output_dir=None, config="name: digits\n", **options):
    options = {"seed": 42, "clock": lambda: TIME, **options}
    return create_run(config, name, output_root=tmp_path / "log", output_dir=output_dir, **options)


def trace_of(run):
    return YAML(typ="safe").load(run.directory / "trace.yaml")


def lines_of(run):
    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    text = (run.directory / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def tree(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# The trace


def test_the_trace_tells_how_a_run_began(run):
    run.begin()
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
        "emrun": emrun.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": ["emrun", "train", "x.yaml"],
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    assert commit is None or len(commit) in (40, 64)


def test_the_trace_tells_how_far_a_run_is(run):
    run.begin()
    run.record_epoch(0, 0, 0.1, {})
    run.record_epoch(3, 120, 0.1, {})
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
    run.begin()
    run.end(status, code, reason, 77)
    trace = trace_of(run)
    assert (trace["status"], trace["exit_status"], trace["reason"]) == (status, code, reason)
    assert trace["iterations_done"] == 77
    assert (trace["train_begin"], trace["train_end"]) == ("2026-11-20T21:03:01+01:00", "2026-11-20T21:04:01+01:00")


def test_a_run_whose_end_cannot_be_written_is_free_again(tmp_path, monkeypatch):
    run = create(tmp_path, output_dir=tmp_path / "mine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageError):
            run.end("finished", 0, None)
    RunLock(tmp_path / "mine").release()


def test_the_first_end_counts(run):
    run.begin()
    run.end("failed", 1, "the model", 5)
    run.end("finished", 0, "the command", 6)
    trace = trace_of(run)
    assert (trace["status"], trace["exit_status"], trace["reason"], trace["iterations_done"]) == (
        "failed",
        1,
        "the model",
        5,
    )


@pytest.mark.parametrize("reason", ["a: b\n- c", "'\"", "é 漢 😀", "null", "12", "x" * 300, "\0\x1b[0m", "\udcff", "",
                                    "a\nepochs_done: 5\n- b\n#\n" + 30 * "word ", "a\u2028b"])  # fmt: skip
def test_any_reason_can_be_read_again(run, reason):
    run.begin()
    run.end("failed", 1, reason)
    assert trace_of(run)["reason"] == reason


def test_the_trace_keeps_its_order(run):
    run.begin()
    assert list(trace_of(run))[:3] == ["train_begin", "train_end", "epochs_done"]
    assert (run.directory / "trace.yaml").read_text().startswith("train_begin:")


def test_the_trace_is_rewritten_as_a_whole(run, monkeypatch):
    run.begin()
    before = tree(run.directory)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageError, match=r"cannot write .*trace.yaml: the disk is full"):
            run.end("finished", 0, None)
    assert tree(run.directory) == before


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
    run.begin()
    return run


def test_the_trace_of_a_resume_keeps_when_the_run_began_and_how_far_it_was(run):
    previous = {
        "train_begin": "2026-11-19T08:00:00+01:00",
        "epochs_done": 3,
        "iterations_done": 120,
        "seed": 7,
        "status": "running",
        "reason": None,
        "command": ["emrun"],
        "host": "there",
        "pid": 5,
        "resumes": ["the first"],
    }
    run.begin_again(previous, {"checkpoint": "latest"})
    trace = trace_of(run)
    kept = ("train_begin", "epochs_done", "iterations_done", "seed")
    assert {key: trace[key] for key in kept} == {key: previous[key] for key in kept}
    assert (trace["status"], trace["pid"]) == ("running", os.getpid())
    before = {"status": "killed", "reason": None, "command": ["emrun"], "host": "there", "pid": 5}
    entry = {"time": "2026-11-20T21:03:01+01:00", "checkpoint": "latest", "before": before}
    assert trace["resumes"] == ["the first", entry]


@pytest.mark.parametrize("previous", [{}, {"train_begin": None, "resumes": "damaged"}], ids=str)
def test_a_trace_that_was_damaged_begins_with_the_resume(run, previous):
    run.begin_again(previous, {})
    trace = trace_of(run)
    assert trace["train_begin"] == "2026-11-20T21:03:01+01:00"
    assert [entry["before"]["status"] for entry in trace["resumes"]] == ["unknown"]


# Metrics


def test_every_epoch_is_a_line(run):
    run.record_epoch(0, 0, 0.25, {"train": {"loss": {"mean": 2.5}}})
    run.record_epoch(1, 40, 1.23456789, {"train": {"loss": {"mean": 0.5, "std": 1}}, "valid": {"accuracy": 0.75}})
    expected = [
        {"epoch": 0, "iteration": 0, "seconds": 0.25, "streams": {"train": {"loss": {"mean": 2.5}}}},
        {
            "epoch": 1,
            "iteration": 40,
            "seconds": 1.234568,
            "streams": {"train": {"loss": {"mean": 0.5, "std": 1}}, "valid": {"accuracy": 0.75}},
        },
    ]
    assert lines_of(run) == run.metrics == expected


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
    run.record_epoch(1, 1, 0.1, {"train": {"plain": value, "loss": {"mean": value}}})
    (line,) = lines_of(run)
    assert line["streams"]["train"] == {"plain": written, "loss": {"mean": written}}
    assert type(line["streams"]["train"]["plain"]) is type(written)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        [1, 2],
        np.zeros(1),
        np.zeros((2, 2)),
        torch.zeros(1),
        torch.zeros(3),
        1j,
        np.str_("a"),
        np.datetime64("2026-01-01"),
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_number_is_left_out(run, value):
    run.record_epoch(1, 1, 0.1, {"train": {"matrix": value, "loss": {"all": value, "mean": 1.0}}})
    assert lines_of(run)[0]["streams"] == {"train": {"loss": {"mean": 1.0}}}


def test_a_stream_without_numbers_is_there(run):
    run.record_epoch(1, 1, 0.1, {"train": {}, "valid": {"x": [1]}})
    assert lines_of(run)[0]["streams"] == {"train": {}, "valid": {}}


def test_a_damaged_line_is_left_out_of_the_metrics_that_are_read(run, caplog):
    content = b'{"epoch": 0, "streams": {}}\n{"epo\n{"epoch": 2, "streams": {}}\n'
    (run.directory / METRICS).write_bytes(content)
    run.rewind(len(content))
    assert run.metrics == [{"epoch": 0, "streams": {}}, {"epoch": 2, "streams": {}}]
    assert "line 2 is damaged" in caplog.text


def test_an_epoch_that_cannot_be_written_is_not_counted(run):
    run.begin()
    run.record_epoch(1, 10, 0.1, {})
    before = tree(run.directory)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (run.metrics_position["metrics"], limit[1]))  # as on a full disk
    try:
        with pytest.raises(StorageError):
            run.record_epoch(2, 20, 0.1, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert tree(run.directory) == before
    assert len(run.metrics) == 1


def test_the_lines_of_the_epochs_are_flushed_at_the_end_before_the_trace_says_that_it_ended(run, monkeypatch):
    flushed = []
    run.begin()
    run.record_epoch(1, 10, 0.1, {})
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    run.end("finished", 0, None)
    assert flushed.index(run.directory / METRICS) < flushed.index(run.directory / ".trace.yaml.tmp")


def test_the_name_of_the_trace_is_flushed_when_a_training_begins_and_ends_and_not_after_each_epoch(run, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def counts(step):
        flushed.clear()
        step()
        return flushed.count(run.directory / ".trace.yaml.tmp"), flushed[-1] == run.directory

    assert counts(run.begin) == (1, True)
    assert counts(lambda: run.begin_again({}, {})) == (1, True)
    run.record_epoch(1, 10, 0.1, {})
    flush_lines()
    assert counts(lambda: run.record_epoch(2, 20, 0.1, {})) == (1, False)
    flush_lines()
    assert counts(lambda: run.end("finished", 0, None)) == (1, True)


# The log


@pytest.fixture
def root_logger():
    logger = logging.getLogger()
    state = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(state[0])
    assert logger.handlers == state[1]


def test_the_log_of_the_block_is_written(run, root_logger):
    root_logger.setLevel(logging.WARNING)
    logging.getLogger("my_hooks").info("before")
    with run.logging():
        logging.getLogger("my_hooks").info("größe %d", 3)
        logging.getLogger("my_hooks").debug("too much")
    logging.getLogger("my_hooks").warning("after")
    (line,) = (run.directory / "train.log").read_text(encoding="utf-8").splitlines()
    assert line.endswith(": INFO    @test_run_dir  : größe 3")


def test_a_level_below_info_is_kept(run, root_logger):
    root_logger.setLevel(logging.DEBUG)
    with run.logging():
        logging.getLogger("my_hooks").debug("much")
    assert "much" in (run.directory / "train.log").read_text()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_log_is_left_after_the_block(run, root_logger, fails):
    root_logger.setLevel(logging.ERROR)
    before = list(root_logger.handlers)
    try:
        with run.logging():
            (handler,) = [each for each in root_logger.handlers if each not in before]
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert root_logger.handlers == before
    assert root_logger.level == logging.ERROR
    assert handler.stream is None  # its file is closed


def test_an_error_that_ends_the_block_is_in_the_log_with_its_traceback(run, root_logger):
    with pytest.raises(KeyError), run.logging():
        raise KeyError("100 % of 'größe'")
    text = (run.directory / "train.log").read_text(encoding="utf-8")
    assert "Traceback (most recent call last):" in text
    assert "test_run_dir.py" in text
    assert text.endswith("""KeyError: "100 % of 'größe'"\n""")


def test_two_blocks_write_one_after_the_other(run, root_logger):
    for number in range(2):
        with run.logging():
            logging.getLogger("x").warning("block %d", number)
    assert [line[-1] for line in (run.directory / "train.log").read_text().splitlines()] == ["0", "1"]


def test_a_log_that_cannot_be_written_is_a_storage_error(run, root_logger):
    (run.directory / "train.log").mkdir()
    with pytest.raises(StorageError, match=r"cannot write .*train.log: Is a directory"), run.logging():
        pass


# Making one


def test_a_run_directory_is_named_after_the_run_and_the_time(tmp_path):
    run = create(tmp_path, config="name: digits  # größe\n", command=["emrun"])
    assert run.directory == tmp_path / "log" / "digits_20261120-210301"
    assert (run.directory / "config.yaml").read_text(encoding="utf-8") == "name: digits  # größe\n"
    assert sorted(tree(run.directory)) == [".lock", ".owner.json", "config.yaml", "trace.yaml"]
    trace = trace_of(run)
    assert (trace["status"], trace["seed"], trace["command"]) == ("running", 42, ["emrun"])
    assert holds_run(run.directory)


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    names = [create(tmp_path).directory.name for _ in range(4)]
    stem = "digits_20261120-210301"
    assert names == [stem, f"{stem}-2", f"{stem}-3", f"{stem}-4"]


def test_a_name_is_also_taken_by_what_is_no_run(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "digits_20261120-210301").write_text("a file")
    assert create(tmp_path).directory.name == "digits_20261120-210301-2"


@pytest.mark.parametrize(
    ("name", "directory"), [("a/b", "a_b"), ("../x", "_x"), ("größe", "größe"), ("my run", "my_run")]
)
def test_the_directory_lies_in_the_root_whatever_the_name(tmp_path, name, directory):
    assert create(tmp_path, name).directory == tmp_path / "log" / f"{directory}_20261120-210301"


@pytest.mark.parametrize("name", ["", "..", "x" * 101])
def test_a_name_that_cannot_be_one_is_an_error(tmp_path, name):
    with pytest.raises(ArgumentError, match=r"^name: "):
        create(tmp_path, name)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("{name}", "digits"),
        ("{timestamp}-{name}", "20261120-210301-digits"),
        ("{name:>8}", "__digits"),
        ("all", "all"),
        ("{name}/{timestamp}", "digits_20261120-210301"),
        ("../{name}", "_digits"),
    ],
)
def test_an_environment_variable_changes_the_name(tmp_path, monkeypatch, pattern, name):
    monkeypatch.setenv("EMRUN_OUTPUT_DIR_FORMAT", pattern)
    assert create(tmp_path).directory == tmp_path / "log" / name
    assert create(tmp_path).directory == tmp_path / "log" / f"{name}-2"


@pytest.mark.parametrize(
    "pattern",
    ["", "{}", "{0}", "{", "{seed}", "{name.x}", "{name[x]}", "{name:d}", "{name!x}", "{timestamp:%Y}", "x" * 101],
)
def test_a_format_that_cannot_be_used_is_an_error(tmp_path, monkeypatch, pattern):
    monkeypatch.setenv("EMRUN_OUTPUT_DIR_FORMAT", pattern)
    with pytest.raises(UsageError) as raised:
        create(tmp_path)
    assert str(raised.value) == (
        f"EMRUN_OUTPUT_DIR_FORMAT={pattern!r} cannot be used for 'digits'; its fields are {{name}}, {{timestamp}}"
    )
    assert exit_status(raised.value) == 2
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("state", ["absent", "empty", "with other files"])
def test_a_path_of_its_own_may_exist_and_hold_what_is_no_run(tmp_path, state):
    directory = tmp_path / "deep" / "mine"
    if state != "absent":
        directory.mkdir(parents=True)
    if state == "with other files":
        (directory / "notes.txt").write_text("mine")
    run = create(tmp_path, output_dir=directory)
    assert run.directory == directory
    assert (directory / "config.yaml").read_text() == "name: digits\n"
    assert not (tmp_path / "log").exists()
    assert state != "with other files" or (directory / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("file", ["config.yaml", "trace.yaml"])
def test_a_path_that_holds_a_run_is_refused_and_left_untouched(tmp_path, file):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).write_text("old")
    with pytest.raises(UsageError, match=r"mine holds a run already .*choose another") as raised:
        create(tmp_path, output_dir=tmp_path / "mine")
    assert exit_status(raised.value) == 2
    assert tree(tmp_path) == {f"mine/{file}": b"old", "mine/.lock": b""}


def test_a_run_that_was_killed_is_told_as_such(tmp_path):
    create(tmp_path, output_dir=tmp_path / "mine").release()  # as the kernel does
    with pytest.raises(UsageError, match=r"mine holds a run already \(killed\)"):
        create(tmp_path, output_dir=tmp_path / "mine")


def test_a_path_that_is_a_file_is_a_storage_error(tmp_path):
    (tmp_path / "mine").write_text("a file")
    for output_dir in (tmp_path / "mine", tmp_path / "mine" / "below"):
        with pytest.raises(StorageError, match="cannot create"):
            create(tmp_path, output_dir=output_dir)


def test_a_config_that_cannot_be_written_leaves_no_run(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageError, match=r"cannot write .*the disk is full"):
            create(tmp_path, output_dir=tmp_path / "mine")
    assert not holds_run(tmp_path / "mine")
    assert trace_of(create(tmp_path, output_dir=tmp_path / "mine"))["status"] == "running"


def race(contestants):
    """Let all of them pass the same gate; return what each returned or raised."""
    gate, results = threading.Barrier(len(contestants)), []

    def enter(contestant):
        gate.wait()
        try:
            results.append(contestant())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=enter, args=(contestant,)) for contestant in contestants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_two_that_pass_the_check_at_the_same_time_one_wins(tmp_path, monkeypatch):
    """Without the lock this fails."""
    for number in range(10):
        monkeypatch.setattr(run_dir, "holds_run", lambda directory: False)
        directory = tmp_path / str(number)
        configs = ["a" * 10_000, "b" * 10_000]
        contestants = [
            lambda c=config, d=directory: (c, create(tmp_path, output_dir=d, config=c)) for config in configs
        ]
        results = race(contestants)
        (loser,) = [result for result in results if isinstance(result, RunInUse)]
        ((config, run),) = [result for result in results if isinstance(result, tuple)]
        assert "is in use by another training of this process" in str(loser)
        assert (run.directory / "config.yaml").read_text() == config
        assert trace_of(run)["status"] == "running"


def test_runs_that_start_in_the_same_second_get_directories_of_their_own(tmp_path):
    results = race([lambda: create(tmp_path).directory.name] * 8)
    stem = "digits_20261120-210301"
    assert sorted(results) == sorted([stem, *(f"{stem}-{number}" for number in range(2, 9))])


def _contend(directory, gate, results):
    gate.wait()
    try:
        create(directory, output_dir=directory / "mine", config=str(os.getpid()))
        results.put((os.getpid(), "won"))
    except (UsageError, RunInUse):
        results.put((os.getpid(), "refused"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads, from Python 3.12 on
def test_of_several_processes_one_wins(tmp_path):
    context = multiprocessing.get_context("fork")
    gate, results = context.Barrier(4), context.SimpleQueue()
    children = [context.Process(target=_contend, args=(tmp_path, gate, results)) for _ in range(4)]
    for child in children:
        child.start()
    answers = [results.get() for _ in children]
    for child in children:
        child.join()
    (winner,) = [pid for pid, answer in answers if answer == "won"]
    assert len(answers) == 4
    assert (tmp_path / "mine" / "config.yaml").read_text() == str(winner)
    assert YAML(typ="safe").load(tmp_path / "mine" / "trace.yaml")["pid"] == winner


# Evaluations, removal


def test_evaluations_are_numbered_by_stream(tmp_path):
    run = create(tmp_path)
    made = [
        create_evaluation(run.directory / "eval", stream, "x: 1\n", clock=lambda: TIME)
        for stream in ("test", "test", "a/b")
    ]
    assert [str(each.directory.relative_to(run.directory)) for each in made] == [
        "eval/test-1",
        "eval/test-2",
        "eval/a_b-1",
    ]
    for each in made:
        assert (each.directory / "config.yaml").read_text() == "x: 1\n"
        assert trace_of(each)["status"] == "running"


def test_an_evaluation_leaves_the_files_of_the_run_alone(tmp_path):
    run = create(tmp_path)
    before = tree(run.directory)
    evaluation = create_evaluation(run.directory / "eval", "test", "x: 1\n")
    evaluation.record_epoch(0, 0, 0.1, {})
    evaluation.end("finished", 0, None)
    after = tree(run.directory)
    assert {name: content for name, content in after.items() if not name.startswith("eval")} == before


@pytest.mark.parametrize("stream", ["", ".."])
def test_a_stream_that_cannot_name_a_directory_is_an_error(tmp_path, stream):
    with pytest.raises(ArgumentError, match=r"^stream: "):
        create_evaluation(create(tmp_path).directory / "eval", stream, "")


def test_removing_deletes_the_directory_and_nothing_beside_it(tmp_path):
    run, other = create(tmp_path), create(tmp_path)
    run.remove()
    assert not run.directory.exists()
    assert holds_run(other.directory)
    with pytest.raises(StorageError, match="cannot delete"):
        run.remove()


def test_a_directory_holds_a_run_when_it_has_a_config_or_a_trace(tmp_path):
    assert not holds_run(tmp_path)
    assert not holds_run(tmp_path / "gone")
    (tmp_path / "metrics.jsonl").touch()
    assert not holds_run(tmp_path)
    (tmp_path / "trace.yaml").touch()
    assert holds_run(tmp_path)


def test_the_checkpoints_lie_in_the_directory(run):
    assert run.checkpoints == run.directory / "checkpoints"
    assert not run.checkpoints.exists()


# what is read of a run


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("status: fini\nseed: 3\n", {"seed": 3}),
        ("seed: [3]\nepochs_done: -1\nreason: {}\npid: x\nhas_checkpoints: 1\n", {}),
        ("resumes: [3]\ncommand: emrun\nforked_from: x\n", {}),
        ("[" * 3000, {}),
        ("status: running\nmore: [1]\n", {"status": "running", "more": [1]}),
    ],
    ids=["status", "numbers", "lists", "deep", "unknown"],
)
def test_fields_of_a_trace_that_cannot_be_are_left_out(tmp_path, text, left):
    (tmp_path / "trace.yaml").write_text(text)
    assert read_trace(tmp_path) == left


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
    for epoch in range(4):
        run.record_epoch(epoch, epoch, 0.5, {"train": {"loss": {"mean": 0.25}}})
    position, path = run.metrics_position, run.directory / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(harm(lines)))
    run.rewind(position["metrics"], position["metrics_digest"], range(position["metrics_first"], 4))
    assert said in caplog.text
    assert [line["epoch"] for line in run.metrics] == epochs
    run.record_epoch(4, 4, 0.5, {"train": {}})
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [*epochs, 4]


def test_metrics_that_are_as_they_were_are_cut_back_without_a_word(run, caplog):
    run.record_epoch(0, 0, 0.5, {"train": {}})
    position = run.metrics_position
    run.record_epoch(1, 1, 0.5, {"train": {}})
    run.rewind(position["metrics"], position["metrics_digest"], range(1))
    assert [line["epoch"] for line in lines_of(run)] == [0]
    assert "metrics" not in caplog.text
