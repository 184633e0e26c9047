"""The base of all kinds of steps: what is done with a train batch, or with a part of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from emrun.base.errors import ArgumentError
from emrun.base.types import Batch, Values
from emrun.models.modes import Tensors
from emrun.models.optimizers.scheduled import ScheduledOptimizer
from emrun.models.outputs import mean_loss
from emrun.models.step.manual import Manual, Run
from emrun.models.step.updater import Closure, Updater

Check = Callable[[Values], bool]
"""Looks at the outputs of the first batch; returns whether the outputs of later batches may have weights."""

Parameters = Sequence[Parameter] | None


def backward(loss: Tensor, of: Parameters = None) -> None:
    """Add the gradients of a scalar loss to those of some parameters; of all by default.

    Raises:
        ArgumentError: the loss does not depend on any parameter with `requires_grad`.
    """
    try:
        loss.backward(inputs=of)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if loss.requires_grad:
            raise
        message = "the loss does not depend on any parameter with requires_grad; there is nothing to train"
        if not torch.is_grad_enabled():
            message = "your code has called torch.set_grad_enabled(False); enable gradients again"
        raise ArgumentError("loss", message) from error


@dataclass(frozen=True, slots=True)
class Calls:
    """What a step calls of the model: methods that a subclass of `TorchModel` may override.

    Args:
        forward: returns the outputs of a batch or a part, in the precision of the model.
        manual: the `train_step` of a subclass; None if the step does what `TrainingStep.train` does.
        backward: a `backward` of a subclass, to which the loss is given; None for that of the step.
        update: an `update` of a subclass, to which the optimizer and the loss are given; None for that of the step.
    """

    forward: Run
    manual: Manual | None = None
    backward: Callable[..., None] | None = None
    update: Callable[..., None] | None = None


class TrainingStep(ABC):
    """Owns the loss that is minimised and the outputs of the batch; a derived class says how gradients come about.

    Args:
        calls: what a step calls of the model.
        updater: makes the updates.
    """

    is_open = False
    """Whether a window of batches has begun that the last batch did not end."""
    weighs_examples = False
    """Whether the weights of the examples of a batch make a difference to the step."""
    is_skipping = False
    """Whether the current update is skipped because its gradients in float16 are not finite."""

    def __init__(self, calls: Calls, updater: Updater) -> None:
        self.minimised: Tensor | None = None
        """The loss that was minimised last, detached, of shape ()."""
        self.outputs: Values | None = None
        """The outputs of the current batch, with gradients; None at other times."""
        self.updater = updater
        self._forward = calls.forward
        self._manual = calls.manual
        self._train: Run = self.train if calls.manual is None else self._train_manually
        self._add: Callable[[Tensor], None] = self.add if calls.backward is None else calls.backward
        self._make: Callable[[ScheduledOptimizer, Any], None] = self.make if calls.update is None else calls.update
        self._looks = False  # whether the outputs of the next batch are looked at
        self._check_first: Check | None = None  # while the first batch of a stream is awaited

    # what each kind of step says

    @abstractmethod
    def run(self, inputs: Tensors, batch: Batch) -> Values:
        """Train on a batch, or on a part of one; return its outputs.

        Args:
            inputs: source name -> tensor on the model's device, or a mapping of tensors.
            batch: the batch or the part, for the number of its examples.
        """

    @abstractmethod
    def add(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of a loss to those of some parameters; of all by default."""

    def make(self, member: ScheduledOptimizer, loss: Tensor | None) -> None:
        """Make the update of an optimizer with the gradients of this batch, or note it for the end of the window."""
        self.updater.update(member, loss)

    @abstractmethod
    def ask(self, member: ScheduledOptimizer, closure: Closure | None) -> None:
        """Make the update that a `train_step` of a subclass asks for; see `make`."""

    def weigh(self, outputs: Values) -> None:  # noqa: B027 - single batches have no weights
        """Look at the outputs of a batch before its loss is minimised, e.g. at the weights of its examples."""

    def begin_stream(self, check_first: Check) -> None:
        """Prepare for the batches of a train stream.

        Args:
            check_first: called with the outputs of the first batch before its update; returns whether the outputs of
                later batches may have weights.
        """
        self._check_first = check_first
        self._looks = True

    def forget(self) -> None:
        """Clear the gradients, and forget what an incomplete batch has left."""
        self.outputs = None
        self.updater.clear()

    # the same for all of them

    def train(self, inputs: Tensors) -> Values:
        """Run forward and backward, and make the updates: what `TorchModel.train_step` does."""
        outputs = self._forward(inputs)
        self.outputs = outputs
        if self._looks:
            self.look(outputs)
        loss = outputs.get("loss")
        if loss.__class__ is not Tensor or loss.ndim:
            loss = mean_loss(outputs)
        self.minimised = loss.detach()
        self._add(loss)
        for member in self.updater.optimizers.members:
            self._make(member, self.minimised)
        self.outputs = None  # frees the graph, whose memory the next step needs
        return outputs

    def replace(self, train: Run) -> None:
        """Train on each batch or part by another function, which an object has in place of its `train_step`."""
        if self._manual is None:
            self._train = train
        else:
            self._manual.replace(train)

    def show(self, outputs: Values | None) -> None:
        """Take what hooks get as `step_outputs`."""
        self.outputs = outputs

    def look(self, outputs: Values) -> None:
        """Look at the outputs of the first batch of a stream, and of later ones if they may have weights."""
        if self._check_first is not None:
            self._begin_batches(outputs, self._check_first)
        self.weigh(outputs)

    def _begin_batches(self, outputs: Values, check_first: Check) -> None:
        """Look at all that the first batch of a stream shows."""
        self._check_first = None
        self._looks = check_first(outputs) and self.weighs_examples

    def _train_manually(self, inputs: Tensors) -> Values:
        """Call the `train_step` of a subclass, which may call `backward` of the loss itself."""
        assert self._manual is not None
        self.minimised = None
        outputs = self._manual(inputs)
        loss = outputs.get("loss")
        if self.minimised is None and isinstance(loss, Tensor) and not loss.dim():
            self.minimised = loss.detach()
        return outputs

    def backward(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of a loss that a subclass has calculated; see `TorchModel.backward`.

        Args:
            loss: the loss.
            of: the parameters that get gradients; all by default, and none if there are none.
        """
        self.minimised = loss.detach()
        if of is not None and not of:
            return
        if self._manual is None:
            self.add(loss, of)
        else:
            self._manual.backward(self.add, loss, of)

    def update(self, optimizer: Any, closure: Closure | None = None) -> None:
        """Make an update that a subclass asks for; see `TorchModel.update`."""
        member = self.updater.member_of(optimizer)
        if self._manual is None:
            self.ask(member, closure)
        else:
            self._manual.update(self.ask, member, closure)
