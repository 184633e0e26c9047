"""The lock of a run directory, held by real processes."""

import gc
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from emrun.errors import RunInUse
from emrun.lock import RunLock

HOLD = """
import sys
from pathlib import Path
from emrun.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.communicate()


def test_another_process_that_holds_it_is_named(tmp_path, holder):
    with pytest.raises(RunInUse, match=f"in use by process {holder.pid} on ") as caught:
        RunLock(tmp_path)
    assert caught.value.exit_status == 75


def test_it_is_free_when_its_process_ended(tmp_path, holder):
    holder.communicate("")
    RunLock(tmp_path).release()


def test_it_is_free_when_its_process_was_killed(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    RunLock(tmp_path).release()


def test_a_process_does_not_take_it_twice(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(RunInUse, match="another training of this process"):
        RunLock(tmp_path / ".." / tmp_path.name)
    lock.release()
    RunLock(tmp_path).release()


def test_a_refused_attempt_does_not_free_it(tmp_path, holder):
    for _ in range(2):
        with pytest.raises(RunInUse):
            RunLock(tmp_path)


def test_releasing_twice_is_no_error(tmp_path):
    lock = RunLock(tmp_path)
    lock.release()
    lock.release()


def test_a_lock_that_is_forgotten_is_released(tmp_path):
    gc.collect()  # what other tests have left
    before = psutil.Process().num_fds()
    lock = RunLock(tmp_path)
    del lock
    gc.collect()
    assert psutil.Process().num_fds() == before
    RunLock(tmp_path).release()


def test_a_child_process_does_not_inherit_it(tmp_path):
    lock = RunLock(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    lock.release()
    RunLock(tmp_path).release()
    child.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who holds the lock")
@pytest.mark.parametrize("content", ["{", "", "3", '{"pid": 0, "host": "here"}'])
def test_a_damaged_or_older_owner_file_is_no_problem(tmp_path, holder, content):
    (tmp_path / ".owner.json").write_text(content.replace("here", socket.gethostname()))
    with pytest.raises(RunInUse, match=f"in use by process {holder.pid} on "):
        RunLock(tmp_path)


def test_where_the_system_does_not_tell_who_holds_it_the_owner_file_does(tmp_path, holder, monkeypatch):
    monkeypatch.setattr("emrun.lock._holder", lambda descriptor: 0)
    with pytest.raises(RunInUse, match=f"in use by process {holder.pid} on "):
        RunLock(tmp_path)
    (tmp_path / ".owner.json").write_text("{")
    with pytest.raises(RunInUse, match="in use by another process"):
        RunLock(tmp_path)
