"""Chats of one example may not see each other: before the training, two are run together and alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from emrun.base.errors import ArgumentError
from emrun.base.types import Values
from emrun.models.precision import Precision
from emrun.models.step.halves import ROUNDED, without_traces

_LOG = logging.getLogger(__name__)
_POSITIONS = "position_ids"
_LESS = 30  # times as exact: what stays in its place is not rounded in another way


def check_packs(module: Module, forward: Callable[[Values], Values], inputs: Values, precision: Precision) -> None:
    """Check that the outputs of a chat are the same alone, after another chat, and after that with other tokens.

    The module runs three times in evaluation mode.

    Args:
        module: the module.
        forward: returns its outputs for a batch.
        inputs: source name -> tensor of a batch of packs, `position_ids` among them if forward gets it.
        precision: the precision of the model, whose rounding does not count.

    Raises:
        ArgumentError: they differ, or forward does not get `position_ids`.
    """
    positions = inputs.get(_POSITIONS)
    if not isinstance(positions, Tensor):
        raise ArgumentError("inputs", f"`pack` needs a module that gets the source {_POSITIONS!r}; add it")
    # two chats: the first two of the batch
    begins = (positions.flatten() == 0).nonzero().flatten().tolist()
    ends = [*begins[1:], positions.numel()]
    whole = {name: each for name, each in inputs.items() if _is_like(each, positions)}

    def chat(index: int) -> dict[str, Tensor]:
        number = index % len(begins)
        return {name: each.flatten()[begins[number] : ends[number]] for name, each in whole.items()}

    first = chat(0)
    second = chat(1)
    other = {name: each if name == _POSITIONS else second[name][-1:].expand_as(each) for name, each in first.items()}
    size = len(second[_POSITIONS])

    def run(*chats: Values) -> Values:
        """Return the outputs of the tokens of the last chat."""
        rest = {name: each[:1] if isinstance(each, Tensor) and each.dim() else each for name, each in inputs.items()}
        joined = {name: torch.cat([chat[name] for chat in chats])[None] for name in whole}
        length = joined[_POSITIONS].shape[1]
        found = forward({**rest, **joined})
        return {
            name: each[0, -size:].float()
            for name, each in found.items()
            if isinstance(each, Tensor) and each.is_floating_point() and each.shape[:2] == (1, length)
        }

    with without_traces(module):
        together = run(first, second)
        changed = run(other, second)
        alone = run(second)
    # what differs
    if not together:
        _LOG.warning("no output has a value for each token, so whether the chats of a pack see each other is not known")
    rounding = ROUNDED.get(str(precision), 3e-2 if any(each.itemsize < 4 for each in module.parameters()) else 1e-3)
    for name, values in together.items():
        scale = float(values.abs().max()) or 1.0
        for what, others, limit in (
            ("with the chat before", changed, rounding / _LESS),
            ("from those of the chat alone", alone, rounding),
        ):
            apart = float((values - others[name]).abs().max())
            if apart > limit * scale:
                seen = f"{name!r} of a chat differs {what} by {apart:.2g}, of at most {scale:.2g}"
                advice = "set `use_cache: false` in the config of the model, or leave out `pack` of the dataset"
                raise ArgumentError("module", f"the chats of a pack see each other: {seen}; {advice}")


def _is_like(values: Any, positions: Tensor) -> bool:
    return isinstance(values, Tensor) and values.shape == positions.shape
