"""How the module of a `TorchModel` is trained: gradients of a window of batches, and the updates of its optimizers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from emrun.base.arguments import check_count
from emrun.base.errors import ArgumentError
from emrun.base.types import EpochData
from emrun.base.wording import NO_OPTIMIZER, listed
from emrun.hook import UpdateSkipped
from emrun.models.gradient_sums import GradientSums
from emrun.models.loss_scale import LossScale
from emrun.models.optimizer import learning_rates, parameters_of
from emrun.models.optimizers import HasModule, Optimizers
from emrun.models.precision import Autocast, in_float32
from emrun.models.scheduled_optimizer import ScheduledOptimizer, named
from emrun.models.skipped_updates import SkippedUpdates
from emrun.models.sync_batch_norm import SynchronisedBatchNorm
from emrun.models.updates import all_parameters, clear_gradients, divide_gradients, parameters_beside
from emrun.ranks.group import ranks
from emrun.ranks.parts import weighted
from emrun.schedule_plan import log_plan

_LOG = logging.getLogger(__name__)
_NOT_FINITE = "gradients in float16 are not finite, so the scale of the loss is reduced"


class Trained(HasModule, Protocol):
    """The model that an `Optimization` belongs to."""

    _scale: LossScale | None
    _skipped: SkippedUpdates
    _synchronised: SynchronisedBatchNorm | None


class Optimization(Optimizers):
    """Clears the gradients, makes the updates of the optimizers, and steps their schedules.

    A window is the batches of an update. The gradients of a window are those of the mean loss over its examples: the
    loss of each batch is multiplied by the weight of the batch, and at the update the gradients are divided by the
    weight of the window, which nobody needs to know before.

    Args:
        model: the model; hooks get it with each update.
        optimizer: the form of the optimizer, or name -> form; None for a model that is only evaluated, or trains in its
            own way.
        scheduler: the form of the schedule, which every optimizer gets, or name of an optimizer -> form.
        accumulate: the number of batches of a window.
        has_parts: whether a batch may have several parts.

    Raises:
        ArgumentError: `accumulate` is not a positive number, or a name is not that of an optimizer.
    """

    def __init__(
        self, model: Trained, optimizer: Any, scheduler: Any, accumulate: int = 1, *, has_parts: bool = False
    ) -> None:
        check_count("accumulate", accumulate, minimum=1)
        super().__init__(model, optimizer, scheduler)
        self.accumulate = accumulate
        self.ranks = ranks()
        """The ranks of the run."""
        self._carries_loss = accumulate == 1 and not has_parts
        self.has_windows = accumulate > 1 or has_parts or self.ranks.several
        """Whether the gradients of several parts are added up for an update: of batches, of their parts, of ranks."""
        self.is_plain = False
        """Whether each batch makes an update, without a scale and without autocast around `train_step`."""
        self.is_own_scheme = False
        """Whether a subclass of the model trains in its own way."""
        self._always_backward = model._synchronised is not None  # which exchanges messages then
        self._sums: dict[torch.optim.Optimizer, GradientSums] = {}  # of several ranks
        self.mean_loss: Tensor | None = None
        """The mean loss of the last update on all ranks, unless its window has several batches."""
        self.is_open = False
        """Whether a window has begun and not ended."""
        self.weight: float | Tensor = 1.0
        """The weight of the current part in its window: its number of examples, or the sum of their weights."""
        self.is_ending = False
        """Whether the window ends with the current part."""
        self._batches = 0  # of the window that have begun
        self._examples = self._rows = 0  # of the current part, and of the window so far
        self._pending: dict[torch.optim.Optimizer, float | Tensor] = {}  # those to step at the end, and their weights
        self._asked: set[torch.optim.Optimizer] = set()  # those whose update the current part has asked for
        self._further = self.members[1:]
        self.scheduled: list[ScheduledOptimizer] = []
        """Those whose schedules step after each window."""
        self.autocast: Autocast | None = None
        """The autocast that the model runs `train_step` in, which is left for gradients and updates."""
        self.scale = model._scale
        """The scale of the loss in float16."""
        self.skipped = model._skipped
        self.is_skipping = False
        """Whether the last update is skipped because its gradients in float16 are not finite."""
        self.has_updated = False
        """Whether an update was made, or begun, since this was last set to False."""
        self.parameters: list[torch.nn.Parameter] = []
        """The parameters of the module at the beginning of the train stream."""
        self._others: list[torch.nn.Parameter] = []  # in no optimizer, but their gradients are cleared
        self._has_looked = False  # whether it was looked for parameters that nothing trains

    def __getstate__(self) -> dict[str, Any]:
        """Return what a deep copy gets: it has no gradients, as torch does not copy them, so it begins a new window."""
        begun = {"is_open": False, "is_ending": False, "_batches": 0, "_pending": {}, "_asked": set(), "_sums": {}}
        return {**vars(self), **begun}

    def begin_epoch(self) -> None:
        """Reset what an incomplete epoch has left."""
        self.clear()
        self.skipped.begin_epoch()

    def begin_stream(self, stream: str) -> None:
        """Prepare for the batches of a train stream.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        self.skipped.begin_stream(stream)
        self.is_plain = not self.has_windows and self.autocast is None and self.scale is None
        self.parameters = all_parameters(self._model.module)
        self._others = parameters_beside(self.parameters, *self.optimizers.values())
        self.scheduled = [each for each in self.members if each.scheduler is not None and each.scheduler.on_update]
        self._look_for_untrained()
        if self._is_plan_due:
            log_plan(self.plan())
        for each in self.members:
            each.begin_stream(self._model._main_loop)

    def _look_for_untrained(self) -> None:
        """Warn once of parameters that no optimizer has."""
        if self._has_looked or not self.is_configured:
            return
        self._has_looked = True
        beside = {id(each) for each in self._others if each.requires_grad}
        names = [name for name, each in self._model.module.named_parameters() if id(each) in beside]
        if names:
            _LOG.warning("no optimizer trains %s; if this is meant, set requires_grad to False", named(names))

    def clear(self) -> None:
        """Clear the gradients, and forget a window that has begun."""
        clear_gradients(self.members[0].optimizer, self._others)
        for each in self._further:
            clear_gradients(each.optimizer)
        if self.scale is not None:
            self.scale.clear()
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
            self._rows = 0
        self._batches += is_last
        self._rows += examples
        self._examples = examples
        self._asked.clear()
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
        if self.scale is not None:
            self.scale.end()
        if self.scheduled:
            self.step_schedules()

    def step_schedules(self) -> None:
        """Step the schedules at the end of a window, whether their optimizers have made one update, several or none."""
        for each in self.scheduled:
            each.optimizer._opt_called = True  # type: ignore[union-attr]  # otherwise schedulers of torch warn
            each.scheduler.step(None)  # type: ignore[union-attr]

    def run_own(self, model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Call the `train_step` of a subclass in 16 bits, except for gradients and updates.

        Raises:
            ArgumentError: it made an update with gradients that are still scaled.
        """
        assert self.autocast is not None
        outputs = self.autocast.call(model.train_step, inputs)
        if self.scale is not None and self.scale.is_pending and model.has_updated:
            message = "fp16 scales the loss: train_step must call self.update(optimizer) instead of optimizer.step()"
            raise ArgumentError("precision", message)
        return outputs

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer | str | None = None) -> None:
        """Calculate the gradients of a scalar loss and add them to those of the parameters.

        Args:
            loss: the loss.
            optimizer: the optimizer, or its name, whose parameters get gradients; None for all.

        Raises:
            ArgumentError: the loss does not depend on any parameter with `requires_grad`.
        """
        of = None if optimizer is None else [p for p in parameters_of(self.named(optimizer)) if p.requires_grad]
        if of == []:
            return  # all are frozen
        if self.autocast is not None:
            with self.autocast.off():
                self._backward(in_float32(loss), of)
            torch.clear_autocast_cache()
        else:
            self._backward(loss, of)

    def _backward(self, loss: Tensor, of: list[torch.nn.Parameter] | None) -> None:
        scale = self.scale
        if self.has_windows:
            if not self._examples and not self._always_backward:
                return
            loss = loss * self.weight if scale is None else scale.weighted(loss, self.weight)
        if scale is not None:
            loss = scale.scaled(loss)
        sums = None
        optimizer = self.optimizer  # several ones could send in another order on each rank
        if self.ranks.several and self.is_ending and optimizer is not None and not self.is_own_scheme:
            sums = self._sums_of(optimizer)
            sums.begin_backward()
        try:
            loss.backward(inputs=of)  # type: ignore[no-untyped-call]
            if sums is not None:
                sums.end_backward()
        except RuntimeError as error:
            if loss.requires_grad:
                raise
            message = "the loss does not depend on any parameter with requires_grad; there is nothing to train"
            raise ArgumentError("loss", message) from error

    def update(self, optimizer: torch.optim.Optimizer | str | None) -> None:
        """Make an update with the gradients, or note that the window makes it at its end.

        Raises:
            ArgumentError: there is no such optimizer, or a window gets two updates of it.
        """
        if optimizer is None:
            names = listed([each.name for each in self.members])
            raise ArgumentError("optimizer", NO_OPTIMIZER if self._is_one else f"name one of the optimizers: {names}")
        if isinstance(optimizer, str):
            optimizer = self.named(optimizer)
        if self.is_plain:
            self._step(optimizer)
        elif self.autocast is not None:
            with self.autocast.off():
                self._update(optimizer)
            torch.clear_autocast_cache()  # which has the weights as they were
        else:
            self._update(optimizer)

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        if self.has_windows:
            if optimizer in self._asked:
                name = next((each.name for each in self.members if each.optimizer is optimizer and each.name), "")
                raise ArgumentError(
                    "accumulate" if self.accumulate > 1 else "micro_batch_size",
                    f"train_step calls update({f'{name!r}' * bool(name)}) twice for a batch, but an optimizer makes "
                    "one update for all parts of a window; call it once, or remove the key",
                )
            self._asked.add(optimizer)
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
        if self.scale is not None:
            self.is_skipping = not self.scale.unscale(optimizer)
        if self.ranks.several:
            weight = self._add_up(optimizer, 1.0 if weight is None else weight)
        if weight is not None:
            unit = self.scale.unit if self.scale is not None else None
            divide_gradients(optimizer, weight if unit is None else weight / unit)
        reason = _NOT_FINITE if self.is_skipping else None
        model = self._model
        loop = model._main_loop
        own = None
        for each in self.members:
            if each.optimizer is optimizer:
                own = each
        first = own if own is not None and not own.has_stepped else None
        if first is not None:
            first.begin_first_update(model.module)
        if loop is not None and loop.listens("before_update"):
            try:
                loop.notify("before_update", model=model, optimizer=optimizer)
            except UpdateSkipped as error:
                reason = reason or error.reason
        if own is not None:
            own.rates = learning_rates(optimizer)  # before a hook or the scheduler changes them
        if reason is not None:
            number = loop.updates_done + 1 if loop is not None else None
            self.skipped.add(reason, number, own.name if own is not None else "")
            clear_gradients(optimizer)
        else:
            self.has_updated = True
            optimizer.step()
            if loop is not None and loop.listens("after_update"):
                loop.notify("after_update", model=model, optimizer=optimizer)
        if first is not None and loop is not None and loop.has_run:
            first.check_loadable()  # most optimizers begin to keep something with their first update

    def _add_up(self, optimizer: torch.optim.Optimizer, weight: float | Tensor) -> Tensor:
        """Add up the gradients of all ranks; return the weight of the window on all of them."""
        loss: Tensor | None = self._model._minimised if self._carries_loss else None  # type: ignore[attr-defined]
        total, mean = self._sums_of(optimizer).add_up(weight, loss, self._rows)
        self.mean_loss = mean if loss is not None else None
        return total

    def _sums_of(self, optimizer: torch.optim.Optimizer) -> GradientSums:
        """Return the sums of the gradients of an optimizer over all ranks."""
        if optimizer not in self._sums:
            self._sums[optimizer] = GradientSums(parameters_of(optimizer), self.ranks)
        return self._sums[optimizer]

    def mean_of_ranks(self, loss: Tensor | None) -> Tensor | None:
        """Return the mean loss of the current batch on all ranks, from that of this rank; all ranks call this."""
        mean, self.mean_loss = self.mean_loss, None
        if mean is None and loss is not None:
            weight = torch.as_tensor(self.weight).to(loss)
            sums = torch.stack([weighted(loss.detach(), weight), weight])
            self.ranks.add_up(sums)
            mean = sums[0] / sums[1]
        return mean

    def end_epoch(self, epoch_data: EpochData) -> None:
        """Step schedulers that step after each training epoch; log how many updates were skipped."""
        self.skipped.report()
        for each in self.members:
            each.end_epoch(epoch_data)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of optimizers and schedulers, the last learning rates, and what was skipped."""
        return {
            **super().state_dict(),
            "loss_scale": self.scale.state_dict() if self.scale is not None else None,
            "skipped_updates": self.skipped.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; see `Optimizers.load_state_dict`.

        Raises:
            StateError: the config has other optimizers or schedulers, or one of them refuses its state.
        """
        super().load_state_dict(state)
        self.skipped.load_state_dict(state["skipped_updates"])
        if self.scale is not None and state["loss_scale"] is not None:
            self.scale.load_state_dict(state["loss_scale"])
        elif self.scale is not None:
            _LOG.warning("the checkpoint has no scale of the loss, which fp16 needs: the scale begins anew")
