"""The gradients of all ranks are summed in the backward pass, and each rank gets some rows of each sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from emrun.base.errors import StreamError
from emrun.models.forward_pass import ForwardPass
from emrun.models.optimizers.parameters import names_of, parameters_of
from emrun.models.sharding import Sharding
from emrun.models.step.gradient_sums import EMPTY, EXTRA
from emrun.models.step.summed import RankSums, SummedStep
from emrun.models.step.training_step import Parameters, backward
from emrun.ranks.group import Ranks
from emrun.ranks.parts import Weight, weighted
from emrun.ranks.pieces import piece


class ShardedSums(RankSums):
    """What ranks exchange in a step of a sharded model.

    Args:
        forward_pass: has the module.
        ranks: the ranks.
        sharding: knows which parameters have got a gradient.
        carries_loss: whether the sums of an update also have the loss: if a window has one part.
    """

    def __init__(self, forward_pass: ForwardPass, ranks: Ranks, sharding: Sharding, *, carries_loss: bool) -> None:
        super().__init__(forward_pass, ranks, carries_loss=carries_loss, sends=False, exchanges=True)
        self._sharding = sharding

    def clear(self) -> None:
        """Forget which parameters have got a gradient."""
        self._sharding.given.clear()

    def new(self, optimizer: Optimizer) -> ShardSums:
        """Return new sums of the gradients of an optimizer."""
        names = names_of(self.forward_pass.module)
        return ShardSums({names[id(each)]: each for each in parameters_of(optimizer)}, self.ranks, self._sharding.given)


class ShardedStep(SummedStep):
    """Divides the gradients of a window, which `fully_shard` has summed, by the weight of the window on all ranks."""

    _sums: ShardedSums

    def add(self, loss: Tensor, of: Parameters = None) -> None:
        """Add the gradients of the weighted loss; a rank without rows takes part with the weight 0."""
        backward(weighted(loss, torch.as_tensor(self.weight)), of)

    def clear(self) -> None:
        """Clear the gradients, at the beginning of a window."""
        super().clear()
        self._sums.clear()


@dataclass(slots=True)
class ShardSums:
    """The sums of the gradients of sharded parameters, which have them already; all ranks do this alike.

    Args:
        parameters: name -> parameter, of an optimizer.
        ranks: the ranks.
        given: the names of the parameters for which this rank has calculated a gradient in the window.
    """

    parameters: dict[str, Parameter]
    ranks: Ranks
    given: set[str]

    def reduce(self, weight: Weight, loss: Tensor | None = None) -> Tensor | None:
        """Divide the gradients by the sum of the weights, unless this is 0; one that no rank has given becomes None.

        Args:
            weight: the weight of the examples of this rank in the window.
            loss: the mean loss of these examples, of shape (); None if it is not wanted.

        Returns:
            The mean of the losses of all ranks, of shape (); None if it is not wanted.

        Raises:
            StreamError: no rank has an example.
        """
        is_given = [name in self.given for name in self.parameters]
        extra = torch.zeros(
            EXTRA + len(is_given),
            dtype=torch.float64,
            device=next((each.device for each in self.parameters.values()), None),
        )
        extra[0] = weight
        extra[1] = 0.0 if loss is None else weighted(loss.detach(), weight)
        extra[2] = has_rows = weight.__class__ is Tensor or weight > 0
        extra[EXTRA:] = torch.tensor(is_given)
        self.ranks.add_up(extra)
        if not has_rows and not extra[2]:  # this waits for the device, on ranks without rows
            raise StreamError(EMPTY)
        if not all(is_given):
            for parameter, flag in zip(self.parameters.values(), extra[EXTRA:].tolist(), strict=True):
                if not flag:
                    parameter.grad = None  # as in one process; the sum has zeros
        total = extra[0].clone()
        grads = [piece(each.grad) for each in self.parameters.values() if each.grad is not None]
        if grads:
            torch._foreach_div_(grads, total.where(total != 0, 1).to(grads[0].device))  # 0 is of gradients that are 0
        return None if loss is None else extra[1] / total
