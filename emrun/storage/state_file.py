"""The file of a checkpoint that holds the state of a training, beside the weights."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from emrun.errors import StorageError
from emrun.storage.files import refuse_timeout

FILE = "state.pt"


def save_state(state: Mapping[str, Any], directory: Path) -> None:
    """Write an encoded state to `state.pt`.

    Raises:
        StorageError: it cannot be written.
    """
    with (directory / FILE).open("wb") as file:
        output = _Output(file)
        try:
            torch.save(dict(state), output)  # type: ignore[arg-type]  # it needs no more
        except Exception:
            if output.error is not None:
                raise output.error from None
            raise


class _Output:
    """A file that keeps the error of a write, which torch reports as something else."""

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file = file

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def load_state(directory: Path) -> dict[str, Any]:
    """Read `state.pt`; nothing in it is imported or called.

    Raises:
        StorageError: it cannot be read.
    """
    path = directory / FILE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, some of which advise to switch the safety off
        refuse_timeout(error, path)
        raise StorageError(errno.EIO, f"cannot read {path}: it is no state of a training") from error
    if not isinstance(state, dict):
        raise StorageError(errno.EIO, f"cannot read {path}: it is no state of a training")
    return state
