"""Measure a training step with `compile: true` next to the raw loop, eager and compiled, in microseconds.

    python benchmarks/compile.py [--rounds 15]

The models are an MLP 784-128-10 with batches of 32 examples, and a transformer of two layers of width 64 on batches of
16 sequences of 32 tokens, both with SGD and one thread; the last batch of an epoch is shorter. The loops of a model
alternate in this process, on the same batches; the medians are printed, and medians of ratios within a round. The last
column is how much longer the first epoch took, which compiles.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from tabulate import tabulate
from torch import nn

from emrun import MainLoop, TorchModel
from emrun.base.types import Factory

STEPS = 100


class MLP(nn.Module):
    """An MLP 784-128-10 with its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x, y):
        return {"loss": nn.functional.cross_entropy(self.layers(x), y)}


class Transformer(nn.Module):
    """A transformer that predicts the class of a sequence, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, x, y):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x.mean(1)), y)}


def batches_of(kind: type, sizes: list[int]) -> list[dict[str, torch.Tensor]]:
    """Return a batch for each size."""
    torch.manual_seed(1)
    if kind is MLP:
        return [{"x": torch.randn(size, 784), "y": torch.randint(10, (size,))} for size in sizes]
    return [{"x": torch.randint(100, (size, 32)), "y": torch.randint(10, (size,))} for size in sizes]


def raw_of(module: nn.Module, batches: list) -> Callable[[], None]:
    """Return an epoch of the raw loop."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def epoch() -> None:
        for batch in batches:
            optimizer.zero_grad()
            module(batch["x"], batch["y"])["loss"].backward()
            optimizer.step()

    return epoch


def emrun_of(module: nn.Module, batches: list, **arguments) -> Callable[[], object]:
    """Return an epoch of emrun."""
    model = TorchModel(module, optimizer=Factory(torch.optim.SGD, lr=0.01), device="cpu", **arguments)
    loop = MainLoop(model, None)
    loop.__enter__()
    return lambda: loop.epoch([batches])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    logging.disable()
    rows = []
    for kind, size in ((MLP, 32), (Transformer, 16)):
        batches = batches_of(kind, [size] * (STEPS - 1) + [size - 3])  # the last batch is short
        compiled = torch.compile(kind())
        loops = {
            "raw loop": raw_of(kind(), batches),
            "raw loop, torch.compile": raw_of(compiled, batches),
            "emrun": emrun_of(kind(), batches),
            "emrun, compile: true": emrun_of(kind(), batches, compile=True),
            "emrun, compile: {dynamic: true}": emrun_of(kind(), batches, compile={"dynamic": True}),
        }
        first: dict[str, float] = {}
        times: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(rounds + 2):
            for name, epoch in loops.items():
                began = perf_counter()
                epoch()
                seconds = perf_counter() - began
                if number == 0:
                    first[name] = seconds
                elif number > 1:
                    times[name].append(seconds)
        for name, figures in times.items():
            ratios = [
                statistics.median(ours / other for ours, other in zip(figures, times[base], strict=True))
                for base in ("raw loop", "raw loop, torch.compile")
            ]
            each = statistics.median(figures) / STEPS
            rows.append([kind.__name__, name, each * 1e6, *ratios, first[name] - each * STEPS])
    headers = ["model", "loop", "us a step", "times raw", "times raw compiled", "s to compile"]
    print(tabulate(rows, headers, tablefmt="github", floatfmt=("", "", ".0f", ".2f", ".2f", ".1f")))


if __name__ == "__main__":
    main()
