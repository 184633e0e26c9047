"""`emrun resume`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from emrun.arguments import expanded
from emrun.cli.completers import complete_overrides, complete_runs
from emrun.cli.console import Directory, with_terminal_log
from emrun.cli.failures import users_code
from emrun.cli.ranks import run_ranks, starts_ranks, with_restarts
from emrun.cli.signals import ignore_early_requests, import_torch, unwound_by_sigterm
from emrun.cli.train import run
from emrun.ranks import leave


@click.command(short_help="Resume a run.")
@click.argument("directory", type=click.Path(path_type=Path), shell_complete=complete_runs)
@click.argument("overrides", metavar="[OVERRIDE...]", nargs=-1, shell_complete=complete_overrides)
@click.option("--checkpoint", metavar="NAME", help="A name or a path; by default the newest intact checkpoint.")
@click.option(
    "--fork", metavar="DIR", type=Directory(),
    help="Continue in a new run directory and leave this one unchanged.",
)  # fmt: skip
@click.option(
    "--nproc", type=click.IntRange(min=1), metavar="N",
    help="Train in N processes on this machine; by default as many as before.",
)  # fmt: skip
@with_restarts
@with_terminal_log
def resume(
    directory: Path,
    overrides: tuple[str, ...],
    checkpoint: str | None,
    fork: Path | None,
    nproc: int | None,
    max_restarts: int,
) -> int:
    """Resume the run in DIRECTORY exactly where its newest checkpoint was saved.

    An OVERRIDE, key.path=value or ~key.path, becomes part of the config of the run: a new learning rate or a later end,
    for example hooks.StopAfter.epochs=40. Changes that a resume cannot make, such as another architecture, are errors.

    For a finished run there is nothing to do; the exit status is 0.
    """
    ignore_early_requests()
    from emrun.config.config import read_config
    from emrun.config.plan import check_statically
    from emrun.training.directories import check_run, ranks_of

    check_run(expanded(directory))
    if (directory / "config.yaml").exists():
        check_statically(read_config(directory, overrides))
    nproc = nproc or ranks_of(expanded(directory))
    if starts_ranks(nproc, max_restarts):
        return run_ranks(nproc, max_restarts)
    import_torch()
    from emrun.training.resume import resume_training

    with unwound_by_sigterm(), users_code():
        training = resume_training(directory, overrides, checkpoint, fork, command=sys.argv)
    if training is None:
        leave()
        return 0
    return run(training)
