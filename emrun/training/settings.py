"""Values that a run finds for `auto` in its config: they are written to the config, so that a resume has them."""

from __future__ import annotations

from functools import partial
from typing import Any

from emrun.config.config import read_config
from emrun.config.yaml_text import dump
from emrun.storage.files import write_atomically
from emrun.storage.run import CONFIG, Run
from emrun.training.build import Training

FOUND = ("model.micro_batch_size",)
"""The keys that may be `auto`."""


def keep_settings(training: Training, run: Run) -> Training:
    """Let the model of a training write what it finds to the config of its run; return the training."""
    training.model.write_setting = partial(_write, run)
    return training


def _write(run: Run, argument: str, value: Any) -> None:
    """Set an argument of the model in the config of a run; its comments are kept."""
    config = read_config(run.directory).overridden([f"model.{argument}={value}"])
    write_atomically(run.directory / CONFIG, dump(config.root, config.text))
