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
