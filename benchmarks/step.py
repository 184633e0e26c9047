"""Measure what each part of emrun adds to a training step of a raw PyTorch loop, in microseconds.

    python benchmarks/step.py [--rounds 15]

The model is an MLP 784-128-10 with batches of 32 examples, SGD and one thread. Each row of the table adds one part to
the row above. Every row alternates with the raw loop in this process; the medians of the differences are printed. The
last rows are compared with something else: four batches in an update with the same by hand, and `Diagnose` at its
default with a loop that has ComputeStats only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from tabulate import tabulate

from emrun import AbstractModel, MainLoop, TorchModel
from emrun.base.types import Factory
from emrun.hooks import ComputeStats, Diagnose, StopOnNaN
from emrun.metrics import accuracy
from emrun.storage.run import Run
from emrun.streams.stream import StreamWrapper

STEPS = 300
BATCH_SIZE = 32
WINDOW = 4


class Logits(torch.nn.Module):
    """An MLP 784-128-10 that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def forward(self, image):
        return self.layers(image)


class WithLoss(Logits):
    """The same MLP with the loss as its output."""

    def forward(self, image, label):
        return {"loss": torch.nn.functional.cross_entropy(self.layers(image), label)}


def step_of(module: WithLoss) -> Callable[[dict], torch.Tensor]:
    """Return the step of the raw loop."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step(batch):
        optimizer.zero_grad()
        loss = module(batch["image"], batch["label"])["loss"]
        loss.backward()
        optimizer.step()
        return loss

    return step


def accumulating_step_of(module: WithLoss) -> Callable[[dict, bool, bool], None]:
    """Return the step of a raw loop with windows: the sum of the losses, and gradients divided at the update."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    parameters = list(module.parameters())
    weight = 0.0

    def step(batch, is_first, is_last):
        nonlocal weight
        if is_first:
            optimizer.zero_grad()
            weight = 0.0
        examples = float(len(batch["image"]))
        (module(batch["image"], batch["label"])["loss"] * examples).backward()
        weight += examples
        if is_last:
            torch._foreach_div_([parameter.grad for parameter in parameters], weight)
            optimizer.step()

    return step


class RawStep(AbstractModel):
    """The raw step as a model."""

    input_names = ("image", "label")
    output_names = ("loss",)

    def __init__(self) -> None:
        self.step = step_of(WithLoss())

    def run(self, batch, train, stream):
        return {"loss": self.step(batch).detach()}

    def save(self, directory):
        """Write nothing."""

    def load(self, directory):
        """Read nothing."""


def epoch_of(model: AbstractModel, batches: list, *hooks, run: Run | None = None, **more) -> Callable[[], object]:
    """Return a function that runs an epoch with emrun."""
    loop = MainLoop(model, None, hooks, run=run, on_unused_sources="ignore", **more)
    loop.__enter__()
    return lambda: loop.epoch([batches])


def model_of(module: torch.nn.Module, **arguments) -> TorchModel:
    """Return a `TorchModel` of a module."""
    return TorchModel(module, optimizer=Factory(torch.optim.SGD, lr=0.01), device="cpu", **arguments)


def from_config(**arguments) -> TorchModel:
    """Return a model whose loss is named in the config."""
    loss = Factory(torch.nn.CrossEntropyLoss, options={"inputs": ["logits", "label"]})
    return model_of(Logits(), inputs=["image"], outputs=["logits"], loss=loss, **arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(1)
    batches = [{"image": torch.randn(BATCH_SIZE, 784), "label": torch.randint(10, (BATCH_SIZE,))} for _ in range(STEPS)]
    step = step_of(WithLoss())
    streamed = StreamWrapper(lambda: batches, name="train", training=False)
    metric = Factory(accuracy, options={"inputs": ["logits", "label"]}, is_import=True)

    def raw():
        for batch in batches:
            step(batch)

    accumulating = accumulating_step_of(WithLoss())

    def raw_accumulating():
        for number, batch in enumerate(batches):
            accumulating(batch, number % WINDOW == 0, number % WINDOW == WINDOW - 1)

    def raw_streamed():
        for batch in streamed:
            step(batch)

    with tempfile.TemporaryDirectory() as place:
        run, measured = Run(Path(place)), {"metrics": {"accuracy": metric}}
        stats = [ComputeStats(["loss", "accuracy"]) for _ in range(2)]
        rows = {
            "the stream, by StreamWrapper": raw_streamed,
            "MainLoop, the raw step as its model": epoch_of(RawStep(), batches),
            "TorchModel instead": epoch_of(model_of(WithLoss()), batches),
            "a run directory": epoch_of(model_of(WithLoss()), batches, run=run, record_steps=0),
            "the step record": epoch_of(model_of(WithLoss()), batches, run=run),
            "the loss named in the config": epoch_of(from_config(), batches, run=run),
            "a metric, accuracy": epoch_of(from_config(**measured), batches, run=run),
            "ComputeStats of loss and accuracy": epoch_of(from_config(**measured), batches, stats[0], run=run),
            "StopOnNaN after every batch": epoch_of(
                from_config(**measured), batches, stats[1], StopOnNaN(after_batch=True), run=run
            ),
        }

        windows = epoch_of(model_of(WithLoss(), accumulate=WINDOW), batches)
        plain = epoch_of(from_config(**measured), batches, ComputeStats(["loss", "accuracy"]), run=run)
        diagnosed = epoch_of(from_config(**measured), batches, ComputeStats(["loss", "accuracy"]), Diagnose(), run=run)
        compared = {
            f"accumulate: {WINDOW}, beside the same by hand": (raw_accumulating, windows),
            "Diagnose, beside a loop without it": (plain, diagnosed),
        }

        def microseconds(run) -> float:
            began = perf_counter()
            run()
            return (perf_counter() - began) / STEPS * 1e6

        added: dict[str, list[float]] = {name: [] for name in rows}
        raws: list[float] = []
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in compared}
        for number in range(rounds + 1):
            for name, run in rows.items():
                before, ours, after = microseconds(raw), microseconds(run), microseconds(raw)
                if number:  # the first round warms up
                    raws.append(before)
                    added[name].append(ours - (before + after) / 2)
            for name, (other, run) in compared.items():
                before, ours, after = microseconds(other), microseconds(run), microseconds(other)
                if number:
                    pairs[name].append(((before + after) / 2, ours))
    base, last, table = statistics.median(raws), 0.0, [["the raw loop", statistics.median(raws), 0.0, 1.0]]
    for name, figures in added.items():
        here = statistics.median(figures)
        table.append([name, base + here, here - last, (base + here) / base])
        last = here
    for name, both in pairs.items():
        other = statistics.median(before for before, _ in both)
        more = statistics.median(ours - before for before, ours in both)
        table.append([name, other + more, more, (other + more) / other])
    print(
        tabulate(
            table, ["", "us a step", "added us", "times raw"], tablefmt="github", floatfmt=(".0f", ".0f", ".1f", ".3f")
        )
    )


if __name__ == "__main__":
    main()
