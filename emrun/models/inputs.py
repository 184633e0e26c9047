"""Convert the sources of a batch to the tensors that a module's forward is called with."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emrun.base.arguments import check_names
from emrun.base.errors import ArgumentError, StreamError, add_inputs
from emrun.base.types import Batch
from emrun.base.wording import did_you_mean, meant_of

InputsForm = Sequence[str] | Mapping[str, str | Mapping[str, str | torch.dtype]]
"""A list of sources, or parameter of forward -> a source or `{source: NAME, dtype: keep or a name}`."""

_AS_USUAL = object()
_OF_NUMPY = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int64, torch.bool)
}


@dataclass(frozen=True, slots=True)
class InputNames:
    """Which sources a module's forward gets, and how.

    Args:
        positional: sources that are passed by position.
        named: parameter of forward -> the source that it gets.
        optional: sources that are passed by name if a batch has them.
        dtypes: source -> the dtype that it is converted to, None to keep its own; other sources are converted as usual.
    """

    positional: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    dtypes: Mapping[str, torch.dtype | None] = field(default_factory=dict)

    @classmethod
    def read(cls, module: torch.nn.Module, inputs: InputsForm | None) -> InputNames:
        """Read the form of `inputs`.

        Raises:
            ArgumentError: the form does not fit the signature of forward.
        """
        names = cls._read(module, inputs)
        try:
            inspect.signature(module.forward).bind(*names.positional, **names.named)
        except TypeError as error:
            raise ArgumentError("inputs", f"{type(module).__name__}.forward: {error}") from error
        return names

    @classmethod
    def _read(cls, module: torch.nn.Module, inputs: InputsForm | None) -> InputNames:
        parameters = inspect.signature(module.forward).parameters
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = {name: p for name, p in parameters.items() if p.kind not in variable}
        takes_any = len(named) < len(parameters)
        kind = type(module).__name__
        if inputs is None:
            if takes_any:
                raise ArgumentError("inputs", f"{kind}.forward takes any arguments; list the sources that it gets")
            optional = tuple(name for name, p in named.items() if p.default is not p.empty)
            return cls(named={name: name for name in named if name not in optional}, optional=optional)
        if isinstance(inputs, Mapping):
            unknown = [name for name in inputs if name not in named]
            if unknown and not takes_any:
                message = f"{kind}.forward has no parameter {unknown[0]!r}{meant_of(unknown[0], named)}"
                raise ArgumentError("inputs", message)
            sources = {parameter: _source(str(parameter), entry) for parameter, entry in inputs.items()}
            dtypes: dict[str, Any] = {}
            for name, dtype in sources.values():
                if dtypes.setdefault(name, dtype) != dtype:
                    message = f"source {name!r} cannot have two dtypes; give all its parameters the same dtype"
                    raise ArgumentError("inputs", message)
            own = {name: dtype for name, dtype in dtypes.items() if dtype is not _AS_USUAL}
            return cls(named={parameter: name for parameter, (name, _) in sources.items()}, dtypes=own)
        check_names("inputs", inputs)
        if all(name in named for name in inputs) and len(set(inputs)) == len(inputs):
            return cls(named={name: name for name in inputs})
        if len(inputs) > len(named) and not takes_any:
            raise ArgumentError("inputs", f"{kind}.forward takes {len(named)} arguments, not {len(inputs)}")
        return cls(tuple(inputs))


class Inputs:
    """Turns batches into tensors on a device, and calls a module with them.

    Args:
        module: floating-point sources get the dtype of its first floating-point parameter or buffer.
        names: the sources of forward.
        others: sources that losses and metrics need, and names that may be sources.
        device: the device of the tensors.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: InputNames,
        others: tuple[Sequence[str], Sequence[str]],
        device: torch.device,
    ) -> None:
        self._names = names
        self._dtypes = names.dtypes
        self.need(*others)
        self._device = device
        self._on_cpu = device.type == "cpu"
        tensors = [*module.parameters(), *module.buffers()]
        self._dtype = next((each.dtype for each in tensors if each.is_floating_point()), torch.get_default_dtype())
        self._wanted = (self._dtype, torch.int64, torch.bool)
        self._shared = {_OF_NUMPY[dtype] for dtype in self._wanted if dtype in _OF_NUMPY} if self._on_cpu else set()
        named, self._positional = dict(names.named), list(names.positional)
        if not self._positional:  # costs less than passing by name
            self._positional = [named.pop(each) for each in _first_parameters(module, named)]
        self._named = [(source, parameter) for parameter, source in named.items()]
        self._maybe = names.optional

    def need(self, required: Sequence[str], optional: Sequence[str]) -> None:
        """Set which sources losses and metrics need, and names that may be sources."""
        names = self._names
        self.required = list(dict.fromkeys((*names.positional, *names.named.values(), *required)))
        self.optional = [name for name in dict.fromkeys((*names.optional, *optional)) if name not in self.required]
        self._usual = [name for name in self.required if name not in self._dtypes]

    def needed(self, batch: Batch) -> list[str]:
        """Return the names of the sources that are needed from a batch."""
        return [*self.required, *(name for name in self.optional if name in batch)]

    def tensors(self, batch: Batch) -> dict[str, Any]:
        """Return source -> tensor on the device, or a mapping of tensors, for the sources that are needed.

        Raises:
            StreamError: a source cannot become a tensor.
        """
        wanted, shared, device, on_cpu = self._wanted, self._shared, self._device, self._on_cpu
        tensors: dict[str, Any] = {}
        for name in [*self._usual, *self.needed(batch)[len(self.required) :]] if self.optional else self._usual:
            value = batch[name]
            if type(value) is np.ndarray and value.dtype in shared and value.flags.writeable:
                try:
                    tensors[name] = torch.from_numpy(value)  # the usual case of `_convert`
                except ValueError:  # strides that a tensor cannot have
                    tensors[name] = self._convert(name, value)
            else:
                is_ready = type(value) is Tensor and value.dtype in wanted
                is_here = is_ready and (value.is_cpu if on_cpu else value.device == device)
                tensors[name] = value if is_here else self._convert(name, value)
        if self._dtypes:
            tensors.update({name: self._convert(name, batch[name]) for name in self._dtypes})
        return tensors

    def call(self, module: torch.nn.Module, tensors: Mapping[str, Tensor], *, is_lazy: bool = False) -> Any:
        """Call the module's forward with its sources; an error in forward gets a note with these inputs."""
        positional = self._positional
        try:
            if not (self._named or self._maybe):
                if len(positional) == 1:
                    return module(tensors[positional[0]])
                return module(*[tensors[source] for source in positional])
            keywords = {parameter: tensors[source] for source, parameter in self._named}
            for source in self._maybe:
                if source in tensors:
                    keywords[source] = tensors[source]
            return module(*[tensors[source] for source in positional], **keywords)
        except Exception as error:
            names = [*positional, *(source for source, _ in self._named), *self._maybe]
            what = f"forward of {type(module).__name__}{', which is lazy,' if is_lazy else ''}"
            add_inputs(error, what, [describe(name, tensors[name]) for name in names if name in tensors])
            raise

    def read(self, name: str, value: Any, part: str = "") -> tuple[Tensor, torch.dtype]:
        """Return a source as a tensor, not yet on the device, and the dtype that it gets on the device.

        Args:
            name: the name of the source.
            value: the source, or a part of a source that is a mapping.
            part: the key of the part, with a dot, for messages.

        Raises:
            StreamError: the source cannot become a tensor.
        """
        try:
            tensor = _tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            text = _text_in(value)
            reason = str(error).splitlines()[0] if text is None else f"it has strings, such as {text!r}"
            message = f"source {name + part!r} cannot become a tensor: {reason}"
            raise StreamError(f"{message}; the dataset must yield numbers of equal shape") from error
        if name in self._dtypes:
            return tensor, self._dtypes[name] or tensor.dtype
        if tensor.is_floating_point():
            return tensor, self._dtype
        return tensor, tensor.dtype if tensor.dtype is torch.bool or tensor.is_complex() else torch.int64

    def _convert(self, name: str, value: Any, part: str = "") -> Any:
        if isinstance(value, Mapping):
            return {key: self._convert(name, each, f"{part}.{key}") for key, each in value.items()}
        tensor, dtype = self.read(name, value, part)
        return tensor.to(device=self._device, dtype=dtype)


def _source(parameter: str, entry: Any) -> tuple[str, Any]:
    """Return the source of a parameter of forward, and the dtype that the source gets: None to keep its own."""
    if isinstance(entry, str):
        return entry, _AS_USUAL
    if not isinstance(entry, Mapping):
        raise ArgumentError("inputs", f"{parameter}: {entry!r} is not a source; write a name, or {{dtype: keep}}")
    for key in entry:
        if key not in ("source", "dtype"):
            hint = did_you_mean(str(key), ("source", "dtype"))
            raise ArgumentError("inputs", f"{parameter}: unknown key {key!r}{hint} (allowed: source, dtype)")
    source, dtype = entry.get("source", parameter), entry.get("dtype", _AS_USUAL)
    if not isinstance(source, str):
        raise ArgumentError("inputs", f"{parameter}: source {source!r} is not a name")
    if dtype == "keep":
        return source, None
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if dtype is not _AS_USUAL and not isinstance(dtype, torch.dtype):
        known = [name for name, each in vars(torch).items() if isinstance(each, torch.dtype)]
        message = f"{parameter}: dtype {dtype!r} is neither keep nor a dtype of torch, such as uint8"
        raise ArgumentError("inputs", f"{message}{did_you_mean(str(dtype), known)}")
    return source, dtype


def describe(name: str, value: Any) -> str:
    """Return an input as messages show it: `x: float32 (32, 10)`, `label: int64 (32,) from 0 to 9`."""
    if isinstance(value, Mapping):
        return ", ".join(describe(f"{name}.{key}", each) for key, each in value.items())
    if not isinstance(value, Tensor):
        return f"{name}: {type(value).__name__}"
    if value.is_nested:
        return f"{name}: {str(value.dtype).removeprefix('torch.')} nested ({value.size(0)}, ...)"
    place = "" if value.is_cpu else f" on {value.device}"
    is_whole = value.is_cpu and value.numel() and not value.dtype.is_floating_point and not value.dtype.is_complex
    span = f" from {int(value.min())} to {int(value.max())}" if is_whole and value.dtype != torch.bool else ""
    return f"{name}: {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{place}{span}"


def _first_parameters(module: torch.nn.Module, wanted: Container[str]) -> list[str]:
    """Return the first parameters of forward, up to one that is not wanted or cannot be passed by position."""
    parameters = inspect.signature(module.forward).parameters.values()
    first = itertools.takewhile(
        lambda each: each.kind is each.POSITIONAL_OR_KEYWORD and each.name in wanted, parameters
    )
    return [each.name for each in first]


def _text_in(value: Any) -> str | None:
    """Return the first entry of a source if it is a string; None if not."""
    while isinstance(value, list | tuple | np.ndarray) and len(value):
        value = value[0]
    return str(value) if isinstance(value, str) else None


def _tensor(value: Any) -> Tensor:
    """Return a source as a tensor, which shares memory with the source if possible."""
    if isinstance(value, np.ndarray) and (
        not value.flags.writeable or any(stride < 0 or stride % (value.itemsize or 1) for stride in value.strides)
    ):
        value = value.copy()  # torch cannot share memory with such an array
    elif isinstance(value, list | tuple) and value and isinstance(value[0], np.ndarray | Tensor | list | tuple):
        return torch.stack([_tensor(each) for each in value])
    return torch.as_tensor(value)
