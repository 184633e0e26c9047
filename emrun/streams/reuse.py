"""Checks of batches that are read ahead: a stream must not change arrays that it has yielded; containers are copied."""

from __future__ import annotations

import array
import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from emrun.base.errors import StreamError
from emrun.streams.stream_pass import WithState

_LOG = logging.getLogger(__name__)
_WHOLE = 4096  # bytes; up to this size all of an array is compared, of a larger array a grid of its entries
_GRID = 256  # the number of entries of this grid, whose offset differs between batches
_THOROUGH = 8  # the number of arrays of a source that share memory and are compared completely
_WHOLE_THEN = 1 << 20  # bytes; the largest array for which that is done
_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))
_UNCHANGEABLE = (np.generic, str, bytes, type)
_LOOKED_AT = 16  # the number of entries of a long list that are examined
_IN_HANDS = 3  # batches: the newest, the one that is run, and one on its way from the queue to the model
_SPARE = 16 << 20  # bytes of arrays that are kept although their batches do not wait any more
_ARRAYS = (np.ndarray, torch.Tensor, memoryview)
_FILLED_AGAIN = (list, bytearray, array.array, set)
_SEQUENCES = (tuple, deque)

_Index = tuple[slice, ...] | None


class _Given:
    """An array that was yielded, and a sample of its content."""

    __slots__ = ("bounds", "index", "last", "owner", "sample", "shared", "source", "values")

    def __init__(self, source: str, values: Any, owner: Any, last: int) -> None:
        self.source = source
        self.values = values  # kept, so that its memory is not used for another array
        self.owner = owner
        self.last = last
        self.shared = False
        self.bounds: tuple[float, float] | None = None  # of its memory; computed at the first use
        self.index: _Index = None
        self.sample: Any = None

    def look(self, whole: bool) -> None:
        """Store a sample of the array's content."""
        view = _view(self.values, self.shared)
        if view.__class__ is np.ndarray:
            most = _WHOLE_THEN if whole else _WHOLE
            self.index = None if view.nbytes <= most else _grid(view.shape, self.last)
        self.sample = _sample(view, self.index)

    def overlaps(self, low: float, high: float) -> bool:
        """Return whether the array's memory overlaps a range of addresses."""
        self.bounds = self.bounds or _bounds(self.values)
        return self.bounds[0] < high and low < self.bounds[1]

    def has_changed(self) -> bool:
        """Return whether the array's content has changed."""
        sample = _sample(_view(self.values, self.shared), self.index)
        return sample != self.sample and sample is not None and self.sample is not None


class _Window:
    """The arrays of the batches that may still wait or be in use.

    Args:
        name: the name of the stream.
        ahead: the number of batches before the present one that may be in use.
        waiting: returns the number of batches that wait to be used.
    """

    def __init__(self, name: str, ahead: int, waiting: Callable[[], int]) -> None:
        self._name = name
        self._ahead = ahead
        self._waiting = waiting
        self._known: dict[int, _Given] = {}  # id of an array -> its record
        self._owners: dict[Any, tuple[int, list[_Given]]] = {}  # owner of memory -> bytes, arrays in it
        self._batches: deque[list[_Given]] = deque([[], []])  # the last one is the present batch
        self._looks: dict[str, int] = {}  # source -> the number of complete comparisons
        self._number = 0
        self._kept = 0  # bytes of all owners
        self._has_warned = False

    def give(self, source: str, values: Any) -> None:
        """Add an array of the present batch, and check the earlier arrays that share memory with it.

        Raises:
            StreamError: one of these arrays has changed.
        """
        given = self._known.get(id(values))
        if given is not None:
            if given.has_changed():
                raise self._changed(given)
            given.last = self._number
            if given.index is not None or not given.shared:
                given.shared = True
                given.look(self._is_thorough(source))
        else:
            owner, size = _owner(values)
            given = _Given(source, values, owner, self._number)
            size, others = self._owners.setdefault(owner, (size, []))
            if others:
                given.shared = True
                given.bounds = _bounds(values)
                for other in others:
                    if other.overlaps(*given.bounds) and other.has_changed():
                        raise self._changed(other)
                    other.shared = True
            else:
                self._kept += size
            others.append(given)
            given.look(self._is_thorough(source) if others[1:] else self._number == 0)
            self._known[id(values)] = given
        self._batches[-1].append(given)

    def end(self) -> None:
        """End the present batch and begin the next: check the previous batch, and remove batches out of use.

        Small batches are kept as long as they may wait, so that the result does not depend on which thread is faster.

        Raises:
            StreamError: the previous batch waits to be used and has changed.
        """
        if not self._known:  # no batch has arrays
            return
        for given in self._batches[-2]:
            if given.last != self._number and (given.shared or self._waiting()) and given.has_changed():
                if self._waiting():
                    raise self._changed(given)
                if not self._has_warned:
                    self._has_warned = True
                    _LOG.warning("%s", self._changed(given, "is still in use"))
        while len(self._batches) > self._ahead or (
            self._kept > _SPARE and len(self._batches) > self._waiting() + _IN_HANDS
        ):
            number = self._number + 1 - len(self._batches)
            for given in self._batches.popleft():
                if given.last <= number and self._known.pop(id(given.values), None) is not None:
                    size, left = self._owners[given.owner]
                    left.remove(given)
                    if not left:
                        del self._owners[given.owner]
                        self._kept -= size
        self._number += 1
        self._batches.append([])

    def _is_thorough(self, source: str) -> bool:
        looks = self._looks[source] = self._looks.get(source, 0) + 1
        return looks <= _THOROUGH

    def _changed(self, given: _Given, where: str = "still waits to be used") -> StreamError:
        return StreamError(
            f"stream {self._name!r} changed {given.source!r} of a batch that it has already yielded and that {where}; "
            "a stream that is read ahead must yield a new array or a copy for each batch (a hook or a model that "
            "changes a batch in place must copy it first)"
        )


def checked_for_reuse(
    batches: Iterator[Any], name: str, ahead: int, waiting: Callable[[], int] | None = None
) -> Iterator[Any]:
    """Yield batches that are read ahead, and check that the stream does not change batches that it has yielded.

    Mappings, lists and similar containers are copied at all levels; arrays and tensors are not. A sample of an array's
    content is stored when the array is yielded. It is compared when the next batch is made, if the array's batch still
    waits, and whenever an array that shares its memory is yielded while the first array may wait or be in use. So a
    stream may yield the same memory any number of times, also overlapping parts of it, if no code writes into it.

    Args:
        batches: the batches of a `StreamPass`.
        name: the name of the stream.
        ahead: the number of batches before the present one that may be in use.
        waiting: returns the number of batches that wait to be used; None if it is not known, then up to `ahead`.

    Raises:
        StreamError: the stream changed a batch that it had yielded.
    """
    window = _Window(name, ahead, waiting or (lambda: ahead))
    for item in _closing(batches):
        batch = item.batch if item.__class__ is WithState else item
        if not hasattr(batch, "items"):  # the loop reports this
            yield item
            continue
        parts: Any = {
            name: part.copy() if part.__class__ is list and _is_plain(part) else _part(name, part, window.give)
            for name, part in batch.items()
        }
        copied = parts if batch.__class__ is dict else _of_its_kind(batch, parts)
        window.end()
        yield item._replace(batch=copied) if item.__class__ is WithState else copied
        del item, batch, copied
    window.end()


def _closing(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches; unlike a `for` loop, this closes their generator when it is closed itself."""
    yield from batches


def _part(source: str, value: Any, give: Callable[[str, Any], None]) -> Any:
    """Return a copy of a container that a stream may fill again; call `give` for its arrays, which are not copied."""
    kind = value.__class__
    if kind is np.ndarray and not value.dtype.hasobject:
        give(source, value)
    elif kind is list or isinstance(value, _SEQUENCES):
        if _is_plain(value):
            return value if isinstance(value, tuple) else value.copy()
        entries = [_part(source, each, give) for each in value]
        if kind in (list, tuple, deque):
            return kind(entries)
        return value._make(entries) if hasattr(kind, "_make") else value
    elif kind in _PLAIN or isinstance(value, _UNCHANGEABLE):
        return value
    elif isinstance(value, np.ma.MaskedArray):
        for each in (value.data, value.mask):
            if isinstance(each, np.ndarray):  # otherwise nothing is masked
                give(source, each)
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        return value.copy()
    elif isinstance(value, Mapping):
        parts = {key: _part(source, each, give) for key, each in value.items()}
        return parts if kind is dict else _of_its_kind(value, parts)
    elif isinstance(value, _FILLED_AGAIN):
        return copy.copy(value)
    elif isinstance(value, _ARRAYS) or _may_have_memory(value):
        give(source, value)
    return value


def _may_have_memory(value: Any) -> bool:
    """Return whether NumPy can convert an object to an array, without running code of its class."""
    if any("__array__" in each.__dict__ or "__array_interface__" in each.__dict__ for each in type(value).__mro__):
        return True
    try:
        return "__array_interface__" in object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return False


def _is_plain(values: Any) -> bool:
    """Return whether a list has only plain values; of a long list, only some entries are examined."""
    if values.__class__ is not deque and len(values) > 2 * _LOOKED_AT:
        values = values[:: len(values) // _LOOKED_AT]
    return _PLAIN.issuperset(map(type, values))


def _of_its_kind(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with these parts; a dict if the mapping cannot be copied."""
    try:
        found = copy.copy(value)
    except Exception:  # for example a view of a mapping
        return parts
    if isinstance(found, MutableMapping):
        for key, part in parts.items():
            if found.get(key) is not part:
                found[key] = part
    return found


def _view(values: Any, by_force: bool = True) -> Any:
    """Return an array over the memory of an array-like object; the object itself if its memory cannot be accessed.

    The result is not cached, because the memory of a tensor may be replaced.

    Args:
        values: an array, a tensor, a memoryview, or an object that NumPy can convert to an array.
        by_force: whether to convert the last kind of object too, which may be slow.
    """
    if values.__class__ is np.ndarray:
        return values
    try:
        if isinstance(values, torch.Tensor):
            if values.requires_grad:
                values = values.detach()
            if values.dtype is torch.bfloat16:
                values = values.view(torch.int16)
            return values.numpy() if values.is_cpu else values
        if isinstance(values, np.ndarray | memoryview):
            return np.asarray(values)
        if by_force:
            view, again = np.asarray(values), np.asarray(values)
            if not view.dtype.hasobject and _address(view) == _address(again):  # otherwise the array is a copy
                return view
    except Exception:  # arrays do not have this layout or dtype
        return values
    return values


def _address(view: Any) -> int:
    return int(view.__array_interface__["data"][0])


def _owner(values: Any, size: int = _SPARE + 1) -> tuple[Any, int]:
    """Return a key for the owner of an array's or a tensor's memory, and the size of this memory in bytes.

    Args:
        values: the array or tensor, or the object that owns its memory.
        size: the size to return if `values` does not provide it.
    """
    if isinstance(values, np.ndarray):
        return (id(values), values.nbytes) if values.base is None else _owner(values.base, values.nbytes)
    if isinstance(values, memoryview):
        return _owner(values.obj, values.nbytes)
    if isinstance(values, torch.Tensor):
        try:
            storage = values.untyped_storage()
            return storage.data_ptr() or id(values), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # the tensor has no memory of its own
            pass
    return id(values), size


def _bounds(values: Any) -> tuple[float, float]:
    """Return the addresses where an array's memory begins and ends; an infinite range if they are not known."""
    view = _view(values)
    if not isinstance(view, np.ndarray):
        return -math.inf, math.inf
    low = _address(view)
    if view.flags.c_contiguous:
        return low, low + view.nbytes
    steps = [(length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True)]
    return low + sum(min(0, each) for each in steps), low + sum(max(0, each) for each in steps) + view.itemsize


def _sample(view: Any, index: _Index) -> Any:
    """Return the content of an array or a part of it; for a tensor that NumPy cannot view, its version counter."""
    if isinstance(view, np.ndarray):
        if index is None:
            return view.tobytes()
        return view[index].tobytes() if view.ndim == len(index) else view.shape
    try:
        return view._version if isinstance(view, torch.Tensor) else None
    except RuntimeError:  # a tensor of inference mode has no version counter
        return None


def _grid(shape: tuple[int, ...], number: int) -> tuple[slice, ...]:
    """Return an index of about `_GRID` evenly spaced entries of an array; `number` shifts the grid."""
    each = max(1, round(_GRID ** (1 / len(shape))))
    steps = [max(1, length // each) for length in shape]
    return tuple(slice(number * 31 % step, None, step) for step in steps)
