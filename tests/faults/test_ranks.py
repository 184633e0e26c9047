"""A run of several ranks of which one is killed at any moment, and that is started again, ends in the same bits."""

import ctypes
import os
import signal
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter

import psutil
import pytest
from projects import SEVERAL, SEVERAL_PARTS
from warm import stand_by

PATIENCE = 60  # seconds that the others have to end
SHARDED = ["model.strategy.shard=^0$"]

CONFIG = f"""{SEVERAL}
hooks:
  - ComputeStats
  - SaveEvery: {{every: 5 updates, keep: 2}}
  - StopAfter: {{epochs: 3}}
"""


def ranks_of(command):
    """Return the process numbers of the ranks that a command has started."""
    found = []
    with suppress(OSError):  # it has ended
        for each in Path(f"/proc/{command.pid}/task").glob("*/children"):
            found += map(int, each.read_text().split())
    return sorted(found)


@pytest.mark.campaign  # tests/cli/test_ranks.py has a rank that is killed, and a command
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not list the children of a process")
@pytest.mark.timeout(7200)
@pytest.mark.fault("a random one of two or three ranks, or the command, is killed, and the run is resumed", share=6)
@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, []),
        (3, []),
        (2, SHARDED),
        (3, SHARDED),
        (2, [*SHARDED, "hooks.SaveEvery.every=1 updates"]),
    ],
    ids=["2", "3", "2 sharded", "3 sharded", "2 sharded, mostly in commits"],
)
def test_a_rank_that_is_killed_at_a_random_moment_changes_nothing(tmp_path, small, trials, size, overrides):
    (tmp_path / "parts.py").write_text(SEVERAL_PARTS)
    (tmp_path / "config.yaml").write_text(CONFIG)
    errors = None

    def start(directory):
        """Start the command; its ranks are processes that stand by, since each would import PyTorch."""
        words = ["train", "-q", "config.yaml", "--nproc", str(size), "--output-dir", directory, "--auto-resume"]
        words += overrides
        child, place, _ = small.began(words, tmp_path, prepare=partial(stand_by, size))
        nonlocal errors
        errors = place / "err"
        return psutil.Process(child)

    def finish():
        assert start("run").wait(PATIENCE + seconds) == 0, errors.read_text()
        assert small.result_of_ranks(tmp_path / "run") == expected
        (tmp_path / "run").rename(tmp_path / f"run-{perf_counter()}")

    seconds = -perf_counter()
    assert start("straight").wait(600) == 0
    seconds += perf_counter()
    expected = small.result_of_ranks(tmp_path / "straight")
    since_finished = 0
    for trial in trials(range(100), small=1):
        with trial:
            command = start("run")
            with suppress(psutil.TimeoutExpired):
                command.wait(trial.random.uniform(0.2, 1) * seconds)
            killed = ranks_of(command)
            ranks = []
            for each in killed:
                with suppress(psutil.NoSuchProcess):  # it has ended
                    ranks.append(psutil.Process(each))
            is_command = trial.case % 4 == 3
            for number in [command.pid] if is_command else trial.random.sample(killed, k=min(1, len(killed))):
                with suppress(ProcessLookupError):  # it has ended
                    os.kill(number, signal.SIGKILL)
            status = command.wait(PATIENCE)
            said = errors.read_text()
            assert psutil.wait_procs(ranks, timeout=PATIENCE)[1] == []
            with trial.telling():
                assert status in ((0, -9) if is_command else (0,) if not killed else (0, 128 + signal.SIGKILL)), said
                assert status <= 0 or "was killed by SIGKILL" in said
            since_finished += 1
            if status == 0 or since_finished == 3:
                since_finished = 0
                finish()
    if since_finished:
        finish()


LISTENS = '''
import os
from contextlib import suppress
from pathlib import Path

from emrun import AbstractHook
from emrun.ranks.group import ranks


class Listens(AbstractHook):
    """Writes on which addresses this rank and the command listen."""

    every_rank = True
    reads = ()

    def after_batch(self):
        found = []
        for table in ("tcp", "tcp6"):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and any(f"socket:[{inode}]" in links(each) for each in ("self", os.getppid())):
                    found.append(local.partition(":")[0])
        Path(f"listens-{ranks().rank}").write_text(" ".join(found))


def links(process):
    found = []
    for each in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread closed the descriptor
            found.append(os.readlink(each))
    return found
'''
LISTENING = "hooks: [parts.Listens, {StopAfter: {iterations: 2}}]"
NEW_USER, NEW_NAME = 0x10000000, 0x04000000
NO_NAMESPACE = 77


def named_elsewhere(size):
    """Be on a machine whose name is another address than 127.0.0.1, and let ranks stand by."""
    unshare = ctypes.CDLL(None).unshare
    if unshare(NEW_NAME) and unshare(NEW_USER | NEW_NAME):
        os._exit(NO_NAMESPACE)
    socket.sethostname("127.0.0.2")
    stand_by(size)


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (["train", "--output-dir", "run"], 2),
        pytest.param(["verify-resume", "--at", "2"], 8, marks=pytest.mark.campaign),
    ],
)
def test_ranks_listen_on_the_loopback_address_whatever_the_name_of_the_machine(tmp_path, small, words, processes):
    (tmp_path / "parts.py").write_text(SEVERAL_PARTS + LISTENS)
    (tmp_path / "config.yaml").write_text(f"{SEVERAL}\nmain_loop: {{report: false}}\n{LISTENING}")
    words = [words[0], "-q", "config.yaml", "--nproc", 2, *words[1:]]
    done = small.command(*words, cwd=tmp_path, prepare=partial(named_elsewhere, processes))
    if done.returncode == NO_NAMESPACE:
        pytest.skip("the system gives no other name to a process")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert set((tmp_path / f"listens-{rank}").read_text().split()) == {"0100007F"}
