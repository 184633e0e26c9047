"""`emrun verify-resume`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from emrun.base.types import Json
from emrun.base.wording import counted
from emrun.cli.console import config_arguments, terminal_log
from emrun.cli.failures import import_torch, print_error, unwound_by_sigterm
from emrun.cli.output import print_json, table, with_json
from emrun.config.config import load_config
from emrun.config.plan import check_statically
from emrun.diagnosis.recorded_trainings import VerificationFailed


@click.command()
@config_arguments
@click.option(
    "--kill", is_flag=True, help="Interrupt by SIGKILL instead of SIGTERM, two iterations after a checkpoint."
)
@click.option(
    "--at", metavar="ITERATION", type=click.IntRange(min=1), multiple=True,
    help="Interrupt after this iteration; can be repeated. By default: in the middle of an epoch, at its end, in an "
    "evaluation and, with fixed_epoch_size, at the end of a pass.",
)  # fmt: skip
@click.option("--full-epochs", is_flag=True, help="Do not shorten epochs of more than 20 iterations.")
@click.option(
    "--nproc", default="1", metavar="N[,N...]", callback=lambda context, parameter, text: _numbers(text),
    help="Make each run in N processes, which train together. With 2,3, those of 2 processes are resumed on 3.",
)  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@with_json
def verify_resume(
    config: Path,
    overrides: tuple[str, ...],
    kill: bool,
    at: tuple[int, ...],
    full_epochs: bool,
    nproc: list[int],
    quiet: bool,
    as_json: bool,
) -> int:
    """Prove, with CONFIG, that an interrupted run equals an uninterrupted one, or name the first difference.

    emrun trains a little more than two epochs, twice, and then once more for each point, interrupted there and resumed.
    Each run has its own process and temporary directory. The processes are forks of one that has imported PyTorch and
    your classes, but the second is a new Python. For every batch emrun compares the inputs and outputs of the model,
    the learning rates and the random states. At the end it compares the parameters, the optimizer, the positions of the
    streams, the hooks and the metrics. Hooks run as usual, except that StopAfter ends nothing and trackers are left
    out. Epochs of more than 20 iterations are cut to 8; evaluations are not shortened. The number of runs is printed at
    the start, the time that they will take after the first.

    Exit status: 0 exact, 1 not exact or a run failed, 2 wrong usage or config.
    """
    with terminal_log(quiet=quiet):
        check_statically(load_config(config, overrides))
        import_torch()
        from emrun.diagnosis.verification import verify

        try:
            with unwound_by_sigterm(), _bar() as tell:
                report = verify(
                    config,
                    overrides,
                    kill=kill,
                    at=at,
                    tell=tell,
                    ranks=nproc[0],
                    resumed_on=nproc[1:],
                    full_epochs=full_epochs,
                )
        except VerificationFailed as error:
            if error.exit_status == 1:
                print_error(str(error).rstrip())
                return error.exit_status
            raise
    if as_json:
        print_json(report)
    else:
        _show(report)
    return 0 if report["exact"] else 1


def _numbers(text: str) -> list[int]:
    """Return the numbers of the option `--nproc`."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text, re.ASCII):
        raise click.BadParameter(f"{text!r} is not a number of processes, or several such as 2,3")
    return list(map(int, text.split(",")))


@contextmanager
def _bar() -> Iterator[Callable[[int, int], object]]:
    """Show how many runs are made, on a terminal."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # a process with a thread cannot be forked
    with tqdm(unit=" runs", leave=False, disable="TQDM_DISABLE" in os.environ or not sys.stderr.isatty()) as bar:

        def tell(done: int, most: int) -> None:
            bar.total = most
            bar.n = done
            bar.refresh()

        yield tell


def _show(report: Json) -> None:
    rows = report["rows"]
    click.echo(table(map(_cells, rows), ["interrupted at", "iteration", "by", "resumed at", "result"]))
    for cause in dict.fromkeys(row["likely_cause"] for row in rows if row["likely_cause"]):
        click.echo(f"\nlikely cause: {cause}")
    for note in report["notes"]:
        click.echo(f"\nnote: {note}")
    if report["exact"]:
        count = len({(row["interrupted_at"], row["iteration"]) for row in rows})
        how = "exact" if all(row["rounding"] is None for row in rows) else "equal up to rounding"
        click.echo(f"\n{how}: interrupted at {counted(count, 'point')}, compared {report['iterations']} iterations")
    elif rows[0]["interrupted_at"] is None:
        click.echo("\nnot exact: two runs without an interruption differ too")
    else:
        click.echo("\nnot exact")


def _cells(row: Json) -> list[str]:
    where = row["interrupted_at"] or "(not interrupted, the same run again)"
    numbers = ["" if row[key] is None else str(row[key]) for key in ("iteration", "resumed_at")]
    agreement = "exact"
    if row["rounding"] is not None:
        numbers[1] += f" on {counted(row['resumed_on'], 'rank')}"
        agreement = f"rounded, by up to {row['rounding']:.1e}"
    return [where, numbers[0], row["by"], numbers[1], row["difference"] or agreement]
