"""What of a module can be saved, and whether a resume could load it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from emrun.base.encoding import decode, encode
from emrun.base.errors import ArgumentError, reason_of
from emrun.base.randomness import preserved_randomness
from emrun.base.wording import few, in_one_line, listed
from emrun.models.optimizer import parameters_of
from emrun.models.weights.fit import is_ordinary, kind_of
from emrun.models.weights.saving import extra_state, own_tensors, put
from emrun.ranks.pieces import piece

_WAYS = (
    "state_dict() must return all that is trained, as it is, and load_state_dict() must copy all of it back; what is "
    "calculated anew is a buffer with persistent=False, what is not a tensor belongs in get_extra_state() and "
    "set_extra_state(), and a frozen backbone that is left out gets its weights in __init__, from load_model or a file"
)

Structure = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name of a parameter or buffer -> its shape and its dtype."""


def structure(tensors: Mapping[str, Tensor]) -> Structure:
    """Return names, shapes and dtypes of tensors, those of a module that are saved."""
    return {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}


def differences(before: Structure, now: Structure, *, of_dtypes: bool = True) -> list[str]:
    """Return the differences of two structures in words: new, missing or different tensors.

    Args:
        before: the structure that a checkpoint is loaded into.
        now: the structure that is saved in the checkpoint.
        of_dtypes: whether dtypes are compared too.
    """
    found = [f"{name!r} is new" for name in now if name not in before]
    found += [f"{name!r} is missing" for name in before if name not in now]
    for name, (shape, dtype) in now.items():
        old_shape, old_dtype = before.get(name, (shape, dtype))
        if old_shape != shape:
            found.append(f"{name!r} had shape {old_shape}, has {shape}")
        elif of_dtypes and old_dtype != dtype:
            found.append(f"{name!r} was {_shown(old_dtype)}, is {_shown(dtype)}")
    return found


def what_cannot_be_held(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the tensors that safetensors cannot store, with the reasons, in words."""
    return [
        f"{name!r} is {f'quantised ({kind_of(each)})' if each.is_quantized else kind_of(each)}"
        for name, each in tensors.items()
        if not (is_ordinary(each) and _is_storable(each.dtype))
    ]


@cache
def _is_storable(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, SafetensorError):
        return False
    return True


def _shown(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


class Loadable:
    """Checks, before the first batch, the first update and each checkpoint, that a resume could load what a run saves.

    Compares the parameters and buffers of a module with those that a resume would load a checkpoint into.

    Args:
        model: the model with the module, which a hook or a subclass may replace.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._registered: Structure = {}  # what a checkpoint would be loaded into
        self._before_update: Structure | None = None  # None without a run
        self._has_updated = False

    def register(self) -> None:
        """Record the structure of the module when the model is registered; after that, a checkpoint is loaded."""
        self._registered, self._before_update = structure(own_tensors(self._model.module)), None

    def check_saving(self, *, saves_more: bool) -> None:
        """Check before the first batch that a checkpoint could be saved, and loaded by a resume.

        Args:
            saves_more: whether the model may save parameters that the module does not have.

        Raises:
            ArgumentError: a checkpoint cannot be saved, or a resume could not load it.
        """
        self._before_update = self._compared(
            self._registered,
            "before_training of a hook or of the model changes parameters or buffers, after the checkpoint was loaded: "
            "{}; do that in the constructor of the hook or model",
            of_dtypes=False,
        )
        if wrong := self._lost(saves_more=saves_more):
            name = type(self._model.module).__name__
            raise ArgumentError("module", f"a resume could not load a checkpoint of {name}: {wrong}; {_WAYS}")

    @torch.no_grad()
    def _lost(self, *, saves_more: bool) -> str:
        """Save and load the module, while what is trained has other values; return what does not come back, in words.

        Afterwards all tensors are as before. A frozen parameter that is saved as it is costs nothing.
        """
        module = self._model.module
        optimized = {id(each) for one in self._model.own_optimizers.values() for each in parameters_of(one)}
        parameters = dict(module.named_parameters())
        own = {id(each) for each in parameters.values()}
        if not (saves_more or optimized <= own):
            return "an optimizer trains parameters that the module does not have"
        frozen = {name for name, each in parameters.items() if not each.requires_grad}
        saved = {name: each if name in frozen else each.clone() for name, each in own_tensors(module).items()}
        extra = decode(encode(extra_state(module), "extra state of the module"))
        unchanged = {piece(saved[name]).data_ptr() for name in frozen & saved.keys()}
        found = {**dict(module.named_buffers()), **parameters}
        tensors = {name: piece(each) for name, each in found.items() if is_ordinary(each)}
        before = {
            name: each.detach().to("cpu", copy=True)
            for name, each in tensors.items()
            if not (name in frozen and each.data_ptr() in unchanged)
        }
        for name in parameters.keys() - frozen:
            if not optimized or id(parameters[name]) in optimized:
                tensors[name].copy_(tensors[name] == 0)
        try:
            with preserved_randomness():
                put({**saved, **extra}, module)
            now = {**dict(module.named_buffers()), **parameters}
            wrong = [name for name in before if not torch.equal(_bits(before[name]), _bits(piece(now[name]).cpu()))]
        except Exception as error:  # code of the user
            return f"load_state_dict() fails: {in_one_line(' '.join(reason_of(error).split()))}"
        finally:
            for name, values in before.items():
                tensors[name].copy_(values)
        left_out = [name for name in wrong if name in parameters and name not in saved]
        if left_out:
            return f"trained, but not saved: {few(map(repr, left_out))}"
        return f"of other values after a load: {few(map(repr, wrong))}" if wrong else ""

    def check_first_update(self) -> None:
        """Call `check` once, between the first forward of a training step and its update."""
        if not self._has_updated:
            self.check()
            self._has_updated = True

    def check(self) -> None:
        """Check that running the module has not changed its structure.

        Raises:
            ArgumentError: a resume could not load the parameters and buffers.
        """
        if self._before_update is not None:
            self._compared(
                self._before_update,
                "forward or a hook changes parameters or buffers: {}; create them in __init__; the optimizer would not "
                "train parameters that are created later; if the first forward makes their shapes, as that of fake "
                "quantization, run the part once in __init__",
            )

    def _compared(self, before: Structure, refusal: str, *, of_dtypes: bool = True) -> Structure:
        """Return the structure of the module, which is that before, and can be saved.

        Args:
            before: the structure before.
            refusal: what is wrong if it is another one, with a place for the differences.
            of_dtypes: whether dtypes are compared too.

        Raises:
            ArgumentError: it is another one, or a tensor cannot be saved.
        """
        tensors = own_tensors(self._model.module)
        now = structure(tensors)
        if changed := differences(before, now, of_dtypes=of_dtypes):
            name, reason = type(self._model.module).__name__, refusal.format(listed(changed))
            raise ArgumentError("module", f"a resume could not load a checkpoint of {name}: {reason}")
        if refused := what_cannot_be_held(tensors):
            raise ArgumentError(
                "module",
                f"the weights cannot be saved: {listed(refused)}, which safetensors cannot store; use another dtype or "
                "layout, such as torch.view_as_real of complex numbers, or a buffer with persistent=False and "
                "get_extra_state()",
            )
        return now


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
