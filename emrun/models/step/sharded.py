"""The gradients of all ranks are summed in the backward pass, and each rank gets some rows of each sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emrun.base.errors import StreamError
from emrun.models.optimizer import parameters_of
from emrun.models.sharding import Sharding
from emrun.models.step.plain import Parameters, backward
from emrun.models.step.summed import SummedGradients
from emrun.ranks.group import Ranks, answered
from emrun.ranks.parts import weighted
from emrun.ranks.pieces import piece

_EXTRA = 3  # numbers before the flags: the weight, the loss times the weight, the number of rows


class ShardedGradients(SummedGradients):
    """Divides the gradients of a window, which `fully_shard` has summed, by the weight of the window on all ranks.

    Args:
        model: a `TorchModel`, which knows the loss of this rank.
        ranks: the ranks.
        carries_loss: whether the sums of an update also have the loss: if a window has one part.
        sharding: knows which parameters have got a gradient.
    """

    def __init__(self, model: Any, ranks: Ranks, *, carries_loss: bool, sharding: Sharding) -> None:
        super().__init__(model, ranks, carries_loss=carries_loss, sends=False)
        self._sharding = sharding

    def backward(self, loss: Tensor, weight: float | Tensor, of: Parameters, *, is_last: bool) -> None:
        """Add the gradients of a part of the window; a rank without rows takes part with the weight 0."""
        with answered():
            backward(weighted(loss, torch.as_tensor(weight)), of)

    def clear(self) -> None:
        """Forget a window that has begun."""
        self._sharding.given.clear()

    def _sums_of(self, optimizer: torch.optim.Optimizer) -> Any:
        if optimizer not in self._sums:
            names = {id(each): name for name, each in self._model.module.named_parameters()}
            parameters = {names[id(each)]: each for each in parameters_of(optimizer)}
            self._sums[optimizer] = ShardSums(parameters, self._ranks, self._sharding.given)  # type: ignore[assignment]
        return self._sums[optimizer]


class ShardSums:
    """The sums of the gradients of sharded parameters, which have them already; all ranks do this alike.

    Args:
        parameters: name -> parameter, of an optimizer.
        ranks: the ranks.
        given: the names of the parameters for which this rank has calculated a gradient in the window.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], ranks: Ranks, given: set[str]) -> None:
        self._parameters, self._ranks, self._given = parameters, ranks, given

    def reduce(self, weight: float | Tensor, loss: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
        """Sum the weights and the losses over all ranks; a parameter without a gradient on any rank gets None.

        Args:
            weight: the weight of the examples of this rank in the window.
            loss: the mean loss of these examples, of shape (); None if it is not wanted.
            rows: the number of these examples.

        Returns:
            The sum of the weights of all ranks, and the mean of their losses, both of shape ().

        Raises:
            StreamError: no rank has an example.
        """
        is_given = [name in self._given for name in self._parameters]
        device = next((each.device for each in self._parameters.values()), None)
        extra = torch.zeros(_EXTRA + len(is_given), dtype=torch.float64, device=device)
        extra[0] = weight
        extra[1] = 0.0 if loss is None else weighted(loss.detach(), weight)
        extra[2] = rows
        extra[_EXTRA:] = torch.tensor(is_given)
        self._ranks.add_up(extra)
        if not rows and not extra[2]:  # this waits for the device, on ranks without rows
            raise StreamError("the batch is empty on all ranks (see main_loop.on_empty_batch)")
        if not all(is_given):
            for parameter, flag in zip(self._parameters.values(), extra[_EXTRA:].tolist(), strict=True):
                if not flag:
                    parameter.grad = None  # as in one process; the sum has zeros
        total = extra[0].clone()
        return total, extra[1] / total

    def divide(self, divisor: Tensor) -> None:
        """Divide the sums in place; a divisor of 0, of gradients that are 0, is 1."""
        divisor = divisor.where(divisor != 0, 1)
        grads = [piece(each.grad) for each in self._parameters.values() if each.grad is not None]
        if grads:
            torch._foreach_div_(grads, divisor.to(grads[0].device))
