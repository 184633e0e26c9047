"""States and batches in plain types and tensors: the part of a checkpoint besides the weights."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta, timezone
from functools import partial
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch

from emrun.base.errors import StateError
from emrun.base.sources import is_nested
from emrun.base.types import Batch

_BITS = 2000
_PLAIN = (type(None), bool, int, float, str, bytes)
_KEYS = _PLAIN[:-1]  # of mappings
_KIND = "emrun.kind"
"""The key of an encoded mapping that stands for a value of another kind; see `decode`."""
_BITS_OF = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_COLLECTIONS = dict, OrderedDict, Counter, defaultdict, deque, set, frozenset, torch.Size
_VALUES = complex, PosixPath, date, datetime, time, timedelta, timezone
_MADE: Mapping[str, type] = {each.__name__: each for each in (*_COLLECTIONS, *_VALUES)}
"""What is made again from its arguments."""
_TYPES: Mapping[str, type] = {**_MADE, **{each.__name__: each for each in (bool, int, float, str, bytes, list, tuple)}}
"""The types that may themselves be values, as what a `defaultdict` makes."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor, of which other ranks have the others.

    Args:
        values: the rows, of shape (rows, ...).
        shape: the shape of the whole tensor.
        begin: the index of the first of these rows in it.
    """

    values: torch.Tensor
    shape: tuple[int, ...]
    begin: int


def encode(value: Any, key: str, *, copied: bool = False, exact: bool = True) -> Any:
    """Return a value in types that `torch.load(weights_only=True)` accepts, with tensors on the CPU.

    Args:
        value: plain types, tensors, NumPy numbers and arrays of numbers or texts, generators of random numbers
            (`numpy.random.Generator`, `torch.Generator`), paths, dates and times, and collections of Python, which
            `decode` restores. Parameters and other kinds of tensors become plain ones. `Rows` stay `Rows`; see
            `taken_out` in `emrun.storage.checkpoints.shards`.
        key: the name of the value in messages.
        copied: copy the tensors, so that later changes in place do not change the result; arrays are always copied.
        exact: refuse other mappings, lists and tuples, such as a named tuple; otherwise they become plain ones.

    Raises:
        StateError: the value is of another type; the message names its key.
    """
    kind: Any = type(value)
    if kind in _PLAIN:
        if value == b"" or (kind is int and value.bit_length() > _BITS):  # torch cannot read it back
            raise StateError(f"{key} is {'huge' if value else 'empty bytes'}, which cannot be saved; use a string")
        return value
    if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        return _encoded_array(value, key)
    inner = partial(encode, copied=copied, exact=exact)
    if is_nested(value):
        layout = "jagged" if value.layout is torch.jagged else "strided"
        return {_KIND: "nested", "layout": layout, "parts": inner(list(value.unbind()), key)}
    if isinstance(value, torch.Tensor):
        detached = value.detach()
        if type(detached) is not torch.Tensor:  # sparse ones refuse
            detached = detached.as_subclass(torch.Tensor)
        return detached.clone() if copied and detached.is_cpu else detached.cpu()
    if isinstance(value, Rows):
        return replace(value, values=inner(value.values, key))
    if kind is dict:
        if all(type(name) in _KEYS for name in value):
            return {inner(name, f"{key}: a key"): inner(entry, f"{key}.{name}") for name, entry in value.items()}
        items = [(inner(name, f"{key}: key {name!r}"), inner(entry, f"{key}.{name}")) for name, entry in value.items()]
        return {_KIND: "dict", "arguments": [items]}
    if kind in (list, tuple):
        return kind(inner(entry, f"{key}[{index}]") for index, entry in enumerate(value))
    if kind in _MADE.values():
        return {_KIND: kind.__name__, "arguments": [inner(argument, key) for argument in _arguments(value)]}
    if kind is type and value in _TYPES.values():
        return {_KIND: "type", "name": value.__name__}
    if not exact and isinstance(value, Mapping | list | tuple):
        plain = next(form for form in (list, tuple, dict) if form is dict or isinstance(value, form))
        return inner(plain(value), key)
    if isinstance(value, torch.Generator):
        return {_KIND: "torch", "device": str(value.device), "state": value.get_state()}
    bits: Any = value.bit_generator if kind is np.random.Generator else None
    if type(bits).__name__ in _BITS_OF and isinstance(seed := bits.seed_seq, np.random.SeedSequence):
        origin = [seed.entropy, seed.spawn_key, seed.n_children_spawned]  # for `spawn`
        return {_KIND: "numpy", "seed": inner(origin, key), "state": inner(bits.state, key)}
    raise _refused(value, key)


def _arguments(value: Any) -> Sequence[Any]:
    """Return the arguments that make a value of one of the types that are `_MADE` again."""
    if isinstance(value, defaultdict):
        return value.default_factory, dict(value)
    if isinstance(value, Mapping):
        return [dict(value)]
    if isinstance(value, deque):
        return list(value), value.maxlen
    if isinstance(value, set | frozenset):
        return [sorted(value, key=repr)]  # so that two runs save the same
    make, arguments, *_ = value.__reduce_ex__(2)
    return arguments if make is type(value) else arguments[1:]  # type: ignore[no-any-return]


def _encoded_array(value: Any, key: str) -> dict[str, Any]:
    """Return an array or a number of NumPy as `encode` does."""
    header = {_KIND: "number" if isinstance(value, np.generic) else "array", "dtype": value.dtype.str}
    if value.dtype.kind == "U":
        return {**header, "values": value.tolist(), "shape": value.shape}
    if value.dtype.kind in "biufc":
        with suppress(TypeError):  # torch has no such dtype
            return {
                **header,
                "values": torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C")),
            }
    raise _refused(value, key)


def _refused(value: Any, key: str) -> StateError:
    what = f"ndarray of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    return StateError(f"{key} is {what}, which cannot be saved; use plain types, tensors and arrays of numbers")


def decode(value: Any) -> Any:
    """Return what `encode` encoded; arrays may share the memory of the encoded value. A decoded value stays as it is.

    Raises:
        Exception: the value does not have the form that `encode` returns.
    """
    if isinstance(value, list | tuple):
        return type(value)(map(decode, value))
    if type(value) is not dict:
        return value
    kind: Any = value.get(_KIND)
    if kind in ("array", "number"):
        values = value["values"]
        array = values.numpy() if isinstance(values, torch.Tensor) else np.array(values).reshape(value["shape"])
        array = array.astype(value["dtype"], copy=False)
        return array[()] if kind == "number" else array
    if kind == "nested":
        return torch.nested.nested_tensor(value["parts"], layout=getattr(torch, value["layout"]))
    if kind == "torch":
        generator = torch.Generator(value["device"])
        generator.set_state(value["state"])
        return generator
    entries = {name: decode(entry) for name, entry in value.items()}
    if kind == "type":
        return _TYPES[entries["name"]]
    if kind in _MADE:
        return _MADE[kind](*entries["arguments"])
    if kind != "numpy":
        return entries
    entropy, spawn_key, spawned = entries["seed"]
    seed = np.random.SeedSequence(entropy, spawn_key=spawn_key, n_children_spawned=spawned)
    bits = getattr(np.random, _BITS_OF[_BITS_OF.index(entries["state"]["bit_generator"])])(seed)
    bits.state = entries["state"]
    return np.random.Generator(bits)


def encode_all(batch: Batch) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the encoded sources of a batch, and for each source that cannot be saved why it is left out."""
    encoded: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, values in batch.items():
        try:
            encoded[str(name)] = encode(values, f"source {name!r}", exact=False)
        except Exception as error:
            left_out[str(name)] = str(error)
    return encoded, left_out


def _python_state() -> Any:
    version, numbers, gauss = random.getstate()
    return version, array("I", numbers).tobytes(), gauss


def _numpy_state() -> Any:
    state: Any = np.random.get_state(legacy=False)
    state["state"]["key"] = state["state"]["key"].tobytes()
    return state


def _cuda_states() -> list[bytes]:
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [state.numpy().tobytes() for state in states]


GENERATORS: Mapping[str, Callable[[], Any]] = {
    "python": _python_state,
    "numpy": _numpy_state,
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
    "cuda": _cuda_states,
}
"""Name of a global generator -> the function that returns its state in plain types; `cuda` is for all devices."""


def random_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch (all CUDA devices)."""
    return {name: take() for name, take in GENERATORS.items()}


def random_digest() -> str:
    """Return a checksum of the states of the global generators of Python, NumPy and torch's CPU."""
    return digest([GENERATORS[name]() for name in ("python", "numpy", "torch")])


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the global generators to a state that `random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(array("I", numbers)), gauss))
    of_numpy = state["numpy"]["state"]
    np.random.set_state({**state["numpy"], "state": {**of_numpy, "key": np.frombuffer(of_numpy["key"], np.uint32)}})
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"]:
        torch.cuda.set_rng_state_all(map(_tensor, state["cuda"]))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(memoryview(data)), dtype=torch.uint8)  # not of a number, which is a length


def digest(batch: Any) -> str:
    """Return a checksum of the names, types, shapes and values of a batch's sources."""
    checksum = hashlib.blake2b(digest_size=16)
    _add(checksum, batch)
    return checksum.hexdigest()


def _add(checksum: Any, value: Any, inside: tuple[int, ...] = ()) -> None:
    """Add a value to a checksum.

    Args:
        checksum: the checksum.
        value: the value.
        inside: the ids of the objects that the value is a part of, which may be parts of themselves.
    """
    if is_nested(value):
        checksum.update(b"nested")
        _add(checksum, list(value.detach().unbind()))
    elif isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        checksum.update(f"{value.layout}{tuple(value.shape)}".encode())
        coordinates = value.detach().to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
        _add(checksum, [coordinates.indices(), coordinates.values()])
    elif isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
        checksum.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.numel() and not value.is_meta:
            checksum.update(value.cpu().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        checksum.update(f"{value.dtype}{value.shape}".encode())
        checksum.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            checksum.update(f"{name}:".encode())
            _add(checksum, value[name], inside)
    elif isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes):
        checksum.update(f"list{len(value)}".encode())
        for entry in value:
            _add(checksum, entry, inside)
    elif isinstance(value, (*_PLAIN, complex, np.generic)):
        checksum.update(repr(value).encode())
    else:  # an object, such as a graph, whose text tells nothing of its content
        checksum.update(type(value).__qualname__.encode())
        if id(value) not in inside:
            with suppress(Exception):  # it cannot be pickled
                reduced = value.__reduce_ex__(2)
                _add(checksum, reduced if isinstance(reduced, str) else list(reduced[1:3]), (*inside, id(value)))
