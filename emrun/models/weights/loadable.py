"""What of a module can be saved, and whether a resume could load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from emrun.base.encoding import decode, encode
from emrun.base.errors import ArgumentError, reason_of
from emrun.base.randomness import preserved_randomness
from emrun.base.temporary import temporary_folder
from emrun.base.wording import few, in_one_line, listed
from emrun.models.modes import Tensors, modes, set_modes
from emrun.models.optimizers.parameters import parameters_of
from emrun.models.weights.matching import dtype_in_words, is_ordinary
from emrun.models.weights.saving import extra_state, own_memory, own_tensors, put, unsaved_buffers
from emrun.ranks.pieces import piece
from emrun.storage.checkpoints.state_file import save_state

Structure = Mapping[str, tuple[tuple[int, ...], str]]
"""Name of a parameter or buffer -> its shape and the name of its dtype."""


def structure(tensors: Tensors) -> Structure:
    """Return names, shapes and dtypes of tensors, those of a module that are saved."""
    return {name: (tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()}


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
            found.append(f"{name!r} was {old_dtype}, is {dtype}")
    return found


def what_cannot_be_held(tensors: Tensors) -> list[str]:
    """Return the tensors that safetensors cannot store, with the reasons, in words."""
    return [
        f"{name!r} is {f'quantised ({dtype_in_words(each)})' if each.is_quantized else dtype_in_words(each)}"
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


class Loadable:
    """Checks, before the first batch, the first update and each checkpoint, that a resume could load what a run saves.

    Compares the parameters and buffers of a module with those that a resume would load a checkpoint into.

    Args:
        model: a `TorchModel`, with the module, which a hook or a subclass may replace.
        begins_with: whether `init_from` gives frozen parameters their values, so that a `load` must do so, too.
    """

    def __init__(self, model: Any, *, begins_with: bool) -> None:
        self._model = model
        self._begins_with = begins_with
        self._registered: Structure = {}  # what a checkpoint would be loaded into
        self._before_update: Structure | None = None  # None without a run
        self._not_loaded: Tensors = {}  # copies of the buffers that a load leaves out, by their names

    def register(self) -> None:
        """Record the structure of the module when the model is registered; after that, a checkpoint is loaded."""
        self._registered = structure(own_tensors(self._model.module))
        self._before_update = None
        self._not_loaded = {}

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
        module = self._model.module
        if not (saves_more or self._trained() <= set(map(id, module.parameters()))):
            raise self._refused(
                "an optimizer trains parameters that the module does not have; make them part of the module, or return "
                "them from state_dict() of the model and restore them in its load_state_dict()"
            )
        frozen = {name for name, each in module.named_parameters() if not each.requires_grad}
        saved = {name: each if name in frozen else each.clone() for name, each in own_tensors(module).items()}
        self._reload(
            partial(put, {**saved, **decode(encode(extra_state(module), "extra state of the module"))}, module), saved
        )

    def check_own(self, objects: Sequence[object]) -> None:
        """Check before the first batch that `load` of a model brings back what its `save` has written to a folder.

        A `save` that fails is not judged: it may need what only the training makes.

        Args:
            objects: the model and the parts of it whose attributes a `load` changes; they get them back.

        Raises:
            ArgumentError: it does not.
        """
        model = self._model
        attributes = [(each, dict(vars(each))) for each in objects]
        before = modes(model.module)
        with temporary_folder("trial") as directory, preserved_randomness():
            try:
                model.save(directory)
                save_state({"model": encode(model.state_dict(), "state of the model")}, directory)
            except Exception:  # code of the user
                return
            try:
                self._reload(partial(model.load, directory), {} if self._begins_with else own_tensors(model.module))
            finally:
                for each, before_load in attributes:
                    vars(each).clear()
                    vars(each).update(before_load)
                set_modes(model.module, before)

    def _trained(self) -> set[int]:
        """Return the ids of the parameters that are trained: those of optimizers, without an optimizer all."""
        own = parameters_of(*self._model.own_optimizers.values())
        return {id(each) for each in own or self._model.module.parameters() if each.requires_grad}

    @torch.no_grad()
    def _reload(self, load: Callable[[], object], saved: Tensors) -> None:
        """Load the module while what is trained, and each buffer, has other values; afterwards, all is as before.

        Args:
            load: loads what was saved.
            saved: what was saved, in which a frozen parameter itself costs nothing; empty if all must come back.

        Raises:
            ArgumentError: the load fails, or a parameter has other values after it.
        """
        module = self._model.module
        own_memory(module)
        parameters = dict(module.named_parameters())
        buffers = dict(module.named_buffers())
        passing = unsaved_buffers(module)
        trained = self._trained()
        frozen = {name: each for name, each in parameters.items() if saved and id(each) not in trained}
        kept = {name for name, each in frozen.items() if name in saved and _place(each) == _place(saved[name])}
        now = {
            name: piece(each)
            for name, each in {**buffers, **parameters}.items()
            if name not in kept and is_ordinary(each)
        }
        before = {name: each.to("cpu", copy=True) for name, each in now.items()}
        for name, each in now.items():
            if name not in frozen and name not in passing:
                each.copy_(before[name] == 0)
        try:
            with preserved_randomness():
                load()
            wrong = [name for name, each in now.items() if _differ(each, before[name])]
            left_alone = [name for name in wrong if name in buffers and not _differ(now[name], before[name] == 0)]
        except Exception as error:  # code of the user
            text = in_one_line(" ".join(reason_of(error).split()))
            raise self._refused(
                f"the load fails: {text}; what is not a tensor belongs in get_extra_state() and set_extra_state(); "
                "what state_dict() leaves out is also left out by load_state_dict(), as with strict=False"
            ) from error
        finally:
            for name, values in before.items():
                now[name].copy_(values)
        self._not_loaded = {name: before[name] for name in left_alone}
        if left_out := [name for name in wrong if saved and name in parameters and name not in saved]:
            raise self._refused(
                f"trained, but not saved: {few(map(repr, left_out))}; return them from state_dict(); a backbone that "
                "is left out is frozen by requires_grad_(False), and gets its weights in __init__, from load_model or "
                "a file: a resume does not load init_from"
            )
        if others := [name for name in wrong if name not in left_alone]:
            raise self._refused(
                f"of other values after a load: {few(map(repr, others))}; what was saved must be copied back as it "
                "was, also what init_from has loaded, which a resume does not load; a buffer that is calculated anew "
                "is one with persistent=False"
            )

    def check(self) -> None:
        """Check between the first forward of a stream and its update, and before a checkpoint, that nothing is lost.

        Raises:
            ArgumentError: a resume could not load the parameters and buffers.
        """
        for name, each in self._model.module.named_buffers():
            if name in self._not_loaded and _differ(each, self._not_loaded[name]):
                raise self._refused(
                    f"a load does not bring back the buffer {name!r}, which changes; return it from state_dict() and "
                    "let load_state_dict() copy it back, or register it with persistent=False if it is calculated anew"
                )
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
            raise self._refused(refusal.format(listed(changed)))
        if refused := what_cannot_be_held(tensors):
            raise ArgumentError(
                "module",
                f"the weights cannot be saved: {listed(refused)}, which safetensors cannot store; use another dtype or "
                "layout, such as torch.view_as_real of complex numbers, or a buffer with persistent=False and "
                "get_extra_state()",
            )
        return now

    def _refused(self, reason: str) -> ArgumentError:
        return ArgumentError(
            "module", f"a resume could not load a checkpoint of {type(self._model.module).__name__}: {reason}"
        )


def _place(tensor: Tensor) -> int:
    return piece(tensor).data_ptr()


def _differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ in a bit, once the other has the dtype of the first."""
    return not torch.equal(_bytes(one, one.dtype), _bytes(other, one.dtype))


def _bytes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to("cpu", dtype).contiguous().flatten().view(torch.uint8)
