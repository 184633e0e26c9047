"""TensorBoard's event file: records of protocol buffers, which a resume cuts down to those of the checkpoint."""

from __future__ import annotations

import logging
import struct
import time
from pathlib import Path
from typing import Any

from emrun.base.errors import HookError, MissingExtra
from emrun.shown import Histogram, Picture, Shown
from emrun.storage.files import make_directory, storing, write_atomically

_LOG = logging.getLogger(__name__)

_PREFIX, _SUFFIX = "events.out.tfevents.", ".emrun"
_HEAD = struct.Struct("<QI")  # the length of a record and its checksum; another checksum follows the record
_TAIL = 4


def check_tensorboard(what: str) -> None:
    """Raise `MissingExtra` unless tensorboard is installed.

    Args:
        what: the class that needs it.
    """
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401 - takes a second, and most runs do not need it
    except ImportError as error:
        raise MissingExtra(what, "tensorboard", "tensorboard") from error


class EventFile:
    """The only event file of emrun in a directory.

    TensorBoard remembers how far it has read a file. So a resume does not cut the file: it writes the records of the
    checkpoint to a new one and removes the old one. TensorBoard then reads the new file, and replaces the curves.

    Args:
        directory: the directory, which need not exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path: Path | None = None
        self.length = 0
        """The number of bytes."""

    def begin(self, length: int) -> bool:
        """Begin with the records that the file had at a checkpoint.

        Args:
            length: the number of bytes that the file had; 0 for a new file.

        Returns:
            Whether the file had all of them; if not, the complete records are kept.

        Raises:
            HookError: the directory has an event file that is not emrun's.
            StorageError: a file cannot be read or written.
        """
        with storing(self.directory, "write"):
            make_directory(self.directory, exist_ok=True)
            there = sorted(self.directory.glob(f"{_PREFIX}*"))
            foreign = [path for path in there if not path.name.endswith(_SUFFIX)]
            if foreign:
                raise HookError(
                    f"WriteTensorBoard: {foreign[0]} was not written by this hook; move it to another directory"
                )
            content = max((path.read_bytes() for path in there), key=len, default=b"")
            kept = content[:length] if len(content) >= length else _complete(content)
            number = max((int(path.name.split(".")[3]) for path in there), default=int(time.time()) - 1) + 1
            self._path = self.directory / f"{_PREFIX}{number:010d}{_SUFFIX}"
            write_atomically(self._path, kept)
            for path in there:
                path.unlink()
        self.length = len(kept)
        if not kept:
            self._append({"file_version": "brain.Event:2", "wall_time": time.time()})
        return len(content) >= length

    def add(self, step: int, *summaries: Any) -> None:
        """Append summaries of `torch.utils.tensorboard.summary`.

        Args:
            step: where they are on the x axis.
            summaries: the summaries.

        Raises:
            StorageError: the file cannot be written.
        """
        now = time.time()
        self._append(*({"step": step, "wall_time": now, "summary": each} for each in summaries))

    def _append(self, *events: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._path is not None
        with storing(self._path, "write"), self._path.open("r+b") as file:
            file.truncate(self.length)  # what a failed write has left
            file.seek(self.length)
            writer = RecordWriter(file)
            for each in events:
                writer.write(Event(**each).SerializeToString())
            file.flush()
            self.length = file.tell()


def summary_of(name: str, shown: Shown) -> Any:
    """Return the summary of something that a hook shows; None for a histogram without a finite value."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import summary

    if isinstance(shown, Picture):
        width, height = shown.size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=shown.png)
        return Summary(value=[Summary.Value(tag=name, image=image)])
    if isinstance(shown, Histogram):
        values = shown.finite()
        return summary.histogram(name, values, bins="auto", max_bins=64) if values.size else None
    return summary.text(name, shown.text)


def _complete(content: bytes) -> bytes:
    """Return the complete records at the beginning of a file."""
    end = 0
    while end + _HEAD.size <= len(content):
        following = end + _HEAD.size + _HEAD.unpack_from(content, end)[0] + _TAIL
        if following > len(content):
            break
        end = following
    return content[:end]
