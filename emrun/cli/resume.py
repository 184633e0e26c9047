"""`emrun resume`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from emrun.cli.console import with_terminal_log
from emrun.cli.failures import users_code
from emrun.cli.signals import ignore_early_requests
from emrun.cli.train import run
from emrun.slow_start import NamedWhenSlow


@click.command(short_help="Go on with a run.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("overrides", metavar="[OVERRIDE...]", nargs=-1)
@click.option("--checkpoint", metavar="NAME", help="Which checkpoint, a name or a path; by default the newest intact.")
@click.option(
    "--fork", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
    help="Leave the run as it is and go on in a new one.",
)  # fmt: skip
@with_terminal_log
def resume(directory: Path, overrides: tuple[str, ...], checkpoint: str | None, fork: Path | None) -> int:
    """Go on with the run in DIRECTORY exactly where its newest checkpoint was saved.

    An OVERRIDE, key.path=value or ~key.path, becomes part of the run's config: a new learning rate or a later end, for
    example hooks.StopAfter.epochs=40. What cannot be changed in the middle, such as the architecture, is refused.

    A finished run has nothing to do and ends with status 0.
    """
    ignore_early_requests()
    if (directory / "config.yaml").exists():
        from emrun.config.config import read_config
        from emrun.config.plan import check_statically

        check_statically(read_config(directory, overrides))
    with NamedWhenSlow("importing PyTorch"):
        from emrun.training.resume import resume_training

    with users_code():
        training = resume_training(directory, overrides, checkpoint, fork, command=sys.argv)
    return 0 if training is None else run(training)
