"""The first batches of a stream, which are given again in every pass."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import cached_property

from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.types import Batch
from emrun.stream_context import WithLeftOut
from emrun.streams.stream_pass import StreamPass, WithState, closable

_LOG = logging.getLogger(__name__)


class KeptBatches:
    """A stream function that gives the first batches of pass 1 of another stream, the same in each call.

    The batches are read once, with random states that are a function of the seed and the name of the stream, so that
    they are the same also for a stream that draws from global random states. Every call gives copies.

    Args:
        function: returns an iterable of batches; takes no argument, or the `StreamContext`.
        name: the name of the stream.
        seed: the seed of the run.
        count: the number of batches.
    """

    def __init__(self, function: Callable[..., Iterable[Batch]], name: str, seed: int, count: int) -> None:
        self._pass = StreamPass(function, name, seed, 1)
        self._count = count

    def __call__(self) -> Iterator[Batch]:
        """Yield a copy of each batch."""
        return map(copy.deepcopy, self._batches)

    @cached_property
    def _batches(self) -> list[Batch]:
        with preserved_randomness():
            seed_everything(self._pass.seed, self._pass.name, "overfit", devices=False)
            with closing(closable(self._pass.read())) as batches:
                found = [copy.deepcopy(each) for each in itertools.islice(batches, self._count)]
        _LOG.info("overfit: every stream gives the first %d batches of stream %r", self._count, self._pass.name)
        if len(found) < self._count:
            _LOG.warning("overfit: pass 1 of stream %r has only %d batches", self._pass.name, len(found))
        return [each.batch if isinstance(each, WithState | WithLeftOut) else each for each in found]
