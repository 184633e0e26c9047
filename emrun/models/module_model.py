"""A model that runs a `torch.nn.Module` on batches: inputs, forward, outputs, and what is saved of the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emrun.encoding import random_state
from emrun.errors import ArgumentError
from emrun.fields import (
    ANOTHER_CHECKPOINT,
    ANYTHING,
    FLAG,
    TEXT,
    mapping_of,
    optional,
    reading,
    record,
    sequence_of,
)
from emrun.hook import Loop
from emrun.model import AbstractModel
from emrun.models.init_from import InitFrom
from emrun.models.inputs import InputNames, Inputs, InputsForm
from emrun.models.laziness import end_laziness, give_shapes, modes, set_modes, uninitialised
from emrun.models.loss_scale import LossScale
from emrun.models.outputs import Outputs
from emrun.models.precision import TF32, Autocast, Precision, in_float32
from emrun.models.skipped_updates import NAME as SKIPPED
from emrun.models.skipped_updates import SkippedUpdates
from emrun.models.stream_metrics import STATE as STATE_OF_METRICS
from emrun.models.stream_metrics import StreamMetrics
from emrun.models.weights import collect_weights, extra_state, load_weights, own_memory
from emrun.storage.state_file import FILE, load_state
from emrun.storage.weights import write_weights
from emrun.types import Batch

EXTRA = mapping_of(ANYTHING)
STATE = {
    "extra": EXTRA,
    "modes": record({"training": FLAG, "others": sequence_of(TEXT)}),
    "stream_metrics": optional(STATE_OF_METRICS),
}
"""The fields of `ModuleModel.state_dict`."""


class ModuleModel(AbstractModel):
    """Runs a `torch.nn.Module`, saves and loads its weights; `TorchModel` explains the arguments, and trains it.

    Raises:
        ArgumentError: an argument does not fit the module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: InputsForm | None,
        outputs: Sequence[str] | None,
        loss: Any,
        metrics: Any,
        device: str,
        precision: Precision = 32,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ArgumentError(
                "module", f"{type(module).__name__} is not a torch.nn.Module; write module: {{class: ...}}"
            )
        self.device = _find_device(device)
        self._random_of_lazy = random_state() if uninitialised(module) else None  # for its first values
        self.module = module.to(self.device)
        own_memory(module)
        self.precision = precision
        self._autocast = Autocast.of(precision, module, self.device)
        self._scale = LossScale(self.device) if precision == "fp16" else None
        self._skipped = SkippedUpdates(self._scale)
        self._tf32 = TF32(self.device) if precision == "tf32" else None
        self._outputs = Outputs(outputs, loss, metrics, self.device)
        of_streams = self._outputs.of_streams
        self._main_loop: Loop | None = None
        self._stream_metrics = StreamMetrics(of_streams, self.device) if of_streams else None
        self._inputs = Inputs(module, InputNames.read(module, inputs), self._outputs.sources(), self.device)

    @property
    def input_names(self) -> Sequence[str]:
        """Names of the sources that every batch must have."""
        return self._inputs.required

    @property
    def optional_input_names(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the sources that are used if a batch has them."""
        return self._inputs.optional

    @property
    def output_names(self) -> Sequence[str]:
        """Names of the outputs, as far as they are known before the first batch."""
        return self._outputs.names

    def part_with(self, source: str) -> str:
        """Return the key of the loss or metric that needs a source, or else `forward`, for messages."""
        return self._outputs.part_with(source) or f"forward of {type(self.module).__name__}"

    @property
    def metric_names(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the entries of `model.metrics` that are outputs."""
        return self._outputs.metrics

    @property
    def writes(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the entries of `model.metrics` that are computed once for each stream; fp16 adds a count."""
        return [*self._outputs.of_streams, *([SKIPPED] if self._scale is not None else [])]

    def stream_values(self, stream: str) -> Mapping[str, Any]:
        """Return the metrics of a whole stream, and of a train stream the number of `skipped_updates`."""
        metrics = self._stream_metrics.values(stream) if self._stream_metrics is not None else {}
        return {**metrics, **self._skipped.values(stream)}

    def before_training(self) -> None:
        """Change the settings of torch, for TF32."""
        if self._tf32 is not None:
            self._tf32.begin()

    def after_training(self, success: bool) -> None:
        """Restore the settings of torch."""
        if self._tf32 is not None:
            self._tf32.end()

    def after_stream(self, stream_name: str) -> None:
        """Compute the metrics of a whole stream.

        Raises:
            ArgumentError: a metric is not a number.
        """
        if self._stream_metrics is not None:
            self._stream_metrics.end(stream_name)

    @property
    def losses(self) -> Mapping[str, Any]:
        """Key in the model's section -> the object that calculates a loss; checkpoints do not have these objects."""
        return self._outputs.losses

    @property
    def is_lazy(self) -> bool:  # type: ignore[override]
        """Whether parts of the module have no shapes yet."""
        return self._random_of_lazy is not None

    def materialise(self, batch: Batch) -> None:
        """Give the lazy parts of the module their shapes and first values.

        The values are drawn as if the parts had been initialised when the module was built. The module runs on the
        batch in evaluation mode, without gradients; its other buffers and all random states are restored afterwards.

        Raises:
            ArgumentError: `forward` does not use a lazy part in an evaluation.
            StreamError: the batch does not fit the module.
        """
        if self._random_of_lazy is None:
            return
        inputs = self._inputs.tensors(batch)
        forward = partial(self._inputs.call, self.module, inputs, is_lazy=True)
        give_shapes(self.module, forward, self._random_of_lazy)
        self._end_laziness()

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Run the module and calculate losses and metrics.

        Args:
            inputs: source name -> tensor on the model's device.

        Returns:
            Output name -> value, with gradients where they are enabled. Values of 16 bits become float32.
        """
        autocast = self._autocast
        if autocast is None:
            return self._outputs.of(self._inputs.call(self.module, inputs), inputs)
        with autocast.on():
            returned = self._inputs.call(self.module, inputs)
        with autocast.off():  # the train_step of a subclass runs with autocast as a whole
            return self._outputs.of(in_float32(returned), inputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the module's extra state, which is not in its tensors, the modes of its parts, and the metrics."""
        metrics = self._stream_metrics.state_dict() if self._stream_metrics is not None else None
        return {"extra": extra_state(self.module), "modes": modes(self.module), "stream_metrics": metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the modes of the module's parts, and the metrics; `load` restores the extra state."""
        if "modes" in state:
            set_modes(self.module, state["modes"])
        if self._stream_metrics is not None and state.get("stream_metrics") is not None:
            self._stream_metrics.load_state_dict(state["stream_metrics"])

    def save(self, directory: Path) -> None:
        """Write the weights to `model.safetensors`.

        Raises:
            StorageError: the file cannot be written.
        """
        write_weights(*collect_weights(self.module), directory)

    def stage(self) -> Callable[[Path], None] | None:
        """Copy the weights; return a function that writes them in any thread, None if a subclass overrides `save`."""
        if getattr(self.save, "__func__", None) is not ModuleModel.save:
            return None
        return partial(write_weights, *collect_weights(self.module, copied=True))

    def load(self, directory: Path) -> None:
        """Read the weights from `model.safetensors`, and the module's extra state from `state.pt`.

        Raises:
            StorageError: a file cannot be read, or does not fit this module.
        """
        load_weights(self.module, directory)
        self.built_apart = None  # not needed any more: the weights fit
        if self.is_lazy:
            self._end_laziness()
        if extra_state(self.module):
            state = load_state(directory)
            with reading(f"{directory / FILE}", ANOTHER_CHECKPOINT):
                record({"model": record({"extra": EXTRA})}).check(state)
            self.module.load_state_dict({**self.module.state_dict(), **state["model"]["extra"]})

    def _begin_with(self, init_from: InitFrom) -> dict[str, Any]:
        """Load other weights to begin with; lazy parts get their shapes from them.

        Returns:
            Where they are from, and what was loaded and what was not; see `InitFrom.load`.

        Raises:
            ArgumentError: they cannot be read, or do not fit the module.
        """
        self.load_initial = None
        found = init_from.load(self.module)
        if self.is_lazy and not uninitialised(self.module):
            self._end_laziness()
        return found

    def _measure(self, outputs: Mapping[str, Any], inputs: Mapping[str, Tensor], train: bool, stream: str) -> None:
        """Add a batch to the metrics of its stream, unless a hook runs the model on a batch of its own."""
        loop, metrics = self._main_loop, self._stream_metrics
        is_of_loop = loop is None or loop.stream_name is None or (loop.stream_name, loop.training) == (stream, train)
        if metrics is not None and is_of_loop:
            metrics.add(stream, outputs, inputs)

    @property
    def _evaluates(self) -> bool:
        return self._main_loop is not None and self._main_loop.evaluating

    def _end_laziness(self) -> None:
        """Finish the initialisation of the lazy parts once the module has all shapes."""
        self._random_of_lazy = None
        end_laziness(self.module)
        own_memory(self.module)


def _find_device(name: str) -> torch.device:
    if name == "auto":
        kinds = (("cuda", torch.cuda.is_available), ("mps", torch.backends.mps.is_available))
        return torch.device(next((kind for kind, available in kinds if available()), "cpu"))
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ArgumentError("device", f"{name!r} cannot be used here: {reason}") from error
    return device
