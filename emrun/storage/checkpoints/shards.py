"""Tensors of a checkpoint, as each rank has written some rows of them or one process all; read here in either case.

Of a sharded model, rank 1 writes `model-1.safetensors`, `training-1.safetensors` and `state-1.safetensors`: its rows of
the tensors that an unsharded checkpoint has in `model.safetensors`, `training.safetensors` and `state.pt`. Rank 0 also
writes what is not sharded, and `shards.json`: the dtype and the shape of each tensor, and which of its rows lie where.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._pytree import keystr, tree_map, tree_map_with_path

from emrun.base.encoding import Rows
from emrun.base.errors import StorageError
from emrun.base.fields import (
    ANOTHER_CHECKPOINT,
    FILE_NAME,
    TEXT,
    FieldError,
    Kind,
    mapping_of,
    reading,
    record,
    sequence_of,
    whole,
)
from emrun.base.wording import few
from emrun.storage.checkpoints.manifest import SHARDS
from emrun.storage.checkpoints.weights import Collected, read_weights, write_weights
from emrun.storage.files import opened_regular, read_regular, storing
from emrun.storage.sealed import describe

OF_STATE = "state.safetensors"
"""What `shards.json` calls the tensors of `state.pt`."""
_LARGEST = 500_000_000  # bytes of `shards.json`
_ROWS = "emrun.rows"  # the only key of a mapping in `state.pt` that stands for a tensor with the name that it has

Shard = dict[str, Any]
"""What a rank has written: `files`, name -> checksum and size, and its part of `shards.json`."""

_DTYPE = Kind("a dtype of torch, such as 'float32'", lambda name: isinstance(getattr(torch, name), torch.dtype))
_PIECE = record({"file": FILE_NAME, "begin": whole(), "end": whole()})
_TENSOR = record({"dtype": _DTYPE, "shape": sequence_of(whole()), "pieces": sequence_of(_PIECE)})
_CONTENT = record({"tensors": mapping_of(mapping_of(_TENSOR)), "tied": mapping_of(mapping_of(TEXT))})


def write_shard(collected: Mapping[str, Collected], rank: int, directory: Path) -> Shard:
    """Write what a rank has of the tensors of a checkpoint to files of its own, and flush them to disk.

    Args:
        collected: name of a file, such as `model.safetensors` -> the tensors, and the names of tied ones. A tensor that
            is not `Rows` is whole on all ranks, and is written by rank 0.
        rank: the rank.
        directory: the directory of the files.

    Raises:
        StorageError: a file cannot be written.
    """
    shard: Shard = {"files": {}, "tensors": {}, "tied": {name: dict(tied) for name, (_, tied) in collected.items()}}
    for name, (tensors, _) in collected.items():
        file = f"{Path(name).stem}-{rank}.safetensors"
        owned: dict[str, Rows] = {}
        for key, tensor in tensors.items():
            if isinstance(tensor, Rows):
                owned[key] = tensor
            elif rank == 0:
                owned[key] = Rows(tensor, tuple(tensor.shape), 0)
        write_weights({key: rows.values for key, rows in owned.items()}, {}, directory, file)
        with storing(directory / file, "write"):
            shard["files"][file] = describe(directory / file, flushes=True)
        entries = shard["tensors"][name] = {}
        for key, rows in owned.items():
            piece = {"file": file, "begin": rows.begin, "end": rows.begin + _rows_in(rows.values.shape)}
            dtype = str(rows.values.dtype).removeprefix("torch.")
            entries[key] = {"dtype": dtype, "shape": list(rows.shape), "pieces": [piece]}
    return shard


def _rows_in(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


def write_places(directory: Path, shards: Sequence[Shard]) -> dict[str, Any]:
    """Write `shards.json`, after all ranks have written their files; return name -> checksum and size of these.

    Raises:
        StorageError: the file cannot be written.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for shard in shards:
        for name, entries in shard["tensors"].items():
            places = tensors.setdefault(name, {})
            for key, entry in entries.items():
                places.setdefault(key, {**entry, "pieces": []})["pieces"] += entry["pieces"]
    tied = {name: names for shard in shards for name, names in shard["tied"].items()}
    with storing(directory / SHARDS, "write"):
        (directory / SHARDS).write_text(json.dumps({"tensors": tensors, "tied": tied}) + "\n", encoding="utf-8")
    return {name: description for shard in shards for name, description in shard["files"].items()}


def has_tensors(directory: Path, name: str) -> bool:
    """Return whether a checkpoint has the tensors of a file, such as `training.safetensors`, in one file or several."""
    return name in _read(directory)["tensors"] if (directory / SHARDS).exists() else (directory / name).exists()


def read_tensors(directory: Path, name: str) -> dict[str, Any]:
    """Return the tensors that a checkpoint has in a file, or that its ranks have in theirs.

    Returns:
        Name -> a tensor, or a `Stored` one; for either, a slice of its rows reads these alone. A tied tensor is
        returned under each of its names.

    Raises:
        StorageError: a file cannot be read.
        StateError: the rows of a tensor are not each in exactly one file.
    """
    if not (directory / SHARDS).exists():
        return read_weights(directory, name)
    content = _read(directory)
    opened = _Opened(directory)
    tensors: dict[str, Any] = {}
    with reading(f"{directory / SHARDS}", ANOTHER_CHECKPOINT):
        for key, entry in content["tensors"][name].items():
            pieces = sorted((piece["begin"], piece["end"], piece["file"]) for piece in entry["pieces"])
            _check_rows(f"tensors.{name}.{key}", _rows_in(entry["shape"]), pieces)
            tensors[key] = Stored(opened, key, getattr(torch, entry["dtype"]), torch.Size(entry["shape"]), pieces)
        return tensors | {key: tensors[other] for key, other in content["tied"][name].items()}


def _read(directory: Path) -> dict[str, Any]:
    with reading(f"{directory / SHARDS}", ANOTHER_CHECKPOINT):
        content: dict[str, Any] = json.loads(read_regular(directory / SHARDS, _LARGEST))
        _CONTENT.check(content)
    return content


def _check_rows(key: str, count: int, pieces: Sequence[tuple[int, int, str]]) -> None:
    """Check that the pieces of a tensor have each of its rows once."""
    is_whole = True
    next_row = 0
    for begin, end, _ in pieces:
        if begin != next_row or end < begin:
            is_whole = False
        next_row = end
    if not is_whole or next_row != count:
        rows = few((f"{begin} to {end} in {file}" for begin, end, file in pieces), 300)
        raise FieldError(key, f"has the rows {rows}", f"a tensor of {count} rows, each in one file")


class _Opened(dict[str, Any]):
    """The opened files of a directory, by their names."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def __missing__(self, name: str) -> Any:
        with opened_regular(self.directory / name):  # a pipe would wait for a writer
            self[name] = safe_open(self.directory / name, framework="pt")
        return self[name]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor whose rows lie in several files. A slice of its rows is read from the files that have them.

    Its other attributes and methods, such as `numel`, are those of a tensor of zeros; `whole_of` reads the tensor.

    Args:
        files: the files.
        name: its name in the files.
        dtype: its dtype.
        shape: its shape; a scalar has one row.
        pieces: first row, end and file of each piece, in their order.
    """

    files: _Opened
    name: str
    dtype: torch.dtype
    shape: torch.Size
    pieces: Sequence[tuple[int, int, str]]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.zeros((), dtype=self.dtype).expand(self.shape), name)

    def __getitem__(self, rows: slice) -> Tensor:
        begin, end, _ = rows.indices(_rows_in(self.shape))
        pieces = [
            self._rows(file, max(begin, first), min(end, last), first, last)
            for first, last, file in self.pieces
            if max(begin, first) < min(end, last)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty((0, *self.shape[1:]), dtype=self.dtype)

    def _rows(self, file: str, begin: int, end: int, first: int, last: int) -> Tensor:
        path = self.files.directory / file
        is_all = (begin, end) == (first, last)
        with storing(path, "read", SafetensorError):
            piece = self.files[file].get_slice(self.name)
            shape = tuple(piece.get_shape())
            rows: Tensor = self.files[file].get_tensor(self.name) if is_all else piece[begin - first : end - first]
        wanted = (last - first, *self.shape[1:]) if self.shape else ()
        if (rows.dtype, shape) != (self.dtype, wanted):
            mismatch = f"{rows.dtype} of shape {shape}, but {SHARDS} says {self.dtype} of shape {wanted}"
            raise StorageError(errno.EIO, f"cannot read {path}: {self.name!r} is {mismatch}")
        return rows


def whole_of(value: Any) -> Any:
    """Return a `Stored` tensor with all its rows; another value as it is."""
    return value[:] if isinstance(value, Stored) else value


def taken_out(state: Any, rows: dict[str, Rows]) -> Any:
    """Return an encoded state in which each `Rows` is replaced by its name, under which `rows` gets it."""

    def take(path: Any, value: Any) -> Any:
        if not isinstance(value, Rows):
            return value
        rows[keystr(path)] = value
        return {_ROWS: keystr(path)}

    return tree_map_with_path(take, state)


def put_back(state: Any, tensors: Mapping[str, Any]) -> Any:
    """Return a state with the tensors that `taken_out` has replaced by their names."""
    return tree_map(lambda value: tensors[value[_ROWS]] if _is_name(value) else value, state, is_leaf=_is_name)


def _is_name(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_ROWS}
