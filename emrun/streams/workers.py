"""Worker processes that read a pass over a stream, on the machinery of torch's DataLoader."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import multiprocessing
import multiprocessing.queues
import os
import pickle
import queue
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import signal_handling

from emrun.censor import censor_standard_error, terminal_censor
from emrun.errors import EmrunError, StreamError
from emrun.streams.pickling import what_cannot_be_pickled
from emrun.streams.reuse import checked_for_reuse
from emrun.streams.stream_pass import StreamPass, named
from emrun.temporary import TemporaryFolder
from emrun.user_modules import user_directories

_LOG = logging.getLogger(__name__)
_BY_PIPE = 4096  # bytes up to which an array costs less in a pipe than in shared memory
_PASS = "pass.pickle"
_SAFE_PATH = "PYTHONSAFEPATH"
_STARTING = threading.Lock()  # held while the path and the environment are those of processes to be
_LOOK_AGAIN = 0.05  # seconds
_PATIENCE = 10.0  # seconds that a process gets to be gone once it was killed
_BEFORE_THEY_ARE_JOINED = 10  # what multiprocessing does with its processes at the end of Python has priority 0
_FOR_STACKS = 1.0  # seconds that a worker gets to write its stacks
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # sent to a whole process group; the loop handles them


class Workers(Iterator[Any]):
    """Reads a pass in processes of its own; hands out the batches in the same order as one process would.

    A stream whose rows come from `ctx.batches` is read by all of them in turn, another one by the first. Tensors and
    arrays come through shared memory.

    Args:
        stream_pass: the pass.
        count: how many processes.
        each_ahead: how many batches each of them reads ahead.
        start_method: fork, forkserver or spawn; None for Python's default.

    Raises:
        StreamError: the stream cannot be sent to a process that is started this way.
    """

    def __init__(self, stream_pass: StreamPass, count: int, each_ahead: int, start_method: str | None) -> None:
        self._name = stream_pass.name
        self._count = count
        self._ended: set[int] = set()
        try:
            folder = TemporaryFolder()
        except OSError as error:
            if _is_out_of_files(error):
                raise _out_of_files(self._name, count) from error
            raise
        self._folder = folder.path
        context = _context(start_method)
        self._processes = context.processes
        self.close = Finalize(self, _end, (context, self._name, folder), exitpriority=_BEFORE_THEY_ARE_JOINED)
        """Kill the processes, and end a wait for a batch."""
        try:
            self._batches = self._start(stream_pass, count, each_ahead, context)
        except BaseException as error:
            _forget_what_did_not_begin(error)
            self.close()
            if _is_out_of_files(error):
                raise _out_of_files(self._name, count) from error
            raise
        self._results = context.results

    def _start(self, stream_pass: StreamPass, count: int, each_ahead: int, context: Any) -> Iterator[Any]:
        """Start the processes; return what they give."""
        begins_anew = context.get_start_method() != "fork"
        with contextlib.ExitStack() as stack:
            part = _Part(stream_pass, self._folder, each_ahead)
            if begins_anew:
                self._write(stream_pass, context.get_start_method())
                part.path, part.safe_path = stack.enter_context(_user_modules_kept_from_children())
                resource_tracker.ensure_running()  # here, because it unblocks signals
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(_signals_kept_from_children())
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores: the user's choice
            loader: DataLoader[Any] = DataLoader(
                part,
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=count,
                prefetch_factor=each_ahead,
                multiprocessing_context=context,
                generator=torch.Generator(),  # not the global one, which is the model's
                worker_init_fn=_begin,
            )
            batches: Any = iter(loader)
            # a handler of SIGCHLD, set by a DataLoader that the user made, would raise in the middle of whatever the
            # loop does when one of these processes ends; `check` does its work
            batches._worker_pids_set = False
            signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
            return cast("Iterator[Any]", batches)

    def _write(self, stream_pass: StreamPass, start_method: str) -> None:
        """Write the pass to where processes that are not forked read it.

        Through the pipe that starts a process, a larger one would block for ever when that process dies over it.
        """
        try:
            with (self._folder / _PASS).open("wb") as file:
                pickle.dump(stream_pass, file, pickle.HIGHEST_PROTOCOL)
        except OSError:  # the disk is full
            raise
        except Exception as error:
            raise StreamError(
                f"stream {stream_pass.name!r} cannot be sent to worker processes that are started by {start_method}: "
                f"{what_cannot_be_pickled(stream_pass.function)} cannot be pickled ({error}); open or make it when the "
                "stream is read, use `start_method: fork`, or `workers: 0`",
                first_batch=True,
            ) from None

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            BaseException: what the stream raised, with the traceback in the worker as a note.
        """
        while True:
            if len(self._ended) == len(self._processes):  # without waiting until they have taken themselves down
                raise StopIteration
            try:
                item = next(self._batches)
            except Exception as error:
                if self._results.closed:
                    raise StopIteration from None
                if _is_out_of_files(error):
                    raise _out_of_files(self._name, self._count) from error
                self.check()
                raise
            if item.__class__ is _Ended:
                self._ended.add(item.worker)
            elif item.__class__ is _Failed:
                raise item.error
            else:
                return _unpacked(item)

    def check(self) -> None:
        """Look whether the processes are there, while nothing comes from them.

        Raises:
            StreamError: one of them ended before its time.
        """
        for index, process in enumerate(self._processes):
            if process.exitcode is not None and not (self._folder / f"{index}.ended").exists():
                began = (self._folder / str(index)).exists()
                raise StreamError(
                    f"stream {self._name!r}: worker process {index} (pid {process.pid}) "
                    f"{_how_it_ended(process.exitcode, began)}"
                )

    def stacks(self) -> str:
        """Return what the processes are doing at the moment: the stacks of their threads."""
        parts = []
        for index, process in enumerate(self._processes):
            path = self._folder / str(index)
            if process.exitcode is None and path.exists():
                before = path.stat().st_size
                os.kill(process.pid, signal.SIGUSR2)
                ends_at = time.monotonic() + _FOR_STACKS
                while path.stat().st_size == before and time.monotonic() < ends_at:
                    time.sleep(0.01)
                parts.append(f"worker process {index} (pid {process.pid}):\n{path.read_text()}")
        return "\n".join(parts)


class _Ended:
    """The last that comes from a worker."""

    def __init__(self, worker: int) -> None:
        self.worker = worker


class _Failed:
    """An exception on its way from a worker to the loop."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Shared:
    """An array on its way through shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Part(IterableDataset[Any]):
    """What a worker reads of the pass."""

    def __init__(self, stream_pass: StreamPass | None, folder: Path, ahead: int) -> None:
        self.stream_pass = stream_pass
        self.name = stream_pass.name if stream_pass is not None else ""
        self.folder = folder
        self.ahead = ahead
        self.censor = terminal_censor()
        self.path: list[str] = []  # where the user's modules are, for a process that begins anew
        self.safe_path: str | None = None  # what the environment says of it
        self.file: Any = None  # where a worker writes its stacks; open as long as it lives

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "stream_pass": None}  # which is read from the folder

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None  # it is only read there
        try:
            stream_pass = self.stream_pass
            if stream_pass is None:
                stream_pass = cast(StreamPass, pickle.loads((self.folder / _PASS).read_bytes()))
            batches = stream_pass.read(worker.id, worker.num_workers)
            for item in checked_for_reuse(batches, stream_pass.name, self.ahead + 1):  # the loop has one
                yield _packed(item)
        except GeneratorExit:
            raise
        except BaseException as error:
            yield _Failed(_sendable(named(error, self.name), worker.id))
        (self.folder / f"{worker.id}.ended").touch()  # the loop may look after the process before it gets this
        yield _Ended(worker.id)


class _Flag:
    """An event that the loader sets when it ends, and that processes which are killed need not know of.

    The real one has a lock, which a process that is killed may hold; whoever sets it then waits for ever.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


class _Results(multiprocessing.queues.Queue):  # type: ignore[type-arg]  # not generic when it runs
    """The queue of the batches; a wait for one ends with the workers.

    Nothing that is put into it would end the wait: a worker that is killed may hold the lock of the queue.
    """

    closed = False

    def _on_queue_feeder_error(self, e: Exception, obj: Any) -> None:
        """Send, instead of a batch that cannot be sent, why not; without this nothing would come."""
        index, _ = obj
        message = (
            f"a batch cannot be sent from a worker process to the loop ({type(e).__name__}: {e}); give arrays, "
            "tensors, numbers and texts, or use `main_loop.buffer`, which reads in a thread, instead of `workers`"
        )
        self.put((index, _Failed(StreamError(message))))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        ends_at = time.monotonic() + (timeout or 0)
        while not self.closed:
            try:
                return super().get(block, _LOOK_AGAIN)
            except queue.Empty:
                if timeout is not None and time.monotonic() >= ends_at:
                    raise
        raise EOFError

    def end_read(self) -> None:
        """End the read of a message that a process which is gone wrote half of."""
        self._writer.close()  # type: ignore[attr-defined]


def _context(start_method: str | None) -> Any:
    """Return a context for processes that are killed; it remembers them, and the queue of their batches."""
    base = multiprocessing.get_context(start_method or multiprocessing.get_start_method())

    class Context(type(base)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.processes: list[Any] = []
            self.results: _Results | None = None

        def Queue(self, maxsize: int = 0) -> Any:
            if self.results is not None:  # for what the loader asks of the workers
                return super().Queue(maxsize)
            self.results = _Results(maxsize, ctx=base)
            return self.results

        def Event(self) -> Any:
            return _Flag()

        def Process(self, *arguments: Any, **keywords: Any) -> Any:
            process = base.Process(*arguments, **keywords)  # type: ignore[attr-defined]
            self.processes.append(process)
            return process

    context = Context()
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload([__name__])  # imports torch once
    return context


def _as_it_is(item: Any) -> Any:
    return item


def _begin(worker: int) -> None:
    """Prepare a worker process: it writes its stacks when it is asked to, and lives until the loop ends it."""
    for number in _BLOCKED:
        signal.signal(number, _do_nothing)  # unlike SIG_IGN, a program that the stream starts does not inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    info = get_worker_info()
    assert info is not None  # it is called there
    part = cast(_Part, info.dataset)
    if part.censor is not None and terminal_censor() is None:  # not forked
        censor_standard_error(part.censor)
    if part.stream_pass is None:
        _set_environment(_SAFE_PATH, part.safe_path)
        sys.path += [each for each in part.path if each not in sys.path]
    threading.Thread(target=_end_with_the_loop, args=(part.folder,), daemon=True).start()
    # where its sockets for shared memory go: it is killed, so that a folder of its own would stay behind
    multiprocessing.current_process()._config["tempdir"] = str(part.folder)  # type: ignore[attr-defined]
    part.file = (part.folder / str(worker)).open("w")
    faulthandler.register(signal.SIGUSR2, file=part.file)


def _do_nothing(number: int, frame: Any) -> None:
    pass


def _end_with_the_loop(folder: Path) -> None:
    """End this worker when the loop's process is gone.

    The loader looks after that too, but not at a loop whose worker came from a fork server, and then waits until all
    that was read is taken.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a worker
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


@contextlib.contextmanager
def _user_modules_kept_from_children() -> Iterator[tuple[list[str], str | None]]:
    """Let processes that begin anew find the modules of Python and emrun before those of the current directory.

    Python puts that first for them, and what they import before they get the path of this process would come from it.
    They get the path without the directories of the user's modules, which they add when emrun is imported.

    Yields:
        These directories, and what `PYTHONSAFEPATH` is otherwise.
    """
    with _STARTING:
        before, user = os.environ.get(_SAFE_PATH), user_directories()
        _set_environment(_SAFE_PATH, "1")
        del sys.path[len(sys.path) - len(user) :]
        try:
            yield user, before
        finally:
            sys.path += user
            _set_environment(_SAFE_PATH, before)


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def _signals_kept_from_children() -> Iterator[None]:
    """Block signals while processes are started: a Ctrl-C reaches them too, before they can say what to do with it.

    The handler of SIGCHLD that a DataLoader sets is put back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(context: Any, name: str, folder: TemporaryFolder) -> None:
    if context.results is not None:
        context.results.closed = True
    started = [process for process in context.processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join(_PATIENCE)
        if process.exitcode is None:
            _LOG.warning("stream %r: worker process (pid %d) cannot be killed and is left behind", name, process.pid)
    if context.results is not None:
        context.results.end_read()
    folder.delete()


def _forget_what_did_not_begin(error: BaseException) -> None:
    """Keep a loader that could not start its processes from complaining, when it is deleted, of what it has not."""
    trace = error.__traceback__
    while trace is not None:
        maker = trace.tb_frame.f_locals.get("self")
        if type(maker).__name__ == "_MultiProcessingDataLoaderIter":
            maker._shutdown = True  # type: ignore[union-attr]  # `_end` ends what was started
        trace = trace.tb_next


def _is_out_of_files(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _out_of_files(name: str, count: int) -> StreamError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return StreamError(
        f"stream {name!r}: too many open files for its {count} worker processes; this process may have {limit} "
        "(`ulimit -n`): allow more, use fewer `workers`, or `main_loop.buffer`, which reads in a thread"
    )


def _how_it_ended(exitcode: int, began: bool) -> str:
    if exitcode >= 0 and not began:
        return f"could not begin (exit status {exitcode}); what it wrote to standard error tells why"
    if exitcode >= 0:
        return f"ended by itself with exit status {exitcode}: the stream left the process"
    name = signal.Signals(-exitcode).name
    hints = {
        "SIGKILL": "; this is how the system ends a process when memory runs out: use fewer workers, smaller batches, "
        "or a smaller buffer",
        "SIGBUS": "; the shared memory (/dev/shm) may be full: use fewer workers or a smaller buffer",
        "SIGSEGV": "; a library that the stream uses crashed",
    }
    return f"was killed by {name}{hints.get(name, '')}"


def _sendable(error: BaseException, worker: int) -> BaseException:
    """Return an exception that can be sent to the loop, with the traceback as a note unless its message says enough."""
    text = "" if isinstance(error, EmrunError) else ":\n" + "".join(traceback.format_exception(error)).rstrip()
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = StreamError(f"{type(error).__name__}: {error}")
    error.add_note(f"in worker process {worker} (pid {os.getpid()}){text}")
    return error


def _packed(item: Any) -> Any:
    """Return a batch whose tensors and larger arrays lie in shared memory.

    They are copied here. What is given to the queue is sent later by a thread, which would move the memory of a tensor
    that the stream still has.
    """
    if item.__class__ is dict:
        return {key: _packed(value) for key, value in item.items()}
    if item.__class__ is list or item.__class__ is tuple:
        return item.__class__(map(_packed, item))
    if item.__class__ is torch.Tensor and item.is_cpu and item.layout is torch.strided and not item.is_quantized:
        return _shared(item.detach()).requires_grad_(item.requires_grad)
    if item.__class__ is np.ndarray and not item.dtype.hasobject:
        if item.nbytes > _BY_PIPE and item.dtype.isnative:
            array = item if item.flags.writeable else item.copy()
            with contextlib.suppress(TypeError):  # a dtype that torch does not have
                return _Shared(_shared(torch.from_numpy(np.ascontiguousarray(array))))
        return item.copy()
    return item


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in shared memory, with the same strides where they leave no gaps."""
    like = torch.empty_like(tensor, device="meta")
    size = max(1, tensor.numel() * tensor.element_size())
    storage: Any = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, like.shape, like.stride()).copy_(tensor)


def _unpacked(item: Any) -> Any:
    if item.__class__ is _Shared:
        return item.tensor.numpy()
    if item.__class__ is dict:
        return {key: _unpacked(value) for key, value in item.items()}
    if item.__class__ is list or item.__class__ is tuple:
        return item.__class__(map(_unpacked, item))
    return item
