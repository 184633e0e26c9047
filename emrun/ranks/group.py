"""The ranks of a run: the processes that train one model together, each on its own rows of every batch.

A run in one process has one rank. `join` makes this process one of several: environment variables tell which. The ranks
that `emrun --nproc` starts meet in a directory of their user, those of torchrun at an address. Everything that ranks
exchange goes through `Ranks`; PyTorch is imported when they join.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from operator import call, methodcaller
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from zlib import crc32

from emrun.base.errors import DifferentRanks, RankFailed, StorageError, UsageError, exit_status
from emrun.base.wording import counted

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.distributed_c10d import Store

Value = TypeVar("Value")
Exchange = Callable[[str, Any], Any]
"""Called by all ranks of a block, by the same name: returns the value of rank 0. See `Ranks.in_step`."""

KEY = "key"
"""The name of the file in the ranks' directory with the key of the codes that prove who has sent an object."""

_STORE = "store"
_PATIENCE = timedelta(minutes=10)  # in which all ranks have to meet, as with torch's launcher
_LOOK = 0.01  # seconds between two looks whether all ranks are there
_LONGEST_WAIT = 1800.0  # seconds
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_HASH = "sha256"
_wait = methodcaller("wait")
_exhaust = deque[Any](maxlen=0).extend  # calls what is mapped, without a step of Python's interpreter for each
_CODE = 32  # bytes of such a code


class _Failure(NamedTuple):
    """What a rank that fails in a block sends instead of a value; its name is empty, whatever the others exchange."""

    exit_status: int
    message: str


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of the processes that train together, and what they exchange.

    The collective methods must be called by all ranks, in the same order. They raise `RankFailed` if another rank has
    ended. An exchange of objects has a name, which must be the same on all ranks; otherwise all of them raise
    `DifferentRanks`.

    Args:
        rank: the index of this process, from 0; rank 0 writes the run directory and speaks.
        size: the number of processes.
        local: the index of this process on its machine.
        group: the process group for plain objects and tensors in main memory; None for one process.
        background: another one, for what the ranks exchange while they do other things.
        least: the least number of rows that a rank gets of a batch, unless it gets none; 2 for BatchNorm.
        key: the key of the ranks of one machine; an object that comes without a code made with the key is not decoded.
            Empty for ranks that torchrun has started, which trust their network.
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    group: ProcessGroup | None = None
    background: ProcessGroup | None = None
    least: int = 1
    key: bytes = b""

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
        return _share(count, self.rank, self.size, self.least)

    def from_first(self, name: str, value: Value) -> Value:
        """Return the value that rank 0 has."""
        return self.all_gathered(name, value if self.is_first else cast(Value, None))[0]

    def gathered(self, name: str, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order, on rank 0; an empty list on the others."""
        return self._collected(name, value, self.is_first, self.group) if self.several else [value]

    def all_gathered(self, name: str, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order, on every rank."""
        return self._collected(name, value, None, self.group) if self.several else [value]

    def check(self, groups: Sequence[ProcessGroup | None]) -> None:
        """Check that no stranger has taken the place of a rank in a process group; all ranks call this."""
        if not self.key:
            return
        for group in groups:
            self._collected("meeting", None, None, group)

    def _collected(self, name: str, value: Any, receives: bool | None, group: ProcessGroup | None) -> list[Any]:
        """Return the values of all ranks on those that receive them.

        Args:
            name: what is exchanged; empty if it may be anything, because this rank fails.
            value: the value of this rank.
            receives: whether this is the only rank that receives them; None if all do. If a rank fails, all do.
            group: the process group that sends them.

        Raises:
            DifferentRanks: another rank exchanges something else.
            RankFailed: another rank has ended or fails.
        """
        import torch
        import torch.distributed as dist

        with answered(()):
            packed = self._packed(value)
            heads = torch.zeros(self.size, 2, dtype=torch.int64)
            dist.all_gather([*heads], torch.tensor([len(packed), crc32(name.encode())]), group=group)
            sizes, names = heads.T.tolist()
            one_fails = 0 in names  # the checksum of an empty name
            if not one_fails and len(set(names)) > 1:
                raise self._different(name, group)
            padded = torch.nn.functional.pad(packed, (0, max(sizes) - len(packed)))
            receives = None if one_fails else receives
            buffers = [torch.empty_like(padded) for _ in range(self.size if receives is not False else 0)]
            if receives is None:
                dist.all_gather(buffers, padded, group=group)
            else:
                dist.gather(padded, buffers or None, dst=0, group=group)
        values = self._unpacked([buffer[:size] for buffer, size in zip(buffers, sizes, strict=False)])
        for rank, received in enumerate(values):
            if isinstance(received, _Failure):
                if rank != self.rank:
                    raise RankFailed(f"rank {rank} failed ({received.message})", received.exit_status)
                break
        return values

    def _different(self, name: str, group: ProcessGroup | None) -> DifferentRanks:
        """Return the error that another rank exchanges something else than this one; all ranks call this."""
        names = self._collected("", name, None, group)
        other = next(rank for rank, exchanged in enumerate(names) if exchanged != name)
        return DifferentRanks(
            f"rank {other} is at {names[other]!r}, this rank ({self.rank}) at {name!r}: code that runs on some ranks "
            "only, or in another order there, calls what all ranks must call"
        )

    def _packed(self, value: Any) -> torch.Tensor:
        """Return a value as bytes, of which the first are the code of this rank."""
        import torch

        buffer = io.BytesIO()
        buffer.write(bytes(_CODE))
        pickle.dump(value, buffer)
        data = buffer.getbuffer()
        data[:_CODE] = self._code(self.rank, data[_CODE:])
        return torch.frombuffer(data, dtype=torch.uint8)

    def _unpacked(self, buffers: Sequence[torch.Tensor]) -> list[Any]:
        """Return the values of the ranks from 0 on.

        Raises:
            RankFailed: the code of a value is not that of its rank.
        """
        import hmac

        values = []
        for rank, buffer in enumerate(buffers):
            data = buffer.numpy().data
            if not hmac.compare_digest(data[:_CODE], self._code(rank, data[_CODE:])):
                raise RankFailed(
                    f"what came from rank {rank} is not from a process of this run: another program of this machine "
                    "has connected to the ranks; start again",
                    is_cause=True,
                )
            values.append(pickle.loads(data[_CODE:]))
        return values

    def _code(self, rank: int, data: memoryview) -> bytes:
        """Return what proves that a rank has sent some bytes; zeros without a key."""
        if not self.key:
            return bytes(_CODE)
        import hmac

        code = hmac.new(self.key, b"%d " % rank, _HASH)
        code.update(data)
        return code.digest()

    def apart(self, seconds: float) -> Ranks:
        """Return the same ranks with a process group of its own, for another thread; all ranks call this.

        Args:
            seconds: how long a rank waits for the others in this group; `limit_waits` does not change it.
        """
        import torch.distributed as dist

        with answered(()):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
            self.check([group])
        return replace(self, group=group)

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
        return self.group if tensor.is_cpu else None

    def summing(self, tensor: torch.Tensor) -> Callable[[], Work]:
        """Return a function that begins to replace a tensor by the sum of those of all ranks.

        To be called, and its result to be waited for, in a block that is `answered`.
        """
        import torch.distributed as dist

        return partial(dist.all_reduce, tensor, group=self._group_of(tensor), async_op=True)

    def begin_maximum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a tensor in main memory by the largest values of all ranks; call the result to end this."""
        if not self.several:
            return lambda: None
        import torch.distributed as dist

        with answered(()):
            work: Work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.background, async_op=True)

        @answered(())
        def end() -> None:
            work.wait()

        return end

    def begin_largest(self, number: float) -> Callable[[], float]:
        """Begin to find the largest number of all ranks; call the result to end this and to get it."""
        import torch

        tensor = torch.tensor(number, dtype=torch.float64)
        end = self.begin_maximum(tensor)

        def largest() -> float:
            end()
            return tensor.item()

        return largest

    def limit_waits(self, seconds: float) -> None:
        """Set how long this rank waits for the others before it raises an error."""
        global _longest_wait  # noqa: PLW0603 - a process is one rank
        _longest_wait = seconds
        if self.several:
            from torch.distributed import distributed_c10d

            name = "set_timeout" if hasattr(distributed_c10d, "set_timeout") else "_set_pg_timeout"  # before torch 2.14
            for group in (self.group, None):
                getattr(distributed_c10d, name)(timedelta(seconds=seconds), group)

    def longest_wait(self) -> float:
        """Return how long this rank waits for the others, in seconds."""
        return _longest_wait

    @contextmanager
    def in_step(self) -> Iterator[Exchange]:
        """A block that all ranks run, each with its own work: if one of them fails, all leave the block with an error.

        The value of the block is a function for all ranks to call at the same points, with the same names: it returns
        the value of rank 0. There, and at the end of the block, the ranks learn which of them have failed. The first of
        these raises its error, the others raise `RankFailed` with its exit status. `DifferentRanks` is raised on all
        ranks anyway.
        """
        try:
            yield self.from_first
        except BaseException as error:
            if not isinstance(error, RankFailed | DifferentRanks):
                self.all_gathered("", _Failure(exit_status(error), f"{type(error).__name__}: {error}"))
            raise
        self.from_first("end of the block", None)


@lru_cache
def _share(count: int, rank: int, size: int, least: int) -> tuple[int, int]:
    """Return the rows of a rank; most batches of a run have the same number of rows."""
    size = min(size, max(1, count // least))
    return count * min(rank, size) // size, count * min(rank + 1, size) // size


@contextmanager
def answered(words: tuple[str, ...] = ("gloo", "NCCL", "Connection ")) -> Iterator[None]:
    """Raise `RankFailed` if another rank has ended in a block, which PyTorch reports as a failure of the connection.

    Args:
        words: words of which one is in the message of such a failure; empty if the block does nothing but exchange.
    """
    global _waits_since  # noqa: PLW0603 - a process is one rank
    before = _waits_since
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:  # another thread writes a checkpoint, while the training goes on
        _waits_since = monotonic()
    try:
        yield
    except RuntimeError as error:
        if words and not any(word in str(error) for word in words):
            raise
        raise _failure(error) from error
    finally:
        if is_main:
            _waits_since = before


def end_sums(begins: Iterable[Callable[[], Work]], works: Iterable[Work]) -> None:
    """Begin sums of `Ranks.summing`, and wait for them and for those that have begun before.

    Args:
        begins: the functions that begin them.
        works: what the functions have returned that were called before.

    Raises:
        RankFailed: another rank has ended.
    """
    global _waits_since  # noqa: PLW0603 - a process is one rank
    _waits_since = monotonic()
    try:
        _exhaust(map(_wait, [*works, *map(call, begins)]))
    except RuntimeError as error:
        raise _failure(error) from error
    finally:
        _waits_since = None


def _failure(error: RuntimeError) -> RankFailed:
    """Return the error for a failure of the connection to the other ranks."""
    global _misses_others  # noqa: PLW0603 - a process is one rank
    _misses_others = True
    if "imed out" in str(error):
        return RankFailed(
            "another rank does not answer: it hangs, or does something that takes long, such as a hook that runs "
            "on rank 0 only; main_loop.rank_timeout says how long the others wait",
            is_cause=True,
        )
    return RankFailed("another rank has ended")


_current = Ranks()
_place: Path | None = None
_has_joined = False
_misses_others = False
_waits_since: float | None = None
_longest_wait = _LONGEST_WAIT


def has_joined() -> bool:
    """Return whether this process has ever joined others."""
    return _has_joined


def waits_since() -> float | None:
    """Return since when this rank waits for others, on the clock `monotonic`; None if it does not."""
    return _waits_since


def misses_others() -> bool:
    """Return whether another rank has ended or does not answer, so that this one is about to end."""
    return _misses_others


def ranks() -> Ranks:
    """Return the ranks of this process: one, until it has joined others."""
    return _current


def number_of_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes a launcher has started to train together; 1 without a launcher."""
    return max(1, _number(environment, "WORLD_SIZE") or 1)


def rank_of(environment: Mapping[str, str] = os.environ) -> int:
    """Return the index of this process among those; 0 if it is not known."""
    return (_number(environment, "RANK") or 0) if number_of_ranks(environment) > 1 else 0


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def meeting_place() -> Path | None:
    """Return the directory in which the ranks of one machine meet; None if `emrun --nproc` has not started this one."""
    return _place


def meet_in(place: Path) -> None:
    """Make this process one of those that meet in a directory."""
    global _place  # noqa: PLW0603 - a process is one rank
    _place = place


def cannot_meet(place: object, reason: object) -> StorageError:
    """Return the error about a directory in which ranks cannot meet."""
    return StorageError(
        errno.EIO,
        f"the ranks cannot meet in {place}: {reason}; set TMPDIR to a directory on a local disk with space",
    )


def join(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Join the other ranks, if a launcher has started this process as one of several; wait until all are there.

    Raises:
        UsageError: an environment variable of the launcher is missing or wrong, or the ranks cannot meet.
        StorageError: the directory in which the ranks meet is full, or its files cannot be locked.
    """
    global _current, _has_joined  # noqa: PLW0603 - a process is one rank
    size = number_of_ranks(environment)
    if size == 1 or _current.several:
        return _current
    # who this is
    rank, local = _identity(size, environment)
    import torch
    import torch.distributed as dist

    has_cuda = torch.cuda.is_available()
    needed = local + 1 if _place is None else size
    if has_cuda and needed > torch.cuda.device_count():
        raise UsageError(
            f"{counted(needed, 'process', 'es')} of this run on this machine, which has "
            f"{counted(torch.cuda.device_count(), 'GPU')}; start at most one process per GPU"
        )

    # where the ranks meet
    _has_joined = True
    where = ""
    key = b""
    try:
        if _place is not None:
            where = str(_place)
            key = (_place / KEY).read_bytes()
            store: Store = dist.FileStore(str(_place / _STORE), size)  # type: ignore[attr-defined]
        else:
            where = ":".join(environment[name] for name in _ADDRESS)
            store, _, _ = next(dist.rendezvous("env://", timeout=_PATIENCE))  # type: ignore[attr-defined]
        backend = "gloo"
        device = None
        if has_cuda:
            torch.cuda.set_device(local)
            backend = "nccl"
            device = torch.device("cuda", local)
        dist.init_process_group(
            backend,
            timeout=_PATIENCE,
            store=_met(store, rank, size),
            rank=rank,
            world_size=size,
            device_id=device,
        )
        group = dist.new_group(backend="gloo")
        background = dist.new_group(backend="gloo")
    except (RuntimeError, ValueError) as error:
        if _place is not None and isinstance(error, dist.DistStoreError):
            raise cannot_meet(_place, error) from error
        raise UsageError(f"rank {rank} of {size} cannot meet the others at {where}: {error}") from error
    _current = Ranks(rank, size, local, group, background, key=key)
    groups: list[ProcessGroup | None] = [group, background]
    if not has_cuda:
        groups.append(None)  # the default one, which takes tensors in main memory then
    _current.check(groups)
    _current.limit_waits(_LONGEST_WAIT)
    return _current


def _identity(size: int, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the index of this process among all, and on its machine, as the environment has them.

    Raises:
        UsageError: a variable is missing or wrong.
    """
    what = f"WORLD_SIZE={size}: this is one of {size} processes that train together"
    way_on = "start them with `emrun train --nproc N` or torchrun; to train in one process, unset WORLD_SIZE"
    needed = _VARIABLES if _place is not None else (*_VARIABLES, *_ADDRESS)
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise UsageError(f"{what}, but {', '.join(missing)} is not set; {way_on}")
    rank = _number(environment, "RANK")
    local = _number(environment, "LOCAL_RANK")
    if rank is None or local is None or max(rank, local) >= size:
        given = ", ".join(f"{name}={environment[name]}" for name in ("RANK", "LOCAL_RANK"))
        raise UsageError(f"{what}, but {given}, which must be from 0 to {size - 1}; {way_on}")
    return rank, local


def _met(store: Store, rank: int, size: int) -> Store:
    """Return a part of a store which only these processes use, when all of them are there.

    The store of torchrun still has what ranks wrote that it has started before: each rank writes a new word, rank 0
    answers with it and its own, and a rank has met the others when it finds its own word in the answer. The ranks are
    waited for here, because a signal does not end a wait of the store.
    """
    from secrets import token_hex

    import torch.distributed as dist

    word_of_rank = token_hex()
    ends_at = monotonic() + _PATIENCE.total_seconds()
    words = [f"word {number}" for number in range(size)]
    answers = [f"answer {number}" for number in range(size)]
    store.set(words[rank], word_of_rank)
    known: list[bytes] = []
    while True:
        if rank == 0 and store.check(words) and known != (now := store.multi_get(words)):
            known = now
            for answer, word in zip(answers, known, strict=True):
                store.set(answer, f"{word_of_rank} {word.decode()}")
        if store.check([answers[rank]]) and word_of_rank in (answer := store.get(answers[rank]).decode()):
            first = answer.split()[0]
            store.set(f"{first} {rank}", "")
            if rank or store.check([f"{first} {number}" for number in range(size)]):
                part: Store = dist.PrefixStore(first, store)  # type: ignore[attr-defined]
                return part
        if monotonic() > ends_at:
            raise ValueError(f"not all of them are there after {_PATIENCE.total_seconds():g} seconds")
        sleep(_LOOK)


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
            before.all_gathered("end of the run", None)
        dist.destroy_process_group()
