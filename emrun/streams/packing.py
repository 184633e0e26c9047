"""How a batch is sent from a worker process to the loop: tensors and larger arrays go through shared memory."""

from __future__ import annotations

import errno
import pickle
import shutil
import weakref
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from emrun.base.errors import StorageError
from emrun.base.wording import size_of
from emrun.stream_context import Array

_BY_PIPE = 4096  # bytes; a smaller array costs less in a pipe than in shared memory
_PLACE = Path("/dev/shm")
_made: dict[int, Any] = {}  # id of an array of `shared_empty` that was not sent -> its memory
_MOST_SHARED = 16  # arrays and tensors of a message, such as those of a list; each is an open file in the loop
_HELD_BY_PIPE = 1 << 16  # bytes; a longer message would block in a full pipe until the loop reads it


def packed(item: Any) -> memoryview:
    """Return a message from which `pickle.loads` restores the item in another process, while this process is running.

    Tensors and larger arrays are copied to shared memory; a tensor keeps its strides if they leave no gaps.
    """
    message = _Pickler.dumps(item, pickle.HIGHEST_PROTOCOL)
    return message if len(message) <= _HELD_BY_PIPE else _Pickler.dumps(_Long(message))


class _Long(NamedTuple):
    """A message that is sent as a whole through shared memory."""

    message: memoryview

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (np.frombuffer(self.message, np.uint8),)


class _Pickler(ForkingPickler):
    _shared = 0  # arrays and tensors that have got shared memory

    def reducer_override(self, item: Any) -> Any:
        kind = item.__class__
        memory = _made.pop(id(item), None)
        if memory is not None and item.flags.c_contiguous:
            item.flags.writeable = False  # the loop has it from now on
            return _array, (memory, item.dtype, item.shape)
        if kind not in (np.ndarray, torch.Tensor):
            return NotImplemented
        is_small = item.nbytes <= _BY_PIPE or self._shared >= _MOST_SHARED
        if is_small and kind is torch.Tensor and item.is_contiguous():
            with suppress(TypeError, RuntimeError):  # NumPy has no such dtype, or the tensor has a gradient
                return _tensor, (item.numpy(),)
        self._shared += not is_small
        if kind is np.ndarray and not is_small and not item.dtype.hasobject:
            memory = _shared_memory(item.nbytes)
            _array(memory, item.dtype, item.shape)[...] = item
            return _array, (memory, item.dtype, item.shape)
        if (
            kind is torch.Tensor
            and item.is_cpu
            and item.layout is torch.strided
            and not (item.is_quantized or item.is_nested)
        ):
            like = torch.empty_like(item, device="meta")
            memory = _shared_memory(item.numel() * item.element_size())
            tensor = torch.empty(0, dtype=item.dtype).set_(memory, 0, like.shape, like.stride()).copy_(item.detach())
            return reduce_tensor(tensor.requires_grad_(item.requires_grad))  # type: ignore[no-untyped-call]
        return NotImplemented


def shared_empty(shape: Any, dtype: Any) -> Array:
    """Return a new array in shared memory, which is sent once without a copy; a small one is an array as usual."""
    array = np.empty(shape, dtype)  # without values, it takes no memory
    if array.nbytes > _BY_PIPE and not array.dtype.hasobject:
        memory = _shared_memory(array.nbytes)
        array = _array(memory, array.dtype, array.shape)
        _made[id(array)] = memory
        weakref.finalize(array, _made.pop, id(array), None)
    return array


def _shared_memory(size: int) -> Any:
    if _PLACE.is_dir() and (free := shutil.disk_usage(_PLACE).free) < size:  # otherwise, writing would end the process
        message = f"{_PLACE}, the shared memory, has {size_of(free)} free, but a worker process needs {size_of(size)}"
        raise StorageError(errno.ENOSPC, f"{message}; use fewer `workers`, a smaller `buffer` or smaller batches")
    return torch.UntypedStorage._new_shared(max(1, size))  # type: ignore[no-untyped-call]


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array)


def _array(memory: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    return np.ndarray(shape, dtype, torch.empty(0, dtype=torch.uint8).set_(memory).numpy())
