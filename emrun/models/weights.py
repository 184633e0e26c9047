"""The weights of a module: which there are, how they are saved and loaded, and whether a resume could load them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor
from torch.nn.parameter import is_lazy

from emrun.errors import ArgumentError, StateError
from emrun.models.laziness import uninitialised
from emrun.storage.weights import FILE, read_weights
from emrun.wording import listed

Structure = Mapping[str, tuple[tuple[int, ...] | None, torch.dtype]]
"""Name of a parameter or buffer -> its shape, None as long as a lazy module has not seen a batch, and its dtype."""


def own_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module that are saved: its state without `extra_state`."""
    return {name: value for name, value in module.state_dict().items() if not _is_extra(name, value)}


def extra_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a module's state has beside tensors: what `get_extra_state` of its parts returned."""
    return {name: value for name, value in module.state_dict().items() if _is_extra(name, value)}


def _is_extra(name: str, value: Any) -> bool:
    """Tell whether an entry of a module's state is what `get_extra_state` returned, and not a tensor of its own."""
    return name.rpartition(".")[2] == "_extra_state" or not isinstance(value, Tensor)


def collect_weights(module: torch.nn.Module, *, copied: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a module's parameters and buffers, tied ones once, and the names of the others: see `write_weights`.

    Args:
        module: the module.
        copied: as they are now, whatever happens to the module's.

    Raises:
        StateError: a lazy module has not seen a batch.
    """
    without_shape = uninitialised(module)
    if without_shape:
        raise StateError(f"{listed(without_shape)}: a lazy module has no weights to save before its first batch")
    weights: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_at: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in own_tensors(module).items():
        own_storage = tensor.untyped_storage().data_ptr()
        place = own_storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if tensor.numel() and place in first_at:
            tied[name] = first_at[place]
            continue
        first_at[place] = name
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage().data_ptr()
        is_shared = storage in storages or (copied and storage == own_storage)
        weights[name] = own.clone() if is_shared else own  # safetensors refuses tensors that share memory
        storages.add(storage)
    return weights, tied


def load_weights(module: torch.nn.Module, directory: Path) -> None:
    """Read the weights that `write_weights` wrote into a module of the same structure.

    Raises:
        StorageError: the file cannot be read.
        StateError: its names or shapes are not those of the module.
    """
    state = read_weights(directory)
    expected = own_tensors(module)
    missing = sorted(expected.keys() - state.keys())
    extra = sorted(state.keys() - expected.keys())
    wrong = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and not is_lazy(tensor) and state[name].shape != tensor.shape
    ]
    if missing or extra or wrong:
        raise StateError(
            f"{directory / FILE} does not fit the module: missing {listed(missing)}; "
            f"not in the module {listed(extra)}; of another shape {listed(wrong)}"
        )
    own_memory(module)
    module.load_state_dict({**module.state_dict(), **state})


def own_memory(module: torch.nn.Module) -> None:
    """Give each value of expanded parameters and buffers its own memory: torch writes into no other ones.

    Buffers with `persistent=False` stay as they are: they are not loaded.
    """
    for part in module.modules():
        tensors = {**part._parameters, **part._buffers}
        for name, tensor in tensors.items():
            if tensor is None or name in part._non_persistent_buffers_set or is_lazy(tensor):
                continue
            axes = zip(tensor.stride(), tensor.shape, strict=True) if tensor.layout is torch.strided else ()
            if any(stride == 0 and size > 1 for stride, size in axes):
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def structure(module: torch.nn.Module) -> Structure:
    """Return names, shapes and dtypes of what is saved of a module's tensors."""
    state = own_tensors(module)
    return {name: (None if is_lazy(each) else tuple(each.shape), each.dtype) for name, each in state.items()}


def differences(before: Structure, now: Structure, *, of_dtypes: bool = True) -> list[str]:
    """Return what is new, gone or of another kind, in words; a shape that was not known may be any.

    Args:
        before: what a checkpoint is loaded into.
        now: what is saved in the checkpoint.
        of_dtypes: dtypes are compared too.
    """
    found = [f"{name!r} is new" for name in now if name not in before]
    found += [f"{name!r} is missing" for name in before if name not in now]
    for name, (shape, dtype) in now.items():
        old_shape, old_dtype = before.get(name, (shape, dtype))
        if old_shape not in (None, shape):
            found.append(f"{name!r} had shape {old_shape}, has {shape}")
        elif of_dtypes and old_dtype != dtype:
            found.append(f"{name!r} was {_shown(old_dtype)}, is {_shown(dtype)}")
    return found


def what_cannot_be_held(module: torch.nn.Module) -> list[str]:
    """Return the parameters and buffers that no file of safetensors can hold, and why, in words."""
    found = []
    for name, tensor in own_tensors(module).items():
        if is_lazy(tensor):
            continue
        if tensor.is_quantized:
            found.append(f"{name!r} is quantised ({_shown(tensor.dtype)})")
        elif tensor.layout is not torch.strided or tensor.is_nested:
            found.append(f"{name!r} is {'nested' if tensor.is_nested else _shown(tensor.layout)}")
        elif tensor.is_meta:
            found.append(f"{name!r} is on the device meta, without values")
        elif not _is_held(tensor.dtype):
            found.append(f"{name!r} is {_shown(tensor.dtype)}")
    return found


def _is_held(dtype: torch.dtype) -> bool:
    """Tell whether safetensors has a dtype."""
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, SafetensorError):
        return False
    return True


def _shown(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


class HasModule(Protocol):
    """A model with a module."""

    module: torch.nn.Module


class Loadable:
    """Whether a resume could load what a training saves: found before the first batch, update and checkpoint.

    Compares the parameters and buffers of a module with those that a resume would load a checkpoint into.

    Args:
        model: has the module, which a hook or a subclass may replace.
    """

    def __init__(self, model: HasModule) -> None:
        self._model = model
        self._as_built = structure(model.module)
        self._registered: Structure = {}  # what a checkpoint would be loaded into
        self._before_update: Structure | None = None  # until the first update is checked

    def register(self) -> None:
        """Take note of what the module has when it is registered: afterwards a checkpoint is loaded."""
        self._registered = structure(self._model.module)

    def check_saving(self, built_apart: Callable[[], Structure | None] | None) -> None:
        """Check before the first batch that a checkpoint could be saved, and loaded by a resume.

        Args:
            built_apart: returns what the module has when another process builds it, if that is known.

        Raises:
            ArgumentError: it could not.
        """
        self._check_that_weights_can_be_held()
        now = structure(self._model.module)
        changed = differences(self._registered, now, of_dtypes=False)
        if changed:
            self._refuse(
                "in before_training, which comes after the loading, a hook or the model changes which parameters or "
                f"buffers there are: {listed(changed)}; do that where the hook or the model is built"
            )
        anew = built_apart() if built_apart is not None else None
        changed = differences(anew, self._as_built) if anew is not None else []
        if changed:
            self._refuse(
                "built from the same config once more, it has other parameters or buffers: "
                f"{listed(changed)}; they must depend on nothing but the config"
            )
        self._before_update = now

    @property
    def pending(self) -> Callable[[], None] | None:
        """What checks the first update, None when that is done."""
        return self.check_first_update if self._before_update is not None else None

    def check_first_update(self) -> None:
        """Check once, between the first forward of a training step and its update, what `check` does."""
        self.check()
        self._before_update = None

    def check(self) -> None:
        """Check that running the module has made no parameters or buffers of other kinds; once only, before an update.

        Raises:
            ArgumentError: a resume could not load them.
        """
        if self._before_update is None:
            return
        changed = differences(self._before_update, structure(self._model.module))
        if changed:
            self._refuse(
                f"forward changes which parameters or buffers there are: {listed(changed)}; create them in __init__, "
                "or use torch.nn.LazyLinear and its kind; the optimizer would not train parameters that are created "
                "later"
            )
        self._check_that_weights_can_be_held()

    def _refuse(self, reason: str) -> NoReturn:
        kind = type(self._model.module).__name__
        raise ArgumentError("module", f"no checkpoint of {kind} could be loaded: {reason}")

    def _check_that_weights_can_be_held(self) -> None:
        found = what_cannot_be_held(self._model.module)
        if found:
            raise ArgumentError(
                "module",
                f"the weights cannot be saved: {listed(found)}, which safetensors cannot hold; use another dtype or "
                "layout, such as torch.view_as_real of complex numbers, or a buffer with persistent=False beside "
                "get_extra_state()",
            )
