"""Which tensors of other weights are loaded into a module: by name, shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module

from emrun.models.modes import Tensors
from emrun.models.weights.saving import own_tensors, same_tensors
from emrun.storage.checkpoints.shards import whole_of

MISMATCHES = ("another shape", "another dtype", "tied here", "not in the file", "only in the file")
"""Why a tensor that should be loaded is not loaded."""


@dataclass(slots=True)
class Matches:
    """How the tensors of a file match those of a module.

    Args:
        sources: name of a parameter or buffer of the module -> the tensor to load.
        tied: names of other parameters or buffers that are the same tensors of the module.
        not_loaded: why tensors are not loaded -> name in the module or in the file -> name with what is wrong, for
            messages.
        sizes: name in the module or in the file -> how many numbers the tensor has; 0 for a tensor counted before.
    """

    sources: dict[str, Tensor] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)
    not_loaded: dict[str, dict[str, str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, names: list[str], in_module: Tensors, in_file: Tensors, selects: Callable[[str], bool]) -> None:
        """Add a tensor of the module, which has several names if it is tied; see `matches_of`."""
        self.sizes |= {**dict.fromkeys(names, 0), names[0]: in_module[names[0]].numel()}
        # the first name under which the file has a tensor that can be loaded
        selected = list(filter(selects, names))
        loaded: str | None = None
        for name in [name for name in selected if name in in_file]:
            mismatch = _mismatch(name, in_module[name], in_file[name])
            if mismatch is not None:
                self.leave_out(name, *mismatch)
            elif loaded is None:
                loaded = name
                self.sources[name] = in_file[name]
            elif not _is_same(in_file[name], in_file[loaded]):
                self.leave_out(name, "tied here", f"{name} and {loaded} are one tensor here, but differ in the file")
        # its other names
        for name in names:
            if name == loaded or any(name in texts for texts in self.not_loaded.values()):
                continue
            if loaded is not None:
                self.tied.append(name)
            else:
                self.leave_out(name, "not in the file" if name in selected else "left out by match")

    def leave_out(self, name: str, why: str, text: str = "") -> None:
        """Note why a tensor is not loaded; the text is the name by default."""
        self.not_loaded.setdefault(why, {})[name] = text or name


def matches_of(module: Module, in_file: Tensors, selects: Callable[[str], bool]) -> Matches:
    """Return how the tensors of a file match those of a module.

    Args:
        module: the module.
        in_file: name, as the module would call it -> tensor, which may be `Stored`.
        selects: returns whether a name is to be loaded.
    """
    matches = Matches()
    in_module = own_tensors(module)
    for names in same_tensors(module, in_module):
        matches.add(names, in_module, in_file, selects)
    for name, tensor in in_file.items():
        if name not in in_module:
            matches.sizes[name] = tensor.numel()
            matches.leave_out(name, "only in the file" if selects(name) else "only in the file, left out by match")
    return matches


def _mismatch(name: str, of_module: Tensor, of_file: Tensor) -> tuple[str, str] | None:
    """Return why a tensor cannot be loaded, and what it is in the file and in the module; None if it can be loaded."""
    if of_module.shape != of_file.shape:
        return "another shape", f"{name} is {tuple(of_file.shape)} in the file, {tuple(of_module.shape)} in the module"
    if not (is_ordinary(of_file) and is_ordinary(of_module) and _meaning(of_file) == _meaning(of_module)):
        return (
            "another dtype",
            f"{name} is {dtype_in_words(of_file)} in the file, {dtype_in_words(of_module)} in the module",
        )
    return None


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of a file are one, or have equal values."""
    return one is other or torch.equal(whole_of(one), whole_of(other))


def dtype_in_words(tensor: Tensor) -> str:
    """Return the dtype of a tensor in words, or what else keeps it from being an ordinary tensor."""
    if tensor.is_meta:
        return "on the device meta, without values"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return str(tensor.dtype).removeprefix("torch.")


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor has one number after another in memory: neither sparse, nested, quantised nor meta."""
    return not (tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta)


def _meaning(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool
