"""Starts the ranks of a run on this machine, with torch's elastic launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from emrun.errors import UsageError
from emrun.ranks import DIRECTORY, LAST_WORDS
from emrun.wording import counted

_COMMAND = "import sys; from emrun.cli import main; sys.exit(main())"
_PATIENCE = 20  # seconds that ranks have to end when one of them has failed
_CHILDREN = Path("/proc/self/task")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Ended:
    """How processes that train together have ended.

    Args:
        status: the exit status of the rank that failed first; negative, the number of a signal, if the ranks ended by a
            signal.
        lines: what to print about a failure.
        directory: the run directory; None if there is none yet.
        is_failure: whether user code failed or something killed a rank, so that another try may succeed.
    """

    status: int
    lines: Sequence[str] = ()
    directory: str | None = None
    is_failure: bool = False


def launch(count: int, arguments: Sequence[str]) -> Ended:
    """Run `emrun` with these arguments in several processes that train together; wait for them.

    SIGINT, SIGTERM and SIGUSR1 are passed on to them.

    Args:
        count: the number of processes.
        arguments: the arguments of the command.

    Raises:
        UsageError: this machine has fewer GPUs than ranks.
    """
    if torch.cuda.is_available() and count > torch.cuda.device_count():
        gpus = counted(torch.cuda.device_count(), "GPU")
        raise UsageError(f"--nproc {count}: this machine has {gpus}; each rank needs one")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",
        shutdown_timeout=_PATIENCE,
    )
    with tempfile.TemporaryDirectory(prefix="emrun-ranks-") as place:
        os.environ[LAST_WORDS] = place
        try:
            with _signals_passed_on():
                elastic_launch(config, sys.executable)("-c", _COMMAND, *arguments)
        except ChildFailedError as error:
            return _explained(error.failures, Path(place))
        finally:
            del os.environ[LAST_WORDS]
    return Ended(0)


def _explained(failures: dict[int, Any], place: Path) -> Ended:
    """Return how the ranks have ended: the status of the one that failed first; the cause, then what survived.

    First come the ranks with a cause of their own, then those that left no words (something has killed them), then
    those that miss another rank. Those that the launcher has then ended by SIGTERM come last.

    Args:
        failures: rank -> its failure, as torch's launcher has it.
        place: the directory with the last words of the ranks.
    """
    said = {int(each.stem): json.loads(each.read_text(encoding="utf-8")) for each in sorted(place.glob("*.json"))}

    def order(item: tuple[int, Any]) -> tuple[bool, int, bool, int, int]:
        rank, failure = item
        code = failure.exitcode
        kind = 1 if rank not in said else 0 if said[rank]["cause"] else 2
        return code == -signal.SIGTERM, kind, code >= 0, failure.timestamp, rank

    rank, first = min(failures.items(), key=order)
    code = int(first.exitcode)
    is_asked = -code in (signal.SIGINT, signal.SIGTERM)
    causes = [(bool(speaker), words["time"], speaker) for speaker, words in said.items() if words["cause"]]
    is_told = rank in said  # otherwise something has killed it, or it has ended itself
    lines = []
    if causes:
        _, _, speaker = min(causes)  # if all ranks fail alike, rank 0 speaks
        lines = [f"rank {speaker}: " * bool(speaker) + said[speaker]["cause"]]
    elif code > 0 and not is_told:
        lines = [f"error: rank {rank} ended with exit status {code}"]
    elif code < 0 and not is_asked:
        lines = [f"error: rank {rank} was killed by {signal.Signals(-code).name}"]
    survived = next((each["survived"] for _, each in sorted(said.items()) if each["survived"]), None)
    directory = place / DIRECTORY
    return Ended(
        code,
        lines if survived is None else [*lines, survived],
        directory.read_text(encoding="utf-8") if directory.exists() else None,
        is_failure=code == 1 or not (is_told or is_asked),
    )


@contextmanager
def _signals_passed_on() -> Iterator[None]:
    """Pass signals on to the ranks, which are the children of this process, in this block.

    Where the system does not list the children, the launcher ends them by the signal.
    """
    if not _CHILDREN.is_dir():
        yield
        return
    before = {number: signal.signal(number, _pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(number: int, frame: FrameType | None) -> None:
    children = [child for each in _CHILDREN.glob("*/children") for child in each.read_text().split()]
    if not children and number != signal.SIGUSR1:  # they have not been started
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for child in children:
        with suppress(OSError):  # it has ended
            os.kill(int(child), number)
