"""How the module of a `TorchModel` is trained: gradients of a window of batches, updates, learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from emrun.arguments import check_count
from emrun.errors import ArgumentError, StateError
from emrun.fields import NUMBER, optional, sequence_of
from emrun.hook import Loop
from emrun.models.closed_form import ClosedForm
from emrun.models.optimizer import (
    build_optimizer,
    configured_arguments,
    learning_rates,
    load_optimizer_state,
    optimizer_state,
)
from emrun.models.planning import check_length, horizon_of, plan_of
from emrun.models.schedule import CLASS_AND_STATE, Scheduler, build_scheduler
from emrun.models.updates import all_parameters, clear_gradients, divide_gradients, parameters_beside
from emrun.schedule_plan import SchedulePlan, log_plan
from emrun.types import EpochData
from emrun.wording import NO_OPTIMIZER

STATE = {
    "optimizer": optional(CLASS_AND_STATE),
    "scheduler": optional(CLASS_AND_STATE),
    "rates": optional(sequence_of(NUMBER)),
}
"""The fields of `Optimization.state_dict`; `optimizer` and `schedule` check the states inside."""


class Trained(Protocol):
    """The model that an `Optimization` belongs to."""

    module: torch.nn.Module
    _main_loop: Loop | None


class Optimization:
    """Clears the gradients, makes the updates of an optimizer, and steps its schedule.

    A window is the batches of an update. The gradients of a window are those of the mean loss over its examples: the
    loss of each batch is multiplied by the weight of the batch, and at the update the gradients are divided by the
    weight of the window, which nobody needs to know before.

    Args:
        model: the model; hooks get it with each update.
        optimizer: the form of the optimizer; None for a model that is only evaluated, or trains in its own way.
        scheduler: the form of the schedule.
        accumulate: the number of batches of a window.
        has_parts: whether a batch may have several parts.

    Raises:
        ArgumentError: `accumulate` is not a positive number.
    """

    def __init__(
        self, model: Trained, optimizer: Any, scheduler: Any, accumulate: int = 1, *, has_parts: bool = False
    ) -> None:
        check_count("accumulate", accumulate, minimum=1)
        self._model = model
        self.accumulate = accumulate
        self.has_windows = accumulate > 1 or has_parts
        """Whether the gradients of several parts are added up for an update."""
        self.is_open = False
        """Whether a window has begun and not ended."""
        self.weight: float | Tensor = 1.0
        """The weight of the current part in its window: its number of examples, or the sum of their weights."""
        self.is_ending = False
        """Whether the window ends with the current part."""
        self._batches = 0  # of the window that have begun
        self._pending: dict[torch.optim.Optimizer, float | Tensor] = {}  # those to step at the end, and their weights
        self._forms = optimizer, scheduler
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Scheduler | ClosedForm | None = None
        self.has_updated = False
        """Whether an update was made, or begun, since this was last set to False."""
        self.parameters: list[torch.nn.Parameter] = []
        """The parameters of the module at the beginning of the train stream."""
        self._others: list[torch.nn.Parameter] = []  # not in the optimizer, but their gradients are cleared
        self._configured: list[dict[str, Any]] = []
        self._rates: list[float | Tensor] | None = None  # of the last update
        self._is_plan_due = False  # whether the plan of the learning rates will be known after the zeroth epoch

    @property
    def is_configured(self) -> bool:
        """Whether there is an optimizer, or will be one when a lazy module has its shapes."""
        return self._forms[0] is not None or self.optimizer is not None

    @property
    def monitors(self) -> list[str]:
        """The statistic that the scheduler reads in the epoch's data, if it reads one."""
        metric = getattr(self._forms[1], "options", {}).get("metric")
        return [] if metric is None else [metric]

    def build(self) -> None:
        """Build optimizer and scheduler from their forms, once all parameters have shapes.

        Raises:
            ArgumentError: they cannot be built.
        """
        optimizer, scheduler = self._forms
        module = self._model.module
        self.optimizer = build_optimizer(module, optimizer) if optimizer is not None else None
        self.scheduler = build_scheduler(self.optimizer, scheduler) if scheduler is not None else None
        self._configured = configured_arguments(module, self.optimizer) if self.optimizer is not None else []

    def begin_stream(self) -> None:
        """Prepare for the batches of a train stream.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        loop = self._model._main_loop
        self.parameters = all_parameters(self._model.module)
        self._others = parameters_beside(self.parameters, self.optimizer)
        if self._is_plan_due:
            log_plan(self.plan())
        if isinstance(self.scheduler, ClosedForm):
            self.scheduler.begin(horizon_of(loop))
        elif self.scheduler is not None and loop is not None and loop.has_run:
            self.scheduler.check_end()  # the replay of a step is not a resume

    def clear(self) -> None:
        """Clear the gradients, and forget a window that has begun."""
        clear_gradients(self.optimizer, self._others)
        if self.has_windows:
            self.is_open, self._batches = False, 0
            self._pending.clear()

    def begin_part(self, examples: int, *, is_last: bool = True) -> None:
        """Prepare for a part of a window; the first part clears the gradients.

        Args:
            examples: the number of examples of the part.
            is_last: whether a batch ends with the part.
        """
        if not self.is_open:
            self.clear()
            self.is_open = True
        self._batches += is_last
        self.is_ending = self._batches == self.accumulate
        self.weight = float(examples)

    def end_part(self) -> None:
        """End a part of a window, and with the last one the window."""
        if self.is_ending:
            self.finish()

    def finish(self) -> None:
        """End the window, if one is open: make the updates that are due."""
        if not self.is_open:
            return
        self.is_ending, self.is_open, self._batches = False, False, 0
        while self._pending:
            optimizer = next(iter(self._pending))
            self._step(optimizer, self._pending.pop(optimizer))

    def backward(self, loss: Tensor) -> None:
        """Calculate the gradients of a scalar loss and add them to those of the parameters.

        Raises:
            ArgumentError: the loss does not depend on any parameter with `requires_grad`.
        """
        if self.has_windows:
            loss = loss * self.weight
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if loss.requires_grad:
                raise
            message = "the loss does not depend on any parameter with requires_grad; there is nothing to train"
            raise ArgumentError("loss", message) from error

    def update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Make an update with the gradients, or note that the window makes it at its end.

        Raises:
            ArgumentError: there is no optimizer.
        """
        if optimizer is None:
            raise ArgumentError("optimizer", NO_OPTIMIZER)
        if self.has_windows:
            self._pending[optimizer] = self._pending.get(optimizer, 0.0) + self.weight
            if self.is_ending:
                self._step(optimizer, self._pending.pop(optimizer))
        else:
            self._step(optimizer)

    def _step(self, optimizer: torch.optim.Optimizer, weight: float | Tensor | None = None) -> None:
        """Make an update with the current gradients; hooks are called before and after.

        Args:
            optimizer: the optimizer.
            weight: what its gradients are divided by.
        """
        if weight is not None:
            divide_gradients(optimizer, weight)
        model = self._model
        loop = model._main_loop
        if loop is not None and loop.listens("before_update"):
            loop.notify("before_update", model=model, optimizer=optimizer)
        self.has_updated = True
        if optimizer is self.optimizer:
            self._rates = learning_rates(optimizer)  # before a hook or the scheduler changes them
        optimizer.step()
        if loop is not None and loop.listens("after_update"):
            loop.notify("after_update", model=model, optimizer=optimizer)
        if self.scheduler is not None and self.scheduler.on_update and optimizer is self.optimizer:
            self.scheduler.step(None)

    def end_epoch(self, epoch_data: EpochData) -> None:
        """Step a scheduler that steps after each training epoch."""
        if self.scheduler is not None and not self.scheduler.on_update:
            self.scheduler.step(epoch_data)

    def rates(self) -> list[float | Tensor] | None:
        """Return the learning rates of the last update; those of the next one within a window, or if there is none."""
        if (self._rates is None or self.is_open) and self.optimizer is not None:
            if isinstance(self.scheduler, ClosedForm):
                with suppress(ArgumentError):  # the first update raises it again, if there is one
                    self.scheduler.begin(horizon_of(self._model._main_loop))
            return learning_rates(self.optimizer)
        return self._rates

    def plan(self) -> SchedulePlan | None:
        """Return the learning rates of the run, as far as its length is known; see `AbstractModel.schedule_plan`.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        loop = self._model._main_loop
        self._is_plan_due = self._forms[1] is not None  # also of a lazy module, which has no optimizer yet
        if loop is None or self.scheduler is None:
            return None
        plan, self._is_plan_due = plan_of(self.scheduler, loop)
        return plan

    def state_dict(self) -> dict[str, Any]:
        """Return the states of optimizer and scheduler, and the learning rates of the last update."""
        return {
            "optimizer": optimizer_state(self.optimizer, self._configured) if self.optimizer is not None else None,
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "rates": [float(rate) for rate in self._rates] if self._rates is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; arguments that the config has changed, e.g. `lr`, replace the saved ones.

        Raises:
            StateError: the config has another optimizer or scheduler, or a field has a value that is not allowed.
        """
        if (self.optimizer is None) is not (state["optimizer"] is None):
            raise StateError("model.optimizer was added or removed; a resume cannot change that")
        if self.optimizer is not None:
            load_optimizer_state(self.optimizer, state["optimizer"], self._configured)
        if (self.scheduler is None) is not (state["scheduler"] is None):
            raise StateError("model.scheduler was added or removed; a resume cannot change that")
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            check_length(self.scheduler, self._model._main_loop)
        self._rates = state.get("rates")
