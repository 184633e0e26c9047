"""The lock of a run directory, held by real processes."""

import ctypes
import errno
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from campaign import thinned

from emrun.base.errors import RunInUse
from emrun.storage.files import append_line, flush_lines, truncate, write_atomically
from emrun.storage.lock import RunLock, last_writer_elsewhere, writer_of


class Stranger:
    """A process that was forked before this one took any lock, and that takes the lock of a directory when asked to."""

    def __init__(self, directory):
        words, self._words = os.pipe()
        self._answers, answers = os.pipe()
        self.pid, self._is_there = os.fork(), True
        if not self.pid:
            try:
                os.close(self._words)  # it ends with this process, whatever happens
                obey(words, answers, directory)
            finally:
                os._exit(0)
        os.close(words)
        os.close(answers)

    def ask(self, word):
        """Let it `hold` the lock or `try` to take it; return the error, or an empty text."""
        os.write(self._words, f"{word}\n".encode())
        return os.read(self._answers, 10_000).decode().strip()

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        if self._is_there:
            os.waitpid(self.pid, 0)
            self._is_there = False

    def end(self):
        """Let it end, unless it was killed."""
        with suppress(BrokenPipeError):
            os.write(self._words, b"end\n")
        self.wait()

    def close(self):
        if self._is_there:
            self.end()
        os.close(self._words)
        os.close(self._answers)


def obey(words, answers, directory):
    held = []
    for line in os.fdopen(words):
        said = ""
        if line == "end\n":
            return
        try:
            lock = RunLock(directory)
        except RunInUse as error:
            said = str(error)
        else:
            held.append(lock) if line == "hold\n" else lock.release()
        os.write(answers, f"{said}\n".encode())


@pytest.fixture
def stranger(tmp_path):
    """Another process, which tries to take the lock."""
    process = Stranger(tmp_path)
    yield process
    process.close()


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock until it ends."""
    process = Stranger(tmp_path)
    assert process.ask("hold") == ""
    yield process
    process.close()


def test_another_process_that_holds_it_is_named(tmp_path, holder):
    with pytest.raises(RunInUse, match=f"in use by process {holder.pid} on ") as caught:
        RunLock(tmp_path)
    assert caught.value.exit_status == 75


def test_it_is_free_when_its_process_ended(tmp_path, holder):
    holder.end()
    RunLock(tmp_path).release()


def test_it_is_free_when_its_process_was_killed(tmp_path, holder):
    holder.kill()
    holder.wait()
    RunLock(tmp_path).release()


FORKED = """
import ctypes, sys
from pathlib import Path
from emrun.storage.lock import RunLock
lock, libc = RunLock(Path(sys.argv[1])), ctypes.CDLL(None)
child = libc.fork() or libc.pause()
print(child, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child(tmp_path):
    """A child of a process that was killed; it has a copy of the descriptor, as if it was about to start a command."""
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        process.kill()
    yield child
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that it is not the holder that has the lock")
def test_the_child_of_a_process_that_was_killed_is_waited_for(tmp_path, child, monkeypatch):
    waited = []

    def wait(seconds):
        if not waited:
            os.kill(child, signal.SIGKILL)
        waited.append(seconds)

    monkeypatch.setattr("emrun.storage.lock.sleep", wait)
    RunLock(tmp_path).release()
    assert waited


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that it is not the holder that has the lock")
def test_a_child_that_does_not_let_go_is_not_waited_for_any_longer(tmp_path, child, monkeypatch):
    monkeypatch.setattr("emrun.storage.lock._PATIENCE", 0.05)
    with pytest.raises(RunInUse, match="is in use by another process; try again when it has ended"):
        RunLock(tmp_path)


def test_a_process_does_not_take_it_twice(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(RunInUse, match="another run of this process"):
        RunLock(tmp_path / ".." / tmp_path.name)
    lock.release()
    RunLock(tmp_path).release()


def test_a_refused_attempt_does_not_free_it(tmp_path, holder):
    for _ in range(2):
        with pytest.raises(RunInUse):
            RunLock(tmp_path)


def test_releasing_twice_is_not_an_error(tmp_path):
    lock = RunLock(tmp_path)
    lock.release()
    lock.release()


def test_a_lock_that_is_forgotten_is_released(tmp_path):
    gc.collect()  # what other tests have left
    lock = RunLock(tmp_path)
    assert has_open(os.getpid(), tmp_path / ".lock")
    del lock
    gc.collect()
    assert not has_open(os.getpid(), tmp_path / ".lock")
    RunLock(tmp_path).release()


def test_a_child_process_does_not_inherit_it(tmp_path):
    lock = RunLock(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    lock.release()
    RunLock(tmp_path).release()
    child.communicate()


CONTENTS = ("{", "", "3", '{"pid": 0, "host": "here"}')


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who holds the lock")
@pytest.mark.parametrize("content", thinned(CONTENTS, [CONTENTS[0], CONTENTS[-1]]))
def test_a_damaged_or_older_owner_file_is_harmless(tmp_path, holder, content):
    (tmp_path / ".owner.json").write_text(content.replace("here", socket.gethostname()))
    with pytest.raises(RunInUse, match=f"in use by process {holder.pid} on "):
        RunLock(tmp_path)


def test_the_owner_file_names_the_holder_where_the_system_does_not(tmp_path, holder, monkeypatch):
    monkeypatch.setattr("emrun.storage.lock._holder", lambda descriptor: 0)
    with pytest.raises(RunInUse, match=f"in use by process {holder.pid} on "):
        RunLock(tmp_path)
    (tmp_path / ".owner.json").write_text("{")
    with pytest.raises(RunInUse, match="in use by another process"):
        RunLock(tmp_path)


@pytest.fixture
def forked():
    """Return a function that forks a sleeping child and returns its pid; the child is killed at the end."""
    children = []

    def fork():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"here")
            signal.pause()
            os._exit(0)
        children.append(child)
        assert os.read(read, 4) == b"here"
        os.close(read)
        os.close(write)
        return child

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_reading_the_lock_file_does_not_free_it(tmp_path, stranger):
    lock = RunLock(tmp_path)
    (tmp_path / ".lock").read_bytes()
    assert f"in use by process {os.getpid()} on " in stranger.ask("try")
    lock.release()
    assert stranger.ask("try") == ""


def test_a_forked_child_has_no_descriptor_of_it(tmp_path, forked):
    lock = RunLock(tmp_path)
    child = forked()
    assert not has_open(child, tmp_path / ".lock")
    lock.release()


def has_open(process, path):
    found = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(entry.readlink())
    return path.resolve() in found


def test_a_child_that_is_forked_while_it_is_opened_has_no_descriptor_of_it(tmp_path, forked, monkeypatch):
    found = []
    thread = threading.Thread(target=lambda: found.append(forked()))
    real = os.open

    def fork_meanwhile(*arguments):
        descriptor = real(*arguments)
        if not thread.ident and str(arguments[0]).endswith(".lock"):
            thread.start()
            thread.join(0.3)  # the fork waits
        return descriptor

    monkeypatch.setattr("emrun.storage.lock.os.open", fork_meanwhile)
    lock = RunLock(tmp_path)
    thread.join()
    monkeypatch.undo()
    assert not has_open(found[0], tmp_path / ".lock")
    lock.release()


def test_releasing_frees_it_when_a_child_that_python_does_not_know_of_has_a_copy(tmp_path, stranger):
    lock, libc = RunLock(tmp_path), ctypes.CDLL(None)
    child = libc.fork()
    if child == 0:
        libc.pause()
    lock.release()
    refused = stranger.ask("try")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert refused == ""


def test_a_forked_child_that_ends_frees_nothing(tmp_path, stranger):
    lock = RunLock(tmp_path)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads((tmp_path / ".owner.json").read_text())["pid"] == os.getpid()
    assert f"in use by process {os.getpid()} on " in stranger.ask("try")
    lock.release()


def test_a_forked_child_cannot_write_the_run(tmp_path):
    lock = RunLock(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            write_atomically(tmp_path / "trace.yaml", "")
        except RunInUse as error:
            os._exit(75 if f"in use by process {os.getppid()} on " in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
    assert not (tmp_path / "trace.yaml").exists()
    lock.release()


def test_a_run_whose_lock_file_was_deleted_is_refused_while_its_owner_lives(tmp_path, holder):
    (tmp_path / ".lock").unlink()
    for _ in range(2):
        with pytest.raises(RunInUse, match=f"in use by process {holder.pid} on .* was deleted"):
            RunLock(tmp_path)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # a zombie does not write
    RunLock(tmp_path).release()


CHANGED = [{"started": 1}, {"host": "elsewhere"}, {"pid": 2**22 + 1}, {"pid": "1"}]


@pytest.mark.parametrize("changed", thinned(CHANGED, CHANGED[:2]))
def test_a_run_without_a_lock_file_is_free_when_its_owner_is_not_a_process_of_this_host(tmp_path, holder, changed):
    """A process with the same pid is not the owner if it started at another time."""
    owner = json.loads((tmp_path / ".owner.json").read_text())
    (tmp_path / ".owner.json").write_text(json.dumps({**owner, **changed}))
    (tmp_path / ".lock").unlink()
    RunLock(tmp_path).release()


def changes(directory):
    return [
        lambda: append_line(directory / "metrics.jsonl", "{}"),
        lambda: write_atomically(directory / "trace.yaml", ""),
        lambda: truncate(directory / "metrics.jsonl", 0),
    ]


@pytest.mark.parametrize("file", [".lock", ".owner.json"])
def test_nothing_is_written_once_another_process_has_taken_the_run_over(tmp_path, file):
    lock = RunLock(tmp_path)
    for change in changes(tmp_path):
        change()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    content = (tmp_path / file).read_text().replace(f'"pid": {os.getpid()}', '"pid": 77')
    (tmp_path / file).rename(tmp_path.with_name(f"{tmp_path.name}-kept"))
    (tmp_path / file).write_text(content)
    for change in changes(tmp_path):
        with pytest.raises(RunInUse, match="was taken over") as caught:
            change()
        assert file == ".lock" or "by process 77 on " in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != file} == {
        path: time for path, time in before.items() if path.name != file
    }
    lock.release()
    assert (tmp_path / ".owner.json").exists() == (file == ".owner.json")  # it is the other's
    append_line(tmp_path / "metrics.jsonl", "{}")
    flush_lines()


def test_a_lock_file_or_an_owner_that_is_only_missing_does_not_end_the_run(tmp_path):
    lock = RunLock(tmp_path)
    for name in (".lock", ".owner.json"):
        (tmp_path / name).unlink()
        for change in changes(tmp_path):
            change()
    flush_lines()
    lock.release()


def test_a_forked_child_may_evaluate_which_takes_no_lock(tmp_path):
    lock = RunLock(tmp_path)
    (tmp_path / "eval").mkdir()
    child = os.fork()
    if child == 0:
        write_atomically(tmp_path / "eval" / "trace.yaml", "mine")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "eval" / "trace.yaml").read_text() == "mine"
    lock.release()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such locks")
@pytest.mark.parametrize(
    "number", thinned([errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP], [errno.EINVAL]), ids=errno.errorcode.get
)
def test_a_record_lock_is_used_where_there_are_no_locks_of_open_files(tmp_path, stranger, monkeypatch, number):
    real = fcntl.fcntl

    def without(descriptor, command, argument=0):
        if command in (fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK):
            raise OSError(number, os.strerror(number))
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", without)
    lock = RunLock(tmp_path)
    assert f"in use by process {os.getpid()} on " in stranger.ask("try")
    lock.release()
    RunLock(tmp_path).release()


def test_who_writes_a_run_is_seen_without_taking_or_changing_its_lock(tmp_path, holder, monkeypatch):
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert writer_of(tmp_path) == f"process {holder.pid} on {socket.gethostname()}"
    with monkeypatch.context() as patch:
        patch.setattr("emrun.storage.lock._command", lambda *_: None)  # no locks of open files
        assert writer_of(tmp_path) == f"process {holder.pid} on {socket.gethostname()}"
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    (tmp_path / ".lock").unlink()
    assert writer_of(tmp_path) == f"process {holder.pid} on {socket.gethostname()}"
    holder.kill()
    holder.wait()
    assert writer_of(tmp_path) is None
    assert last_writer_elsewhere(tmp_path) is None


def test_a_run_that_this_process_writes_or_nobody_writes(tmp_path):
    assert writer_of(tmp_path) is None
    lock = RunLock(tmp_path)
    assert writer_of(tmp_path) == f"process {os.getpid()}"
    lock.release()
    assert writer_of(tmp_path) is None
    (tmp_path / ".owner.json").write_text(json.dumps({"pid": 3, "started": 1, "host": "elsewhere"}))
    assert (writer_of(tmp_path), last_writer_elsewhere(tmp_path)) == (None, "process 3 on elsewhere")
