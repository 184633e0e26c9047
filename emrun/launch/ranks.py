"""Starts processes that train together on this machine, waits for them, and finds which of them has failed first.

They meet in a directory that only this user can read, and talk on the loopback interface: nobody else can join them.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from time import monotonic
from typing import IO, Any

from emrun.base.cores import SHARE, share_of
from emrun.base.errors import reason_of
from emrun.base.signals import Signals, unless_ignored
from emrun.base.temporary import temporary_folder
from emrun.base.types import Json
from emrun.launch.jobs import THREADS, end_with, threads_per_job
from emrun.ranks.group import KEY, cannot_meet, meet_in

DIRECTORY = "directory"
"""The name of the file in the ranks' directory in which rank 0 leaves the run directory."""

_BEGIN = "import sys; sys.path[:] = {path!r}; from emrun.launch.ranks import begin; begin({place!r}, {parent}); "
_COMMAND = "from emrun.cli import main; sys.argv[0] = 'emrun'; sys.exit(main())"
_ROOM = bytes(1 << 20)  # more than the ranks write when they meet
_PATIENCE = 20  # seconds that ranks have to end when one of them has failed
_GRACE = 5  # seconds that a rank has to leave the cause, when others have only missed it
_LOOK = 1.0  # seconds between two looks at the ranks, although the system tells when one has ended
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Ended:
    """How processes that train together have ended.

    Args:
        status: the exit status of the rank that failed first; negative, the number of a signal, if the ranks ended by a
            signal.
        lines: what to print about a failure.
        directory: the run directory; None if there is none yet.
        is_failure: whether user code failed or something killed a rank, so that another try may succeed.
        problems: the error for programs, as the rank that failed first has left it.
    """

    status: int
    lines: Sequence[str] = ()
    directory: str | None = None
    is_failure: bool = False
    problems: Sequence[Any] = ()


def launch(count: int, arguments: Sequence[str]) -> Ended:
    """Run `emrun` with these arguments in several processes that train together; wait for them.

    Signals are passed on to them: SIGINT, SIGTERM, SIGUSR1, SIGUSR2, and SIGHUP unless it is ignored.

    Args:
        count: the number of processes.
        arguments: the arguments of the command.

    Raises:
        StorageError: the directory for temporary files is full, or its files cannot be locked.
    """
    with ranks_directory() as place:
        return _explained(run_processes(count, _COMMAND, arguments, place, passed_on=unless_ignored(_PASSED_ON)), place)


@contextmanager
def ranks_directory() -> Iterator[Path]:
    """The directory in which the ranks meet and leave their last words.

    Raises:
        StorageError: it cannot be made.
    """
    with ExitStack() as stack:
        try:
            place = stack.enter_context(temporary_folder("ranks"))
            with (place / KEY).open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(_ROOM)
            (place / KEY).write_bytes(os.urandom(32))
        except OSError as error:
            raise cannot_meet("the directory for temporary files", reason_of(error)) from error
        yield place


def run_processes(
    count: int,
    code: str,
    arguments: Sequence[str],
    place: Path,
    *,
    passed_on: Sequence[int] = (),
    errors: IO[bytes] | None = None,
) -> dict[int, int]:
    """Run code in new Python processes, which train together if there are several, and end with this process.

    Args:
        count: the number of processes.
        code: the Python code; `sys.path` is that of this process.
        arguments: the arguments in `sys.argv`.
        place: the directory in which they meet.
        passed_on: the signals that are passed on to them; others have their usual effect on this process.
        errors: where they write what is for standard error, and no standard output; None to write as this process does.

    Returns:
        Rank -> exit status, of the processes that have failed, in the order in which they ended.
    """
    shared = dict(os.environ)
    if count > 1:
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        shared |= {"WORLD_SIZE": str(count), SHARE: str(share_of(count))}
        shared |= {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": names[0]}
    if (threads := threads_per_job(count)) is not None:
        shared[THREADS] = str(threads)
    program = _BEGIN.format(path=sys.path, place=str(place), parent=os.getpid()) + code
    ranks: list[Popen[bytes]] = []
    try:
        for rank in range(count):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
            ranks.append(
                Popen(
                    [sys.executable, "-P", "-c", program, *arguments],
                    env=shared | of_rank,
                    stdin=DEVNULL,
                    stdout=None if errors is None else DEVNULL,
                    stderr=errors,
                    start_new_session=True,  # a Ctrl-C on the terminal reaches this process, which passes it on
                )
            )
        with Signals(passed_on) as signals:  # not before, so that the processes begin with SIGUSR1 ignored
            return _failures(ranks, signals, place)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def _failures(ranks: Sequence[Popen[bytes]], signals: Signals, place: Path) -> dict[int, int]:
    """Wait for processes and return what has failed; if one fails, the others are ended, after a while by SIGKILL.

    A rank that fails tells the others before it leaves its words, and they may end first. Then it has time for these.
    """
    codes: dict[int, int] = {}
    failed_at = ends_at = None
    while True:
        for rank, process in enumerate(ranks):
            if rank not in codes and (code := process.poll()) is not None:
                codes[rank] = code
        running = [process for rank, process in enumerate(ranks) if rank not in codes]
        if not running:
            return {rank: code for rank, code in codes.items() if code}
        if failed_at is None and any(codes.values()):
            failed_at = monotonic()
        is_known = failed_at is not None and (monotonic() > failed_at + _GRACE or not _miss_another(codes, place))
        if ends_at is None and is_known:
            ends_at = monotonic() + _PATIENCE
            signals.pending.append(signal.SIGTERM)
        elif ends_at is not None and monotonic() > ends_at:
            signals.pending.append(signal.SIGKILL)
        while signals.pending:
            number = signals.pending.pop(0)
            for process in running:
                process.send_signal(number)
        signals.wait(_LOOK)


def _miss_another(codes: Mapping[int, int], place: Path) -> bool:
    """Return whether all ranks that have failed have left words without a cause: another rank has failed before."""
    words = _words(place)
    return all(rank in words and not words[rank]["cause"] for rank, code in codes.items() if code)


def _words(place: Path) -> dict[int, Json]:
    """Return rank -> its last words."""
    return {int(file.stem): json.loads(file.read_text(encoding="utf-8")) for file in sorted(place.glob("*.json"))}


def begin(place: str, parent: int) -> None:
    """Be one of the processes that `run_processes` has started.

    Args:
        place: the directory in which they meet.
        parent: the process that has started them.
    """
    end_with(parent, signal.SIGKILL)
    meet_in(Path(place))


def _explained(failures: Mapping[int, int], place: Path) -> Ended:
    """Return how the ranks have ended: the status of the one that failed first; the cause, then what survived.

    First come the ranks with a cause of their own, then those that left no words (something has killed them), then
    those that miss another rank. Those that were then ended by SIGTERM come last.

    Args:
        failures: rank -> exit status, in the order in which they ended.
        place: the directory with the last words of the ranks.
    """
    # which rank has failed first
    named = place / DIRECTORY
    directory = named.read_text(encoding="utf-8") if named.exists() else None
    if not failures:
        return Ended(0, directory=directory)
    words_of = _words(place)
    causes = {rank: entry for rank, entry in words_of.items() if entry["cause"]}

    def order(rank: int) -> tuple[bool, bool, bool, bool]:
        code = failures[rank]
        return code == -signal.SIGTERM, rank not in causes, rank in words_of, code >= 0

    rank = min(failures, key=order)
    code = failures[rank]
    is_asked = -code in _ASKING

    # what it has said
    lines = []
    problems = []
    if causes:
        # if all fail alike, rank 0 speaks
        speaker = min(causes, key=lambda number: (number > 0, causes[number]["time"]))
        problems = causes[speaker]["problems"]
        who = f"rank {speaker}: " if speaker else ""
        lines = [who + causes[speaker]["cause"]]
    elif code > 0 and rank not in words_of:  # something has killed it, or it has ended itself
        lines = [f"error: rank {rank} ended with exit status {code}"]
    elif code < 0 and not is_asked:
        lines = [f"error: rank {rank} was killed by {signal.Signals(-code).name}"]
    lines += [words_of[number]["survived"] for number in sorted(words_of) if words_of[number]["survived"]][:1]
    is_failure = code == 1 or not (rank in words_of or is_asked)
    return Ended(code, lines, directory, is_failure, problems)
