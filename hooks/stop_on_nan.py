"""Abort the training when a variable becomes NaN."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch

from emrun.base.arguments import check_choice, check_flag, check_names
from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import EpochData
from emrun.hook import AbstractHook, TrainingAborted
from emrun.hooks._shared.parameters import dense
from emrun.ranks.parts import weighs_nothing
from emrun.ranks.pieces import whole

UnknownType = Literal["error", "warn", "ignore"]

_LOG = logging.getLogger(__name__)


class StopOnNaN(AbstractHook):
    """Aborts the training (exit status 3) when a variable is NaN; the checkpoints saved before are kept.

    With `after_batch`, the outputs and the gradients are checked before each update, so that an update with NaN is
    never made. The weights before this update are saved with the batch, and `emrun replay` names the examples that
    cause the NaN.

        hooks:
          - ComputeStats: {variables: [loss]}
          - StopOnNaN: {variables: [loss], after_batch: true}

    List this hook before the hooks that save, so that nothing of the epoch with the NaN is saved. A batch whose
    `example_weight` is 0 everywhere has no loss. This is not a fault. Numbers are looked at wherever they are, in lists
    and mappings too, but for outputs that are sparse or nested tensors: `on_unknown_type` says what happens then.

    Args:
        variables: which variables are checked; by default all. With `after_batch`, every batch must have them; without
            `after_batch`, an earlier hook must write them.
        on_unknown_type: what to do if a value is not a number: `error`, `warn` (once per variable) or `ignore`.
        stop_on_inf: abort also when a value is infinite.
        after_batch: check the variables of every batch and the gradients of every update; the check waits for the
            device. Gradients are checked whatever `variables` says.
        after_epoch: check the variables of every epoch.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: a value is not a number and `on_unknown_type` is `error`.
        TrainingAborted: a value or a gradient is NaN, or infinite with `stop_on_inf`.
    """

    every_rank = True

    def __init__(
        self,
        variables: Sequence[str] | None = None,
        on_unknown_type: UnknownType = "ignore",
        stop_on_inf: bool = False,
        after_batch: bool = False,
        after_epoch: bool = True,
    ) -> None:
        super().__init__()
        check_choice("on_unknown_type", on_unknown_type, UnknownType)
        if variables is not None:
            check_names("variables", variables)
        for name, value in (("stop_on_inf", stop_on_inf), ("after_batch", after_batch), ("after_epoch", after_epoch)):
            check_flag(name, value)
        if not (after_batch or after_epoch):
            raise ArgumentError("after_epoch", "after_batch and after_epoch are both false; set one to true")
        addresses = [name for name in variables or () if "/" in name and not after_batch]
        if addresses:
            name = addresses[0]
            raise ArgumentError(
                "variables",
                f"{name!r} is not a variable; name variables only, [loss]: all their statistics are checked",
            )
        self._variables = variables
        self._warned: set[str] = set()
        self._on_unknown_type = on_unknown_type
        self._stop_on_inf = stop_on_inf
        if not after_batch:  # these would do nothing
            self.mute("before_update", "after_batch")
        if not after_epoch:
            self.mute("after_epoch")
        self.reads = variables if after_batch else ()
        self.monitors = () if after_batch or variables is None else variables

    def before_update(self, model: Any, optimizer: Any = None) -> None:
        """Check the outputs and the gradients of the batch before they change the weights."""
        iteration = self.main_loop.iterations_done + 1  # of this batch, which is not counted yet
        stream = str(self.main_loop.stream_name)
        self._check(stream, getattr(model, "step_outputs", None) or {}, iteration)
        module = getattr(model, "module", None)
        if isinstance(module, torch.nn.Module) and not getattr(model, "is_skipping", False):
            self._check_gradients(stream, module, optimizer, iteration)

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Check the variables of the batch."""
        self._check(stream_name, batch_data)

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Check the variables of the epoch."""
        for stream, variables in epoch_data.items():
            self._check(stream, variables)

    def _check(self, stream: str, variables: Mapping[str, Any], iteration: int | None = None) -> None:
        looked_at = {
            name: value for name, value in variables.items() if self._variables is None or name in self._variables
        }
        if not _are_finite(looked_at.values()):
            lacks_means = weighs_nothing(variables)
            for name, value in looked_at.items():
                if not (lacks_means and isinstance(value, torch.Tensor) and not value.dim()):
                    self._check_value(f"{stream}/{name}", value, iteration)

    def _check_gradients(self, stream: str, module: torch.nn.Module, optimizer: Any, iteration: int) -> None:
        groups = getattr(optimizer, "param_groups", None)
        updated = None if groups is None else {id(parameter) for group in groups for parameter in group["params"]}
        named = [
            (name, dense(parameter.grad.detach()))
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
            and (updated is None or id(parameter) in updated)  # those of others may still be scaled
        ]
        norm = whole(torch.nn.utils.get_total_norm([gradient for _, gradient in named]))  # waits for the device once
        if not norm.isfinite():
            for name, gradient in named:
                self._check_value(f"{stream}/gradient of {name}", whole(gradient), iteration)

    def _check_value(self, address: str, value: Any, iteration: int | None) -> None:
        if isinstance(value, Decimal | Fraction):
            value = float(value)
        if isinstance(value, Mapping):
            for key, entry in value.items():
                self._check_value(f"{address}/{key}", entry, iteration)
        elif isinstance(value, list | tuple):
            for entry in value:
                self._check_value(address, entry, iteration)
        elif isinstance(value, torch.Tensor) and _is_dense(value):
            self._judge(address, value.isnan().any(), value.isinf().any(), iteration)
        elif isinstance(value, torch.Tensor) or (array := np.asarray(value)).dtype.kind not in "biufc":
            self._tell_of_type(address, value)
        else:
            self._judge(address, np.isnan(array).any(), np.isinf(array).any(), iteration)

    def _judge(self, address: str, has_nan: Any, has_inf: Any, iteration: int | None) -> None:
        if has_nan or (self._stop_on_inf and has_inf):
            done = self.main_loop.iterations_done if iteration is None else iteration
            raise TrainingAborted(f"{address} is {'NaN' if has_nan else 'infinite'} at iteration {done} (StopOnNaN)")

    def _tell_of_type(self, address: str, value: Any) -> None:
        message = f"StopOnNaN: {address} is {type(value).__name__}, not a number (see on_unknown_type)"
        if self._on_unknown_type == "error":
            raise HookError(message)
        if self._on_unknown_type == "warn" and address not in self._warned:
            self._warned.add(address)
            _LOG.warning("%s", message)


def _is_dense(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not value.is_nested


def _are_finite(values: Iterable[Any]) -> bool:
    """Return whether all values are dense tensors of finite numbers, by their norm; False if unsure. Waits once."""
    floats = []
    for value in values:
        if not isinstance(value, torch.Tensor) or not _is_dense(value) or value.is_complex():
            return False
        if value.is_floating_point():
            floats.append(value.detach())
    if any(tensor.element_size() == 1 for tensor in floats):  # torch has no norm of float8
        return False
    return bool(torch.nn.utils.get_total_norm(floats).isfinite())
