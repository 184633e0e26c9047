"""Diagnose: names layers that do not learn, from a look at the training now and then."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from emrun import AbstractHook
from emrun.base.fields import NUMBER, Kind, mapping_of, record, sequence_of
from emrun.base.types import Batch, Interval, Units
from emrun.hook import Loop
from emrun.hooks._findings import findings
from emrun.hooks._look import Activations, Updates
from emrun.hooks._parameters import module_of, suffix_of
from emrun.hooks._verdicts import FILE, STATE, Verdicts
from emrun.ranks.group import ranks

_LOG = logging.getLogger(__name__)

_COUNTS = Kind("a 1-D tensor of whole numbers", lambda value: value.dtype == torch.int32 and value.dim() == 1)
_STATE = record({"verdicts": record(STATE), "zeros": mapping_of(_COUNTS), "peaks": mapping_of(sequence_of(NUMBER))})


class Diagnose(AbstractHook):
    """Looks at the training now and then, and warns of what usually is a mistake.

        hooks:
          - Diagnose: {every: 200 updates}

    It says nothing when all is well. There are six verdicts; each is a warning in the log with the layers, a figure and
    what usually helps:

    - A parameter that requires a gradient gets none, or only zeros.
    - A parameter never changes, because it is in no optimizer, or because its learning rate is 0 or too small for its
      dtype. Parameters whose `requires_grad` is False, such as those that `Freeze` holds, are not meant.
    - A layer returns NaN or infinity.
    - The outputs of the module are the same for all examples of a batch; if it returns only the loss, those of the last
      layer with parameters.
    - Half or more of the units of a layer such as `ReLU` or `GELU` are 0 for all examples. Functions such as
      `torch.relu` are not seen, only layers.
    - An update of a weight is less than 1e-6 or more than 0.1 of the size of the weight; 1e-3 is a usual value.
      Biases and other parameters of one dimension are not judged. Learning rates that the schedule makes small are not
      the reason for a verdict.

    Most verdicts need three looks in a row. A verdict is given once, and again only if the fault had gone. All of them
    are in `diagnosis.jsonl` in the run directory, a line of JSON for each: `update`, `iteration`, `verdict`, `layers`,
    `figures` and `message`.

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

    def __init__(
        self,
        every: Annotated[int | str, Units(("updates",))] = "200 updates",
        model: Any = None,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(model=model, output_dir=output_dir)
        self._every = int(Interval.parse("every", every, ("updates",)).count)
        self._path = None if output_dir is None or not ranks().is_first else Path(output_dir) / FILE
        self._next = 0  # the update before which there is no look
        self._look: _Look | None = None
        self._verdicts = Verdicts()
        self._zeros: dict[str, Tensor] = {}  # layer -> how many values of each unit were 0 in a row
        self._peaks: dict[str, list[float]] = {}  # optimizer -> the highest learning rate of each parameter group
        self._has_told = False
        if model is not None:
            module_of("Diagnose", model)

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check the model."""
        super().register_mainloop(main_loop)
        module_of("Diagnose", main_loop.model)

    def before_training(self) -> None:
        """Write the verdicts that the checkpoint has."""
        if self._path is not None and not self.main_loop.evaluating:
            self._verdicts.write(self._path)

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Begin a look if it is time for one."""
        loop = self.main_loop
        update = loop.updates_done + 1
        if update < self._next or not loop.training or loop.model.is_accumulating or loop.model.is_lazy:
            return
        self._drop()
        due = sorted({max(1, self._every * share // 10) for share in (1, 2, 5)})
        if update in due or update % self._every == 0:
            self._look = _Look(loop.model, update, self._peaks)
            self._tell(self._look)
        later = [each for each in due if each > update]
        self._next = min([*later, (update // self._every + 1) * self._every])

    def before_update(self, model: Any, optimizer: Any) -> None:
        """Measure the gradients in a look."""
        look = self._look
        if look is None or getattr(model, "is_skipping", False):
            return
        with torch.no_grad():
            if look.activations.is_blind:
                look.activations.see_outputs(getattr(model, "step_outputs", None) or {})
            look.updates.begin(optimizer, suffix_of(model, optimizer))

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

    def state_dict(self) -> dict[str, Any]:
        """Return the verdicts, what the looks have counted, and the highest learning rates."""
        return {
            "verdicts": self._verdicts.state_dict(),
            "zeros": {name: each.cpu() for name, each in self._zeros.items()},
            "peaks": {name: list(each) for name, each in self._peaks.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        _STATE.check(state)
        self._verdicts.load_state_dict(state["verdicts"])
        self._zeros = dict(state["zeros"])
        self._peaks = {name: list(each) for name, each in state["peaks"].items()}
        self._next = 0

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
            loss = loop.model.step_values().get("loss")
            found = findings(look.activations, look.updates, self._zeros, look.update, loss)
        for each in found:
            self._verdicts.add(*each)
        if self._verdicts.give(look.update, loop.iterations_done) and self._path is not None:
            self._verdicts.write(self._path)


class _Look:
    """A look: what the layers return in the first batch of an update, and what the update does to the parameters."""

    def __init__(self, model: Any, update: int, peaks: dict[str, list[float]]) -> None:
        self.update = update
        """The number of the update."""
        self.activations = Activations(module_of("Diagnose", model))
        self.updates = Updates(model, peaks)
