"""Weights that any program saved: reads the tensors of a run, a checkpoint, a directory of transformers, or a file.

Nothing in a file is trusted: nothing is imported, called, or used as a path that leaves the directory.
"""

from __future__ import annotations

import errno
import json
import re
import stat
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emrun.base.errors import StorageError, UsageError, reason_of
from emrun.base.wording import few, in_one_line
from emrun.storage.checkpoints.finding import find, note_intact
from emrun.storage.checkpoints.manifest import FILE as MANIFEST, SHARDS, verify
from emrun.storage.checkpoints.shards import read_tensors
from emrun.storage.checkpoints.state_file import is_compressed
from emrun.storage.checkpoints.weights import FILE, INDEX, read_safetensors
from emrun.storage.files import refuse_timeout, storing
from emrun.storage.run import CHECKPOINTS, holds_run

_INDEX_ENDING = ".index.json"
_LARGEST_INDEX = 100_000_000  # bytes, as safetensors limits its headers
_CALLED = re.compile(r"GLOBAL ([\w.]+)")
_ALONE = "save the state dict alone: torch.save(module.state_dict(), PATH)"


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The tensors that a program saved.

    Args:
        source: where they are from, for messages: the path, and the checkpoint of a run.
        tensors: name -> tensor on the CPU. Those of safetensors are mapped from the file: each is read when it is used.
            Those of a sharded model are `Stored`.
        others: entries of a state dict that are not tensors.
    """

    source: str
    tensors: Mapping[str, Tensor]
    others: list[str]


def read_saved(path: Path) -> SavedWeights:
    """Read the weights at a path.

    Args:
        path: a run directory, which means its checkpoint `best`, or `latest` if there is no `best`; the directory of a
            checkpoint; a directory with `model.safetensors` or `model.safetensors.index.json`, such as transformers
            writes; or a file: safetensors, an index of files (`.index.json`), or a state dict that `torch.save` wrote.

    Raises:
        UsageError: there is nothing at the path, or the directory holds no weights.
        StateError: a field of a checkpoint's manifest has an invalid value.
        StorageError: a file cannot be read, is damaged, or is not what its name says.
    """
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} does not exist; write the path of a run, a checkpoint or a file on this machine"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise StorageError(errno.EIO, f"cannot read {path}: {reason_of(error)}") from error
    if not is_directory:
        return _of_file(path)
    if holds_run(path):
        return _of_run(path)
    if (path / MANIFEST).exists():
        verify(path.resolve())
        if not _weights_in(path).exists():
            raise UsageError(f"checkpoint {path} has no {FILE}: its model saves its weights in another way")
    file = _weights_in(path)
    if not file.exists():
        raise UsageError(
            f"{path} is neither a run nor a checkpoint, and has no {FILE} or {INDEX}; write the path of a file"
        )
    return _of_file(file)


def _weights_in(directory: Path) -> Path:
    """Return the file that has or lists the weights; `model.safetensors` if neither is there."""
    for name in (FILE, INDEX, SHARDS):
        if (directory / name).exists():
            return directory / name
    return directory / FILE


def _of_run(path: Path) -> SavedWeights:
    """Read `best` of a run, otherwise `latest`. If the run trains, and the name moves meanwhile, read the newer one."""
    root = path / CHECKPOINTS
    while True:
        try:
            place = find(root, "best")
            which = "best"
        except UsageError:
            place = find(root)
            which = "the run has no best; latest"
        try:
            verify(place)
            weights = _of_file(_weights_in(place))
        except StorageError as error:
            if find(root) == place:
                note_intact(error, root)
                raise
            continue
        return SavedWeights(f"{path} ({which}: {place.name})", weights.tensors, weights.others)


def _of_file(path: Path) -> SavedWeights:
    with storing(path, "read"):
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device may never end
            raise StorageError(errno.EINVAL, f"cannot read {path}: it is not a regular file")
    if path.name == SHARDS:
        return SavedWeights(str(path), read_tensors(path.parent, FILE), [])
    if path.name.endswith(_INDEX_ENDING):
        return SavedWeights(str(path), _of_index(path), [])
    if path.suffix != ".safetensors":
        return _state_dict(path, _load(path))
    return SavedWeights(str(path), read_safetensors(path), [])


def _of_index(path: Path) -> dict[str, Tensor]:
    """Read the tensors that an index of files lists."""
    # the index
    with storing(path, "read"):
        size = path.stat().st_size
        if size > _LARGEST_INDEX:
            raise StorageError(errno.EFBIG, f"cannot read {path}: an index of {size} bytes")
        text = path.read_bytes()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StorageError(errno.EINVAL, f"cannot read {path}: it is not JSON ({error})") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        wanted = "it has no weight_map, a mapping from names of tensors to names of files"
        raise StorageError(errno.EINVAL, f"cannot read {path}: {wanted}")

    # the files that it names
    files: dict[str, Mapping[str, Tensor]] = {}
    for file in dict.fromkeys(names.values()):
        is_plain = file == Path(file).name and "\\" not in file and file.isprintable() and file not in ("", ".", "..")
        if not is_plain or file.endswith(".json"):
            wrong = f"{in_one_line(file)!r} is not the name of a file with weights in its directory"
            raise StorageError(errno.EINVAL, f"cannot read {path}: {wrong}")
        if not (path.parent / file).exists():
            raise StorageError(errno.ENOENT, f"cannot read {path}: {path.parent / file} is missing")
        files[file] = _of_file(path.parent / file).tensors

    # the tensors
    lacking = [name for name, file in names.items() if name not in files[file]]
    if lacking:
        wrong = f"{in_one_line(names[lacking[0]])} has no {few(lacking)}"
        raise StorageError(errno.EINVAL, f"cannot read {path}: {wrong}; the files are of different models")
    return {name: files[file][name] for name, file in names.items()}


def _load(path: Path) -> Any:
    """Return what `torch.save` wrote; nothing in the file is imported or called."""
    try:
        with storing(path, "read"):
            with path.open("rb") as file:  # older versions of torch wrote no archive
                if zipfile.is_zipfile(file) and is_compressed(file, path.stat().st_size):
                    wrong = "it is compressed, so larger inside than outside"
                    raise StorageError(errno.EINVAL, f"cannot read {path}: {wrong}")
            return torch.load(path, map_location="cpu", weights_only=True)
    except StorageError:
        raise
    except Exception as error:  # torch raises many types; some messages advise to disable `weights_only`
        refuse_timeout(error, path)
        called = _CALLED.search(str(error))
        reason = "torch.save did not write it as a state dict"
        if called is not None:
            reason = (
                f"it needs {in_one_line(called[1])}, and only tensors and plain values are read; nothing was called"
            )
        raise StorageError(errno.EINVAL, f"cannot read {path}: {reason}; {_ALONE}") from error


def _state_dict(path: Path, content: Any) -> SavedWeights:
    """Return the state dict that `torch.save` wrote."""
    entries = content if isinstance(content, Mapping) else {}
    tensors = {key: tensor for key, tensor in entries.items() if isinstance(key, str) and isinstance(tensor, Tensor)}
    if not tensors:
        what = f"a mapping of {few(map(str, entries))}" if entries else f"a {type(content).__name__}"
        raise StorageError(errno.EINVAL, f"cannot read {path}: it holds {what}, not a state dict; {_ALONE}")
    return SavedWeights(str(path), tensors, [str(key) for key in entries if key not in tensors])
