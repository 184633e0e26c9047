"""Runs a function in several processes that train together: forks of this one, which meet as those of `--nproc`."""

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo  # imported by optimizers: once here instead of in each fork
import torch.distributed.fsdp

from emrun.ranks import group

PATIENCE = 60  # seconds
needs_shards = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp.FSDPModule, "set_force_sum_reduction_for_comms"),
    reason="this torch cannot sum the gradients of shards",
)


class Failed:
    """What a rank sends whose function has raised an error."""

    def __init__(self, error):
        self.kind, self.message, self.text = type(error).__name__, str(error), traceback.format_exc()


def in_ranks(size, function, *arguments, **keywords):
    """Call a function on each rank; return the results, in the order of the ranks."""
    found = results_of(size, partial(function, **keywords), *arguments)
    for rank, each in enumerate(found):
        assert not isinstance(each, Failed), f"rank {rank}: {each.text}"
    return found


def all_in_ranks(size, calls, failing=()):
    """Call functions, which are given by name, one after another on each rank, which costs less than ranks for each.

    Return name -> the results, in the order of the ranks. The calls whose names are in `failing` may raise an error on
    all ranks, which is a `Failed`.
    """
    found = in_ranks(size, _each_of, calls)
    for rank, of_rank in enumerate(found):
        for name, each in of_rank.items():
            assert name in failing or not isinstance(each, Failed), f"{name!r} on rank {rank}: {each.text}"
    return {name: [of_rank[name] for of_rank in found] for name in calls}


def _each_of(calls):
    return {name: _result_of(call) for name, call in calls.items()}


def _result_of(call):
    try:
        return call()
    except Exception as error:
        return Failed(error)


def results_of(size, function, *arguments):
    """Call a function on each rank; return the results, or what has failed: a `Failed`, or the exit status.

    Results are pickled without PyTorch's multiprocessing, whose tensors in shared memory end with the rank.
    """
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / group.KEY).write_bytes(b"of a test")
        return _results(size, Path(place), function, arguments)


def _results(size, place, function, arguments):
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(rank, size, place, sender, function, arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    found = []
    try:
        for receiver, process in zip(pipes, processes, strict=True):
            assert receiver.poll(PATIENCE), "a rank hangs"
            try:
                found.append(pickle.loads(receiver.recv_bytes()))
            except EOFError:
                process.join(PATIENCE)
                found.append(process.exitcode)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _run(rank, size, place, sender, function, arguments):
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE - 5, exit=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    group.meet_in(place)
    try:
        sender.send_bytes(pickle.dumps(function(*arguments)))
    except BaseException as error:
        sender.send_bytes(pickle.dumps(Failed(error)))
        group.leave(waits=False)
    else:
        group.leave()
    finally:
        sender.close()
        os._exit(0)
