"""`emrun report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from emrun.base.arguments import expanded, resolved
from emrun.base.errors import UsageError
from emrun.base.wording import counted, from_here, in_one_line, size_of
from emrun.cli.console import GivenPath, complete_runs
from emrun.runs.finding import find_runs, followed
from emrun.runs.report.page import REPORT, write_page
from emrun.runs.stored_run import StoredRun


@click.command("report")
@click.argument(
    "directories", metavar="RUN...", nargs=-1, required=True, type=GivenPath(path_type=Path),
    shell_complete=complete_runs,
)  # fmt: skip
@click.option(
    "-o", "--output", type=GivenPath(path_type=Path, dir_okay=False),
    help="The file; by default report.html in the directory of the run or the sweep.",
)  # fmt: skip
@click.option(
    "--by", metavar="STATISTIC", help="What runs are compared by, e.g. max:valid/accuracy; by default that of SaveBest."
)
@click.option("--overwrite", is_flag=True, help="Replace the file also if it is not a page of emrun.")
@click.option("--follow", is_flag=True, help="Write the page again as the runs go on; in a browser, it reloads itself.")
def write_report(
    directories: tuple[Path, ...], output: Path | None, by: str | None, overwrite: bool, follow: bool
) -> None:
    """Write one HTML file about runs: how they ended, their curves, configs, checkpoints, failures, and what differs.

    RUN is a run directory, or a directory with runs, such as that of a sweep. The file needs no network and no other
    file. Nothing is run, and neither PyTorch nor your code is imported; what is damaged is left out and listed.

    Exit status: 0 the file is written, 2 wrong usage, 74 a directory cannot be read, or the file cannot be written.
    """
    places = [from_here(resolved(directory)) for directory in directories]

    def find() -> Sequence[StoredRun]:
        return [run for place in places for run in _runs_in(place)]

    first = find()
    if output is None and len(places) > 1:
        raise UsageError("several directories: name the file, such as -o report.html")
    file = places[0] / REPORT if output is None else expanded(output)
    is_sweep = len(places) == 1 and len(first) > 1
    title = in_one_line(places[0].absolute().name, 80) if is_sweep else None
    passes = followed(find) if follow else [(first, False)]
    for runs, is_running in passes:
        size = write_page(file, runs, overwrites=overwrite, title=title, by=by, reloads=is_running)
    problems = sum(len(run.problems) for run in runs)
    more = f"; {counted(problems, 'problem')} of what could not be read" if problems else ""
    click.echo(f"{file} ({counted(len(runs), 'run')}, {size_of(size)}){more}")


def _runs_in(directory: Path) -> list[StoredRun]:
    """Return the run in a directory, or the runs directly in it.

    Raises:
        UsageError: there are none.
    """
    runs = list(find_runs(directory))
    if not runs:
        raise UsageError(f"{directory} is neither a run nor a directory with runs; emrun ls -r looks below it")
    return runs
