"""Measure what emrun adds to updates with accumulation, clipping, averages and a schedule, compared with a plain loop.

    python benchmarks/updates.py [--rounds 40]

Both make the same updates, which is asserted: four batches each, the norm of the gradients clipped, AdamW with a
cosine schedule with warm-up, and an exponential average of the weights. The plain loop uses torch's `clip_grad_norm_`,
`LambdaLR` and `AveragedModel`; it records nothing. Epochs of emrun, with all that belongs to their end, alternate with
the plain loop in this process, with one thread. The table has the medians of both times, and the median of the ratios
of the pairs with its interval of 95 %.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tabulate import tabulate
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from emrun import MainLoop, TorchModel
from emrun.base.types import Factory
from emrun.hooks import AverageWeights, ClipGradients, StopAfter
from emrun.models.schedules.built_in import Cosine
from emrun.storage.run import Run

sys.path.append(str(Path(__file__).parents[1] / "sample_configs" / "char_gpt"))
import my_model

WINDOW = 4
UPDATES, WARM = 10_000, 20
NORM, DECAY = 1.0, 0.5 ** (1 / 50)
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}

Batch = Mapping[str, torch.Tensor]


class Perceptron(torch.nn.Module):
    """An MLP 784-128-10."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def forward(self, x, target):
        return {"loss": cross_entropy(self.layers(x), target)}


class Gpt(my_model.GPT):
    """The model of `sample_configs/char_gpt`, with its loss."""

    def forward(self, x, target):
        return {"loss": cross_entropy(super().forward(x)["logits"], target)}


def perceptron() -> tuple[torch.nn.Module, list[Batch]]:
    """Return the MLP and batches of 32 examples."""
    return Perceptron(), [{"x": torch.randn(32, 784), "target": torch.randint(10, (32,))} for _ in range(300)]


def gpt() -> tuple[torch.nn.Module, list[Batch]]:
    """Return a GPT of two layers and batches of 4 windows."""
    texts = torch.randint(128, (40, 4, 33))
    return Gpt(32, width=64, layers=2), [{"x": text[:, :-1], "target": text[:, 1:]} for text in texts]


def by_hand(module: torch.nn.Module, batches: list[Batch]) -> tuple[Callable[[], None], Callable[[], torch.nn.Module]]:
    """Return a function that trains on all batches in a plain loop, and one that returns the averages."""
    no_decay = [each for each in module.parameters() if each.dim() < 2]
    decayed = [each for each in module.parameters() if each.dim() > 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": no_decay, "weight_decay": 0.0}], **ADAMW)

    def factor(done: int) -> float:
        if done < WARM:
            return (done + 1) / WARM
        return (1 + math.cos(math.pi * (done - WARM) / (UPDATES - WARM - 1))) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    averages = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    parameters = list(module.parameters())

    def run() -> None:
        module.train()
        for number, batch in enumerate(batches, 1):
            (module(batch["x"], batch["target"])["loss"] / WINDOW).backward()
            if number % WINDOW == 0:
                torch.nn.utils.clip_grad_norm_(parameters, NORM)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                averages.update_parameters(module)

    return run, lambda: averages.module


def by_emrun(
    module: torch.nn.Module, batches: list[Batch], run: Run | None
) -> tuple[Callable[[], None], Callable[[], torch.nn.Module]]:
    """Return the same of emrun; with a run directory, loss, learning rate and norm of every step are recorded."""
    model = TorchModel(
        module,
        optimizer=Factory(torch.optim.AdamW, **ADAMW, options={"no_decay": "biases_and_norms"}),
        scheduler=Factory(Cosine, warmup=f"{WARM} updates"),
        accumulate=WINDOW,
        device="cpu",
    )
    hooks = [ClipGradients(norm=NORM), AverageWeights(decay=DECAY), StopAfter(updates=UPDATES)]
    loop = MainLoop(model, None, hooks, run=run, fixed_epoch_size=len(batches), on_unused_sources="ignore")
    loop.__enter__()

    def averaged() -> torch.nn.Module:
        averages = copy.deepcopy(module)
        averages.load_state_dict({**model.evaluation_weights})
        return averages

    return lambda: loop.epoch([batches]) and None, averaged


def measured(make: Callable[[], tuple[Any, list[Batch]]], rounds: int, run: Run | None) -> list[float]:
    """Return the microseconds of a batch of both, and the median, the low and the high end of the ratio."""
    torch.manual_seed(1)
    module, batches = make()
    ours, our_averages = by_emrun(copy.deepcopy(module), batches, run)
    theirs, their_averages = by_hand(copy.deepcopy(module), batches)

    def microseconds(function: Callable[[], None]) -> float:
        began = perf_counter()
        function()
        return (perf_counter() - began) / len(batches) * 1e6

    ours(), theirs()  # to warm up
    for mine, other in zip(our_averages().parameters(), their_averages().parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)
    pairs = []
    for number in range(rounds):
        both = (ours, theirs) if number % 2 else (theirs, ours)
        times = {function: microseconds(function) for function in both}
        pairs.append((times[ours], times[theirs]))
    ratios = sorted(mine / other for mine, other in pairs)
    off = math.ceil(0.98 * math.sqrt(rounds))  # order statistics on both sides of the median
    middle = rounds // 2
    low, high = ratios[max(middle - off, 0)], ratios[min(middle + off, rounds - 1)]
    times = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return [*reversed(times), statistics.median(ratios), low, high]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = []
    for name, make in {"an MLP 784-128-10, batches of 32": perceptron, "a GPT of two layers": gpt}.items():
        table.append([name, *measured(make, rounds, None)])
        with tempfile.TemporaryDirectory() as place:
            table.append([f"{name}, with a run directory", *measured(make, rounds, Run(Path(place)))])
    headers = ["", "plain loop, us a batch", "emrun, us", "times plain", "from", "to"]
    print(tabulate(table, headers, tablefmt="github", floatfmt=(".0f", ".0f", ".0f", ".3f", ".3f", ".3f")))


if __name__ == "__main__":
    main()
