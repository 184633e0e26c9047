"""How long a training waits for a checkpoint, and how long that takes in all, over a plain `torch.save` of the state.

    python benchmarks/checkpoint.py [--pairs 10] [--millions 30]

A linear layer of so many million parameters with AdamW; alternating, medians. The wait is from the hook's request to
the next batch; the rest of a checkpoint, which is also flushed to disk and summed up, happens beside the training.
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
from emrun.storage.run import Run
from emrun.types import Factory

BUDGET = 0.3  # times torch.save
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
        """Yield them."""
        for _ in range(2):
            yield {"x": torch.ones(4, WIDTH)}


class Watch(AbstractHook):
    """Asks for a checkpoint after the first batch and takes the time until the second, and until it is there."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.link = place / "checkpoints" / "measured"
        self.asked = self.wait = self.total = 0.0

    def after_batch(self):
        """Ask, or end the training."""
        if self.asked:
            raise TrainingTerminated("measured")
        self.main_loop.request_checkpoint("measured")
        self.asked = perf_counter()

    def before_batch(self):
        """Take the times."""
        if self.asked:
            self.wait = perf_counter() - self.asked
            while not self.link.exists():
                time.sleep(0.001)
            self.total = perf_counter() - self.asked


def checkpoint(model: TorchModel) -> tuple[float, float]:
    """Return the seconds that a training waits for a checkpoint, and those that it takes in all."""
    with tempfile.TemporaryDirectory() as place:
        watch = Watch(Path(place))
        MainLoop(model, Data(), [watch], skip_zeroth_epoch=True, run=Run(Path(place))).run_training()
        return watch.wait, watch.total


def plain(model: TorchModel) -> float:
    """Return the seconds that a plain `torch.save` of weights and optimizer takes."""
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
    checkpoint(model), plain(model)  # the optimizer's state is made
    figures = [(*checkpoint(model), plain(model)) for _ in range(arguments.pairs)]
    wait, total, base = (statistics.median(column) for column in zip(*figures, strict=True))
    ratio = statistics.median(each[0] / each[2] for each in figures)
    verdict = "held" if ratio <= BUDGET else "NOT HELD"
    print(f"checkpoint of {arguments.millions} M parameters: the training waits {wait:.3f} s, it takes {total:.3f} s;")
    print(f"plain torch.save {base:.3f} s: {ratio:.2f} times, budget {BUDGET}, {verdict}")


if __name__ == "__main__":
    main()
