"""The forward pass: sources become tensors, the module runs in its precision, and outputs get losses and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from emrun.base.types import Batch, Prefetch, Values
from emrun.models.compilation import Compilation
from emrun.models.inputs import InputNames, Inputs, InputsForm
from emrun.models.memory_format import MemoryFormat
from emrun.models.modes import Tensors
from emrun.models.outputs import Outputs
from emrun.models.precision import Autocast, in_float32
from emrun.models.prefetching import Prefetcher, can_prefetch

Read = Callable[[Batch], Values]
"""Returns source -> tensor, or a mapping or list of them."""


class ForwardPass:
    """Owns a module, and runs it on batches.

    Args:
        module: the module, on its device.
        device: the device.
        inputs: the form of the sources of forward; see `TorchModel`.
        outputs: names the values that forward returns, and adds losses and metrics.
        autocast: the precision; None in 32 bits.
        memory_format: that of inputs; None for torch's own.

    Raises:
        ArgumentError: the form of the sources does not fit the module.
    """

    def __init__(
        self,
        module: Module,
        device: torch.device,
        inputs: InputsForm | None,
        outputs: Outputs,
        autocast: Autocast | None = None,
        memory_format: MemoryFormat | None = None,
    ) -> None:
        self.module = module
        self.device = device
        self.outputs = outputs
        self.autocast = autocast
        self.compilation: Compilation | None = None
        # the sources
        required, optional = outputs.sources()
        names = InputNames.read(module, inputs, [*required, *optional])
        self.inputs = Inputs(
            module,
            names,
            (required, optional),
            device,
            {name for term in outputs.terms.values() for name in term.inputs},
        )
        self.memory_format = memory_format
        self._prefetcher: Prefetcher | None = None
        self.tensors = self._formatted(self.inputs.tensors)
        """Returns the tensors of the sources of a batch: source -> tensor on the device, or a mapping of tensors."""
        self._call: Callable[[Module, Tensors], Any] = self.inputs.passing.call

    def replace(self, module: Module) -> None:
        """Run another module from now on, which code of the user has put in place of the first one."""
        self.module = module

    def compile(self, value: Values | bool) -> None:
        """Compile the module; see the argument `compile` of `TorchModel`.

        Raises:
            ArgumentError: torch refuses the argument, or the module is compiled already.
        """
        self.compilation = Compilation(value, self.module, self.device)
        self._call = partial(self.compilation.call, self.inputs.passing.call)

    def run(self, inputs: Tensors) -> dict[str, Any]:
        """Run the module and calculate losses and metrics.

        Args:
            inputs: source name -> tensor on the device.

        Returns:
            Output name -> value, with gradients where they are enabled. Values of 16 bits become float32.
        """
        if self.autocast is not None:
            return self._run_in_16_bits(self.autocast, inputs)
        return self.outputs.of(self._call(self.module, inputs), inputs)

    def leave_autocast(self) -> None:
        """Run the module in the precision of its weights from now on."""
        self.autocast = None

    def _run_in_16_bits(self, autocast: Autocast, inputs: Tensors) -> dict[str, Any]:
        with autocast.on():
            returned = self._call(self.module, inputs)
        with autocast.off():  # the train_step of a subclass runs with autocast as a whole
            return self.outputs.of(in_float32(returned), inputs)

    def prefetcher(self) -> Prefetch | None:
        """Return the function that pins a batch's sources and copies them ahead of time; None on CPU and MPS."""
        if not can_prefetch(self.device):
            return None
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self.inputs, self.device)
            self.tensors = self._formatted(self._prefetcher.tensors)
        return self._prefetcher.pin

    def clear(self) -> None:
        """Drop the batches that were copied ahead of time."""
        if self._prefetcher is not None:
            self._prefetcher.clear()

    def part_with(self, source: str) -> str:
        """Return the key of the loss or metric that needs a source, or else `forward`, for messages."""
        return self.outputs.part_with(source) or f"forward of {type(self.module).__name__}"

    def leave_out_missing(self) -> None:
        """From now on, leave out losses and metrics that need a source which a batch does not have."""
        required, optional = self.outputs.sources()
        self.outputs.leave_out_missing()
        self.inputs.predict_only(self.module, [*required, *optional])

    def leave_out_measures(self) -> None:
        """From now on, leave out losses and metrics, and the sources that only they need."""
        self.outputs.leave_out_all()
        self.inputs.predict_only(self.module, [])

    @contextmanager
    def changing(self, change: Callable[[Any], Any]) -> Iterator[None]:
        """Change the tensors of the sources in the block.

        Args:
            change: gets source -> tensor, and returns the same with other tensors.
        """
        tensors = self.tensors
        self.tensors = lambda batch: change(tensors(batch))
        try:
            yield
        finally:
            self.tensors = tensors

    def _formatted(self, tensors: Read) -> Read:
        """Return a function that also changes the memory format of what a function makes of a batch."""
        return tensors if self.memory_format is None else partial(self.memory_format.tensors, tensors)
