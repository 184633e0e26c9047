"""Convert the sources of a batch to the tensors that a module's forward is called with."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import Parameter
from operator import attrgetter, itemgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module

from emrun.base.arguments import check_flag, check_keys, check_names
from emrun.base.errors import ArgumentError, StreamError, add_inputs, reason_of
from emrun.base.sources import changed
from emrun.base.types import Batch, Strings, Values
from emrun.base.wording import did_you_mean, meant_of
from emrun.models.modes import Tensors
from emrun.models.scaling import KEYS, Scaling

_LOG = logging.getLogger(__name__)

InputsForm = Strings | Mapping[str, str | Mapping[str, str | torch.dtype | float | bool | Sequence[float]]]
"""A list of sources, or parameter of forward -> a source or `{source, dtype, scale, mean, std, stack}`."""

SourceForm = torch.dtype | Scaling | Literal["keep", "list"]
_TABLES = Embedding | EmbeddingBag
_KEYS = ("source", "dtype", *KEYS, "stack")
_kind_of = attrgetter("__class__", "dtype", "flags.carray")  # contiguous, aligned and writeable
_from_numpy = torch.from_numpy
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
        optional: those of these parameters that get their source only if a batch has it.
        forms: source -> the dtype or the scaling that it gets, `keep` if it keeps its dtype, or `list` if it stays a
            list; other sources are converted as usual.
    """

    positional: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    optional: Strings = ()
    forms: Mapping[str, SourceForm] = field(default_factory=dict)

    @classmethod
    def read(cls, module: Module, inputs: InputsForm | None, others: Container[str] = ()) -> InputNames:
        """Read the form of `inputs`.

        Args:
            module: the module.
            inputs: the form.
            others: what losses and metrics read; `inputs` may give such a source a form, under its own name.

        Raises:
            ArgumentError: the form does not fit the signature of forward.
        """
        parameters = signature_of(module).parameters
        named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        takes_any = len(named) < len(parameters)
        kind = type(module).__name__
        if inputs is None and takes_any and isinstance(own := getattr(module, "inputs", None), list):
            inputs = own  # of a `Graph`
        if inputs is None:
            if takes_any:
                raise ArgumentError("inputs", f"{kind}.forward takes any arguments; list the sources that it gets")
            return cls(named={name: name for name in named}, optional=_with_default(module, named))
        if isinstance(inputs, Mapping):
            sources = {parameter: _source(str(parameter), entry) for parameter, entry in inputs.items()}
            unknown = [name for name in inputs if name not in named and not takes_any]
            beside = [name for name in unknown if sources[name][0] == name and sources[name][1] and name in others]
            if unknown := [name for name in unknown if name not in beside]:
                raise ArgumentError(
                    "inputs", f"{kind}.forward has no parameter {unknown[0]!r}{meant_of(unknown[0], named)}"
                )
            forms: dict[str, SourceForm | None] = {}
            for name, form in sources.values():
                if forms.setdefault(name, form) != form:
                    keys = " or ".join(("dtypes", *KEYS, "stack"))
                    raise ArgumentError(
                        "inputs", f"source {name!r} cannot have two {keys}; give all its parameters the same"
                    )
            return cls(
                named={parameter: name for parameter, (name, _) in sources.items() if parameter not in beside},
                forms={name: form for name, form in forms.items() if form is not None},
            )
        check_names("inputs", inputs)
        fits = all(name in named for name in inputs) or (
            any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            and all(name in inputs for name, p in named.items() if p.default is p.empty)
        )
        if fits and len(set(inputs)) == len(inputs):
            return cls(named={name: name for name in inputs})
        return cls(tuple(inputs))


class Passing:
    """Calls a module with the sources of its forward.

    Args:
        names: the sources.
        module: the module.
    """

    def __init__(self, names: InputNames, module: Module) -> None:
        self.change(names, module)

    def change(self, names: InputNames, module: Module, untold: Iterable[str] = ()) -> None:
        """Pass other sources from now on; log once which of `untold` a batch does not have.

        Raises:
            ArgumentError: forward cannot be called with these sources.
        """
        signature = signature_of(module)
        named = dict(names.named)
        try:
            signature.bind(*names.positional, **named)
        except TypeError as error:
            raise ArgumentError("inputs", f"{type(module).__name__}.forward: {error}") from error
        self._untold = set(untold)
        self.sources = {*names.positional, *named.values()}
        by_name = named.keys() - names.optional
        first = itertools.takewhile(
            lambda each: each.kind is each.POSITIONAL_OR_KEYWORD and each.name in by_name, signature.parameters.values()
        )
        self._positional = [*names.positional, *(named.pop(each.name) for each in first)]  # costs less than by name
        self._named = list(named.items())
        self._only = self._positional[0] if len(self._positional) == 1 and not named else None

    def call(self, module: Module, tensors: Tensors) -> Any:
        """Call the module's forward with its sources; an error in forward gets a note with these inputs."""
        try:
            if self._only is not None:
                return module(tensors[self._only])
            for source in sorted(self._untold.difference(tensors)):
                self._untold.remove(source)
                _LOG.info("the batch has no %r: forward of %s is called without it", source, type(module).__name__)
            keywords = {parameter: tensors[source] for parameter, source in self._named if source in tensors}
            return module(*[tensors[source] for source in self._positional], **keywords)
        except Exception as error:
            add_inputs(
                error,
                f"forward of {type(module).__name__}",
                [
                    describe(name, tensors[name])
                    for name in [*self._positional, *(source for _, source in self._named)]
                    if name in tensors
                ],
            )
            raise


class Inputs:
    """Turns batches into tensors on a device.

    Args:
        module: floating-point sources get its `dtype_of`.
        names: the sources of forward.
        others: sources that losses and metrics need, and names that may be sources.
        device: the device of the tensors.
        of_losses: what losses read, which are tensors.
    """

    def __init__(
        self,
        module: Module,
        names: InputNames,
        others: tuple[Strings, Strings],
        device: torch.device,
        of_losses: Container[str] = (),
    ) -> None:
        self._names = names
        self._of_losses = of_losses
        self._device = device
        self._on_cpu = device.type == "cpu"
        self.need(*others)
        self._wanted = (dtype_of(module), torch.int64, torch.bool)
        self._shared = {(np.ndarray, _OF_NUMPY[dtype], True) for dtype in self._wanted if dtype in _OF_NUMPY}
        self.passing = Passing(names, module)

    def predict_only(self, module: Module, optional: Strings) -> None:
        """From now on, need no source for a parameter with a default, and `optional` ones only if a batch has them."""
        names = self._names = replace(self._names, optional=_with_default(module, self._names.named))
        self.passing.change(names, module, [names.named[name] for name in names.optional])
        self.need([], optional)

    def need(self, required: Strings, optional: Strings) -> None:
        """Set which sources losses and metrics need, and names that may be sources."""
        names = self._names
        own = [source for parameter, source in names.named.items() if parameter not in names.optional]
        self.required = list(dict.fromkeys((*names.positional, *own, *required)))
        self.optional = [
            name for name in dict.fromkeys((*names.named.values(), *optional)) if name not in self.required
        ]
        is_all = self._on_cpu and not self.optional and not names.forms
        self._values = values_of(self.required) if is_all else None  # of all sources, as they are in a batch

    def needed(self, batch: Batch) -> list[str]:
        """Return the names of the sources that are needed from a batch."""
        return [*self.required, *(name for name in self.optional if name in batch)]

    def tensors(self, batch: Batch) -> Values:
        """Return source -> tensor on the device, or a mapping of tensors, for the sources that are needed.

        Raises:
            StreamError: a source cannot become a tensor.
        """
        if self._values is not None:
            try:
                values = self._values(batch)
                if self._shared.issuperset(map(_kind_of, values)):
                    return dict(zip(self.required, map(_from_numpy, values), strict=True))
            except (AttributeError, TypeError, ValueError):  # no arrays, or strides that a tensor cannot have
                pass
        tensors: dict[str, Any] = {}
        names = self.required
        if self.optional:
            names = self.needed(batch)
        for name in names:
            value = batch[name]
            is_ready = type(value) is Tensor and value.dtype in self._wanted and name not in self._names.forms
            is_ready = is_ready and value.layout is torch.strided and value.is_contiguous()
            if not is_ready or not (value.is_cpu if self._on_cpu else value.device == self._device):
                value = self._convert(name, value)
            tensors[name] = value
        return tensors

    def unscaled(self, batch: Batch) -> Values:
        """Return source -> tensor in its dtype, or a mapping of tensors, before it is scaled; a list stays a list."""
        return {name: self._unscaled(name, batch[name]) for name in self.needed(batch) if name in batch}

    def _unscaled(self, name: str, value: Any, part: str = "") -> Any:
        if isinstance(value, Mapping):
            return {key: self._unscaled(name, each, f"{part}.{key}") for key, each in value.items()}
        if self.is_list(name, value):
            return value
        tensor, dtype = self.read(name, value, part)
        return tensor.to(dtype)

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
            raise StreamError(
                f"source {name + part!r} cannot become a tensor: {str(error).splitlines()[0]}; "
                "the dataset must yield numbers of equal shape, or set {stack: false} in `inputs` to pass a list"
            ) from error
        form = self._names.forms.get(name)
        dtype = tensor.dtype
        if isinstance(form, torch.dtype):
            dtype = form
        elif dtype.is_floating_point and form != "keep":
            dtype = torch.float32 if form else self._wanted[0]  # scaled in float32
        elif not (form or dtype is torch.bool or dtype.is_complex):
            dtype = torch.int64
        return _converted(name + part, tensor, dtype), dtype

    def _convert(self, name: str, value: Any, part: str = "") -> Any:
        if isinstance(value, Mapping):
            return {key: self._convert(name, each, f"{part}.{key}") for key, each in value.items()}
        if self.is_list(name, value):
            return self._list(name + part, value)
        tensor, dtype = self.read(name, value, part)
        if isinstance(form := self._names.forms.get(name), Scaling):
            return form.of(name + part, tensor.to(self._device), self._wanted[0])
        return tensor.to(device=self._device, dtype=dtype)

    def is_list(self, name: str, value: Any) -> bool:
        """Return whether a source, or a part of one, stays a list: by `stack`, or strings that no tensor is made of."""
        is_numbers = name in self.passing.sources or name in self._of_losses
        return self._names.forms.get(name) == "list" or (not is_numbers and _is_text(value))

    def _list(self, name: str, values: Any) -> list[Any]:
        """Return the entries of a source, with arrays and tensors inside as tensors on the device.

        Raises:
            StreamError: an entry cannot be moved to the device.
        """
        found: list[Any] = []
        if isinstance(values, np.ndarray) and values.dtype.kind in "UO":
            values = values.tolist()
        for entry in values:
            try:
                found.append(changed(entry, self._moved))
            except Exception as error:
                raise StreamError(
                    f"source {name!r}: entry {len(found)}, a {type(entry).__name__}, cannot be moved to"
                    f" {self._device}: {reason_of(error)}"
                ) from error
        return found

    def _moved(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return _tensor(value).to(self._device) if value.dtype.kind in "biufc" else value
        if isinstance(value, Tensor):
            return value.to(self._device)
        return copy.copy(value).to(self._device) if callable(getattr(value, "to", None)) else value


def dtype_of(module: Module) -> torch.dtype:
    """Return the floating dtype of most numbers in a module's parameters, or in its buffers if no parameter has one.

    Tables of embeddings do not count, as no floating-point source meets them, unless there is nothing else. Nor do
    numbers of 8 bits, which are unpacked before they are used.
    """
    tables = {id(each) for part in module.modules() if isinstance(part, _TABLES) for each in part.parameters()}
    weights = list(module.parameters())
    layers = [each for each in weights if id(each) not in tables]
    for tensors in (layers, weights, module.buffers()):
        sizes = Counter[torch.dtype]()
        for each in tensors:
            if each.is_floating_point() and each.dtype.itemsize > 1:
                sizes[each.dtype] += each.numel()
        if sizes:
            return sizes.most_common(1)[0][0]
    return torch.get_default_dtype()


def tokens_of(module: Module) -> int | None:
    """Return how many tokens a model of transformers has embeddings of; None for another module."""
    for each in module.modules():
        get = getattr(each, "get_input_embeddings", None)
        if callable(get):
            with suppress(NotImplementedError):
                size = getattr(get(), "num_embeddings", None)
                return size if isinstance(size, int) else None
    return None


def values_of(names: Strings) -> Callable[[Values], Sequence[Any]]:
    """Return a function that returns the values of a mapping under some names."""
    return itemgetter(*names) if len(names) > 1 else lambda values: [values[name] for name in names]


def signature_of(module: Module) -> inspect.Signature:
    """Return the signature of a module's forward; Python does not know that of a module that `torch.jit` has traced."""
    try:
        return inspect.signature(module.forward)
    except ValueError:
        forward: Any = module.forward
        return inspect.Signature(
            [
                Parameter(
                    each.name,
                    Parameter.POSITIONAL_OR_KEYWORD,
                    default=each.default_value if each.has_default_value() else Parameter.empty,
                )
                for each in forward.schema.arguments[1:]
            ]
        )


def _with_default(module: Module, names: Container[str]) -> list[str]:
    """Return those parameters of forward that have a default value."""
    return [
        each.name
        for each in signature_of(module).parameters.values()
        if each.name in names and each.default is not each.empty
    ]


def _source(parameter: str, entry: Any) -> tuple[str, SourceForm | None]:
    """Return the source of a parameter of forward, and the form that it gets; None for the usual one."""
    if isinstance(entry, str):
        return entry, None
    if not isinstance(entry, Mapping):
        raise ArgumentError("inputs", f"{parameter}: {entry!r} is not a source; write a name, or {{dtype: keep}}")
    check_keys(f"inputs.{parameter}", entry, _KEYS)
    source = entry.get("source", parameter)
    dtype = entry.get("dtype")
    if not isinstance(source, str):
        raise ArgumentError("inputs", f"{parameter}: source {source!r} is not a name")
    stack = entry.get("stack", True)
    check_flag(f"inputs.{parameter}.stack", stack)
    if not stack:
        if beside := [key for key in entry if key not in ("source", "stack")]:
            raise ArgumentError(
                "inputs", f"{parameter}: {beside[0]} cannot be used with `stack: false`, which passes a list as it is"
            )
        return source, "list"
    if isinstance(dtype, str) and dtype != "keep":
        dtype = getattr(torch, dtype, dtype)
    if "dtype" in entry and dtype != "keep" and not isinstance(dtype, torch.dtype):
        known = [name for name, each in vars(torch).items() if isinstance(each, torch.dtype)]
        raise ArgumentError(
            "inputs",
            f"{parameter}: dtype {dtype!r} is neither keep nor a dtype of torch, such as uint8"
            f"{did_you_mean(str(dtype), known)}",
        )
    return source, Scaling.read(parameter, entry, dtype) or dtype


def describe(name: str, value: Any) -> str:
    """Return an input as messages show it: `x: float32 (32, 10)`, `label: int64 (32,) from 0 to 9`."""
    if isinstance(value, Mapping):
        return ", ".join(describe(f"{name}.{key}", each) for key, each in value.items())
    if isinstance(value, list) and value:
        return f"{name}: list of {len(value)}, the first a {type(value[0]).__name__}"
    if not isinstance(value, Tensor) or value.is_nested:
        return f"{name}: {type(value).__name__}"
    place = "" if value.is_cpu else f" on {value.device}"
    is_whole = (
        type(value) is Tensor
        and value.is_cpu
        and value.numel()
        and not value.dtype.is_floating_point
        and not value.dtype.is_complex
    )
    span = f" from {int(value.min())} to {int(value.max())}" if is_whole and value.dtype != torch.bool else ""
    return f"{name}: {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{place}{span}"


def _is_text(value: Any) -> bool:
    """Return whether the first entry of a source is a string."""
    while isinstance(value, list | tuple | np.ndarray) and len(value):
        value = value[0]
    return isinstance(value, str)


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a source in another dtype, or as it is if the dtype can hold all values of its own, and in a trace.

    Raises:
        StreamError: the dtype cannot hold one of the numbers; NaN and infinity are no such numbers.
    """
    own = tensor.dtype
    is_float = dtype.is_floating_point
    is_wider = dtype.itemsize > own.itemsize and is_float >= own.is_floating_point
    if own == dtype or is_wider or dtype.is_complex or dtype is torch.bool or torch.compiler.is_compiling():
        return tensor
    found = tensor.to(dtype)
    before = _stored(tensor)
    after = _stored(found)
    if is_float and math.isfinite((after := after.float()).sum()):  # a tenth of the time of `isfinite` of each number
        return found
    is_wrong = before.isfinite() & ~after.isfinite() if is_float else before.double() != after.double()
    if is_wrong.any():
        first = before.flatten()[int(is_wrong.flatten().nonzero()[0])]  # torch 2.6 has no masks of uint64
        raise StreamError(
            f"source {name!r} has {first.item()}, which {str(dtype).removeprefix('torch.')}"
            f" cannot hold; change it in the dataset, or set {{dtype: keep}} in `inputs`"
        )
    return found


def _stored(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor that may be nested or sparse."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    return tensor.values() if tensor.is_nested or tensor.layout is not torch.strided else tensor


def _tensor(value: Any) -> Tensor:
    """Return a source as a contiguous tensor, which shares memory with the source if possible.

    Raises:
        ValueError: it has masked entries, is quantised, or has no values.
    """
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if np.ma.is_masked(value):
        raise ValueError("it has masked entries; yield `.filled(NUMBER)`, and the mask as a source of its own")
    if isinstance(value, np.ndarray) and (
        not value.flags.writeable or any(stride < 0 or stride % (value.itemsize or 1) for stride in value.strides)
    ):
        value = value.copy()  # torch cannot share memory with such an array
    elif isinstance(value, list | tuple) and value and isinstance(value[0], np.ndarray | Tensor | list | tuple):
        return torch.stack([_tensor(each) for each in value])
    tensor = torch.as_tensor(value)
    if not isinstance(value, np.ndarray | Tensor) and not tensor.sum().isfinite():  # numbers of Python
        tensor = torch.as_tensor(value, dtype=torch.promote_types(tensor.dtype, torch.float64))
    if tensor.is_meta:
        raise ValueError("it is on the device meta, so it has no values; yield a tensor on the CPU")
    if tensor.is_quantized:
        raise ValueError("it is quantised; yield its `.dequantize()`")
    return tensor.contiguous() if tensor.layout is torch.strided else tensor
