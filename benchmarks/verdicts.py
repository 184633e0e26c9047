"""How often `emrun compare` is right: many comparisons of real trainings, whose truth is known, in one process.

    python benchmarks/verdicts.py [--comparisons 200] [--pairs 3..12] [--effect 2]

A linear model is trained on 64 examples; its value is the lowest loss of the stream `valid`. Seeds change the initial
weights and the order of the data, and with these the value. In the first row, A is compared with itself, but B has
other seeds: each verdict is wrong. (With the same seeds, all values are equal.) In the second row, B has a larger
learning rate. It is chosen, on seeds that the comparisons do not use, so that the mean difference is `--effect` times
the noise, the standard deviation of the differences. The verdicts are those of the command. The last column is the
noise that the differences would have if B had other seeds than A: it shows what the pairs are worth.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.hooks import ComputeStats, StopAfter
from emrun.launch.pairs import judge, worst_for_missing

CALIBRATION = range(10**6, 10**6 + 100)
"""The seeds with which the learning rate of B is chosen."""
OTHERS = 10**7
"""What is added to the seeds of B that are others than those of A."""
RATE = 0.04
"""The learning rate of A."""


class Rows:
    """A noisy linear function of eight numbers."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.x = random.normal(size=(128, 8)).astype(np.float32)
        self.y = (self.x @ random.normal(size=8) + random.normal(size=128)).astype(np.float32)

    def train_stream(self, ctx: Any) -> Iterator[dict[str, Any]]:
        """Yield the first half, in an order of the seed."""
        for rows in ctx.batches(64, 8, shuffle=True):
            yield {"x": self.x[rows], "y": self.y[rows]}

    def valid_stream(self) -> Iterator[dict[str, Any]]:
        """Yield the second half."""
        yield {"x": self.x[64:], "y": self.y[64:]}


class Line(torch.nn.Module):
    """A linear function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the squared error of each example."""
        return {"loss": (self.layer(x)[:, 0] - y) ** 2}


class Keep(AbstractHook):
    """Keeps the lowest loss of the stream `valid`."""

    reads = ()
    monitors = ("valid/loss/mean",)

    def __init__(self) -> None:
        super().__init__()
        self.value = float("inf")

    def after_epoch(self, epoch_id: int, epoch_data: Any) -> None:
        """Look at the loss, but not at that of the zeroth epoch."""
        if epoch_id:
            self.value = min(self.value, epoch_data["valid"]["loss"]["mean"])


DATA = Rows()


@cache
def trained(rate: float, seed: int) -> float:
    """Train once and return the value of the metric."""
    torch.manual_seed(seed)
    model = TorchModel(Line(), optimizer=Factory(torch.optim.SGD, lr=rate), device="cpu")
    keep = Keep()
    hooks = [ComputeStats(["loss"]), keep, StopAfter(epochs=3)]
    MainLoop(model, DATA, hooks, extra_streams=["valid"], seed=seed, skip_zeroth_epoch=True).run_training()
    return keep.value


def effect(rate: float, seeds: range) -> float:
    """Return how much better a rate is than that of A, in units of the noise of the differences."""
    found = [trained(RATE, seed) - trained(rate, seed) for seed in seeds]
    return statistics.fmean(found) / statistics.stdev(found)


def rate_with(wanted: float) -> float:
    """Return a learning rate that is better by an effect: between these two, a larger rate has a smaller effect."""
    low, high = 0.05, 0.1
    for _ in range(4):
        middle = (low + high) / 2
        low, high = (middle, high) if effect(middle, CALIBRATION) > wanted else (low, middle)
    return round((low + high) / 2, 4)


def row(name: str, rate: float, offset: int, comparisons: int, pairs: range) -> list[Any]:
    """Make comparisons; return how many of the verdicts were which, the median of the pairs, and the noise."""
    words: Counter[str] = Counter()
    counts, sides = [], ([], [])
    for comparison in range(comparisons):
        seeds = range(comparison * pairs[-1], (comparison + 1) * pairs[-1])
        for count in pairs:
            both = [[trained(of, seed + other) for seed in seeds[:count]] for of, other in ((RATE, 0), (rate, offset))]
            verdict = judge(*worst_for_missing(both, "min"), "min")
            if verdict.word != "undecided":
                break
        words[verdict.word] += 1
        counts.append(count)
        for side, values in zip(sides, both, strict=True):
            side.extend(values)
    found = [left - right for left, right in zip(*sides, strict=True)]
    noise, unpaired = statistics.stdev(found), math.hypot(*map(statistics.stdev, sides))
    shares = [f"{words[word] / comparisons:.1%}" for word in ("b", "a", "undecided")]
    return [name, rate, statistics.fmean(found) / noise, *shares, statistics.median(counts), noise, unpaired]


def main() -> None:
    """Print a table with a row for each kind of comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument("--pairs", default="3..12")
    parser.add_argument("--effect", type=float, default=2.0)
    given = parser.parse_args()
    low, high = map(int, given.pairs.split(".."))
    torch.set_num_threads(1)
    arguments = given.comparisons, range(low, high + 1)
    better = row("better", rate_with(given.effect), 0, *arguments)
    rows = [row("equal, other seeds", RATE, OTHERS, *arguments), better]
    headers = ["B", "rate", "effect", "B better", "A better", "undecided", "median of pairs", "noise", "unpaired"]
    sys.stdout.write(tabulate(rows, headers, tablefmt="github", floatfmt=".3g") + "\n")


if __name__ == "__main__":
    main()
