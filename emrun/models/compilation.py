"""`compile`: torch.compile of a module, in place, so that its names stay as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from emrun.base.errors import ArgumentError
from emrun.base.sources import changed
from emrun.base.types import Values
from emrun.models.modes import Tensors

_KEY = "compile"
_NOTE = (
    "torch.compile failed, which model.compile uses; with model.compile=false, the same runs without it, which tells "
    "whether the module is the cause"
)
_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes that replay CUDA graphs, which reuse the memory of outputs


class Compilation:
    """Calls a module compiled.

    The module is compiled when it is called for the first time, and again for inputs of other shapes: torch then takes
    the sizes that differ as variable, and does not compile again for each. Training and evaluation are compiled
    separately.

    Args:
        value: the argument `compile`: true, or arguments of torch.compile.
        module: the module.
        device: the device of the module.

    Raises:
        ArgumentError: the argument is neither, torch refuses it, or the module is compiled already.
    """

    def __init__(self, value: object, module: Module, device: torch.device) -> None:
        if value is not True and not isinstance(value, Mapping):
            raise ArgumentError(
                _KEY, f"{value!r} is neither true nor arguments of torch.compile, such as {{dynamic: true}}"
            )
        if (name := next((name for name, part in module.named_modules() if _is_compiled(part)), None)) is not None:
            where = f"{name} of {type(module).__name__}" if name else type(module).__name__
            raise ArgumentError(
                _KEY, f"{where} is compiled already; give emrun the plain module, or set compile: false"
            )
        self._options: Values = dict(value) if isinstance(value, Mapping) else {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch's own modules, which this imports
                self.begin(module)
        except Exception as error:  # torch raises many kinds
            raise ArgumentError(_KEY, f"torch.compile refuses {self._options}: {error!s:.300}") from error
        self._is_on = True
        has_option = (self._options.get("options") or {}).get("triton.cudagraphs", False)
        self._copies = device.type == "cuda" and (self._options.get("mode") in _GRAPHS or has_option)

    def begin(self, module: Module) -> None:
        """Compile a module in place when it is called the next time, unless it is compiled already."""
        if not _is_compiled(module):
            module._compiled_call_impl = torch.compile(_calling(module._call_impl), **self._options)

    def call(self, call: Callable[..., Any], module: Module, tensors: Tensors) -> Any:
        """Call a module with its sources.

        Args:
            call: the function that calls the module with the sources.
            module: the module.
            tensors: source name -> tensor.
        """
        if not self._is_on:
            return call(module, tensors)
        self.begin(module)
        if self._copies:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            outputs = call(module, tensors)
        except Exception as error:
            self.advise(error)
            raise
        if not self._copies:
            return outputs
        return changed(outputs, lambda each: each.clone() if isinstance(each, Tensor) else each)  # the graph reuses it

    @contextmanager
    def off(self, module: Module) -> Iterator[None]:
        """Call a module as it is in the block, and compiled again afterwards, without compiling it once more."""
        compiled = module._compiled_call_impl
        self._is_on = False
        module._compiled_call_impl = None
        try:
            yield
        finally:
            self._is_on = True
            module._compiled_call_impl = compiled

    def advise(self, error: Exception) -> None:
        """Add a note to an error of torch's compiler, which may compile in the backward pass too, unless it has one."""
        if isinstance(error, torch._dynamo.exc.TorchDynamoException) and _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)


def _is_compiled(module: Module) -> bool:
    """Return whether a module was compiled, in place or by torch.compile."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _calling(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a module: torch compiles no module of its own, such as `Sequential`, by itself."""

    def called(*arguments: Any, **keywords: Any) -> Any:
        return call(*arguments, **keywords)

    return called
