"""ClipGradients: limits the gradients of each update."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from emrun import AbstractHook
from emrun.base.arguments import check_number
from emrun.base.errors import ArgumentError
from emrun.hooks._shared.parameters import dense, module_of, suffix_of
from emrun.ranks.pieces import whole


class ClipGradients(AbstractHook):
    """Limits the gradients of each update: their norm, or each of their values.

        hooks:
          - ClipGradients: {norm: 1.0}

    The gradients are those of the whole update, also with `model.accumulate`. The result is that of
    `torch.nn.utils.clip_grad_norm_` or `clip_grad_value_`; nothing is copied from the device. With several optimizers,
    the gradients of each are limited by themselves. Parameters without a gradient are skipped, and so is an update in
    which no parameter has one.

    With `norm`, the norm before clipping is the column `gradient_norm` of `steps.jsonl`; with several optimizers, there
    is a column `gradient_norm_NAME` for each.

    Gradients that are NaN or infinite are not made finite: as in torch, a norm that is not finite makes all gradients
    NaN or 0. List `StopOnNaN: {after_batch: true}` before this hook to end the run there.

    Args:
        norm: the largest 2-norm of all gradients of an optimizer, as one vector; larger gradients are scaled to it.
        value: the largest absolute value of each number in the gradients; larger values are set to it.

    Raises:
        ArgumentError: not exactly one argument is given, or it is not a positive number.
        HookError: the model is not a `TorchModel`.
    """

    reads = ()

    def __init__(self, norm: float | None = None, value: float | None = None) -> None:
        super().__init__()
        given = {name: limit for name, limit in (("norm", norm), ("value", value)) if limit is not None}
        if len(given) != 1:
            raise ArgumentError("norm", "give norm or value, e.g. norm: 1.0; to limit both, list the hook twice")
        for name, limit in given.items():
            check_number(name, limit, "a positive number, e.g. 1.0", above=0)
        self._norm = norm
        self._value = value

    def before_training(self) -> None:
        """Check that the model has gradients."""
        module_of("ClipGradients", self.main_loop.model)

    def before_update(self, model: Any, optimizer: Any) -> None:
        """Limit the gradients of the optimizer's parameters."""
        of_groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
        parameters = [_dense_stand_in(parameter) for parameter in of_groups if parameter.grad is not None]
        if not parameters:
            return
        if self._norm is None:
            clip_grad_value_(parameters, float(self._value or 0))
        else:
            norm = clip_grad_norm_(parameters, float(self._norm))
            self.main_loop.record(f"gradient_norm{suffix_of(model, optimizer)}", whole(norm))


def _dense_stand_in(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter; for one with a sparse gradient, which torch cannot clip, a tensor with its values."""
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    parameter.grad = parameter.grad.coalesce()
    values = dense(parameter.grad)
    stand_in = torch.empty_like(values)
    stand_in.grad = values
    return stand_in
