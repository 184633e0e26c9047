"""Other weights for evaluations than those being trained, such as their averages."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from emrun.base.errors import ArgumentError
from emrun.base.wording import did_you_mean
from emrun.models.modes import Tensors
from emrun.models.weights.matching import dtype_in_words
from emrun.models.weights.saving import tensors_of
from emrun.ranks.pieces import is_in_pieces, piece


class EvaluationWeights:
    """Exchanges tensors of a module with others of the same shapes; nothing is copied.

    Args:
        module: the module.
        others: name of a parameter or buffer -> the tensor for evaluations, of the same shape and dtype and on the same
            device. While it is in use, this tensor has the values of the training.

    Raises:
        ArgumentError: a name or a tensor does not fit the module.
    """

    def __init__(self, module: Module, others: Tensors) -> None:
        self.others = dict(others)
        self.in_use = False
        """Whether the module has the tensors for evaluations."""
        tensors = tensors_of(module)
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for name, other in self.others.items():
            if name not in tensors:
                raise ArgumentError(
                    "evaluation_weights", f"the module has no parameter or buffer {name!r}{did_you_mean(name, tensors)}"
                )
            tensor = tensors[name]
            if (tensor.shape, tensor.dtype, tensor.device) != (other.shape, other.dtype, other.device):
                raise ArgumentError(
                    "evaluation_weights", f"{name!r} is {_shown(other)}, but {_shown(tensor)} is needed"
                )
            self._pairs.append((tensor, other))

    def use(self, evaluation: bool) -> None:
        """Put the tensors for evaluations into the module, or those of the training."""
        if evaluation is self.in_use:
            return
        self.in_use = evaluation
        for tensor, other in self._pairs:
            if is_in_pieces(tensor):  # `fully_shard` reads its own memory
                rows = piece(tensor)
                values = rows.clone()
                rows.copy_(piece(other))
                piece(other).copy_(values)
            else:
                tensor.data, other.data = other.data, tensor.data

    def replaced(self, *, evaluation: bool) -> dict[int, Tensor]:
        """Return id of a parameter or buffer -> what it has in evaluations, or in the training, if not this now."""
        return {} if evaluation is self.in_use else {id(tensor): other for tensor, other in self._pairs}


def _shown(tensor: Tensor) -> str:
    return f"{dtype_in_words(tensor)} of shape {tuple(tensor.shape)} on {tensor.device}"
