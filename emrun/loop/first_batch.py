"""The first batch of the train stream, shown to a lazy model before the training."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from emrun.dataset import open_stream, stream_names
from emrun.errors import ArgumentError
from emrun.events import listener, may_change_batches
from emrun.hook import AbstractHook
from emrun.loop.batch_checks import BatchChecks
from emrun.loop.dispatch import Events
from emrun.model import AbstractModel
from emrun.randomness import preserved_randomness, seed_everything
from emrun.slow_start import NamedWhenSlow
from emrun.stream_context import StreamContext
from emrun.streams.stream_pass import is_stateful
from emrun.types import Batch

_MOST_UNUSABLE = 100  # batches are looked at for one from which a lazy model gets its shapes


@dataclass(frozen=True)
class FirstBatch:
    """Gives lazy models their shapes.

    Args:
        dataset: has the stream.
        stream: the name of the train stream.
        seed: of the run.
        events: has the hooks.
        checks: looks at the batches.
    """

    dataset: Any
    stream: str
    seed: int
    events: Events
    checks: BatchChecks

    def show(self, model: AbstractModel, *, may_fail: bool = False) -> None:
        """Show a lazy model the first batch of an evaluation pass of the train stream; one that was loaded needs none.

        Hooks that may change batches get `before_batch`. The pass leaves no traces: a stream with a state is put back
        into that. A dataset without that stream is for epochs by hand, whose first batch the model takes.

        Args:
            model: the model.
            may_fail: leave the model lazy when a hook or the model cannot use the batch yet.

        Raises:
            ArgumentError: the stream is one iterator, from which the training would miss the batch.
        """
        name = self.stream
        if not model.is_lazy or name not in stream_names(self.dataset):
            return
        changers = [each for each in (*self.events.hooks, model) if may_change_batches(each)]
        check = self.checks.begin(name, ", ".join(self.events.changers))
        with preserved_randomness(), NamedWhenSlow("reading the first batch, for the shapes of a lazy module"):
            seed_everything(self.seed, "evaluation", name)
            with self._first_batches() as batches:
                for batch in batches:
                    changed = dict(batch)
                    if check(batch) == 0:
                        continue
                    with suppress(*([Exception] if may_fail else [])):
                        for each in changers:
                            call = listener(each, "before_batch", AbstractModel if each is model else AbstractHook)
                            if call is not None:
                                call(stream_name=name, batch=changed)
                        if changers and self.checks.check_changed(changed) == 0:
                            continue
                        model.materialise(changed)
                    break

    @contextmanager
    def _first_batches(self) -> Iterator[Iterator[Batch]]:
        """Begin an evaluation pass over the stream; at the end of the block the stream is as it was."""
        name = self.stream
        context = StreamContext(name, seed=self.seed, epoch=0)
        stream = open_stream(self.dataset, name, context)
        before = copy.deepcopy(stream.state_dict()) if is_stateful(stream) else None
        batches = iter(stream)
        if before is None and batches is stream and open_stream(self.dataset, name, context) is stream:
            raise ArgumentError(
                "module",
                f"stream {name!r} returns the same iterator for each pass, so that the training would miss the batch "
                "that gives a lazy module its shapes; return a new iterator for each pass, give the iterator "
                "state_dict() and load_state_dict(), or give the module its sizes",
            )
        try:
            yield itertools.islice(batches, _MOST_UNUSABLE)
        finally:
            close = getattr(batches, "close", None)
            if close is not None and (before is None or batches is not stream):
                close()
            if before is not None:
                stream.load_state_dict(before)
