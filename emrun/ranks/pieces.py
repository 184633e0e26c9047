"""Pieces of tensors: what a rank has of a tensor whose rows lie on several ranks (a `DTensor`), and the whole of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from emrun.base.encoding import Rows
from emrun.ranks.group import answered, ranks

if TYPE_CHECKING:
    from torch import Tensor


def is_in_pieces(tensor: object) -> bool:
    """Return whether the rows of a tensor lie on several ranks."""
    return hasattr(tensor, "full_tensor")  # DTensor, whose import takes as long as a start


def whole(tensor: Any) -> Any:
    """Return a tensor with all its rows, which its ranks exchange: all of them call this; another value as it is.

    Raises:
        RankFailed: another rank has ended.
    """
    if not is_in_pieces(tensor):
        return tensor
    with answered(()):
        return tensor.detach().full_tensor()


def piece(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor, in the same memory: some rows, or none; another tensor as it is."""
    return tensor.detach().to_local() if is_in_pieces(tensor) else tensor  # type: ignore[attr-defined]


def rows_of(tensor: Any) -> Any:
    """Return what this rank has of a tensor, in the same memory, with its place; another value as it is."""
    if not is_in_pieces(tensor):
        return tensor
    size = len(tensor)
    mesh = tensor.device_mesh
    return Rows(piece(tensor), tuple(tensor.shape), min(size, mesh.get_local_rank() * -(-size // mesh.size())))


def in_pieces_like(tensor: Any, other: Any) -> Tensor:
    """Return a tensor in pieces as another one is; only this rank's rows of it are read and copied.

    Args:
        tensor: the whole tensor, or what returns its rows for a slice, such as `Stored`.
        other: the other one, of the same shape.
    """
    from torch.distributed.tensor import DTensor

    rows = rows_of(other)
    mesh = other.device_mesh
    local = tensor[rows.begin : rows.begin + len(rows.values)].to(rows.values.device, copy=True)
    return DTensor.from_local(
        local.contiguous(), mesh, other.placements, shape=other.shape, stride=other.stride(), run_check=False
    )


def norms_of_all(norms: list[Tensor], tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the 2-norms of whole tensors from those of the pieces of this rank; all ranks call this.

    Args:
        norms: for each tensor the norm of what this rank has of it, of shape ().
        tensors: the tensors, in pieces or not.
    """
    import torch

    divided = [index for index, tensor in enumerate(tensors) if is_in_pieces(tensor)]
    if not divided:
        return norms
    squares = torch.stack([norms[index].double() ** 2 for index in divided])
    ranks().add_up(squares)
    whole_norms = dict(zip(divided, squares.sqrt().unbind(), strict=True))
    return [whole_norms[index].to(norm.dtype) if index in whole_norms else norm for index, norm in enumerate(norms)]
