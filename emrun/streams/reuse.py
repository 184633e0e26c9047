"""Batches that are read ahead: a stream may not change what it gave away, and what it may refill is copied."""

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

from emrun.errors import StreamError
from emrun.streams.stream_pass import WithState

_LOG = logging.getLogger(__name__)
_WHOLE = 4096  # bytes up to which all of an array is compared; of a larger one, a grid of its entries
_GRID = 256  # entries of it, which lie elsewhere in another batch
_THOROUGH = 8  # so many arrays of a source that share memory are compared whole,
_WHOLE_THEN = 1 << 20  # up to so many bytes
_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))
_UNCHANGEABLE = (np.generic, str, bytes, type)
_LOOKED_AT = 16  # entries of a long list
_IN_HANDS = 3  # batches: the one just made, the one at work, and one that is on its way to it
_SPARE = 16 << 20  # bytes of arrays that are kept though nobody waits for them
_ARRAYS = (np.ndarray, torch.Tensor, memoryview)
_FILLED_AGAIN = (list, bytearray, array.array, set)
_SEQUENCES = (tuple, deque)

_Index = tuple[slice, ...] | None


class _Given:
    """An array that was given away, and what was in it."""

    __slots__ = ("bounds", "index", "last", "owner", "sample", "shared", "source", "values")

    def __init__(self, source: str, values: Any, owner: Any, last: int) -> None:
        self.source = source
        self.values = values  # kept, so that its memory is not used again for another one
        self.owner = owner
        self.last = last
        self.shared = False
        self.bounds: tuple[float, float] | None = None  # of its memory; found when somebody asks
        self.index: _Index = None
        self.sample: Any = None

    def look(self, whole: bool) -> None:
        """Take note of what is in the array."""
        view = _view(self.values, self.shared)
        if view.__class__ is np.ndarray:
            most = _WHOLE_THEN if whole else _WHOLE
            self.index = None if view.nbytes <= most else _grid(view.shape, self.last)
        self.sample = _sample(view, self.index)

    def overlaps(self, low: float, high: float) -> bool:
        """Tell whether its memory has a part in common with some other."""
        self.bounds = self.bounds or _bounds(self.values)
        return self.bounds[0] < high and low < self.bounds[1]

    def has_changed(self) -> bool:
        """Tell whether something else is in it now."""
        sample = _sample(_view(self.values, self.shared), self.index)
        return sample != self.sample and sample is not None and self.sample is not None


class _Window:
    """What is in the batches that may wait or be in use.

    Args:
        name: the name of the stream.
        ahead: how many batches before the one that is made may be in use.
        waiting: tells how many batches wait to be used.
    """

    def __init__(self, name: str, ahead: int, waiting: Callable[[], int]) -> None:
        self._name = name
        self._ahead = ahead
        self._waiting = waiting
        self._known: dict[int, _Given] = {}  # the identity of an array -> what is known of it
        self._owners: dict[Any, tuple[int, list[_Given]]] = {}  # whose memory it is -> bytes of it, and likewise
        self._batches: deque[list[_Given]] = deque([[], []])  # the last one is being made
        self._looks: dict[str, int] = {}  # source -> how many arrays with memory in common were compared whole
        self._number = 0
        self._kept = 0  # bytes of all of them
        self._has_warned = False

    def give(self, source: str, values: Any) -> None:
        """Take note of an array of the batch, and compare those before it that have memory in common with it.

        Raises:
            StreamError: they are not what they were.
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
        """End the batch and begin the next: compare the one before it, and forget those that nobody has any more.

        Small ones are kept as long as they may wait, so that what is noticed does not depend on who is faster.

        Raises:
            StreamError: it waits, and is not what it was.
        """
        if not self._known:  # no batch has an array
            return
        for given in self._batches[-2]:
            if given.last != self._number and (given.shared or self._waiting()) and given.has_changed():
                if self._waiting():
                    raise self._changed(given)
                if not self._has_warned:
                    self._has_warned = True
                    _LOG.warning("%s", self._changed(given, "is in use"))
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

    def _changed(self, given: _Given, where: str = "waits to be used") -> StreamError:
        return StreamError(
            f"stream {self._name!r} changes the {given.source!r} of a batch that it gave away, and which {where}, as "
            "it is read ahead; make a new array for each batch, or copy it (a hook or a model that changes it in place "
            "has to copy it too)"
        )


def checked_for_reuse(
    batches: Iterator[Any], name: str, ahead: int, waiting: Callable[[], int] | None = None
) -> Iterator[Any]:
    """Yield batches that are read ahead, and check that the stream leaves alone what it gave away.

    Mappings, lists and the like are copied, as deep as they lie in each other; arrays and tensors are not. What is in
    an array is noted when it is given away, and compared when the next batch is made, if it still waits, and whenever
    an array that has memory in common with it is given away while it may wait or be in use. So memory may be given away
    as often as one likes, also in parts that overlap, as long as nobody writes into it.

    Args:
        batches: what a `StreamPass` reads.
        name: the name of the stream.
        ahead: how many batches before the one that is made may be in use.
        waiting: tells how many batches wait to be used; None: nobody knows, so that all of `ahead` may.

    Raises:
        StreamError: it changed one of them.
    """
    window = _Window(name, ahead, waiting or (lambda: ahead))
    for item in _closing(batches):
        batch = item.batch if item.__class__ is WithState else item
        if not hasattr(batch, "items"):  # which the loop complains about
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
    """Yield the batches; unlike a loop over them, this ends their generator when it is ended itself."""
    yield from batches


def _part(source: str, value: Any, give: Callable[[str, Any], None]) -> Any:
    """Return a copy of what a stream may fill again, and give away the arrays in it, which are not copied."""
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
            if isinstance(each, np.ndarray):  # else nothing is masked
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
    """Tell whether an array can be made of an object, without running any code of its class."""
    if any("__array__" in each.__dict__ or "__array_interface__" in each.__dict__ for each in type(value).__mro__):
        return True
    try:
        return "__array_interface__" in object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return False


def _is_plain(values: Any) -> bool:
    """Tell whether a list has nothing in it that is looked at; of a long one, some entries speak for all."""
    if values.__class__ is not deque and len(values) > 2 * _LOOKED_AT:
        values = values[:: len(values) // _LOOKED_AT]
    return _PLAIN.issuperset(map(type, values))


def _of_its_kind(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with its parts; one that is not a dict may not let them be set."""
    try:
        found = copy.copy(value)
    except Exception:  # such as of a view of a mapping
        return parts
    if isinstance(found, MutableMapping):
        for key, part in parts.items():
            if found.get(key) is not part:
                found[key] = part
    return found


def _view(values: Any, by_force: bool = True) -> Any:
    """Return an array over the memory of something like an array; the thing itself where it shows none.

    Made anew each time: the memory of a tensor may be replaced.

    Args:
        values: an array, a tensor, a memoryview, or any object that arrays can be made of.
        by_force: also of the last kind, which may cost something.
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
            if not view.dtype.hasobject and _address(view) == _address(again):  # else of something made anew
                return view
    except Exception:  # of a layout or a type that arrays do not have
        return values
    return values


def _address(view: Any) -> int:
    return int(view.__array_interface__["data"][0])


def _owner(values: Any, size: int = _SPARE + 1) -> tuple[Any, int]:
    """Return a key of whose memory an array or a tensor lies in, and how large that is.

    Args:
        values: the array or tensor, or what its memory belongs to.
        size: how large it is when that is not known of `values`.
    """
    if isinstance(values, np.ndarray):
        return (id(values), values.nbytes) if values.base is None else _owner(values.base, values.nbytes)
    if isinstance(values, memoryview):
        return _owner(values.obj, values.nbytes)
    if isinstance(values, torch.Tensor):
        try:
            storage = values.untyped_storage()
            return storage.data_ptr() or id(values), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # without memory of its own
            pass
    return id(values), size


def _bounds(values: Any) -> tuple[float, float]:
    """Return where the memory of an array begins and ends, everywhere for what is none."""
    view = _view(values)
    if not isinstance(view, np.ndarray):
        return -math.inf, math.inf
    low = _address(view)
    if view.flags.c_contiguous:
        return low, low + view.nbytes
    steps = [(length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True)]
    return low + sum(min(0, each) for each in steps), low + sum(max(0, each) for each in steps) + view.itemsize


def _sample(view: Any, index: _Index) -> Any:
    """Return what is in an array, or in a part of it; of a tensor that is none, how often torch changed it."""
    if isinstance(view, np.ndarray):
        if index is None:
            return view.tobytes()
        return view[index].tobytes() if view.ndim == len(index) else view.shape
    try:
        return view._version if isinstance(view, torch.Tensor) else None
    except RuntimeError:  # it was made where nobody counts
        return None


def _grid(shape: tuple[int, ...], number: int) -> tuple[slice, ...]:
    """Return an index of some `_GRID` entries of an array, evenly spread; of others for another number."""
    each = max(1, round(_GRID ** (1 / len(shape))))
    steps = [max(1, length // each) for length in shape]
    return tuple(slice(number * 31 % step, None, step) for step in steps)
