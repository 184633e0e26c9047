"""Measure how long training waits for a checkpoint and how long the checkpoint takes, relative to a `torch.save`.

    python benchmarks/checkpoint.py [--pairs 10] [--millions 30]

The model is a linear layer with the given number of million parameters, trained with AdamW. Checkpoints and plain saves
alternate; medians are printed. The wait is the time from the request of the hook to the next batch. The rest of a
checkpoint, with its checksums and the flush to disk, happens while training continues.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from time import perf_counter

import torch

from emrun import AbstractHook, MainLoop, TorchModel, TrainingTerminated
from emrun.base.types import Factory
from emrun.storage.run import Run

BUDGET = 0.3  # of the time of torch.save
WIDTH = 5000


class Module(torch.nn.Module):
    """One large linear layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, rows, bias=False)

    def forward(self, x):
        """Return a loss."""
        return {"loss": self.inner(x).square().mean()}


class Data:
    """Two batches of four examples."""

    def train_stream(self):
        """Yield the batches."""
        for _ in range(2):
            yield {"x": torch.ones(4, WIDTH)}


class Watch(AbstractHook):
    """Requests a checkpoint after the first batch; measures the time until the second batch and until it is saved."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.link = place / "checkpoints" / "measured"
        self.asked = self.wait = self.total = 0.0

    def after_batch(self):
        """Request the checkpoint, or end the run."""
        if self.asked:
            raise TrainingTerminated("measured")
        self.main_loop.request_checkpoint("measured")
        self.asked = perf_counter()

    def before_batch(self):
        """Measure both times."""
        if self.asked:
            self.wait = perf_counter() - self.asked
            while not self.link.exists():
                time.sleep(0.001)
            self.total = perf_counter() - self.asked


def checkpoint(model: TorchModel) -> tuple[float, float]:
    """Return the seconds that training waits for a checkpoint, and the seconds until the checkpoint is saved."""
    with tempfile.TemporaryDirectory() as place:
        watch = Watch(Path(place))
        MainLoop(model, Data(), [watch], skip_zeroth_epoch=True, run=Run(Path(place))).run_training()
        return watch.wait, watch.total


def plain(model: TorchModel) -> float:
    """Return the seconds of a plain `torch.save` of the weights and the optimizer."""
    with tempfile.TemporaryDirectory() as place:
        began = perf_counter()
        state = {"module": model.module.state_dict(), "optimizer": model.optimizer.state_dict()}
        torch.save(state, Path(place) / "all.pt")
        return perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--millions", type=int, default=30)
    arguments = parser.parse_args()
    model = TorchModel(Module(arguments.millions * 10**6 // WIDTH), optimizer=Factory(torch.optim.AdamW))
    checkpoint(model), plain(model)  # the first update creates the state of the optimizer
    figures = [(*checkpoint(model), plain(model)) for _ in range(arguments.pairs)]
    wait, total, base = (statistics.median(column) for column in zip(*figures, strict=True))
    ratio = statistics.median(each[0] / each[2] for each in figures)
    verdict = "held" if ratio <= BUDGET else "NOT HELD"
    print(f"checkpoint of {arguments.millions} M parameters: training waits {wait:.3f} s, saving takes {total:.3f} s;")
    print(f"a plain torch.save takes {base:.3f} s; the wait is {ratio:.2f} times as long, budget {BUDGET}, {verdict}")


if __name__ == "__main__":
    main()
