"""The first batch of the train stream, from which a lazy model gets its shapes before the training."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from emrun.base.errors import ArgumentError
from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.slow_start import NamedWhenSlow
from emrun.base.types import Batch
from emrun.dataset import open_stream, stream_names
from emrun.events import listener, may_change_batches
from emrun.hook import AbstractHook, Loop
from emrun.loop.batch_checks import BatchChecks
from emrun.loop.dispatch import Events
from emrun.model import AbstractModel
from emrun.stream_context import StreamContext
from emrun.streams.stream_pass import is_stateful

_MOST_UNUSABLE = 100  # number of batches that are read at most, to find a usable one


@dataclass(frozen=True)
class FirstBatch:
    """Gives lazy models their shapes.

    Args:
        loop: has the dataset and its hooks.
        events: has the hooks.
        checks: checks the batches.
    """

    loop: Loop
    events: Events
    checks: BatchChecks

    def show(self, model: AbstractModel, *, may_fail: bool = False) -> None:
        """Give a lazy model the first batch of an evaluation pass of the train stream.

        Hooks that may change batches get `before_batch`. Afterwards the state of the stream is restored, so that the
        training does not see this pass. If the dataset does not have the train stream, the epochs are run by hand, and
        the model takes its shapes from their first batch. A model that was loaded already has its shapes.

        Args:
            model: the model.
            may_fail: whether the model stays lazy if a hook or the model cannot use the batch yet.

        Raises:
            ArgumentError: each pass of the stream is the same iterator, so that the training would miss the batch.
        """
        name = self.loop.train_stream_name
        if not model.is_lazy or name not in stream_names(self.loop.dataset):
            return
        changers = [each for each in (*self.loop.hooks, model) if may_change_batches(each)]
        check = self.checks.begin(name, ", ".join(self.events.changes.by))
        with preserved_randomness(), NamedWhenSlow("reading the first batch, for the shapes of a lazy module"):
            seed_everything(self.loop.seed, "evaluation", name)
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
        """Begin an evaluation pass over the stream; restore the state of the stream at the end of the block."""
        name = self.loop.train_stream_name
        context = StreamContext(name, seed=self.loop.seed, epoch=0)
        stream = open_stream(self.loop.dataset, name, context)
        before = copy.deepcopy(stream.state_dict()) if is_stateful(stream) else None
        batches = iter(stream)
        if before is None and batches is stream and open_stream(self.loop.dataset, name, context) is stream:
            raise ArgumentError(
                "module",
                f"stream {name!r} returns the same iterator for each pass, so the training would miss the batch that "
                "gives a lazy module its shapes; return a new iterator for each pass, define state_dict() and "
                "load_state_dict() on the iterator, or give the module its sizes",
            )
        try:
            yield itertools.islice(batches, _MOST_UNUSABLE)
        finally:
            close = getattr(batches, "close", None)
            if close is not None and (before is None or batches is not stream):
                close()
            if before is not None:
                stream.load_state_dict(before)
