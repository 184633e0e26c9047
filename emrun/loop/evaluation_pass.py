"""A pass of a stream on which the model does not run, for a hook that looks at the batches of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.types import Batch
from emrun.loop.epochs import Epochs
from emrun.ranks.shares import rows_in


def evaluation_pass(epochs: Epochs, name: str) -> Iterator[Batch]:
    """Yield the batches of a pass of a stream; see `Loop.evaluation_pass`."""
    loop, endings = epochs.loop, epochs.endings
    before, was_training = epochs.current, loop.training
    stream = epochs.streams.get(name, train=False)
    intake = epochs.events.begin_looking(name)
    several = epochs.events.of_ranks is not None
    with preserved_randomness(), stream:
        seed_everything(loop.seed, "evaluation", name)
        epochs.enter(stream, train=False)
        try:
            for batch in stream:
                if (several and not rows_in(batch)) or intake.check(batch) == 0:
                    continue
                changed = intake.announce(stream_name=name, batch=batch) if intake.announce is not None else None
                if changed is None:
                    yield batch
                elif (rows_in(changed) or not several) and intake.accept(changed) is not None:
                    yield changed
                endings.raise_if_due(in_epoch=True)
            endings.raise_if_due(in_epoch=True)  # a signal may end the stream
        finally:
            epochs.enter(before, train=was_training)
