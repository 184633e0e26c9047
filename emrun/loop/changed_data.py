"""Data that have changed since a checkpoint: the lengths of streams are compared with those before a resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from emrun.base.arguments import check_choice
from emrun.base.errors import DataChanged
from emrun.base.types import Policy
from emrun.base.wording import listed
from emrun.streams.dataset_streams import DatasetStreams
from emrun.streams.stream import StreamWrapper

_LOG = logging.getLogger(__name__)


class ChangedData:
    """Knows the length of a pass of each stream; after a resume, compares the first one that is known with that before.

    Args:
        streams: the streams.
        on_changed_data: what to do if a resume finds data of another length than before.
    """

    def __init__(self, streams: DatasetStreams, on_changed_data: Policy = "error") -> None:
        check_choice("on_changed_data", on_changed_data, Policy)
        self.policy = on_changed_data
        """What to do if a resume finds data of another length than before."""
        self.overrides: Sequence[str] = ()
        """The overrides of a resume that change the data, for messages."""
        self._streams = streams
        self._lengths: dict[str, str] = {}  # stream -> its length; empty if passes have different lengths
        self._before: dict[str, str] = {}  # those of a loaded state that were not compared yet

    def expect(self, overrides: Sequence[str]) -> None:
        """Expect other data, because of overrides of a resume."""
        self.overrides = overrides

    def end_stream(self, stream: StreamWrapper, *, train: bool) -> None:
        """Compare a stream at the end of its pass; a training has compared the data at its resume."""
        self.compare(stream, refuses=not (train or self.overrides))

    def compare(self, stream: StreamWrapper, *, refuses: bool, change: str = "") -> bool:
        """Keep the length of a pass; after a resume, compare the first one that is known with that before.

        Args:
            stream: the stream.
            refuses: whether `on_changed_data: error` ends the training here.
            change: how the length has changed, if this is known, such as `has 2 batches, and had 4 or more`.

        Returns:
            Whether the length has changed.

        Raises:
            DataChanged: it ends the training.
        """
        # what the length is now, and what it was
        now = self._known_length(stream)
        if not now and stream.last_pass is not None:
            now = f"{stream.last_pass.batch} batches"
        before = self._before.get(stream.name) or now
        is_comparable = now.split()[1:] == before.split()[1:]  # examples or batches
        if now != before and is_comparable:
            change = change or f"has {now}, and had {before}"

        # what to do if it has changed
        if change:
            why = f", as this resume changes {listed(self.overrides)}" if self.overrides else ""
            message = f"stream {stream.name!r} {change} before the resume{why}"
            if self.policy == "error" and refuses:
                advice = (
                    f"go back to the data of before, or resume with {DataChanged.key} to train on with those of now"
                )
                raise DataChanged(f"{message}; {advice}")
            if self.policy != "ignore":
                _LOG.warning("this resume is not exact: %s", message)
            self._lengths.pop(stream.name, None)

        # keep it
        if change or now:
            self._before.pop(stream.name, None)
        if now and self._lengths.setdefault(stream.name, now) != now:
            self._lengths[stream.name] = ""
        return bool(change)

    def _known_length(self, stream: StreamWrapper) -> str:
        """Return the length of the current pass of a stream; empty if it is only known at the end."""
        if stream.rows:
            return f"{stream.rows} examples"
        batches = self._streams.pass_length
        if batches is None or stream.name != self._streams.train_stream_name:
            return ""
        return f"{batches} batches"

    def state_dict(self) -> dict[str, str]:
        """Return stream -> the length of a pass."""
        known = {name: self._known_length(stream) for name, stream in self._streams.trained.items()}
        return self._lengths | {name: length for name, length in known.items() if length}

    def load_state_dict(self, lengths: Mapping[str, str]) -> None:
        """Restore what `state_dict` returned."""
        self._lengths = dict(lengths)
        self._before = dict(lengths)
