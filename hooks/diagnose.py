"""Diagnose: names layers that do not learn, from a look at the training now and then."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import torch

from emrun import AbstractHook
from emrun.base.errors import HookError
from emrun.base.types import Batch, Interval, Units
from emrun.hook import Loop
from emrun.hooks._diagnose.findings import findings
from emrun.hooks._diagnose.look import Activations, Updates
from emrun.hooks._diagnose.verdicts import Verdicts
from emrun.hooks._shared.parameters import module_of

_LOG = logging.getLogger(__name__)


class Diagnose(AbstractHook):
    """Looks at the training now and then, and warns of what usually is a mistake.

        hooks:
          - Diagnose: {every: 200 updates}

    It says nothing when all is well. Each verdict is a warning in the log with the layers, a figure and what usually
    helps:

    - A parameter that requires a gradient gets none, or only zeros.
    - A parameter never changes, because its learning rate is 0 or too small for its dtype. Parameters that no optimizer
      has, or whose `requires_grad` is False, such as those that `Freeze` holds, are not meant.
    - A layer returns NaN or infinity.
    - The outputs of the module are the same for all examples of a batch; if it returns only the loss, those of the last
      layer with parameters.
    - An update of a weight is less than 1e-6 or more than 0.1 of the size of the weight; 1e-3 is a usual value.
      Biases and other parameters of one dimension are not judged. Learning rates that the schedule makes small are not
      the reason for a verdict.

    Most verdicts need three looks in a row. A verdict on a layer is given once. After a resume, the looks begin anew,
    and so do verdicts; only parameters that never change and updates that are too small are not judged again, since
    weights that have converged look the same.

    The first looks are after a tenth, a fifth and half of the interval. Steps between looks cost nothing. A look waits
    for the device once, and needs memory for a copy of the weights. It does not change the training. With
    `model.compile`, the layers are not seen, and only outputs and parameters are judged.

    Args:
        every: how often: `200 updates`.

    Raises:
        ArgumentError: the interval is not one of updates.
        HookError: the model is not a `TorchModel`.
    """

    reads = ()
    changes_batches = False

    def __init__(self, every: Annotated[int | str, Units(("updates",))] = "200 updates", model: Any = None) -> None:
        super().__init__(model=model)
        self._every = int(Interval.parse("every", every, ("updates",)).count)
        self._next = 0  # the update of the next look; 0 before the first batch
        self._begin = 0  # the updates done then
        self._look: _Look | None = None
        self._verdicts = Verdicts()
        self._has_told = False
        if model is not None:
            module_of("Diagnose", model)

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """The verdicts that this process has given: `update`, `verdict`, `layers`, and what usually `helps`."""
        return self._verdicts.given

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check the model."""
        super().register_mainloop(main_loop)
        module_of("Diagnose", main_loop.model)
        if main_loop.model.is_sharded:
            raise HookError("Diagnose looks at whole weights, which model.strategy divides; remove one of them")

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Begin a look if it is time for one."""
        loop = self.main_loop
        update = loop.updates_done + 1
        if update < self._next or not loop.training or loop.model.is_accumulating:
            return
        self._drop()
        if not self._next:
            self._begin = loop.updates_done
            self._next = self._due(update)
        if update == self._next:
            self._look = _Look(loop.model, update)
            self._tell(self._look)
        self._next = self._due(update + 1)

    def before_update(self, model: Any, optimizer: Any) -> None:
        """Measure the gradients in a look."""
        look = self._look
        if look is None or getattr(model, "is_skipping", False):
            return
        with torch.no_grad():
            if look.activations.is_blind:
                look.activations.see_outputs(getattr(model, "step_outputs", None) or {})
            look.updates.begin(optimizer)

    def after_update(self, model: Any, optimizer: Any) -> None:
        """Measure the update in a look."""
        if self._look is not None:
            with torch.no_grad():
                self._look.updates.end(optimizer)

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """End a look, unless the update comes later; the layers are watched in the first batch of an update only."""
        if self._look is None or not self.main_loop.training:
            return
        self._look.activations.stop()
        if not self.main_loop.model.is_accumulating:
            self._judge(self._look)

    def after_stream(self, stream_name: str) -> None:
        """End the look at the last update of an epoch, which has fewer batches."""
        if self._look is not None and stream_name == self.main_loop.train_stream_name:
            self._judge(self._look)

    def after_training(self, success: bool) -> None:
        """Forget a look that an error has ended."""
        self._drop()

    def _due(self, least: int) -> int:
        """Return the update of the next look, `least` or a later one."""
        first = [self._begin + max(1, self._every * share // 10) for share in (1, 2, 5)]
        return min([*(update for update in first if update >= least), -(-least // self._every) * self._every])

    def _drop(self) -> None:
        if self._look is not None:
            self._look.activations.stop()
            self._look = None

    def _tell(self, look: _Look) -> None:
        """Say once if the layers cannot be watched."""
        if look.activations.is_blind and not self._has_told:
            self._has_told = True
            _LOG.info("Diagnose: the module is compiled, so only its outputs and parameters are looked at")

    def _judge(self, look: _Look) -> None:
        """End a look and give its verdicts."""
        self._drop()
        loop = self.main_loop
        with torch.no_grad():
            judgements = findings(
                look.activations, look.updates.changes, look.update, loop.model.step_values().get("loss")
            )
        self._verdicts.give(look.update, judgements, is_resumed=self._begin > 0)


class _Look:
    """A look: what the layers return in the first batch of an update, and what the update does to the parameters."""

    def __init__(self, model: Any, update: int) -> None:
        self.update = update
        """The number of the update."""
        self.activations = Activations(module_of("Diagnose", model))
        self.updates = Updates(model)
