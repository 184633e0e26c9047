"""Run directories: their names, new ones, evaluations, their ends, what one holds."""

import errno
import multiprocessing
import os
import sys
import threading
from datetime import datetime, timedelta, timezone

import pytest
from ruamel.yaml import YAML
from storage.committing import trace_of, tree

from emrun.base.errors import ArgumentError, RunInUse, StorageError, UsageError, exit_status
from emrun.record.metrics_log import MetricsLog
from emrun.storage import run as run_module
from emrun.storage.lock import RunLock
from emrun.storage.run import create_evaluation, create_run, holds_run

TIME = datetime(2026, 11, 20, 21, 3, 1, 987_654, tzinfo=timezone(timedelta(hours=1)))


def create(tmp_path, name="digits", output_dir=None, config="name: digits\n", **options):
    options = {"seed": 42, "clock": lambda: TIME, **options}
    return create_run(config, name, output_root=tmp_path / "log", output_dir=output_dir, **options)


def test_a_run_directory_is_named_after_the_run_and_the_time(tmp_path):
    run = create(tmp_path, config="name: digits  # größe\n", command=["emrun"])
    assert run.directory == tmp_path / "log" / "digits_20261120-210301"
    assert (run.directory / "config.yaml").read_text(encoding="utf-8") == "name: digits  # größe\n"
    plain = [".config.yaml.json", ".trace.yaml.json"]
    names = [".lock", ".owner.json", *plain, "config.yaml", "trace.yaml"]
    assert sorted(tree(run.directory)) == sorted(names)
    trace = trace_of(run)
    assert (trace["status"], trace["seed"], trace["command"]) == ("running", 42, ["emrun"])
    assert holds_run(run.directory)


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    names = [create(tmp_path).directory.name for _ in range(4)]
    stem = "digits_20261120-210301"
    assert names == [stem, f"{stem}-2", f"{stem}-3", f"{stem}-4"]


def test_a_directory_that_is_not_a_run_takes_a_name_too(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "digits_20261120-210301").write_text("a file")
    assert create(tmp_path).directory.name == "digits_20261120-210301-2"


@pytest.mark.parametrize(
    ("name", "directory"), [("a/b", "a_b"), ("../x", "_x"), ("größe", "größe"), ("my run", "my_run")]
)
def test_the_directory_lies_in_the_root_whatever_the_name(tmp_path, name, directory):
    assert create(tmp_path, name).directory == tmp_path / "log" / f"{directory}_20261120-210301"


@pytest.mark.parametrize("name", ["", "..", "x" * 101])
def test_a_name_that_is_not_valid_is_an_error(tmp_path, name):
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
        f"EMRUN_OUTPUT_DIR_FORMAT={pattern!r} is not a valid format for 'digits'; "
        "its fields are {name}, {overrides}, {timestamp}"
    )
    assert exit_status(raised.value) == 2
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("state", ["absent", "empty", "with hidden files"])
def test_an_output_dir_may_exist_if_it_is_empty(tmp_path, state):
    directory = tmp_path / "deep" / "mine"
    if state != "absent":
        directory.mkdir(parents=True)
    if state == "with hidden files":
        (directory / ".notes").write_text("mine")
        (directory / "lost+found").mkdir()
    run = create(tmp_path, output_dir=directory)
    assert run.directory == directory
    assert (directory / "config.yaml").read_text() == "name: digits\n"
    assert not (tmp_path / "log").exists()
    assert state != "with hidden files" or (directory / ".notes").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
def test_an_output_dir_that_is_not_empty_is_refused_and_left_untouched(tmp_path, kind):
    directory = tmp_path / "mine"
    directory.mkdir()
    place = directory / "job.out"
    {
        "file": lambda: place.write_text("mine"),
        "folder": place.mkdir,
        "link": lambda: place.symlink_to("nowhere"),
        "pipe": lambda: os.mkfifo(place),
    }[kind]()
    with pytest.raises(UsageError, match=r"is not empty: it has job\.out\. .*such as to .*mine\.out"):
        create(tmp_path, output_dir=directory)
    assert [path.name for path in directory.iterdir() if path.name != ".lock"] == ["job.out"]


def test_a_name_that_the_run_has_not_had_is_not_claimed_if_something_is_there(tmp_path):
    run = create(tmp_path)
    run.claim(["training.csv", "plots/", "matrix_*.png"])
    run.trace.write()
    for name in ("training.csv", "matrix_1.png"):
        (run.directory / name).write_text("of the run")
    run.claim(["matrix_*.png", "more.csv", "more.csv"])
    run.trace.write()
    assert trace_of(run)["files"] == ["training.csv", "plots/", "matrix_*.png", "more.csv"]
    (run.directory / "notes").mkdir()
    for name in ("notes/", "note*"):
        with pytest.raises(UsageError, match=r"the run has not written .*notes, which one of its hooks would write"):
            run.claim([name])


def test_a_start_after_a_failed_one_knows_the_names_that_it_wrote(tmp_path):
    failed = create(tmp_path, output_dir=tmp_path / "mine")
    failed.claim(["training.csv"])
    failed.end("failed", 1, "no data", 0, 0)
    (tmp_path / "mine" / "training.csv").write_text("epoch")
    run = create(tmp_path, output_dir=tmp_path / "mine")
    run.claim(["training.csv"])
    assert trace_of(run)["files"] == ["training.csv"]


@pytest.mark.parametrize("file", ["config.yaml", "trace.yaml"])
def test_a_path_that_holds_a_run_is_refused_and_left_untouched(tmp_path, file):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).write_text("old")
    with pytest.raises(UsageError, match=r"mine already holds a run .*choose another") as raised:
        create(tmp_path, output_dir=tmp_path / "mine")
    assert exit_status(raised.value) == 2
    assert tree(tmp_path) == {f"mine/{file}": b"old", "mine/.lock": b""}


def test_a_run_that_was_killed_is_reported_as_killed(tmp_path):
    create(tmp_path, output_dir=tmp_path / "mine").release()  # as the kernel does
    with pytest.raises(UsageError, match=r"mine already holds a run \(killed\)"):
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
    """Let all calls start at the same time; return what each call returned or raised."""
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
        monkeypatch.setattr(run_module, "holds_run", lambda directory: False)
        directory = tmp_path / str(number)
        configs = ["a" * 10_000, "b" * 10_000]
        contestants = [
            lambda c=config, d=directory: (c, create(tmp_path, output_dir=d, config=c)) for config in configs
        ]
        results = race(contestants)
        (loser,) = [result for result in results if isinstance(result, RunInUse)]
        ((config, run),) = [result for result in results if isinstance(result, tuple)]
        assert "is in use by another run of this process" in str(loser)
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
    MetricsLog(evaluation.directory).add_epoch(0, 0, 0, 0.1, {})
    evaluation.end("finished", 0, None)
    after = tree(run.directory)
    assert {name: content for name, content in after.items() if not name.startswith("eval")} == before


@pytest.mark.parametrize("stream", ["", ".."])
def test_a_stream_that_cannot_name_a_directory_is_an_error(tmp_path, stream):
    with pytest.raises(ArgumentError, match=r"^stream: "):
        create_evaluation(create(tmp_path).directory / "eval", stream, "")


def test_a_directory_holds_a_run_when_it_has_a_config_or_a_trace(tmp_path):
    assert not holds_run(tmp_path)
    assert not holds_run(tmp_path / "gone")
    (tmp_path / "metrics.jsonl").touch()
    assert not holds_run(tmp_path)
    (tmp_path / "trace.yaml").touch()
    assert holds_run(tmp_path)


def test_a_run_whose_end_cannot_be_written_is_free_again(tmp_path, monkeypatch):
    run = create(tmp_path, output_dir=tmp_path / "mine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageError):
            run.end("finished", 0, None)
    RunLock(tmp_path / "mine").release()


def test_the_first_end_counts(run):
    run.trace.begin()
    run.end("failed", 1, "the model", 0, 5)
    run.end("finished", 0, "the command", 0, 6)
    trace = trace_of(run)
    assert (trace["status"], trace["exit_status"], trace["reason"], trace["iterations_done"]) == (
        "failed",
        1,
        "the model",
        5,
    )


def test_the_checkpoints_lie_in_the_directory(run):
    assert run.checkpoints == run.directory / "checkpoints"
    assert not run.checkpoints.exists()


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def without_links(request, monkeypatch):
    """Let links be refused as by a file system that has none."""

    def refuse(*arguments, **options):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(os, "symlink", refuse)


@pytest.mark.parametrize("given", [None, "mine"])
def test_a_file_system_without_links_is_found_when_the_run_is_made(tmp_path, without_links, monkeypatch, given):
    with pytest.raises(StorageError, match=r"has no symbolic links .*choose a directory elsewhere with -o or --output"):
        create(tmp_path, output_dir=given and tmp_path / given)
    monkeypatch.undo()  # another directory, and the same one once it lies elsewhere
    assert create(tmp_path, output_dir=tmp_path / "mine").directory == tmp_path / "mine"


def test_another_error_of_a_link_is_told_as_it_is(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(StorageError, match=r"cannot write in .*: the disk is full"):
        create(tmp_path)
