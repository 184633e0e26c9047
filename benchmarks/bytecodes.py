"""Count the Python bytecodes of emrun's own code that a training step executes, by file.

Unlike times, the counts are the same in each run.

    python benchmarks/bytecodes.py [bare] [typical] [window] [ranks] [deep]

The module is an MLP 784-128-10, trained in a run directory. Of an epoch, the steps from one batch to a later one are
counted, so that what happens once per run, epoch or chunk of the step record does not count. `bare` has SGD and
`StopAfter`; `typical` also has ComputeStats of two variables, LogVariables, WriteCSV, SaveBest, SaveLatest and
StopOnNaN; `window` is `bare` with an update for every 4 batches; `ranks` is `bare` on rank 0 of two, `deep` the same
with a layer more, so that the difference is that of two parameters. Several ranks look for news now and then, by the
clock; this is not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

import emrun
from emrun import create_training
from emrun.loop.ranks import requests as agreement
from emrun.ranks import group
from emrun.training.create import train

CASES = ("bare", "typical", "window", "ranks", "deep")
FIRST, LAST = 8, 28
"""The counted batches of the epoch, which are windows as a whole."""
WINDOW = 4

_OURS = str(Path(emrun.__file__).parent)
_COUNTED: Counter[str] = Counter()


class Data:
    """The same batch again and again; counting begins with one batch and ends with a later one."""

    def train_stream(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of an epoch."""
        random = np.random.default_rng(0)
        x, y = random.normal(size=(64, 784)).astype(np.float32), random.integers(0, 10, 64)
        for number in range(LAST + WINDOW):
            if number == FIRST:
                _begin(sys._getframe())
            elif number == LAST:
                _end(sys._getframe())
            yield {"x": x, "y": y}


class Net(torch.nn.Sequential):
    """An MLP 784-128-10."""

    def __init__(self, depth: int = 0) -> None:
        more = [torch.nn.Linear(128, 128) for _ in range(depth)]
        super().__init__(torch.nn.Linear(784, 128), torch.nn.ReLU(), *more, torch.nn.Linear(128, 10))


def _begin(frame: FrameType | None) -> None:
    _COUNTED.clear()
    sys.settrace(_called)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            frame.f_trace, frame.f_trace_opcodes = _executed, True
        frame = frame.f_back


def _end(frame: FrameType | None) -> None:
    sys.settrace(None)
    while frame is not None:
        frame.f_trace, frame.f_trace_opcodes = None, False
        frame = frame.f_back


def _called(frame: FrameType, event: str, argument: Any) -> Any:
    if not frame.f_code.co_filename.startswith(_OURS):
        return None
    frame.f_trace_opcodes = True
    return _executed


def _executed(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "opcode":
        _COUNTED[frame.f_code.co_filename] += 1
    return _executed


def count(case: str) -> dict[str, float]:
    """Return file -> the bytecodes of a step in it, the largest number first."""
    calculated = [{"ComputeStats": {"variables": ["loss", "logits"]}}, "LogVariables", "WriteCSV"]
    saving = [{"SaveBest": {"stream": "train"}}, "SaveLatest", "StopOnNaN"]
    config = {
        "seed": 1,
        "dataset": {"class": f"{__name__}.Data"},
        "model": {
            "module": {"class": f"{__name__}.Net", "depth": int(case == "deep")},
            "inputs": {"input": "x"},
            "outputs": ["logits"],
            "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "y"]},
            "optimizer": {"class": "SGD", "lr": 0.01},
            "accumulate": WINDOW if case == "window" else 1,
            "device": "cpu",
        },
        "main_loop": {"skip_zeroth_epoch": True},
        "hooks": [*((*calculated, *saving) if case == "typical" else ()), {"StopAfter": {"iterations": LAST + 1}}],
    }
    with tempfile.TemporaryDirectory() as directory:
        if case in ("ranks", "deep"):
            return _counted_on_first(config, Path(directory))
        return _counted(config, Path(directory) / "run")


def _counted(config: dict[str, Any], run: Path) -> dict[str, float]:
    train(create_training(config, output_dir=run))
    return {name[len(_OURS) + 1 :]: number / (LAST - FIRST) for name, number in _COUNTED.most_common()}


def _counted_on_first(config: dict[str, Any], directory: Path) -> dict[str, float]:
    """Train in two processes, which meet in a directory; return what the first one counts."""
    (directory / group.KEY).write_bytes(os.urandom(32))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [context.Process(target=_train_on, args=(rank, config, directory, sender)) for rank in range(2)]
    for each in ranks:
        each.start()
    sender.close()
    try:
        counted: dict[str, float] = receiver.recv()
    finally:
        for each in ranks:
            each.join()
    return counted


def _train_on(rank: int, config: dict[str, Any], directory: Path, sender: Connection) -> None:
    torch.set_num_threads(1)
    agreement._SECONDS = 1e6
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    group.meet_in(directory)
    counted = _counted(config, directory / "run")
    if rank == 0:
        sender.send(counted)
    group.leave()


def main() -> None:
    """Print the bytecodes of a step by file."""
    parser = argparse.ArgumentParser(description="Count the bytecodes of emrun that a training step executes.")
    parser.add_argument("cases", nargs="*", help=f"{', '.join(CASES)}; all by default")
    torch.set_num_threads(1)
    for case in parser.parse_args().cases or CASES:
        counted = count(case)
        print(tabulate([*counted.items(), ("sum", sum(counted.values()))], headers=[case, "bytecodes"]), end="\n\n")


if __name__ == "__main__":
    main()
