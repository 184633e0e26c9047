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

from emrun.base.arguments import check_flag
from emrun.base.errors import ArgumentError
from emrun.base.sources import changed
from emrun.base.wording import did_you_mean, listed
from emrun.models.inputs import describe

_LOG = logging.getLogger(__name__)

_KEY = "compile"
_OFF = "set compile: false"
_KINDS: dict[str, tuple[Any, str]] = {
    "mode": (str | None, "is not the name of a mode"),
    "backend": (str | Callable, "is neither the name of a backend nor a function"),
    "options": (Mapping | None, "is not a mapping from options to values"),
}
"""Argument of torch.compile -> its types, and what is wrong with a value of another type."""
_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes that replay CUDA graphs, which reuse the memory of outputs


class _Stopwatch:
    """The seconds that torch has spent on compiling, in this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None

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
        compiled = [name for name, part in module.named_modules() if _is_compiled(part)]
        if compiled:
            where = f"{listed(compiled[:1])} of {type(module).__name__}" if compiled[0] else type(module).__name__
            message = f"{where} is compiled already; give emrun the plain module, or {_OFF}"
            raise ArgumentError(_KEY, message)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch's own modules, which this imports
                torch.compile(_nothing, **self._options)
        except Exception as error:  # torch raises many kinds
            raise _refused(error, self._options) from error
        if self._options.get("backend", "inductor") == "inductor":
            _check_compiler(device)
        options = self._options.get("options") or {}
        has_graphs = self._options.get("mode") in _GRAPHS or options.get("triton.cudagraphs", False)
        self._copies = has_graphs and device.type == "cuda"
        self._was_used = False
        self._before = _STOPWATCH.seconds
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
        except Exception as error:
            if isinstance(error, torch._dynamo.exc.TorchDynamoException):
                error.add_note(
                    "torch.compile failed, which model.compile uses; with model.compile=false, the same runs without "
                    "it, which tells whether the module is the cause"
                )
            raise
        if _STOPWATCH.seconds > before:
            shapes = ", ".join(describe(name, each) for name, each in tensors.items())
            seconds = _STOPWATCH.seconds - before
            _LOG.info("compiling %s took %.1f s, for %s", type(module).__name__, seconds, shapes)
        if not self._copies:
            return outputs
        return changed(outputs, lambda each: each.clone() if isinstance(each, Tensor) else each)  # the graph reuses it

    def check_use(self, module: torch.nn.Module) -> None:
        """Warn, once, if nothing was compiled although the module was trained or evaluated."""
        if not self._was_used and _STOPWATCH.seconds == self._before:
            kind = type(module).__name__
            _LOG.warning("model.compile has no effect: nothing calls %s itself, but at most its parts", kind)
        self._was_used = True


def _options(value: object) -> dict[str, Any]:
    """Return the arguments of torch.compile."""
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        message = f"{value!r} is neither true nor arguments of torch.compile, such as {{dynamic: true}}"
        raise ArgumentError(_KEY, message)
    parameters = inspect.signature(torch.compile).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    known = [name for name in known if name not in ("disable", "name")]
    for key, each in value.items():
        argument = f"{_KEY}.{key}"
        if key not in known:
            hint = f"; {_OFF}" if key == "disable" else did_you_mean(str(key), known)
            raise ArgumentError(argument, f"torch.compile has no such option here{hint} (allowed: {', '.join(known)})")
        if key == "fullgraph" or (key == "dynamic" and each is not None):
            check_flag(argument, each)
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
    found = next((key for key in ("mode", "options") if key in options), None)
    both = {"mode", "options"} <= options.keys()
    return ArgumentError(_KEY if both or found is None else f"{_KEY}.{found}", _short(text))


def _short(text: str) -> str:
    """Return a message of torch without its list of all options."""
    return text if len(text) <= 300 else f"{text[: text.find(', known options')]}; see torch._inductor.list_options()"


def _check_compiler(device: torch.device) -> None:
    """Check that the backend inductor finds the compiler that it needs.

    Raises:
        ArgumentError: there is none.
    """
    if device.type == "cpu":
        from torch._inductor import config  # of the compiler, which is imported when it is needed

        names = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else (config.cpp.cxx,)
        if not any(name is not None and shutil.which(name) for name in names):
            tried = listed([str(name) for name in names if name is not None])
            now = f" (now {os.environ['CXX']!r})" if "CXX" in os.environ else ""
            raise ArgumentError(
                _KEY,
                f"there is no C++ compiler {tried}, which torch.compile needs on a CPU; install one, such as g++, name "
                f"it in the environment variable CXX{now}, or {_OFF}",
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


def _nothing() -> None:
    """Stand for a module, to check the options."""
