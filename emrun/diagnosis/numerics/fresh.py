"""A fresh process gives the statistics that the training's own evaluation has given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from emrun.config.config import Config
from emrun.diagnosis.numerics.rows import DIFFERS, SAME, NotApplicableError, Row
from emrun.diagnosis.recorded_trainings import Job
from emrun.diagnosis.rehearsal import train_shortly
from emrun.diagnosis.run_verification import evaluated
from emrun.runs.stored_run import StoredRun
from emrun.training.create import create_training

WHAT = "evaluated in a fresh process"


def in_fresh_process(config: Config, lengths: Mapping[str, int], evaluations: Mapping[str, str], place: Path) -> Row:
    """Train a short epoch, and compare the statistics of its evaluations with those of the checkpoint in a new process.

    Args:
        config: the config.
        lengths: stream of the dataset -> its most batches in an epoch.
        evaluations: name in the evaluation -> name of the stream.
        place: the directory for all files.

    Raises:
        NotApplicableError: nothing is evaluated.
        VerificationFailed: the new process failed.
    """
    if not evaluations:
        raise NotApplicableError("main_loop.extra_streams names no stream")
    streams = [{source: {"batches": lengths[source]}} for source in evaluations.values()]
    shorter = config.overridden([f"main_loop.extra_streams={json.dumps(streams)}"])
    training = create_training(shorter, output_dir=place / "run", checks_schedule=False)
    train_shortly(training.main_loop, lengths, after_epoch=True)
    run = StoredRun(place / "run")
    result, text, _ = evaluated(run, run.directory, partial(Job, str(place), overrides=[]), None)
    if result == "left out":
        raise NotApplicableError(text)
    name = text.split(", ", 1)[-1].split(":")[0] if result == "differs" else None
    return Row(WHAT, SAME if result == "same" else DIFFERS, text if result == "differs" else "", name)
