"""Whether a resume could load what a training saves: found before the first batch, update and checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from emrun.errors import ArgumentError
from emrun.models.structure import Structure, differences, structure, what_cannot_be_held
from emrun.wording import listed


class Loadable:
    """Compares the parameters and buffers of a module with those that a resume would load a checkpoint into.

    Args:
        module: what is trained, as it was built.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._as_built = structure(module)
        self._registered: Structure = {}  # what a checkpoint would be loaded into
        self._before_update: Structure | None = None  # until the first update is checked

    def register(self) -> None:
        """Take note of what the module has when it is registered: afterwards a checkpoint is loaded."""
        self._registered = structure(self._module)

    def check_saving(self, built_apart: Callable[[], Structure | None] | None) -> None:
        """Check before the first batch that a checkpoint could be saved, and loaded by a resume.

        Args:
            built_apart: returns what the module has when another process builds it, if that is known.

        Raises:
            ArgumentError: it could not.
        """
        self._check_that_weights_can_be_held()
        now = structure(self._module)
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
    def is_update_pending(self) -> bool:
        """Whether the first update is still to be checked."""
        return self._before_update is not None

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
        changed = differences(self._before_update, structure(self._module))
        if changed:
            self._refuse(
                f"forward changes which parameters or buffers there are: {listed(changed)}; create them in __init__, "
                "or use torch.nn.LazyLinear and its kind; the optimizer would not train parameters that are created "
                "later"
            )
        self._check_that_weights_can_be_held()

    def _refuse(self, reason: str) -> NoReturn:
        kind = type(self._module).__name__
        raise ArgumentError("module", f"no checkpoint of {kind} could be loaded: {reason}")

    def _check_that_weights_can_be_held(self) -> None:
        found = what_cannot_be_held(self._module)
        if found:
            raise ArgumentError(
                "module",
                f"the weights cannot be saved: {listed(found)}, which safetensors cannot hold; use another dtype or "
                "layout, such as torch.view_as_real of complex numbers, or a buffer with persistent=False beside "
                "get_extra_state()",
            )
