"""`emrun resume`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from emrun.cli.console import terminal_log
from emrun.cli.train import run


@click.command(short_help="Go on with a run.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("overrides", metavar="[OVERRIDE...]", nargs=-1)
@click.option("--checkpoint", metavar="NAME", help="Which checkpoint, a name or a path; by default the newest intact.")
@click.option(
    "--fork", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
    help="Leave the run as it is and go on in a new one.",
)  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Show debug messages.")
@click.option("-q", "--quiet", is_flag=True, help="Show warnings and errors only.")
def resume(
    directory: Path, overrides: tuple[str, ...], checkpoint: str | None, fork: Path | None, verbose: bool, quiet: bool
) -> int:
    """Go on with the run in DIRECTORY exactly where its newest checkpoint was saved.

    An OVERRIDE, key.path=value or ~key.path, becomes part of the run's config: a new learning rate or a later end, for
    example hooks.StopAfter.epochs=40. What cannot be changed in the middle, such as the architecture, is refused.

    A finished run has nothing to do and ends with status 0.
    """
    with terminal_log(verbose, quiet):
        from emrun.resuming import resume_training

        training = resume_training(directory, overrides, checkpoint, fork, command=sys.argv)
        return 0 if training is None else run(training, quiet)
