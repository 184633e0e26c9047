"""What is written into a run besides what the loop writes: values found for `auto` in its config, and its page."""

from __future__ import annotations

from functools import partial
from typing import Any

from emrun.config.config import read_config
from emrun.config.yaml_text import dump
from emrun.runs.report.page import write_at_end
from emrun.storage.plain import write_with_plain
from emrun.storage.run import CONFIG, Run
from emrun.training.build import Training

FOUND = ("model.micro_batch_size",)
"""The keys that may be `auto`."""


def connected(training: Training, run: Run) -> Training:
    """Connect a training with its run, and return it.

    What the model finds for `auto` is written to the config, so that a resume has it; at the end, unless
    `main_loop.report` is false, a page of the run is written.
    """
    training.model.write_setting = partial(_write, run)
    run.write_report = write_at_end if training.main_loop.report else None
    return training


def _write(run: Run, argument: str, value: Any) -> None:
    """Set an argument of the model in the config of a run; its comments are kept."""
    config = read_config(run.directory).overridden([f"model.{argument}={value}"])
    write_with_plain(run.directory / CONFIG, dump(config.root, config.text), config.root.plain())
