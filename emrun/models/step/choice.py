"""Which kind of step a model has; the table is in the docstring of the package."""

from __future__ import annotations

from emrun.models.step.accumulated import AccumulatedScaledStep, AccumulatedStep
from emrun.models.step.sharded import ShardedStep, ShardedSums
from emrun.models.step.single import ScaledStep, SingleStep
from emrun.models.step.summed import RankSums, SummedBatchStep, SummedStep
from emrun.models.step.training_step import Calls, TrainingStep
from emrun.models.step.updater import Updater


def choose_step(
    calls: Calls, updater: Updater, accumulate: int, *, is_single: bool, sums: RankSums | None
) -> TrainingStep:
    """Return the step of a model.

    Args:
        calls: what a step calls of the model.
        updater: makes the updates.
        accumulate: the number of batches of a window.
        is_single: whether an update has a single part: a batch that is run whole.
        sums: what several ranks exchange; None in one process.
    """
    scale = updater.skipped.scale
    if isinstance(sums, ShardedSums):
        return ShardedStep(calls, updater, accumulate, sums)
    if sums is not None:
        is_plain = is_single and calls.manual is None and updater.optimizers.only is not None
        kind = SummedBatchStep if is_plain else SummedStep
        return kind(calls, updater, accumulate, sums)
    if scale is not None:
        if is_single:
            return ScaledStep(calls, updater, scale)
        return AccumulatedScaledStep(calls, updater, accumulate, scale)
    if is_single:
        return SingleStep(calls, updater)
    return AccumulatedStep(calls, updater, accumulate)
