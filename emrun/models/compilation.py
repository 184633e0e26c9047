"""`compile`: torch.compile of a module, in place, so that its names stay as they are; and what compiling costs."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from emrun.base.errors import ArgumentError
from emrun.base.sources import changed
from emrun.base.wording import did_you_mean, listed
from emrun.models.inputs import describe

_LOG = logging.getLogger(__name__)

_KEY = "compile"
_OFF = "set compile: false"
_KINDS: dict[str, tuple[Any, str]] = {
    "fullgraph": (bool, "is neither true nor false"),
    "dynamic": (bool | None, "is neither true nor false"),
    "mode": (str | None, "is not the name of a mode"),
    "backend": (str | Callable, "is neither the name of a backend nor a function"),
    "options": (Mapping | None, "is not a mapping from options to values"),
}
"""Argument of torch.compile -> its types, and what is wrong with a value of another type."""
_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes that replay CUDA graphs, which reuse the memory of outputs


class _Stopwatch:
    """The seconds that torch has spent on compiling, in this process."""

    seconds = 0.0
    _began: float | None = None

    def set(self) -> None:
        """Begin to listen to torch, if that was not done before, or torch was reset since."""
        from torch._dynamo.callback import callback_handler  # takes a second

        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def clock(self) -> float:
        """Return the time in seconds, without the time that torch has spent on compiling."""
        return perf_counter() - self.seconds

    def _begin(self, *arguments: Any) -> None:
        self._began = perf_counter()

    def _end(self, *arguments: Any) -> None:
        if self._began is not None:
            self.seconds += perf_counter() - self._began
        self._began = None


_STOPWATCH = _Stopwatch()


class Compilation:
    """Calls a module compiled, and logs how long compiling took.

    The module is compiled when it is called for the first time, and again for inputs of other shapes: torch then takes
    the sizes that differ as variable, and does not compile again for each. Training and evaluation are compiled
    separately.

    Args:
        value: the argument `compile`: true, or arguments of torch.compile.
        module: the module; checked, and not changed before the first call.
        device: the device of the module.

    Raises:
        ArgumentError: the argument is wrong, the module is compiled already, or there is no compiler.
    """

    def __init__(self, value: object, module: torch.nn.Module, device: torch.device) -> None:
        self._options = _options(value)
        if (name := next((name for name, part in module.named_modules() if _is_compiled(part)), None)) is not None:
            where = f"{name} of {type(module).__name__}" if name else type(module).__name__
            message = f"{where} is compiled already; give emrun the plain module, or {_OFF}"
            raise ArgumentError(_KEY, message)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch's own modules, which this imports
                torch.compile(lambda: None, **self._options)
        except Exception as error:  # torch raises many kinds
            raise _refused(error, self._options) from error
        if self._options.get("backend", "inductor") == "inductor":
            _check_compiler(device)
        has_option = (self._options.get("options") or {}).get("triton.cudagraphs", False)
        self._copies = device.type == "cuda" and (self._options.get("mode") in _GRAPHS or has_option)
        self._before: float | None = _STOPWATCH.seconds  # None once it was checked that something is compiled
        _STOPWATCH.set()

    clock = staticmethod(_STOPWATCH.clock)
    """Return the time in seconds, without the time that torch has spent on compiling."""

    def begin(self, module: torch.nn.Module) -> None:
        """Compile a module in place when it is called the next time, unless it is compiled already."""
        if not _is_compiled(module):
            module._compiled_call_impl = torch.compile(_calling(module._call_impl), **self._options)

    def call(self, call: Callable[..., Any], module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> Any:
        """Call a module with its sources; log the seconds that compiling has taken.

        Args:
            call: the function that calls the module with the sources.
            module: the module.
            tensors: source name -> tensor.
        """
        self.begin(module)
        if self._copies:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        before = _STOPWATCH.seconds
        try:
            outputs = call(module, tensors)
        except torch._dynamo.exc.TorchDynamoException as error:
            error.add_note(
                "torch.compile failed, which model.compile uses; with model.compile=false, the same runs without it, "
                "which tells whether the module is the cause"
            )
            raise
        if (seconds := _STOPWATCH.seconds - before) > 0:
            shapes = ", ".join(describe(name, each) for name, each in tensors.items())
            _LOG.info("compiling %s took %.1f s, for %s", type(module).__name__, seconds, shapes)
        if not self._copies:
            return outputs
        return changed(outputs, lambda each: each.clone() if isinstance(each, Tensor) else each)  # the graph reuses it

    def check_use(self, module: torch.nn.Module) -> None:
        """Warn, once, if nothing was compiled although the module was trained or evaluated."""
        if self._before == _STOPWATCH.seconds:
            _LOG.warning(
                "model.compile has no effect: nothing calls %s itself, but at most its parts", type(module).__name__
            )
        self._before = None


def _options(value: object) -> dict[str, Any]:
    """Return the arguments of torch.compile."""
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        message = f"{value!r} is neither true nor arguments of torch.compile, such as {{dynamic: true}}"
        raise ArgumentError(_KEY, message)
    parameters = inspect.signature(torch.compile).parameters.values()
    keywords = (each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    known = [name for name in keywords if name not in ("disable", "name")]
    for key, each in value.items():
        argument = f"{_KEY}.{key}"
        if key not in known:
            hint = f"; {_OFF}" if key == "disable" else did_you_mean(str(key), known)
            raise ArgumentError(argument, f"torch.compile has no such option here{hint} (allowed: {', '.join(known)})")
        kinds, wrong = _KINDS.get(key, (object, ""))
        if not isinstance(each, kinds):
            raise ArgumentError(argument, f"{each!r} {wrong}")
    return dict(value)


def _refused(error: Exception, options: Mapping[str, Any]) -> ArgumentError:
    """Return the error for options that torch.compile refuses, at the option if it is known."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if type(error).__name__ == "InvalidBackend":
        backends = torch._dynamo.list_backends()
        hint = did_you_mean(str(options["backend"]), backends)
        text = f"{options['backend']!r} is not a backend{hint} (there are {', '.join(backends)})"
        return ArgumentError(f"{_KEY}.backend", text)
    if len(text) > 300:  # with a list of all options
        text = f"{text[: text.find(', known options')]}; see torch._inductor.list_options()"
    given = [key for key in ("mode", "options") if key in options]
    return ArgumentError(f"{_KEY}.{given[0]}" if len(given) == 1 else _KEY, text)


def _check_compiler(device: torch.device) -> None:
    """Check that the backend inductor finds the compiler that it needs.

    Raises:
        ArgumentError: there is none.
    """
    if device.type == "cpu":
        from torch._inductor import config  # of the compiler, which is imported when it is needed

        given = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else (config.cpp.cxx,)
        names = [name for name in given if name is not None]
        if not any(map(shutil.which, names)):
            now = f" (now {os.environ['CXX']!r})" if "CXX" in os.environ else ""
            raise ArgumentError(
                _KEY,
                f"there is no C++ compiler {listed(names)}, which torch.compile needs on a CPU; install one, such as "
                f"g++, name it in the environment variable CXX{now}, or {_OFF}",
            )
    elif device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            message = f"torch.compile needs Triton on {device}, which is not installed or does not support it"
            raise ArgumentError(_KEY, f"{message}; pip install triton, or {_OFF}")


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module was compiled, in place or by torch.compile."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _calling(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a module: torch compiles no module of its own, such as `Sequential`, by itself."""

    def called(*arguments: Any, **keywords: Any) -> Any:
        return call(*arguments, **keywords)

    return called
