"""The work of all runners: a small classifier, its batches, and the clock in their stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch

BATCH_SIZE = 32
DISTINCT = 100  # batches, which are repeated in this order
RATE = 0.01

Batch = Any
Form = Callable[[torch.Tensor, torch.Tensor], Batch]


class Mlp(torch.nn.Module):
    """An MLP that returns logits, by default 784-128-10.

    Args:
        width: the number of units of a hidden layer.
        layers: the number of hidden layers.
    """

    def __init__(self, width: int = 128, layers: int = 1) -> None:
        super().__init__()
        hidden = [layer for _ in range(layers - 1) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        first = [torch.nn.Linear(784, width), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*first, *hidden, torch.nn.Linear(width, 10))

    def forward(self, image):
        """Return the logits."""
        return self.layers(image)


class MlpWithLoss(Mlp):
    """The same MLP for frameworks in which the module returns the loss."""

    def forward(self, image, label):
        """Return the mean cross entropy."""
        return {"loss": torch.nn.functional.cross_entropy(self.layers(image), label)}


class Last(torch.optim.SGD):
    """Ends the process after its first update."""

    def step(self, *args, **kwargs):
        """Make the update."""
        super().step(*args, **kwargs)
        os._exit(0)


class Clocked(torch.optim.SGD):
    """Notes the time of an update after the first ones, and of the last update.

    Args:
        params: the parameters.
        lr: the learning rate.
        work: its number of steps and of those that warm up, and its clock.
    """

    def __init__(self, params, lr, work: Work) -> None:
        super().__init__(params, lr=lr)
        self._work, self._made = work, 0

    def step(self, *args, **kwargs):
        """Make the update."""
        super().step(*args, **kwargs)
        self._made += 1
        if self._made == self._work.warm:
            self._work.began = perf_counter()
        elif self._made == self._work.steps:
            self._work.ended = perf_counter()


class Pass:
    """The batches of one epoch; `len` is their number."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __len__(self) -> int:
        return self._work.steps

    def __iter__(self) -> Iterator[Batch]:
        work = self._work
        items, warm, last = work.items, work.warm, work.steps - 1
        for index in range(work.steps):
            if index == warm and not work.began and not work.is_clocked:
                work.began = perf_counter()
            if index == last and not work.is_clocked:
                work.ended = perf_counter()
            work.taken += 1
            yield items[index % len(items)]


class Work:
    """A model to train, its batches and the time that training took.

    The clock in the stream starts when the runner requests the first batch after `warm` others, and stops when it
    requests the last batch of an epoch. The time before the first batch is not measured.

    Args:
        steps: the number of steps of an epoch.
        epochs: the number of epochs.
        warm: the number of steps before the clock starts.
        optimizer: the class, called with the parameters and `lr`.
        rank: the rank of this process, which has batches of its own.
        module: the model; an MLP 784-128-10 by default.
    """

    def __init__(
        self,
        steps: int,
        epochs: int = 1,
        warm: int = 0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        rank: int = 0,
        module: Callable[[], torch.nn.Module] = Mlp,
    ) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.is_clocked = False  # whether the optimizer has the clock
        self.steps = steps
        self.epochs = epochs
        self.warm = warm
        self.optimizer = optimizer
        self.rate = RATE
        self.module = module()
        self.items: list[Batch] = []
        self.taken = 0
        self.began = self.ended = 0.0
        self.losses: list[float] = []

    def batches(self, form: Form) -> Pass:
        """Return batches to iterate over once per epoch; `form` is applied to them in advance."""
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(min(DISTINCT, self.steps)):
            image = torch.randn(BATCH_SIZE, 784, generator=generator)
            self.items.append(form(image, torch.randint(10, (BATCH_SIZE,), generator=generator)))
        return Pass(self)

    def nothing(self) -> Pass:
        """Return batches for a model that does nothing."""
        self.items = [{"image": [0.0] * BATCH_SIZE, "label": [0] * BATCH_SIZE}]
        return Pass(self)

    def with_loss(self) -> MlpWithLoss:
        """Return the model in the form that returns the loss."""
        module = MlpWithLoss()
        module.load_state_dict(self.module.state_dict())
        self.module = module
        return module

    def sgd(self) -> torch.optim.Optimizer:
        """Return the optimizer of the module."""
        return self.optimizer(self.module.parameters(), lr=self.rate)

    def clocked(self) -> None:
        """Let the optimizer have the clock, so that time is the same for all who read ahead."""
        self.is_clocked, self.optimizer = True, partial(Clocked, work=self)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, from the first timed step to the one before the last."""
        return (self.ended - self.began) / (self.steps - (not self.is_clocked) - self.warm)

    def weights(self) -> list[torch.Tensor]:
        """Return copies of the trained weights."""
        return [parameter.detach().clone() for parameter in self.module.parameters()]
