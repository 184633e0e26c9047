"""`emrun trace`."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from emrun.base.arguments import expanded, resolved
from emrun.base.wording import in_one_line
from emrun.cli.console import GivenPath, complete_runs
from emrun.cli.failures import print_error
from emrun.cli.output import plain, table
from emrun.runs.finding import find_run, followed
from emrun.runs.run_table import RUN, RunTable

_MOST_ROWS = 10_000  # of a table, which is made in memory


@click.command()
@click.argument(
    "runs", metavar="RUN...", nargs=-1, required=True, type=GivenPath(path_type=Path), shell_complete=complete_runs
)
@click.option("--steps", is_flag=True, help="The steps of the step record, instead of the epochs.")
@click.option(
    "-f", "--format", "kind", type=click.Choice(["csv", "tsv", "jsonl", "table"]), default="csv", show_default=True,
    help="How the rows are printed.",
)  # fmt: skip
@click.option(
    "-k", "--keys", metavar="[NEW=]OLD,...", multiple=True,
    help="Only these columns, or keys of the config, perhaps with another name; may be repeated.",
)  # fmt: skip
@click.option("--stream", "streams", metavar="NAME", multiple=True, help="Only this stream; may be repeated.")
@click.option("--variable", "variables", metavar="NAME", multiple=True, help="Only this variable; may be repeated.")
@click.option("--list-keys", is_flag=True, help="Print the names of the columns only, one on each line.")
@click.option("--follow", is_flag=True, help="Print further rows as they are recorded, until the run ends.")
def trace(
    runs: tuple[Path, ...], steps: bool, kind: str, keys: tuple[str, ...], streams: tuple[str, ...],
    variables: tuple[str, ...], list_keys: bool, follow: bool,
) -> None:  # fmt: skip
    """Print the epochs, or with --steps the steps, that each RUN has recorded, as one table on standard output.

    The columns are epoch, iteration, seconds, and the statistics: valid/loss is a mean, valid/loss/std another
    aggregation. Of several runs, the column run has the name. Resumes are joined: an epoch or a step is there once. A
    value that is missing is empty; numbers are exact, and those that are not finite are NaN, Infinity and -Infinity.

    With --follow, the columns of CSV are those of the first rows. If a resume takes the run back, the rows that come
    again are printed again. Steps come when up to 1,000 of them are complete, or with the end of their epoch.
    """
    names = dict(_renamed(text) for option in keys for text in option.split(",") if text.strip())
    if follow:
        if len(runs) > 1 or kind == "table" or list_keys:
            raise click.UsageError("--follow prints the rows of one run as csv, tsv or jsonl")
        _follow(runs[0], (steps, streams, variables), names, kind)
        return
    recorded = RunTable(_named([find_run(expanded(directory)) for directory in runs]), steps, streams, variables)
    if names:
        recorded.check_keys(list(names.values()))
        names = names if len(recorded.runs) == 1 or RUN in names.values() else {RUN: RUN, **names}
    else:
        names = {key: key for key in recorded.keys()}  # noqa: SIM118 - not a mapping
    if list_keys:
        click.echo("\n".join(in_one_line(name) for name in names))
    else:
        _print(recorded.rows(list(names.values())), names, kind)
    for name, run in recorded.runs.items():
        for problem in run.problems:
            print_error(f"warning: {in_one_line(name)}: {in_one_line(problem)}")


def _follow(place: Path, selection: tuple[Any, ...], names: Mapping[str, str], kind: str) -> None:
    """Print the rows of a run as they are recorded."""
    place = resolved(place)
    printed = 0
    has_begun = False
    for (run,), is_running in followed(lambda: [find_run(place)]):
        if is_running and next(RunTable({"": run}, selection[0]).rows([]), None) is None:
            continue  # nothing is recorded yet
        recorded = RunTable({"": run}, *selection)
        names = names or {key: key for key in recorded.keys()}  # noqa: SIM118 - not a mapping
        rows = list(recorded.rows(list(names.values())))
        printed = printed if printed <= len(rows) else 0
        _print(rows[printed:], names, kind, with_heading=not has_begun)
        sys.stdout.flush()
        printed = len(rows)
        has_begun = True


def _named(runs: Sequence[Any]) -> Mapping[str, Any]:
    """Return the runs by the names of their directories; by their paths if two have the same name."""
    names = [run.directory.resolve().name for run in runs]
    is_unique = len(set(names)) == len(names)
    return {in_one_line(name if is_unique else str(run.directory)): run for name, run in zip(names, runs, strict=True)}


def _renamed(text: str) -> tuple[str, str]:
    new, sign, old = text.strip().partition("=")
    return (new, old) if sign else (new, new)


def _print(
    rows_of_runs: Iterable[Mapping[str, Any]], names: Mapping[str, str], kind: str, *, with_heading: bool = True
) -> None:
    rows = ({new: row[old] for new, old in names.items() if old in row} for row in rows_of_runs)
    if kind == "jsonl":
        for row in rows:
            click.echo(json.dumps(plain(row)))
        return
    heading = [in_one_line(name) for name in names]
    if kind == "table":
        cells = []
        for row in rows:
            cells.append([_cell(row[name], short=True) if name in row else "" for name in names])
            if len(cells) > _MOST_ROWS:
                raise click.UsageError(f"a table has at most {_MOST_ROWS:,} rows; use -f csv")
        click.echo(table(cells, heading, ["left" if name == "run" else "right" for name in names]))
        return
    writer = csv.writer(sys.stdout, delimiter="," if kind == "csv" else "\t", lineterminator="\n")
    if with_heading:
        writer.writerow(heading)
    writer.writerows([_cell(row[name]) if name in row else "" for name in names] for row in rows)


def _cell(value: Any, *, short: bool = False) -> str:
    """Return a value for a table or a line of CSV; text is in one line and without control characters."""
    if isinstance(value, float) and short and math.isfinite(value):
        return f"{value:.6g}"
    return in_one_line(value if isinstance(value, str) else json.dumps(value))
