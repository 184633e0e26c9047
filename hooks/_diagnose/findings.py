"""What the figures of a look mean: which layers have which fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emrun.hooks._diagnose.look import Activations, Change, Range, Updates, read
from emrun.hooks._diagnose.verdicts import Finding

_Judge = Callable[[list[float], float | None], list[Finding]]  # called with the values of tensors, and the loss
_Question = tuple[Sequence[Tensor], _Judge]

_DEAD_SHARE = 0.5  # cs231n.github.io/neural-networks-1: "as much as 40%" is a sign of a learning rate that is too high
_DEAD_VALUES = 96  # that are 0 in a row, so that a unit counts as dead
_OF_A_LOOK = 32  # values of a look that count at most, so that three looks are needed
_SMALL, _LARGE = 1e-6, 0.1  # cs231n.github.io/neural-networks-3: "somewhere around 1e-3", here with wide bounds
_SETTLED = 20  # updates after which their size is judged: weights that begin at 0 change much before
_ROUNDING = 1e-6  # differences between examples, relative to the values, that are not differences


def findings(seen: Activations, updates: Updates, zeros: dict[str, Tensor], update: int, loss: Any) -> list[Finding]:
    """Return what a look has found, and where it has looked without finding anything; waits for the device.

    Args:
        seen: what the layers have returned.
        updates: what the update has done.
        zeros: layer -> how many values of each unit were 0 in a row, as int32; is changed.
        update: the number of the update.
        loss: what was minimised in the last batch; None if it is not known.
    """
    outputs = seen.outputs or dict([seen.last] if seen.last is not None else [])
    questions = [
        _finite(seen.finite),
        *(_dead(name, _count(zeros, name, *found)) for name, found in seen.zeros.items()),
        *([_same(outputs)] if outputs else []),
        *(_unmoved(name, step) for name, step in updates.unmoved()),
        *(_changed(change, is_settled=update >= _SETTLED) for change in updates.changes),
    ]
    of_loss = [loss.detach()] if isinstance(loss, Tensor) else []
    values = read([*of_loss, *(each for tensors, _ in questions for each in tensors)])
    minimised = values.pop(0) if of_loss else loss
    found = []
    for tensors, judge in questions:
        own, values = values[: len(tensors)], values[len(tensors) :]
        found += judge(own, minimised)
    return found


def _finite(seen: Sequence[tuple[str, Tensor, Tensor]]) -> _Question:
    """Judge whether layers return finite values; only the first one that does not is named."""

    def judge(values: list[float], loss: float | None) -> list[Finding]:
        found: dict[str, Finding] = {}
        for index, (layer, *_) in enumerate(seen):
            low, high = values[2 * index : 2 * index + 2]
            is_mask = low == -math.inf and math.isfinite(high) and loss is not None and math.isfinite(loss)
            if not is_mask and not (math.isfinite(low) and math.isfinite(high)):
                found[layer] = ("not_finite", layer, True, [low, high])
                break
            found.setdefault(layer, ("not_finite", layer, False, None))
        return list(found.values())

    return [each for _, low, high in seen for each in (low, high)], judge


def _same(outputs: Mapping[str, Range]) -> _Question:
    """Judge whether the outputs differ between examples; one that does is enough."""
    tensors = [each for low, high in outputs.values() for each in (high - low, low, high)]

    def judge(values: list[float], loss: float | None) -> list[Finding]:
        spreads, sizes = (
            values[::3],
            [max(abs(low), abs(high)) for low, high in zip(values[1::3], values[2::3], strict=True)],
        )
        is_so = all(spread <= _ROUNDING * size for spread, size in zip(spreads, sizes, strict=True))
        return [("same_output", ", ".join(outputs), is_so, [max(spreads), max(sizes)])]

    return [each.amin() if index % 3 == 1 else each.amax() for index, each in enumerate(tensors)], judge


def _count(zeros: dict[str, Tensor], layer: str, is_zero: Tensor, values: int) -> Tensor:
    """Count the values of the units that were 0 in a row; return the share of dead units.

    Args:
        zeros: see `findings`.
        layer: the layer.
        is_zero: for each unit, whether all its values of the look were 0.
        values: the number of these values.
    """
    before = zeros.get(layer)
    if before is None or before.shape != is_zero.shape:
        before = torch.zeros(is_zero.shape, dtype=torch.int32)
    counts = before.to(is_zero.device).add(min(values, _OF_A_LOOK)).clamp(max=_DEAD_VALUES)
    zeros[layer] = counts.mul(is_zero)
    return (zeros[layer] == _DEAD_VALUES).float().mean()


def _dead(layer: str, share: Tensor) -> _Question:
    """Judge how many units of a layer are dead; the whole layer is a verdict of its own."""

    def judge(values: list[float], loss: float | None) -> list[Finding]:
        (dead,) = values
        return [
            ("dead_units", layer, _DEAD_SHARE <= dead < 1, dead),
            ("dead_layer", layer, dead == 1, dead),
        ]

    return [share], judge


def _unmoved(name: str, step: Tensor) -> _Question:
    """Judge whether a parameter that no optimizer has is changed by something else."""
    return [step], lambda values, loss: [("never_moves", name, values[0] == 0, None)]


def _changed(change: Change, *, is_settled: bool) -> _Question:
    """Judge the gradient of a parameter and its update."""
    tensors = [each for each in (change.step, change.gradient, change.size) if each is not None]

    def judge(values: list[float], loss: float | None) -> list[Finding]:
        name, step = change.name, values[0]
        gradient = None if change.gradient is None else values[1]
        found: list[Finding] = []
        is_planned = gradient == 0 and not change.is_full  # what begins at 0 stays there in a warm-up from 0
        if (loss is None or abs(loss) > 0) and not is_planned:  # with 0 or none (NaN), the batch has nothing to learn
            found.append(("no_gradient", name, not gradient, gradient))
        is_due = change.is_full and bool(gradient)  # a change is expected
        if step > 0 or is_due:
            found.append(("never_moves", name, step == 0, change.rate))
        if change.size is not None and is_settled and step > 0 and values[-1] > 0:
            ratio = step / values[-1]
            found.append(("large_update", name, ratio > _LARGE, ratio))
            if ratio >= _SMALL or is_due:
                found.append(("small_update", name, ratio < _SMALL, ratio))
        return found

    return tensors, judge
