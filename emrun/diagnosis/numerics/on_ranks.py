"""Several ranks that share a batch have the gradients of one process."""

from __future__ import annotations

import pickle
from pathlib import Path

from emrun.base.types import Batch
from emrun.config.config import load_config
from emrun.config.import_finder import Imported
from emrun.config.plan import Plan
from emrun.diagnosis.numerics.gradients import Measured, Step, difference
from emrun.diagnosis.numerics.rows import DIFFERS, SAME, Row
from emrun.diagnosis.numerics.ways import WAYS
from emrun.diagnosis.recorded_trainings import Job
from emrun.ranks.group import join, ranks
from emrun.ranks.shares import own_share
from emrun.storage.run import Run
from emrun.training.build import assemble

WHAT = "several ranks and one"
_BATCH, _WEIGHTS, _GRADIENTS = "batch.pickle", "weights", "gradients.pickle"  # in a directory of this user alone


def on_ranks(step: Step, batch: Batch, place: Path, count: int) -> Row:
    """Compare the gradients of a batch with those of several processes that share it.

    Args:
        step: the step.
        batch: the batch.
        place: the directory of the config, and for files of the processes.
        count: the number of processes.

    Raises:
        NotApplicableError: gradients cannot be taken.
        VerificationFailed: the processes failed.
    """
    with step.model.ways.without(WAYS):
        alone = step.measure(batch)
    leave(step, batch, place)
    Job(str(place), str(place), [], "ranks", ranks=count, measures=True).run()
    return compared(alone, place)


def leave(step: Step, batch: Batch, place: Path) -> None:
    """Leave the weights and a batch for the processes."""
    (place / _WEIGHTS).mkdir()
    step.model.save(place / _WEIGHTS)
    (place / _BATCH).write_bytes(pickle.dumps(dict(batch)))


def compared(alone: Measured, place: Path) -> Row:
    """Compare the gradients that the processes have left with those of one."""
    shared: Measured = pickle.loads((place / _GRADIENTS).read_bytes())
    differing = difference(alone.gradients, shared.gradients)
    if differing is None:
        return Row(WHAT, SAME)
    name, deviation = differing
    return Row(WHAT, DIFFERS, f"{name} by {deviation:.2g}", name, deviation)


def measure_on_ranks(job: Job) -> None:
    """Measure the gradients of a batch that the ranks share, in one of their processes."""
    join()
    place = Path(job.place)
    plan = Plan.of(load_config(job.config, job.overrides), Imported())
    training = assemble(plan, place, Run(place))
    step = Step.of(training)
    step.model.load(place / _WEIGHTS)
    batch = pickle.loads((place / _BATCH).read_bytes())
    with step.model.ways.without(WAYS):
        measured = step.measure(own_share(batch, ranks()))
    if ranks().is_first:
        (place / _GRADIENTS).write_bytes(pickle.dumps(measured))
