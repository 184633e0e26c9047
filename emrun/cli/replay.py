"""`emrun replay`."""

from __future__ import annotations

import traceback
from pathlib import Path

import click

from emrun.censor import for_terminal
from emrun.cli.console import terminal_log, users_code


@click.command(short_help="Repeat the step that made a run fail, and find the cause.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--device", metavar="NAME", help="Where to run the model, e.g. cpu; by default as the config says.")
@click.option("--anomaly", is_flag=True, help="Also name the operation whose gradients are not numbers (slow).")
def replay(directory: Path, device: str | None, anomaly: bool) -> int:
    """Do the step again that made the run in DIRECTORY fail, and name the examples of its batch that cause it.

    DIRECTORY is the run, or a capsule in its folder failures, where the batch, the weights and the random states of the
    step are kept. The model is built from the run's config. Nothing is written into the run.

    Exit status: 0 it failed in the same way, 1 it did not, 2 wrong usage or config, 74 the capsule is damaged.
    """
    with terminal_log(quiet=True):
        if (directory / "config.yaml").exists() and not (directory / "failure.json").exists():
            from emrun.config.config import read_config
            from emrun.config.plan import check_statically

            check_statically(read_config(directory))
        from emrun.diagnosis.replay import replay as do_again
        from emrun.diagnosis.replay import report
        from emrun.errors import exit_status

        with users_code():
            found = do_again(directory, device, anomaly)
        if found.error is not None and exit_status(found.error) == 1:
            traceback.print_exception(found.error)
        click.echo(for_terminal(report(found)))
    return 0 if found.reproduced else 1
