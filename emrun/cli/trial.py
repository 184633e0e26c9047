"""The process of a trial of `emrun sweep`: `emrun train`, and what a sweep checks there."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from emrun.base.errors import ConfigError, EmrunError, HookError, StorageError, UsageError
from emrun.base.terminal import leave_logs
from emrun.cli.failures import fail
from emrun.cli.train import train
from emrun.config.config import Config
from emrun.epoch_data import check_monitors

if TYPE_CHECKING:
    from emrun.training.build import Training

COMMAND = (sys.executable, "-P", "-c", "import sys; from emrun.cli.trial import main; sys.exit(main(sys.argv[1:]))")
"""Begins a new Python that does the same as `main`."""


def arguments(
    command: Sequence[str], directory: Path, objective: str | None, place: str, ends_sweep: Path, *, records: bool
) -> list[str]:
    """Return the arguments for `main`: those of `emrun train`, after what `TrialChecks` gets."""
    paths = {"directory": str(directory), "ends_sweep": str(ends_sweep)}
    return [json.dumps({**paths, "objective": objective, "place": place, "records": records}), *command]


def main(given: Sequence[str]) -> int:
    """Train a trial as `emrun train` does, and return the exit status; see `arguments`."""
    leave_logs()
    sys.argv = ["emrun", *given[1:]]
    checks = TrialChecks(**json.loads(given[0]))
    try:
        status = train.main(["-q", *given[2:]], standalone_mode=False, obj=checks)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # the user's code may also have called sys.exit
        checks.note_failure(error)
        return fail(error)
    return status if isinstance(status, int) else 0


class _WrongSweep(EmrunError):
    """What is wrong with the sweep and not with one trial."""

    exit_status = 78


class Sweep:
    """Stands for a hook that reads the objective of a sweep, for the check of monitored statistics.

    Args:
        objective: the address of the objective.
    """

    def __init__(self, objective: str) -> None:
        self.monitors = (objective,)


def check_objective(training: Training, objective: str | None, place: str) -> None:
    """Check that a hook writes the objective of a sweep.

    Raises:
        UsageError: no hook does.
    """
    loop = training.main_loop
    try:
        check_monitors(
            [*loop.hooks, training.model, *([Sweep(objective)] if objective is not None else [])],
            [loop.train_stream_name, *loop.extra_streams],
        )
    except HookError as error:
        raise UsageError(f"{place}: {error}") from error


class TrialChecks:
    """The checks of a trial; the object of click's context there.

    Args:
        directory: the run directory.
        objective: the objective; None if the sweep has none.
        place: where the objective stands, for messages.
        ends_sweep: a file that is made if the other trials would fail, too.
        records: whether the trial has failed if its config is refused, and is not started by the next sweep.
    """

    def __init__(self, directory: str, objective: str | None, place: str, ends_sweep: str, records: bool) -> None:
        self._directory = Path(directory)
        self._objective = objective
        self._place = place
        self._ends_sweep = Path(ends_sweep)
        self._records = records
        self._config: Config | None = None

    def check_config(self, loaded: Config) -> None:
        """Check that the config is that of the trial."""
        from emrun.launch.trials import identity  # imports NumPy

        if not self._directory.name.endswith(identity(loaded)):
            raise _WrongSweep("the config was changed after the sweep began; start the sweep again")
        self._config = loaded.without("sweep") if self._records else None

    def check_training(self, training: Training) -> None:
        """Check that a hook writes the objective of the sweep, before the training begins."""
        from emrun.training.create import remove

        try:
            check_objective(training, self._objective, self._place)
        except UsageError as error:
            if (run := training.main_loop.run) is not None:
                remove(run)
            raise _WrongSweep(str(error)) from error

    def note_failure(self, error: BaseException) -> None:
        """Tell the sweep if the other trials would fail with the error, too; record that the config is refused."""
        is_full = isinstance(error, StorageError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or isinstance(error, _WrongSweep):
            with suppress(OSError):
                self._ends_sweep.touch()
        elif self._config is not None and getattr(error, "exit_status", 1) == ConfigError.exit_status:
            from emrun.launch.trials import record_refusal

            with suppress(EmrunError):
                record_refusal(self._config, self._directory, str(error).partition("\n")[0])
