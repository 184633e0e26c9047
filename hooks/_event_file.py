"""TensorBoard's event file: records of protocol buffers, which a resume cuts down to those of the checkpoint."""

from __future__ import annotations

import hashlib
import io
import time
from pathlib import Path
from typing import Any

from emrun.base.errors import HookError
from emrun.shown import Counts, Picture, Written
from emrun.storage.files import check_owner, make_directory, storing, write_atomically

_PREFIX, _SUFFIX = "events.out.tfevents.", ".emrun"


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
        self._digest = hashlib.sha256()
        self._buffer = io.BytesIO()  # what is not written yet

    def begin(self, length: int, digest: str | None) -> bool:
        """Begin with the records that the file had at some time.

        Args:
            length: the number of bytes that the file had; 0 for a new file.
            digest: the SHA-256 of these bytes; None if it does not matter.

        Returns:
            Whether the file had them; if not, nothing is changed.

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
            kept = content[:length]
            self._digest, self._buffer = hashlib.sha256(kept), io.BytesIO()
            if len(kept) < length or digest not in (None, self.digest):
                return False
            self.length = len(kept)
            if kept and len(there) == 1 and len(content) == length:
                self._path = there[0]
                return True
            number = max((int(path.name.split(".")[3]) for path in there), default=int(time.time()) - 1) + 1
            self._path = self.directory / f"{_PREFIX}{number:010d}{_SUFFIX}"
            write_atomically(self._path, kept)
            for path in there:
                path.unlink()
        if not kept:
            self._append(file_version="brain.Event:2", wall_time=time.time())
            self.flush()
        return True

    @property
    def digest(self) -> str:
        """The SHA-256 of the file."""
        return self._digest.hexdigest()

    def add(self, step: int, now: float, values: list[Any]) -> None:
        """Add values of summaries; `flush` writes them.

        Args:
            step: where they are on the x axis.
            now: the time, in seconds since 1970.
            values: the values, each a `Summary.Value` of TensorBoard.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        if values:
            self._append(step=step, wall_time=now, summary=Summary(value=values))

    def _append(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._buffer).write(Event(**event).SerializeToString())

    def flush(self) -> None:
        """Append what was added.

        Raises:
            StorageError: the file cannot be written.
        """
        added, self._buffer = self._buffer.getvalue(), io.BytesIO()
        if not added:
            return
        assert self._path is not None
        check_owner(self._path)
        with storing(self._path, "write"), self._path.open("r+b") as file:
            file.truncate(self.length)  # what a failed write has left
            file.seek(self.length)
            file.write(added)
        self._digest.update(added)
        self.length += len(added)


def value_of(name: str, shown: Written) -> Any:
    """Return something that a hook shows as the value of a summary."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import summary

    if isinstance(shown, Picture):
        width, height = shown.size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=shown.png)
        return Summary.Value(tag=name, image=image)
    if isinstance(shown, Counts):
        ends = shown.edges[0], shown.edges[-1], sum(shown.counts), shown.total, shown.squares
        return summary.histogram_raw(name, *ends, shown.edges[1:], shown.counts).value[0]
    return summary.text(name, shown.text).value[0]
