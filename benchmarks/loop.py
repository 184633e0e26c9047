"""What the loop costs: bookkeeping of a batch, and a bare training step over the raw PyTorch loop.

    python benchmarks/loop.py [--pairs 30]

Both are measured side by side in this process, alternating; medians are printed beside the budgets.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from time import perf_counter

import torch

from emrun import AbstractHook, AbstractModel, MainLoop, TorchModel
from emrun.types import Factory

BOOKKEEPING_BUDGET = 2.0  # microseconds a batch
STEP_BUDGET = 1.05  # times the raw loop
BATCHES = 20_000
STEPS = 300
BATCH_SIZE = 32


class Nothing(AbstractModel):
    """A model that does nothing."""

    input_names = ("image", "label")
    output_names = ()

    def run(self, batch, train, stream):
        """Return no outputs."""
        return {}

    def save(self, directory):
        """Write nothing."""

    def load(self, directory):
        """Read nothing."""


class Mlp(torch.nn.Module):
    """784-128-10, with the loss as its only output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def forward(self, image, label):
        """Return the mean cross entropy."""
        return {"loss": torch.nn.functional.cross_entropy(self.layers(image), label)}


def microseconds(run, count: int) -> float:
    """Return how long one of `count` rounds of `run` takes."""
    began = perf_counter()
    run()
    return (perf_counter() - began) / count * 1e6


def bookkeeping(pairs: int) -> float:
    """Return the microseconds that the loop takes for a batch beside the model, over a bare `for`."""
    batch = {"image": [0.0] * BATCH_SIZE, "label": [0] * BATCH_SIZE}
    model, hooks = Nothing(), [AbstractHook() for _ in range(6)]
    loop = MainLoop(model, dataset=None, hooks=hooks)

    def raw() -> None:
        for each in itertools.repeat(batch, BATCHES):
            model.run(each, True, "train")

    extra = []
    with loop:
        for _ in range(pairs):
            ours = microseconds(lambda: loop.epoch([itertools.repeat(batch, BATCHES)]), BATCHES)
            extra.append(ours - microseconds(raw, BATCHES))
    return statistics.median(extra)


def bare_step(pairs: int) -> tuple[float, float, float]:
    """Return microseconds a step of the raw loop and of emrun, and the median of their ratios."""
    torch.manual_seed(0)
    batches = [{"image": torch.randn(BATCH_SIZE, 784), "label": torch.randint(10, (BATCH_SIZE,))} for _ in range(STEPS)]
    module, ours = Mlp(), Mlp()
    ours.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    loop = MainLoop(TorchModel(ours, optimizer=Factory(torch.optim.SGD, lr=0.01), device="cpu"), dataset=None)

    def raw() -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss = module(batch["image"], batch["label"])["loss"]
            loss.backward()
            optimizer.step()

    figures = []
    with loop:
        for index in range(pairs + 2):
            runs = [raw, lambda: loop.epoch([batches])]
            order = (0, 1) if index % 2 else (1, 0)
            times = {which: microseconds(runs[which], STEPS) for which in order}
            if index >= 2:  # the first two warm up
                figures.append((times[0], times[1], times[1] / times[0]))
    medians = [statistics.median(column) for column in zip(*figures, strict=True)]
    return medians[0], medians[1], medians[2]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    cost = bookkeeping(pairs)
    budget = f"budget {BOOKKEEPING_BUDGET} us"
    print(f"bookkeeping of a batch     {cost:6.2f} us    {budget}    {verdict(cost, BOOKKEEPING_BUDGET)}")
    raw, ours, ratio = bare_step(pairs)
    print(f"raw step                   {raw:6.0f} us")
    print(f"step of emrun              {ours:6.0f} us")
    print(f"ratio, median of pairs     {ratio:6.3f}       budget {STEP_BUDGET}      {verdict(ratio, STEP_BUDGET)}")


def verdict(value: float, budget: float) -> str:
    """Return whether a budget is held."""
    return "held" if value <= budget else "NOT HELD"


if __name__ == "__main__":
    main()
