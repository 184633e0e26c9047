"""The gradients that the step of a model gives to its optimizers, and how much two of them differ."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.sources import examples_of
from emrun.base.types import Batch
from emrun.diagnosis.numerics.rows import NotApplicableError, RandomError
from emrun.diagnosis.tryout import begin
from emrun.hook import AbstractHook, UpdateSkipped
from emrun.model import AbstractModel
from emrun.ranks.parts import loss_weights
from emrun.training.build import Training

Gradients = Mapping[str, Tensor]
"""Name of a parameter -> its gradient, on the CPU."""
_ROUNDING = 1000  # of the resolution of the dtype: what sums in another order may differ by
_TINY = 0.01  # a gradient that is 0 but for rounding has the error of the largest one, times this
_SCALES = 24  # of the loss in float16, each half of the one before
_COARSE = 0.01  # TF32, which other devices than the CPU may use


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step has calculated of a batch: its gradients, and the weight of its examples in a mean."""

    gradients: Gradients
    weight: float


class Catch(AbstractHook):
    """Takes the gradients of an update, and skips the update."""

    reads = ()
    changes_batches = False

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[Tensor, Tensor] | None = None
        """Parameter -> gradient; None while updates are made."""

    def before_update(self, model: AbstractModel, optimizer: Any) -> None:
        """Take the gradients of the parameters of an optimizer."""
        if self.gradients is None:
            return
        trained = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        self.gradients |= {parameter: parameter.grad.detach().to_dense().cpu().clone() for parameter in trained}
        raise UpdateSkipped("its gradients are compared")


@dataclass(frozen=True, slots=True)
class Step:
    """The step of a model on the train stream, without updates: it changes neither buffers nor random states.

    Args:
        model: the model, in a main loop that has the hook.
        catch: the hook.
        stream: the train stream.
    """

    model: Any
    catch: Catch
    stream: str

    @classmethod
    def of(cls, training: Training) -> Step:
        """Begin a training of the model in a separate main loop, whose only hook takes the gradients."""
        loop = begin(training.model, training.main_loop, catch := Catch())
        return cls(training.model, catch, loop.train_stream_name)

    def train(self, batch: Batch) -> None:
        """Make an update with a copy of a batch."""
        self.model.run(copy.deepcopy(batch), True, self.stream)
        self.model.finish_update()

    def measure(self, batch: Batch, *, seed: int = 0, dropout: bool = False) -> Measured:
        """Return the gradients of a batch; in float16, of the first scale of the loss for which they are finite.

        Args:
            batch: the batch; a copy of it is used.
            seed: the random numbers.
            dropout: whether dropout is on.

        Raises:
            NotApplicableError: no gradients can be taken, or they are not finite.
        """
        for _ in range(_SCALES if self.model.precision == "fp16" else 1):
            measured = self._once(copy.deepcopy(batch), seed, dropout)
            if all(gradient.isfinite().all() for gradient in measured.gradients.values()):
                return measured
        raise NotApplicableError("gradients are not finite")

    def _once(self, batch: Batch, seed: int, dropout: bool) -> Measured:
        module = self.model.module
        before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self.catch.gradients = {}
        module.train()
        with preserved_randomness(), nullcontext() if dropout else without_dropout(module):
            seed_everything(seed, "numerics")
            try:
                outputs = self.model.run(batch, True, self.stream)
                self.model.finish_update()
            finally:
                caught = self.catch.gradients
                self.catch.gradients = None
                module.zero_grad()
                for name, buffer in module.named_buffers():
                    buffer.data.copy_(before.get(name, buffer))
        names = {parameter: name for name, parameter in module.named_parameters()}
        gradients = {names[parameter]: grad for parameter, grad in caught.items() if parameter in names}
        if not gradients:
            raise NotApplicableError("train_step makes no update by self.update, before which gradients can be taken")
        weights = loss_weights(outputs)
        return Measured(gradients, float(examples_of(batch) if weights is None else weights.sum()))

    def check_repeats(self, batch: Batch, *, dropout: bool = False) -> None:
        """Check that the same batch gives the same gradients again.

        Raises:
            RandomError: it does not, with the same random states, or without dropout with others.
        """
        first = self.measure(batch, dropout=dropout).gradients
        if differing := difference(first, self.measure(batch, dropout=dropout).gradients):
            raise RandomError(
                f"a step repeated with the same random states gives another gradient of {differing[0]}: the module has "
                "state that is not in buffers, or random numbers of its own"
            )
        if not dropout and (differing := difference(first, self.measure(batch, seed=1).gradients)):
            raise RandomError(f"without dropout, the gradient of {differing[0]} still depends on random numbers")


def difference(one: Gradients, other: Gradients, bounds: Mapping[str, float] | None = None) -> tuple[str, float] | None:
    """Return the parameter whose gradients differ most, and by how much relative to their norm; None for rounding.

    Args:
        one: the gradients.
        other: others; a gradient that is missing is 0.
        bounds: parameter -> what the norm of the difference may be; by default, what rounding explains.
    """
    largest = max((gradient.double().norm().item() for gradient in (*one.values(), *other.values())), default=0.0)
    worst: tuple[str, float] | None = None
    for name in dict.fromkeys((*one, *other)):
        values = [
            gradients[name].double() if name in gradients else torch.zeros(1).double() for gradients in (one, other)
        ]
        norm = max(value.norm().item() for value in values)
        distance = (values[0] - values[1]).norm().item()
        bound = bounds[name] if bounds is not None else rounding({**other, **one}[name]) * (norm + _TINY * largest)
        if distance > bound and (worst is None or distance / norm > worst[1]):
            worst = name, distance / norm
    return worst


def rounding(values: Tensor) -> float:
    """Return the relative error that sums in another order may have."""
    error = _ROUNDING * torch.finfo(values.dtype).eps
    return max(error, _COARSE) if torch.cuda.is_initialized() else error  # type: ignore[no-untyped-call]


@contextmanager
def without_dropout(module: torch.nn.Module) -> Iterator[None]:
    """Run a module without dropout in the block: `Dropout` evaluates, and numbers of a name with `drop` are 0."""
    with ExitStack() as stack:
        for part in module.modules():
            for name, value in list(vars(part).items()):
                if "drop" in name and isinstance(value, float):
                    stack.callback(setattr, part, name, value)
                    vars(part)[name] = 0.0
                elif name == "training" and isinstance(part, _DropoutNd):
                    stack.callback(setattr, part, name, value)
                    vars(part)[name] = False
        yield
