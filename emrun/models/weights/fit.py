"""Which tensors of other weights fit a module: by name, shape and dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from emrun.models.weights.saving import own_tensors, same_tensors
from emrun.storage.checkpoints.shards import whole_of

Reason = Literal["another shape", "another dtype", "tied here", "not in the file", "only in the file"]
"""Why a tensor that should be loaded is not loaded."""


@dataclass(slots=True)
class Fit:
    """How the tensors of a file fit a module.

    Args:
        sources: name of a parameter or buffer of the module -> the tensor to load.
        tied: name of a parameter or buffer -> the name in `sources` of the same tensor of the module.
        left: reason -> name -> name with what is wrong, for messages.
        not_selected: names in the module that no pattern selects.
        only_there: names in the file that no pattern selects and the module does not have.
        values: name in the module or in the file -> how many numbers the tensor has; 0 for a tensor counted before.
    """

    sources: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    left: dict[Reason, dict[str, str]] = field(default_factory=dict)
    not_selected: list[str] = field(default_factory=list)
    only_there: list[str] = field(default_factory=list)
    values: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module, there: Mapping[str, Tensor], selects: Callable[[str], bool]) -> Fit:
        """Find which tensors fit.

        Args:
            module: the module.
            there: name, as the module would call it -> tensor, which may be `Stored`.
            selects: returns whether a name is to be loaded.
        """
        found = cls()
        here = own_tensors(module)
        for names in same_tensors(module, here):
            found._fit_one([each for each in names if selects(each)], names, here, there)
        beside = [each for each in there if each not in here]
        found.values |= {name: there[name].numel() for name in beside}
        found.only_there = [name for name in beside if not selects(name)]
        for name in filter(selects, beside):
            found._leave("only in the file", name)
        return found

    def _fit_one(
        self, selected: list[str], names: list[str], here: Mapping[str, Tensor], there: Mapping[str, Tensor]
    ) -> None:
        """Fit a tensor of the module, which has several names if it is tied."""
        self.values.update(dict.fromkeys(names, 0))
        self.values[names[0]] = here[names[0]].numel()
        found = {each: _mismatch(here[each], there[each]) for each in selected if each in there}
        for name, wrong in found.items():
            if wrong is not None:
                self._leave(wrong[0], name, f"{name} is {wrong[1]} in the file, {wrong[2]} in the module")
        fitting = [name for name, wrong in found.items() if wrong is None]
        first = next(iter(fitting), None)
        if first is None:
            for name in [each for each in selected if each not in there]:
                self._leave("not in the file", name)
            self.not_selected += [each for each in names if each not in selected]
            return
        self.sources[first] = there[first]
        for name in [each for each in fitting if each != first]:
            if there[name] is not there[first] and not torch.equal(whole_of(there[name]), whole_of(there[first])):
                self._leave("tied here", name, f"{name} and {first} are one tensor here, but differ in the file")
        left = {each for found in self.left.values() for each in names if each in found}
        self.tied |= {each: first for each in names if each != first and each not in left}

    def _leave(self, reason: Reason, name: str, text: str = "") -> None:
        self.left.setdefault(reason, {})[name] = text or name


def _mismatch(here: Tensor, there: Tensor) -> tuple[Reason, str, str] | None:
    """Return why a tensor cannot be loaded, and what it is in the file and in the module; None if it can be loaded."""
    if here.shape != there.shape:
        return "another shape", str(tuple(there.shape)), str(tuple(here.shape))
    if not _converts(there, here):
        return "another dtype", kind_of(there), kind_of(here)
    return None


def kind_of(tensor: Tensor) -> str:
    """Return the dtype of a tensor in words, or what else keeps it from being an ordinary tensor."""
    if tensor.is_meta:
        return "on the device meta, without values"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return str(tensor.dtype).removeprefix("torch.")


def _converts(there: Tensor, here: Tensor) -> bool:
    """Return whether a tensor can be copied into another one without another meaning: floats to floats, for example."""
    if there.is_meta or any(
        each.layout is not torch.strided or each.is_nested or each.is_quantized for each in (there, here)
    ):
        return False
    return _meaning(there) == _meaning(here)


def _meaning(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool
