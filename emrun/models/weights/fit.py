"""Which tensors of other weights fit a module: by name, shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from emrun.models.modes import Tensors
from emrun.models.weights.saving import own_tensors, same_tensors
from emrun.storage.checkpoints.shards import whole_of

MISMATCHES = ("another shape", "another dtype", "tied here", "not in the file", "only in the file")
"""Why a tensor that should be loaded is not loaded."""


@dataclass(slots=True)
class Fit:
    """How the tensors of a file fit a module.

    Args:
        sources: name of a parameter or buffer of the module -> the tensor to load.
        tied: names of other parameters or buffers that are the same tensors of the module.
        left: why tensors are not loaded -> name in the module or in the file -> name with what is wrong, for messages.
        values: name in the module or in the file -> how many numbers the tensor has; 0 for a tensor counted before.
    """

    sources: dict[str, Tensor] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)
    left: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module, there: Tensors, selects: Callable[[str], bool]) -> Fit:
        """Find which tensors fit.

        Args:
            module: the module.
            there: name, as the module would call it -> tensor, which may be `Stored`.
            selects: returns whether a name is to be loaded.
        """
        found = cls()
        here = own_tensors(module)
        for names in same_tensors(module, here):
            found._fit_one(names, here, there, selects)
        for name in [each for each in there if each not in here]:
            found.values[name] = there[name].numel()
            found._leave("only in the file" if selects(name) else "only in the file, left out by match", name)
        return found

    def _fit_one(self, names: list[str], here: Tensors, there: Tensors, selects: Callable[[str], bool]) -> None:
        """Fit a tensor of the module, which has several names if it is tied."""
        self.values |= {**dict.fromkeys(names, 0), names[0]: here[names[0]].numel()}
        wanted = list(filter(selects, names))
        first: str | None = None
        for name in [each for each in wanted if each in there]:
            wrong = _mismatch(name, here[name], there[name])
            if wrong is not None:
                self._leave(wrong[0], name, wrong[1])
            elif first is None:
                first = name
                self.sources[name] = there[name]
            elif there[name] is not there[first] and not torch.equal(whole_of(there[name]), whole_of(there[first])):
                self._leave("tied here", name, f"{name} and {first} are one tensor here, but differ in the file")
        left = {each for found in self.left.values() for each in names if each in found}
        for name in [each for each in names if each != first and each not in left]:
            if first is not None:
                self.tied.append(name)
            else:
                self._leave("not in the file" if name in wanted else "left out by match", name)

    def _leave(self, why: str, name: str, text: str = "") -> None:
        self.left.setdefault(why, {})[name] = text or name


def _mismatch(name: str, here: Tensor, there: Tensor) -> tuple[str, str] | None:
    """Return why a tensor cannot be loaded, and what it is in the file and in the module; None if it can be loaded."""
    if here.shape != there.shape:
        return "another shape", f"{name} is {tuple(there.shape)} in the file, {tuple(here.shape)} in the module"
    if not (is_ordinary(there) and is_ordinary(here) and _meaning(there) == _meaning(here)):
        return "another dtype", f"{name} is {kind_of(there)} in the file, {kind_of(here)} in the module"
    return None


def kind_of(tensor: Tensor) -> str:
    """Return the dtype of a tensor in words, or what else keeps it from being an ordinary tensor."""
    if tensor.is_meta:
        return "on the device meta, without values"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return str(tensor.dtype).removeprefix("torch.")


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor has one number after another in memory: neither sparse, nested, quantised nor meta."""
    is_special = tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta
    return not is_special


def _meaning(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool
