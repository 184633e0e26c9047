"""Load the model of a finished run, for a model that is made of such models."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from emrun.base.arguments import resolved
from emrun.base.errors import UsageError
from emrun.base.fields import ANOTHER_CHECKPOINT, reading
from emrun.base.preparations import PREPARATION
from emrun.base.wording import from_here, progress
from emrun.config.config import Config, read_over
from emrun.config.plan import Plan
from emrun.model import AbstractModel
from emrun.storage.checkpoints.finding import find
from emrun.storage.checkpoints.manifest import Manifest, verify
from emrun.storage.class_names import check_classes
from emrun.storage.preparation import read_preparation
from emrun.storage.run import CHECKPOINTS, CONFIG
from emrun.training.directories import check_run
from emrun.training.user_code import warn_of_changed_code

_LOG = logging.getLogger(__name__)


def load_model(
    supplied: Mapping[str, Any],
    within: Sequence[Path],
    run_directory: str,
    checkpoint_name: str | None = None,
    overrides: Sequence[str] = (),
) -> AbstractModel:
    """Build the model of a run without losses and metrics, load a checkpoint, and return the model.

    Args:
        supplied: the objects that the model gets, with the `dataset`.
        within: the directories whose models are being built from other runs.
        run_directory: the directory of the run, or of a config whose model is made of runs.
        checkpoint_name: a name such as `latest`; by default `best`, or `latest` if there is no `best`.
        overrides: overrides of the config of the run.

    Raises:
        UsageError: there is no such run or checkpoint, or the model of the run is made of itself.
        StateError: the dataset has other classes than the run.
        StorageError: the checkpoint is damaged or does not fit.
        BaseException: an error of the model.
    """
    directory = resolved(run_directory)
    if directory in within:
        raise UsageError(f"{directory} is among its own runs")
    plan = Plan.of(config_of(directory).without("hooks", "eval").overridden(overrides))
    place = None if plan.is_made_of_runs else find(directory / CHECKPOINTS, checkpoint_name)
    check_classes(supplied["dataset"], directory)
    inner = partial(load_model, supplied, [*within, directory])
    own = {"load_model": inner, PREPARATION: read_preparation(directory)}
    model: AbstractModel = plan.model.build({**supplied, **own})
    model.load_initial = None
    model.without_measures()
    if place is not None:
        manifest = load_weights(model, place)
        _LOG.info(
            "the model of %s, checkpoint %s: %s",
            from_here(directory),
            place.name,
            progress(manifest.epoch, manifest.iteration),
        )
        warn_of_changed_code(plan, directory)
    return model


def load_weights(model: AbstractModel, place: Path) -> Manifest:
    """Load a checkpoint into a model and return its manifest.

    Raises:
        StorageError: the checkpoint is damaged or does not fit.
    """
    manifest = verify(place)
    with reading(f"weights of checkpoint {place}", ANOTHER_CHECKPOINT, model.load):
        model.load(place)
    return manifest


def config_of(directory: Path, instead: str | Path | None = None) -> Config:
    """Return the config of a run, before interpolation; `instead` as `read_over` has it."""
    check_run(directory)
    return read_over(directory / CONFIG, instead)
