"""`emrun resume`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import click

from emrun.base.arguments import expanded
from emrun.base.cores import cores
from emrun.base.errors import UsageError
from emrun.base.wording import counted
from emrun.cli.console import overrides_argument, run_argument, with_terminal_log, without_slash
from emrun.cli.failures import ignore_early_requests, import_torch
from emrun.cli.output import with_json
from emrun.cli.ranks import run_ranks, starts_ranks, with_restarts
from emrun.cli.train import resume_run
from emrun.config.config import read_config
from emrun.config.plan import check_statically
from emrun.ranks.group import number_of_ranks
from emrun.training.directories import check_run, ranks_of


@click.command()
@run_argument
@overrides_argument
@click.option(
    "--checkpoint", metavar="NAME", type=without_slash,
    help="A name or a path; by default the newest intact checkpoint.",
)  # fmt: skip
@click.option(
    "--nproc", type=click.IntRange(min=1), metavar="N",
    help="Train in N processes on this machine; by default as many as before.",
)  # fmt: skip
@with_restarts
@with_json
@with_terminal_log
def resume(
    directory: Path,
    overrides: tuple[str, ...],
    checkpoint: str | None,
    nproc: int | None,
    max_restarts: int,
    as_json: bool,
) -> int:
    """Resume the run in DIRECTORY exactly where its newest checkpoint was saved.

    An OVERRIDE, key.path=value or ~key.path, becomes part of the config of the run: a new learning rate or a later end,
    for example hooks.StopAfter.epochs=40. Changes that a resume cannot make, such as another architecture, are errors.

    For a finished run there is nothing to do; the exit status is 0.
    """
    ignore_early_requests()

    check_run(expanded(directory))
    config = read_config(directory, overrides)
    check_statically(config)
    nproc = nproc or ranks_before(expanded(directory), _as_many)
    if starts_ranks(nproc, max_restarts):
        return run_ranks(nproc, max_restarts)
    import_torch(config)
    return resume_run(directory, overrides, checkpoint)


def _as_many(count: int) -> str:
    command = shlex.join(["emrun", *sys.argv[1:], "--nproc", str(count)])
    return f"to start as many here all the same: {command}; a smaller number works too"


def ranks_before(directory: Path, advice: Callable[[int], str]) -> int:
    """Return how many ranks have trained a run, or how many a launcher has started.

    Args:
        directory: the directory of the run, of whose trace the number is.
        advice: returns what to do if the machine is too small for so many.

    Raises:
        UsageError: this machine has fewer cores and fewer GPUs.
    """
    count = number_of_ranks()
    if count > 1 or (count := ranks_of(directory)) <= cores():
        return count
    import_torch()
    import torch

    if count > torch.cuda.device_count():
        raise UsageError(
            f"{directory} was trained by {count} processes, but this machine has {counted(cores(), 'core')} "
            f"and {counted(torch.cuda.device_count(), 'GPU')}; {advice(count)}"
        )
    return count
