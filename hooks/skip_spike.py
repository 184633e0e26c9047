"""SkipSpike: skips updates whose gradients or loss are far above the usual."""

from __future__ import annotations

import logging
import math
from collections import deque
from statistics import median
from typing import Any, Literal

import torch

from emrun import AbstractHook, UpdateSkipped
from emrun.base.arguments import check_choice, check_count, check_number
from emrun.base.errors import ArgumentError
from emrun.hook import Loop
from emrun.hooks._shared.parameters import dense, module_of, suffix_of
from emrun.ranks.group import ranks
from emrun.ranks.parts import weighs_nothing
from emrun.ranks.pieces import whole
from emrun.storage.capsules import MOST

_LOG = logging.getLogger(__name__)

Spiking = Literal["gradient_norm", "loss"]


class SkipSpike(AbstractHook):
    """Skips an update whose gradients, or whose loss, are far above the median of the last updates.

        hooks:
          - SkipSpike: {factor: 10.0, window: 50}

    A single bad batch can ruin a long run. When the value is more than `factor` times the median, the gradients are
    dropped and the optimizer makes no step; the log has the iteration and the value. A value that is NaN or infinite is
    a spike too. The number of skipped updates of an epoch is `skipped_updates` in the data of the train stream. All
    finite values count for the median, so that a lasting change is soon usual. Nothing else is skipped in the first
    `window` updates, or while the median is not positive.

    Each update waits for the device. List this hook before `ClipGradients`, which hides large gradients. With several
    optimizers, each has a median of its own.

    The first skipped updates are kept below `failures` in the run directory: the batch, the weights, the random states.
    The log names the directory; `emrun replay DIRECTORY` makes the step again and finds the examples behind the spike.
    With `model.accumulate`, only the last batch of the update is kept.

    Args:
        factor: how many times the median is a spike, above 1.
        variable: `gradient_norm`, the 2-norm of all gradients of the update, or `loss`, what is minimised. The loss of
            an update that has several parts is not known, so with `model.accumulate` and `model.micro_batch_size` it
            must be `gradient_norm`.
        window: the number of updates whose median is taken.
        keep: how many skipped updates of the run are kept, at most 5; 0 for none. Each takes the space of a checkpoint.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the model is not a `TorchModel`.
    """

    reads = ()

    def __init__(
        self,
        factor: float = 10.0,
        variable: Spiking = "gradient_norm",
        window: int = 100,
        keep: int = 3,
        model: Any = None,
    ) -> None:
        super().__init__(model=model)
        check_number("factor", factor, "a number above 1, e.g. 10.0", above=1)
        check_choice("variable", variable, Spiking)
        check_count("window", window, minimum=1)
        check_count("keep", keep)
        if keep > MOST:
            raise ArgumentError("keep", f"{keep} is too many: a run keeps its {MOST} newest capsules of steps")
        self._factor = factor
        self._variable = variable
        self._window = window
        self._keep = keep
        self._kept = 0
        self._values: dict[str, deque[float]] = {}  # suffix of the optimizer -> the last values
        if model is not None:
            self._check(model)

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check that the model has the variable."""
        super().register_mainloop(main_loop)
        self._check(main_loop.model)

    def before_update(self, model: Any, optimizer: Any) -> None:
        """Skip the update if the value is a spike.

        Raises:
            UpdateSkipped: it is.
        """
        if model.is_skipping:
            return  # the gradients are not finite in float16, which is usual
        value = self._value(model, optimizer)
        if value is None:
            return
        values = self._values.setdefault(suffix_of(model, optimizer), deque(maxlen=self._window))
        usual = median(values) if len(values) == self._window else 0.0
        is_finite = math.isfinite(value)
        if is_finite and (usual <= 0 or value <= self._factor * usual):
            values.append(value)
            return
        before = None
        if self._kept < self._keep:
            before = self.state_dict()
            self._kept += 1
        if is_finite:
            values.append(value)
        iteration = self.main_loop.iterations_done + 1  # of this batch, which is not counted yet
        reason = f"{self._variable} {value:.3g}" + (f", and the median is {usual:.3g}" if usual > 0 else "")
        _LOG.info("SkipSpike skips the update of iteration %d: %s", iteration, reason)
        raise UpdateSkipped(reason, keep=before)

    def state_dict(self) -> dict[str, Any]:
        """Return the last values, and how many updates are kept."""
        return {"values": {name: list(values) for name, values in self._values.items()}, "kept": self._kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._kept = state["kept"]
        self._values = {name: deque(values, self._window) for name, values in state["values"].items()}

    def _check(self, model: Any) -> None:
        module_of("SkipSpike", model)
        key = "micro_batch_size" if model.splits_batches else None
        if model.iterations_per_update > 1:
            key = "accumulate"
        if self._variable == "loss" and key is not None:
            raise ArgumentError("variable", f"with model.{key}, the loss of an update is not known; use gradient_norm")

    def _value(self, model: Any, optimizer: Any) -> float | None:
        """Return the value of the current update; None if there is none. Waits for the device."""
        if self._variable == "loss":
            loss = model.step_values().get("loss")
            value = None if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            if ranks().several and not math.isnan(value or 0):  # the mean of all ranks
                return value
            are_empty = ranks().all_gathered("empty batches of an update", weighs_nothing(model.step_outputs or {}))
            return None if all(are_empty) else value
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        gradients = [dense(parameter.grad) for parameter in parameters if parameter.grad is not None]
        return whole(torch.nn.utils.get_total_norm(gradients)).item() if gradients else None
