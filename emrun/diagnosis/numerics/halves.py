"""The gradient of a batch is the weighted mean of those of its halves, unless something looks at the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emrun.base.sources import examples_of
from emrun.base.types import Batch
from emrun.diagnosis.numerics.gradients import Gradients, Measured, difference, rounding
from emrun.diagnosis.numerics.rows import DEPENDS, DIFFERS, SAME, NotApplicableError, Row
from emrun.ranks.parts import split

WHAT = "gradients of the halves of a batch"
_FITS = 0.01  # what is left over, relative to the gradient, if a weighting of the halves explains it
_Seen = dict[tuple[str, int], tuple[list[Tensor], ...]]  # part and number of its call -> its inputs, its outputs


def halves(
    measure: Callable[[Batch], Measured], batch: Batch, module: torch.nn.Module, losses: Mapping[str, Any]
) -> Row:
    """Compare the gradients of a batch with the weighted mean of those of its halves.

    Args:
        measure: returns the gradients of a batch, always with the same random numbers and buffers, without dropout.
        batch: source name -> values.
        module: the module, whose parts are searched for one that looks at the whole batch.
        losses: key -> function that calculates a loss, for the text.

    Raises:
        NotApplicableError: the batch has one example.
    """
    count = examples_of(batch)
    if count < 2:
        raise NotApplicableError("the batch has one example")

    # the gradients of the batch, and those of its halves
    whole, outputs = _traced(measure, batch, module)
    others = [_traced(measure, half, module) for half, _ in split(batch, count, -(-count // 2))]
    gradients = [measured.gradients for measured, _ in others]
    total = sum(measured.weight for measured, _ in others)
    weights = [measured.weight / total for measured, _ in others]
    differing = difference(whole.gradients, _sum(weights, gradients))
    if differing is None:
        return Row(WHAT, SAME)
    name, deviation = differing

    # why they differ
    part = _first_apart(outputs, [seen for _, seen in others])
    if part is not None:
        kind = type(module.get_submodule(part)).__name__
        shown = f"{part} ({kind})" if part else kind
        return Row(WHAT, DEPENDS, f"{shown} gives an example another output in another batch", part or kind)
    fitted, left = _fit(whole.gradients, gradients)
    if left < _FITS and min(fitted) > _FITS:
        return Row(WHAT, DIFFERS, f"{name} by {deviation:.2g}: {_weighting(fitted, weights)}", name, deviation)
    kinds = [getattr(loss, "__name__", type(loss).__name__) for loss in losses.values()]
    shown = ", ".join(kinds) or "the loss that forward returns"
    return Row(WHAT, DEPENDS, f"{shown} is not a mean of one value for each example", shown)


def _traced(measure: Callable[[Batch], Measured], batch: Batch, module: torch.nn.Module) -> tuple[Measured, _Seen]:
    """Return what a step has measured, and what goes into and out of the parts of the module for each example."""
    seen: _Seen = {}
    count = examples_of(batch)
    calls: dict[str, int] = {}

    def note(name: str, *values: Any) -> None:
        calls[name] = calls.get(name, 0) + 1
        seen[name, calls[name]] = tuple(_rows(value, count) for value in values)

    handles = [
        part.register_forward_hook(
            lambda _, given, named, output, name=name: note(name, (*given, *named.values()), output), with_kwargs=True
        )
        for name, part in module.named_modules()
    ]
    try:
        return measure(batch), seen
    finally:
        for handle in handles:
            handle.remove()


def _rows(values: Any, count: int) -> list[Tensor]:
    """Return copies of the floating-point tensors that have a row for each example."""
    entries = values if isinstance(values, tuple) else (values,)
    if isinstance(values, Mapping):
        entries = tuple(values.values())
    rows = [tensor.detach() for tensor in entries if isinstance(tensor, Tensor) and tensor.shape[:1] == (count,)]
    return [tensor.clone() for tensor in rows if tensor.is_floating_point()]


def _first_apart(whole: _Seen, of_halves: Sequence[_Seen]) -> str | None:
    """Return the first part of the module that makes, of the same rows, other rows of the batch than of its half."""
    for key, (inputs, outputs) in whole.items():
        if all(key in half for half in of_halves):
            others = [half[key] for half in of_halves]
            differs = _are_apart(outputs, *(rows for _, rows in others))
            if differs and not _are_apart(inputs, *(rows for rows, _ in others)):
                return key[0]
    return None


def _are_apart(whole: list[Tensor], *halves: list[Tensor]) -> bool:
    if any(len(half) != len(whole) for half in halves):
        return False
    pairs = [(one, both) for one, *both in zip(whole, *halves, strict=True)]
    joined = [(one, torch.cat(both)) for one, both in pairs if {half.shape[1:] for half in both} == {one.shape[1:]}]
    return any((one - other).norm() > rounding(one) * one.norm() for one, other in joined)


def _sum(weights: Sequence[float], gradients: Sequence[Gradients]) -> Gradients:
    return {
        name: sum(weight * of_half[name] for weight, of_half in zip(weights, gradients, strict=True) if name in of_half)  # type: ignore[misc]
        for name in dict.fromkeys(name for of_half in gradients for name in of_half)
    }


def _fit(whole: Gradients, parts: Sequence[Gradients]) -> tuple[tuple[float, float], float]:
    """Return the two weights of the halves with which they come next to the whole, and what is left, relatively."""

    def joined(gradients: Gradients) -> Tensor:
        return torch.cat([gradients.get(name, torch.zeros_like(whole[name])).double().flatten() for name in whole])

    halves = torch.stack([joined(of_half) for of_half in parts], 1)
    both = joined(whole)
    weights = torch.linalg.lstsq(halves, both[:, None]).solution
    left = (halves @ weights)[:, 0] - both
    return (float(weights[0]), float(weights[1])), float(left.norm() / both.norm())


def _weighting(fitted: tuple[float, float], wanted: Sequence[float]) -> str:
    if abs(fitted[0] - 1) < _FITS and abs(fitted[1] - 1) < _FITS:
        return "the loss is a sum over the examples; return it per example, or as their mean"
    shares = [f"{100 * one:.3g} : {100 * other:.3g}" for one, other in (fitted, wanted)]
    return (
        f"the loss weighs the halves {shares[0]}, and emrun {shares[1]}; return the weights of the examples as an "
        "output `loss_weight`, such as the number of tokens of each"
    )
