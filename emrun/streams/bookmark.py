"""Remembering how to come back to a position in a pass: what made the last batch before it, and its checksums."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from emrun.encoding import digest, encode
from emrun.types import Batch


@dataclass(slots=True)
class Bookmark:
    """What brings a resume behind the last batch that was handed out of a pass: it makes that batch again.

    Args:
        began: the random states that the pass began with, of a training.
        last: that batch.
        before_last: the state of the stream before it, of a stream that has one.
    """

    began: dict[str, Any] | None = None
    last: Batch | None = None
    before_last: Any = None

    def state(self, name: str) -> dict[str, Any]:
        """Return it as a state that can be saved; `name` is that of the stream."""
        return {
            "began": self.began,
            "digest": _digests(self.last) if self.last is not None else None,
            "before_last": encode(self.before_last, f"stream {name!r}"),
        }


def different(batch: Any, digests: str | None) -> list[str]:
    """Return the sources of a batch that are not those whose checksums a state has."""
    if digests is None:
        return []
    now = json.loads(_digests(batch))
    if not digests.startswith("{"):  # as it was written once: of all of them
        return [] if digest(batch) == digests else list(now)
    try:
        before = json.loads(digests)
    except ValueError:
        return list(now)
    return [source for source in {**before, **now} if before.get(source) != now.get(source)]


def _digests(batch: Any) -> str:
    """Return a text with a checksum of each source of a batch."""
    sources = batch.items() if hasattr(batch, "items") else [("", batch)]
    return json.dumps({str(source): digest(values) for source, values in sources})
