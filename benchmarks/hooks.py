"""Measure what hooks cost a training step: ten that many configs have, each alone and all together.

    python benchmarks/hooks.py [--rounds 15]

The model is the one of `benchmarks/step.py`, an MLP 784-128-10 with batches of 32 examples, its loss and a metric named
as in a config, one thread, a run directory, epochs of 300 updates. Epochs with a hook alternate with epochs without it,
in this process; the medians of the differences and of the ratios are printed. What happens at the end of an epoch
counts. ComputeStats is measured beside no hook, and all others beside ComputeStats.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from tabulate import tabulate

from emrun import AbstractHook, MainLoop
from emrun.base.types import Factory
from emrun.hooks import (
    ClassificationMetrics,
    ComputeStats,
    EarlyStopping,
    LogNorms,
    LogProfile,
    LogVariables,
    SaveBest,
    ShowProgress,
    StopAfter,
    StopOnNaN,
    WriteCSV,
    WriteSQLite,
    WriteTensorBoard,
)
from emrun.metrics import accuracy
from emrun.storage.run import Run
from emrun.streams.stream import StreamWrapper

sys.path.append(str(Path(__file__).parent))
import step

ALONE = (
    "ClassificationMetrics",
    "StopOnNaN, after every batch",
    "WriteSQLite, every 50 updates",
    "LogNorms, every update",
)
"""Hooks that are measured, but are not among the ten."""


class Terminal(io.StringIO):
    """Stands for a terminal, so that the progress bar is drawn."""

    def isatty(self) -> bool:
        """Return whether this is a terminal."""
        return True


def hooks_of(place: Path) -> dict[str, Callable[[], AbstractHook]]:
    """Return name -> a function that makes the hook, in the order of a config."""
    classes = {"predicted_variable": "logits", "gt_variable": "label", "f1_average": "macro", "var_prefix": "class_"}
    return {
        "ComputeStats": lambda: ComputeStats(["loss", "accuracy"]),
        "StopOnNaN": StopOnNaN,
        "ShowProgress": ShowProgress,
        "LogVariables": LogVariables,
        "WriteCSV": lambda: WriteCSV(place),
        "WriteTensorBoard, every 50 updates": lambda: WriteTensorBoard(every="50 updates", output_dir=place),
        "SaveBest, which does not save here": lambda: SaveBest(stream="train", condition="max"),
        "EarlyStopping": lambda: EarlyStopping(patience=10**6, stream="train"),
        "LogProfile": LogProfile,
        "StopAfter": lambda: StopAfter(epochs=10**6),
        ALONE[0]: lambda: ClassificationMetrics(**classes),
        ALONE[1]: lambda: StopOnNaN(after_batch=True),
        ALONE[2]: lambda: WriteSQLite(every="50 updates", output_dir=place),
        ALONE[3]: LogNorms,
    }


def epoch_of(batches: list, place: Path, *hooks: AbstractHook) -> Callable[[], object]:
    """Return a function that runs an epoch with these hooks, in a run directory of its own."""
    metric = Factory(accuracy, options={"inputs": ["logits", "label"]}, is_import=True)
    run = Run(place)
    loop = MainLoop(step.from_config(metrics={"accuracy": metric}), None, hooks, run=run, on_unused_sources="ignore")
    loop.__enter__()
    stream = StreamWrapper(lambda: iter(batches), name="train", training=True)
    return lambda: loop.epoch([stream])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(1)
    shape = step.BATCH_SIZE
    batches = [{"image": torch.randn(shape, 784), "label": torch.randint(10, (shape,))} for _ in range(step.STEPS)]
    raw_step = step.step_of(step.WithLoss())

    def raw() -> None:
        for batch in batches:
            raw_step(batch)

    def microseconds(function: Callable[[], object]) -> float:
        began = perf_counter()
        function()
        return (perf_counter() - began) / step.STEPS * 1e6

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(Terminal()):
        number = itertools.count()

        def place() -> Path:
            path = Path(folder) / f"run-{next(number)}"
            path.mkdir()
            return path

        def with_hooks(*names: str) -> Callable[[], object]:
            directory = place()
            made = hooks_of(directory)
            needs = [] if "ComputeStats" in names else ["ComputeStats"]
            return epoch_of(batches, directory, *(made[name]() for name in (*needs, *names)))

        names = list(hooks_of(Path(folder)))
        ten = [name for name in names if name not in ALONE]
        none, stats = epoch_of(batches, place()), with_hooks("ComputeStats")
        rows = {name: ((none if name == "ComputeStats" else stats), with_hooks(name)) for name in names}
        rows[f"these {len(ten)} together"] = none, with_hooks(*ten)
        rows["the same, over the raw loop"] = raw, rows[f"these {len(ten)} together"][1]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
        for index in range(rounds + 1):
            for name, (other, ours) in rows.items():
                before, here, after = microseconds(other), microseconds(ours), microseconds(other)
                if index:  # the first round warms up
                    found[name].append(((before + after) / 2, here))
    table = [
        [
            name,
            statistics.median(ours - other for other, ours in pairs),
            statistics.median(ours / other for other, ours in pairs),
        ]
        for name, pairs in found.items()
    ]
    print(tabulate(table, ["", "added us a step", "times"], tablefmt="github", floatfmt=("", ".1f", ".3f")))


if __name__ == "__main__":
    main()
