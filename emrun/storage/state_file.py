"""The file of a checkpoint that holds the state of a training, beside the weights."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from emrun.errors import StorageError
from emrun.storage.files import refuse_timeout

FILE = "state.pt"


def save_state(state: Mapping[str, Any], directory: Path) -> None:
    """Write an encoded state to `state.pt`.

    Raises:
        OSError: it cannot be written.
    """
    with (directory / FILE).open("wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # torch's, about the end of a file that a write which failed left behind
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


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
