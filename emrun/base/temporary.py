"""Folders in the system's directory for temporary files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A folder `emrun-PURPOSE-*` for temporary files, which is deleted at the end of the block.

    Unlike `tempfile.TemporaryDirectory`, it has no finalizer, which a forked process would call at its end.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"emrun-{purpose}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
