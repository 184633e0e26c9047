"""A whole training: which epochs follow one another, and what is evaluated at its end."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import NoReturn

from emrun.epoch_data import ByStream
from emrun.hook import TrainingTerminated
from emrun.loop.endings import switched_on
from emrun.loop.epochs import Epochs
from emrun.loop.state import Phase
from emrun.record.rows import as_floats
from emrun.streams.dataset_streams import different_names

_LOG = logging.getLogger(__name__)


def train(epochs: Epochs, *, skip_zeroth_epoch: bool) -> NoReturn:
    """Run epoch after epoch, from the start or from the restored checkpoint.

    Raises:
        TrainingTerminated: a hook or a signal ends the training.
    """
    loop, state, streams, endings = epochs.loop, epochs.state, epochs.streams, epochs.endings
    name = streams.train_stream_name
    try:
        endings.agree()
        if not state.is_in_epoch:
            endings.raise_if_due()
        if loop.has_run:
            state.encoded()  # a state that cannot be saved is found before the first batch
        loop.epoch_began, loop.epoch_is_resumed = perf_counter(), state.is_in_epoch
        resume(epochs)
        if state.is_in_epoch:
            with streams.get(name, train=True) as stream:
                is_left = state.phase is Phase.TRAIN and not stream.is_at_end()
            endings.raise_if_due(in_epoch=True, is_left=is_left)
        if state.phase is Phase.BEFORE and not skip_zeroth_epoch:
            epochs.run_epoch([], [streams.get(name, train=False), *streams.due(0)], 0)
        while True:
            number = loop.training_epochs_done + 1
            epochs.run_epoch([streams.get(name, train=True)], streams.due(number), number)
    except TrainingTerminated as error:
        if error.limit:
            _evaluate_at_end(epochs, error)
        raise


def resume(epochs: Epochs) -> None:
    """Complete the restore of a checkpoint, if one was restored; see `TrainingState.resume`."""

    def begin_again(epoch_id: int) -> None:
        with switched_on(epochs.endings, "begins_again"):
            epochs.events.notify("before_epoch", epoch_id=epoch_id)

    epochs.state.resume(begin_again)


def _evaluate_at_end(epochs: Epochs, limit: TrainingTerminated) -> None:
    """Evaluate the extra streams once more, if a limit has ended the training since one of them was evaluated.

    Nothing of this counts for a longer run: the checkpoint `latest` is saved before.

    Raises:
        Interrupted: a signal ends the evaluation.
    """
    loop, state, streams = epochs.loop, epochs.state, epochs.streams
    epoch_id = loop.training_epochs_done + state.is_in_epoch
    due = [] if state.is_in_epoch else streams.due(epoch_id)
    evaluated = streams.all_extra()
    if not loop.iterations_done or len(due) == len(evaluated) or epochs.measured_at_end == state.point:
        return
    streams.stop()
    epochs.saving.save_latest(*state.point)
    where = f"in epoch {epoch_id}" if state.is_in_epoch else f"after epoch {epoch_id}"
    _LOG.info("the training ends %s: evaluating all extra streams once more", where)
    epochs.endings.ended_by = limit
    names = different_names(evaluated)
    with (
        switched_on(loop, "at_end"),
        switched_on(epochs.saving, "keeps_all"),
        epochs.events.without_model("after_epoch"),
    ):
        try:
            state.keep_copy()
            if state.is_in_epoch:
                names.insert(0, streams.train_stream_name)
            else:
                loop.epoch_began = perf_counter()
                epochs.events.notify("before_epoch", epoch_id=epoch_id)
            last = epochs.trained or next((as_floats(each["streams"]) for each in reversed(loop.metrics)), {})
            epoch_data = ByStream((name, {}) for name in names)
            epoch_data.before = {streams.train_stream_name: {}, **last}
            epochs.end_epoch(epoch_data, [], evaluated, epoch_id)
            epochs.endings.agree()  # on checkpoints that hooks of rank 0 have requested
            epochs.save_requested()
        except TrainingTerminated:
            raise
        except BaseException as error:
            error.add_note(
                f"in the evaluation at the end of the training ({limit.reason}); the training is finished, and its "
                "checkpoint latest is saved; `emrun resume` evaluates again"
            )
            raise
    epochs.measured_at_end = state.point
