"""The process of a trial of `emrun sweep`: `emrun train`, and what a sweep checks."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from emrun.cli.failures import fail
from emrun.cli.train import train
from emrun.cli.trial_checks import TrialChecks

COMMAND = (sys.executable, "-P", "-c", "import sys; from emrun.cli.trial import main; sys.exit(main(sys.argv[1:]))")
"""Begins a new Python that does the same as `main`."""


def arguments(
    command: Sequence[str], directory: Path, objective: str | None, place: str, ends_sweep: Path
) -> list[str]:
    """Return the arguments for `main`: those of `emrun train`, after what `TrialChecks` gets."""
    named = {"directory": str(directory), "objective": objective, "place": place, "ends_sweep": str(ends_sweep)}
    return [json.dumps(named), *command]


def main(given: Sequence[str]) -> int:
    """Train a trial as `emrun train` does, and return the exit status; see `arguments`."""
    logging.getLogger().handlers.clear()  # those of the sweep, if this process was forked
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
