"""How a resume returns to a position in a pass: the states that produced the last batch before it, and checksums."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from emrun.base.encoding import digest, encode
from emrun.base.types import Batch


@dataclass(slots=True)
class Bookmark:
    """Everything that a resume needs to continue after the last batch of a pass that was yielded.

    The resume produces this batch again and compares it.

    Args:
        began: the random states at the beginning of the pass, for a train stream.
        last: the last batch that was yielded.
        before_last: the state of the stream before this batch, for a stream with `state_dict`.
        before_first: the state at the beginning of the pass.
        after: of a stream that asks the model, which cannot make a batch again: returns the state after the last batch;
            or this state, as it was loaded.
        digested: the number of a batch with its checksums: two checkpoints after one batch compute them once.
    """

    began: dict[str, Any] | None = None
    last: Batch | None = None
    before_last: Any = None
    before_first: Any = None
    after: Any = None
    digested: tuple[int, str | None] = 0, None

    def state(self, name: str, batch: int) -> dict[str, Any]:
        """Return the bookmark of the stream `name`, after a batch of this number, as a state that can be saved."""
        if self.digested[0] != batch:
            self.digested = batch, None if self.last is None else json.dumps(digests_of(self.last))
        return {
            "began": self.began,
            "digest": self.digested[1],
            "before_last": encode(self.before_last, f"stream {name!r}"),
            "before_first": encode(self.before_first, f"stream {name!r}"),
            "after": encode(self.after(), f"stream {name!r}") if callable(self.after) else self.after,
        }


def different(batch: Any, digests: str | None) -> list[str]:
    """Return the sources of a batch whose checksums differ from the saved ones."""
    if digests is None:
        return []
    before = json.loads(digests)
    now = digests_of(batch)
    return [source for source in {**before, **now} if before.get(source) != now.get(source)]


def digests_of(batch: Any) -> dict[str, str]:
    """Return a checksum of each source of a batch."""
    sources = batch.items() if hasattr(batch, "items") else [("", batch)]
    return {str(source): digest(values) for source, values in sources}
