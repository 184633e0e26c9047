"""The precision that a module calculates in: autocast to bfloat16 or float16, and TF32."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from emrun.base.arguments import check_choice
from emrun.base.errors import ArgumentError
from emrun.base.sources import changed
from emrun.base.types import Values

_LOG = logging.getLogger(__name__)

Precision = Literal[32, "tf32", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Autocast:
    """Runs parts of a model in 16 bits, by `torch.autocast`; the weights keep their dtype.

    Args:
        dtype: bfloat16 or float16.
        device: the device of the model.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device.type
        self._is_enabled = True  # False while 16 bits are compared with 32

    @classmethod
    def of(cls, precision: Precision, module: Module, device: torch.device) -> Autocast | None:
        """Return the autocast of a precision; None if it has none.

        Raises:
            ArgumentError: there is no such precision, or the device or the module does not have it.
        """
        check_choice("precision", precision, Precision)
        dtype = _DTYPES.get(str(precision))
        if dtype is None:
            return None
        try:
            with warnings.catch_warnings(action="error"), torch.autocast(device.type, dtype):
                pass
        except (RuntimeError, UserWarning) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ArgumentError(
                "precision", f"{precision} cannot be used on the device {str(device)!r}: {reason}; use 32"
            ) from error
        floats = [each.dtype for each in module.parameters() if each.is_floating_point()]
        refused = torch.float16 if precision == "fp16" else torch.float64
        if refused in floats or (floats and floats[0] is torch.float64):
            shown = str(refused if refused in floats else floats[0]).removeprefix("torch.")
            raise ArgumentError(
                "precision", f"{precision} needs a module with weights of float32, but it has parameters of {shown}"
            )
        return cls(dtype, device)

    def on(self) -> AbstractContextManager[Any]:
        """Return the context in which operations run in 16 bits, as far as autocast allows it."""
        return torch.autocast(self._device, self._dtype, enabled=self._is_enabled)

    def off(self) -> AbstractContextManager[Any]:
        """Return the context in which operations run in the dtype of their inputs."""
        return torch.autocast(self._device, enabled=False)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run in 32 bits in the block, which is compared with 16 bits."""
        self._is_enabled = False
        try:
            yield
        finally:
            self._is_enabled = True

    def call(self, function: Callable[[Any], Values], inputs: Any) -> Values:
        """Call a function in 16 bits; return the outputs in float32."""
        with self.on():
            outputs = function(inputs)
        return {name: in_float32(value) for name, value in outputs.items()}


def in_float32(value: Any) -> Any:
    """Return a tensor of 16 bits in float32, also in mappings, lists and tuples; other values are unchanged."""

    def widened(each: Any) -> Any:
        return each.float() if isinstance(each, Tensor) and each.dtype in _DTYPES.values() else each

    return changed(value, widened)


class TF32:
    """Lets a GPU multiply matrices in TF32 during a training, as it convolves by default.

    Args:
        device: the device of the model; without TF32 there, a warning is logged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: str | None = None  # the setting of torch, which is that of the process, while another is in use

    def begin(self) -> None:
        """Change the setting of torch."""
        if self._before is not None:
            return
        self._before = torch.get_float32_matmul_precision()
        if has_tf32(self._device):
            torch.set_float32_matmul_precision("high")
        else:
            _LOG.warning(
                "precision: tf32 has no effect on the device %r, which calculates in float32: only GPUs of NVIDIA have "
                "TF32, since Ampere",
                str(self._device),
            )

    def end(self) -> None:
        """Restore the setting of torch."""
        if self._before is not None:
            torch.set_float32_matmul_precision(self._before)
            self._before = None


def has_tf32(device: torch.device) -> bool:
    """Return whether a device can calculate in TF32."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8
