"""The ranks of a run: the processes that train one model together, each on its own rows of every batch.

A run in one process has one rank. `join` makes this process one of several: the environment variables of torch's
launcher tell which. Everything that ranks exchange goes through `Ranks`; PyTorch is imported when they join.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from emrun.errors import RankFailed, UsageError, exit_status

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work

Value = TypeVar("Value")

LAST_WORDS = "EMRUN_LAST_WORDS"
"""The environment variable with the directory in which ranks leave what `emrun --nproc` prints when one has failed."""

DIRECTORY = "directory"
"""The name of the file there in which rank 0 leaves the run directory."""

_PATIENCE = timedelta(minutes=10)  # in which all ranks have to meet, as with torch's launcher
_LONGEST_WAIT = 1800.0  # seconds
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of the processes that train together, and what they exchange.

    The collective methods must be called by all ranks, in the same order. They raise `RankFailed` if another rank has
    ended.

    Args:
        rank: the index of this process, from 0; rank 0 writes the run directory and speaks.
        size: the number of processes.
        local: the index of this process on its machine.
        group: the process group for plain objects and tensors in main memory; None for one process.
        background: another one, for what the ranks exchange while they do other things.
        least: the least number of rows that a rank gets of a batch, unless it gets none; 2 for BatchNorm.
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    group: ProcessGroup | None = None
    background: ProcessGroup | None = None
    least: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are several ranks."""
        return self.size > 1

    def share(self, count: int) -> tuple[int, int]:
        """Return which rows of a batch with `count` rows are those of this rank, as (begin, end).

        The shares differ by at most one row. With too few rows for all ranks, the last ones have none.
        """
        size = min(self.size, max(1, count // self.least))
        return count * min(self.rank, size) // size, count * min(self.rank + 1, size) // size

    def from_first(self, value: Value) -> Value:
        """Return the value that rank 0 has."""
        if not self.several:
            return value
        import torch.distributed as dist

        values = [value]
        with answered(()):
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order, on rank 0; an empty list on the others."""
        if not self.several:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.is_first else None
        with answered(()):
            dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def all_gathered(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order, on every rank."""
        if not self.several:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with answered(()):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace a tensor, on any device, by the sum of those of all ranks; its shape and dtype are the same there."""
        if self.several:
            import torch.distributed as dist

            with answered(()):
                dist.all_reduce(tensor, group=self._group_of(tensor))

    def copy_from_first(self, tensor: torch.Tensor) -> None:
        """Replace a tensor, on any device, by that of rank 0, which has the same shape and dtype."""
        if self.several:
            import torch
            import torch.distributed as dist

            values = tensor.detach().contiguous()
            with answered(()):
                dist.broadcast(values.view(-1).view(torch.uint8), src=0, group=self._group_of(tensor))
            tensor.detach().copy_(values)

    def _group_of(self, tensor: torch.Tensor) -> ProcessGroup | None:
        """Return the process group for a tensor; None for the default one, that of the GPUs if there are any."""
        return self.group if tensor.device.type == "cpu" else None

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a tensor, on any device, by the sum of those of all ranks; call the result to end this."""
        return self._begin("SUM", tensor, self._group_of(tensor))

    def begin_maximum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a tensor in main memory by the largest values of all ranks; call the result to end this."""
        return self._begin("MAX", tensor, self.background)

    def _begin(self, operation: str, tensor: torch.Tensor, group: ProcessGroup | None) -> Callable[[], None]:
        if not self.several:
            return lambda: None
        import torch.distributed as dist

        with answered(()):
            work: Work = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation), group=group, async_op=True)

        def end() -> None:
            with answered(()):
                work.wait()

        return end

    def limit_waits(self, seconds: float) -> None:
        """Set how long this rank waits for the others before it raises an error."""
        if self.several:
            from torch.distributed.distributed_c10d import _set_pg_timeout

            for group in (self.group, None):
                _set_pg_timeout(timedelta(seconds=seconds), group)

    @contextmanager
    def in_step(self) -> Iterator[Callable[[Any], Any]]:
        """A block that all ranks run, each with its own work: if one of them fails, all leave the block with an error.

        The value of the block is a function for all ranks to call at the same points: it returns the value of rank 0.
        There, and at the end of the block, the ranks learn which of them have failed. The first of these raises its
        error, the others raise `RankFailed` with its exit status.
        """
        exchanged: list[BaseException] = []

        def exchange(value: Any, error: BaseException | None = None) -> Any:
            if not self.several:
                return value
            failure = None if error is None else (exit_status(error), f"{type(error).__name__}: {error}")
            found = self.all_gathered((failure, value if self.is_first else None))
            failures = [(rank, each) for rank, (each, _) in enumerate(found) if each is not None]
            if failures and failures[0][0] != self.rank:
                rank, (status, message) = failures[0]
                exchanged.append(RankFailed(f"rank {rank} failed ({message})", status))
                raise exchanged[0]
            return found[0][1]

        try:
            yield exchange
        except BaseException as error:
            if error not in exchanged and not isinstance(error, RankFailed):
                exchange(None, error)
            raise
        exchange(None)


@contextmanager
def answered(words: tuple[str, ...] = ("gloo", "NCCL", "Connection ")) -> Iterator[None]:
    """Raise `RankFailed` if another rank has ended in a block, which PyTorch reports as a failure of the connection.

    Args:
        words: words of which one is in the message of such a failure; empty if the block does nothing but exchange.
    """
    try:
        yield
    except RuntimeError as error:
        global _misses_others  # noqa: PLW0603 - a process is one rank
        if words and not any(word in str(error) for word in words):
            raise
        _misses_others = True
        if "imed out" in str(error):
            raise RankFailed(
                "another rank does not answer: it hangs, or does something that takes long, such as a hook that runs "
                "on rank 0 only; main_loop.rank_timeout says how long the others wait",
                is_cause=True,
            ) from error
        raise RankFailed("another rank has ended") from error


_current = Ranks()
_has_joined = False
_misses_others = False


def misses_others() -> bool:
    """Return whether another rank has ended or does not answer, so that this one is about to end."""
    return _misses_others


def ranks() -> Ranks:
    """Return the ranks of this process: one, until it has joined others."""
    return _current


def number_of_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes a launcher has started to train together; 1 without a launcher."""
    size = environment.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


def join(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Join the other ranks, if a launcher has started this process as one of several; wait until all are there.

    Raises:
        UsageError: an environment variable of the launcher is missing, or the ranks cannot meet.
    """
    global _current, _has_joined  # noqa: PLW0603 - a process is one rank
    size = number_of_ranks(environment)
    if size == 1 or _current.several:
        return _current
    missing = [name for name in _VARIABLES if not environment.get(name)]
    if missing:
        raise UsageError(
            f"WORLD_SIZE={size}: this is one of {size} processes that train together, but {', '.join(missing)} is not "
            "set; start them with `emrun train --nproc N` or torchrun"
        )
    import torch
    import torch.distributed as dist

    has_cuda = torch.cuda.is_available()
    local = int(environment["LOCAL_RANK"])
    if has_cuda and local >= torch.cuda.device_count():
        raise UsageError(
            f"rank {environment['RANK']} is process {local} of this machine, which has {torch.cuda.device_count()} "
            "GPUs; start at most one process per GPU"
        )
    _has_joined = True
    try:
        if has_cuda:
            torch.cuda.set_device(local)
            dist.init_process_group("nccl", device_id=torch.device("cuda", local), timeout=_PATIENCE)
        else:
            dist.init_process_group("gloo", timeout=_PATIENCE)
        group, background = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    except (RuntimeError, ValueError) as error:
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        raise UsageError(f"rank {environment['RANK']} of {size} cannot meet the others at {where}: {error}") from error
    _current = Ranks(int(environment["RANK"]), size, local, group, background)
    _current.limit_waits(_LONGEST_WAIT)
    return _current


def end_process(status: int) -> None:
    """End this process at once if it has joined others, after its threads and Python's handlers at exit.

    Otherwise a thread of PyTorch that still runs now and then aborts the process while the libraries are unloaded.
    """
    if not _has_joined:
        return
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # the reader of the output has ended
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def leave(*, waits: bool = True) -> None:
    """Disconnect from the other ranks.

    Args:
        waits: whether to wait until all ranks call this, so that none ends while another one still works; false if
            this rank has failed.
    """
    global _current
    if _current.several:
        import torch.distributed as dist

        before, _current = _current, Ranks()
        if waits:
            before.all_gathered(None)
        dist.destroy_process_group()
