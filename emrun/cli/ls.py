"""`emrun ls`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from emrun.base.arguments import expanded
from emrun.base.errors import StorageError
from emrun.base.types import Json
from emrun.base.wording import counted, in_one_line, size_of
from emrun.cli.console import GivenPath, complete_runs
from emrun.cli.failures import print_error
from emrun.cli.output import print_json, table, with_json
from emrun.epoch_data import as_float
from emrun.runs.columns import FACTS, Column, Row, column
from emrun.runs.conditions import Condition, chosen
from emrun.runs.finding import find_runs
from emrun.runs.stored_run import MISSING, size_below

_SHORT = ("name", "status", "epochs", "best", "age", "duration", "size")
_LONG = ("best_epoch", "iterations", "looks", "config_looks", "model", "dataset", "reason")
_MOST_PROBLEMS = 10


def choosing_runs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what commands that choose runs share: the directory, the search below it, and conditions."""
    where = click.option(
        "--where", "conditions", metavar="CONDITION", multiple=True,
        help="Only runs that meet it, e.g. model.optimizer.lr=0.1, 'valid/loss<0.3' or status=failed; may be repeated.",
    )  # fmt: skip
    recursive = click.option("-r", "--recursive", is_flag=True, help="Also search the directories below.")
    directory = click.argument(
        "directory", type=GivenPath(path_type=Path), default=Path("log"), shell_complete=complete_runs
    )
    return directory(where(recursive(command)))


@click.command()
@choosing_runs
@click.option("-l", "--long", is_flag=True, help="Show more: the epoch of the best value, the model, the dataset, ...")
@click.option("-a", "--all", "everything", is_flag=True, help="Also show runs that ended before their first iteration.")
@click.option("-v", "--verbose", is_flag=True, help="As -l; of a single run, also show its config and its files.")
@click.option("-c", "--columns", metavar="NAME,...", help="Show these after the name, instead of the usual columns.")
@click.option("--sort", metavar="NAME", default="name", show_default=True, help="Sort by this; -NAME in reverse.")
@with_json
def ls(
    directory: Path, conditions: tuple[str, ...], recursive: bool, long: bool, everything: bool, verbose: bool,
    columns: str | None, sort: str, as_json: bool,
) -> None:  # fmt: skip
    """List the runs in DIRECTORY (by default log), or the run in it. Nothing is imported, and nothing is written.

    NAME is a fact, a key of the config or a statistic. The facts are name, status, epochs, iterations, best,
    best_epoch, age, duration, size, looks, config_looks, begin, end, reason, host, model and dataset. A key is
    model.optimizer.lr or hooks.StopAfter.epochs. Of the statistics, valid/loss is the mean of the last epoch,
    min:valid/loss the lowest, valid/loss/std another aggregation. best is the best value of the statistic of SaveBest,
    or else the lowest valid/loss. looks counts the evaluations of a run on streams that its training does not use;
    config_looks is the sum over all runs of the list whose configs differ only in seed and name.
    """
    root = expanded(directory)
    wanted = [Condition.parse(text) for text in conditions]
    names = [name.strip() for name in columns.split(",") if name.strip()] if columns else []
    usual: tuple[str, ...] = _SHORT[1:]
    if long or verbose:
        usual += _LONG
    shown = [column(name) for name in names] or [FACTS[name] for name in usual]
    key = column(sort.removeprefix("-"))
    wanted_columns = [*shown, key]
    if as_json:
        wanted_columns.append(FACTS["best"])
    every_row, rows = chosen(find_runs(root, deep=recursive), root, wanted, wanted_columns)
    if not (everything or wanted or (every_row and every_row[0].run.directory == root)):
        rows = [row for row in rows if row.run.iterations_done or row.run.status in ("running", "killed", "damaged")]
    having = [row for row in rows if key.of(row) is not MISSING]
    having.sort(key=lambda row: _order(key, row), reverse=sort.startswith("-"))
    rows = having + [row for row in rows if key.of(row) is MISSING]
    if as_json:
        print_json([_in_json(row, names) for row in rows])
    elif rows:
        click.echo(runs_table(rows, list(dict.fromkeys([FACTS["name"], *shown]))))
        if (long or verbose) and len(rows) > 1:
            click.echo(f"\n{_counts(rows)}")
        if verbose and len(rows) == 1:
            click.echo(f"\n{_contents(rows[0])}")
    _tell(root, every_row, rows, has_conditions=bool(wanted))


def _order(key: Column, row: Row) -> tuple[Any, ...]:
    """Return what rows are sorted by; the best value comes first, whether it is the lowest or the highest."""
    value = key.of(row)
    if key.name == "best":
        address, which = row.summaries.watched
        return address, which, -value if which == "max" else value
    return (0, as_float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def runs_table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return runs as a table; the statistic of `best` is in the heading if it is the same in all of them."""
    watched = {_watched(row) for row in rows} if any(shown.name == "best" for shown in columns) else set()
    headers = []
    align = []
    cells = []
    for shown in columns:
        values = [shown.of(row) for row in rows]
        texts = [shown.text(value) for value in values]
        heading = in_one_line(shown.name)
        is_number = shown.is_number or all(isinstance(value, int | float) for value in values)
        if shown.name == "best" and len(watched) == 1:
            heading = min(watched)
        elif shown.name == "best":
            is_number = False
            texts = [f"{_watched(row)} {text}" if text else "" for row, text in zip(rows, texts, strict=True)]
        headers.append(heading)
        align.append("right" if is_number else "left")
        cells.append(texts)
    return table(list(zip(*cells, strict=True)), headers, align)


def _watched(row: Row) -> str:
    address, which = row.summaries.watched
    return in_one_line(f"{which} {address.removesuffix('/mean')}", 60)


def _counts(rows: Sequence[Row]) -> str:
    """Return how many runs there are of each model on each dataset."""
    kinds = ("model", "dataset")
    pairs = Counter(tuple(FACTS[kind].text(FACTS[kind].of(row)) for kind in kinds) for row in rows)
    return table(
        [[*pair, str(count)] for pair, count in sorted(pairs.items())], [*kinds, "runs"], ["left", "left", "right"]
    )


def _contents(row: Row) -> str:
    """Return the config of a run and what its directory holds, with sizes."""
    try:
        text = row.run.config_text
    except StorageError as error:
        text = str(error)
    config = "\n".join(in_one_line(line) for line in text.split("\n")).rstrip()
    lines = []
    for path in sorted(row.run.directory.glob("[!.]*")):
        is_folder = path.is_dir() and not path.is_symlink()
        size = size_below(path) if is_folder else path.lstat().st_size
        lines.append(["d" if is_folder else "-", in_one_line(path.name), size_of(size)])
    return f"{config}\n\n{table(lines, align=['left', 'left', 'right'])}"


def _in_json(row: Row, names: Sequence[str]) -> Json:
    """Return all facts about a run for programs, and what was asked for by name; null for what is missing."""
    address, which = row.summaries.watched
    best = row.summaries.best
    units = {"age": "age_seconds", "duration": "duration_seconds", "size": "size_bytes"}
    others = {name: fact for name, fact in FACTS.items() if name not in ("best", "best_epoch")}
    content: Json = {units.get(name, name): _plain(fact.of(row)) for name, fact in others.items()}
    content["best"] = None
    if best is not None:
        value, epoch = best
        content["best"] = {"statistic": address, "condition": which, "value": _plain(value), "epoch": epoch}
    content["columns"] = {name: _plain(column(name).of(row)) for name in names}
    return {"directory": str(row.run.directory), **content, "problems": row.run.problems}


def _plain(value: Any) -> Any:
    if value is MISSING:
        return None
    return value.isoformat() if isinstance(value, datetime) else value


def _tell(root: Path, every_row: Sequence[Row], rows: Sequence[Row], *, has_conditions: bool) -> None:
    """Say on standard error what the list does not show, and what is damaged."""
    if not every_row:
        print_error(f"no runs in {root} (-r also searches the directories below)")
    elif len(every_row) > len(rows):
        ended_early = "they ended before the first iteration; -a shows them"
        why = "they do not meet the conditions" if has_conditions else ended_early
        print_error(f"{counted(len(every_row) - len(rows), 'run')} not shown: {why}")
    problems = [f"{in_one_line(row.name)}: {in_one_line(problem)}" for row in rows for problem in row.run.problems]
    for problem in problems[:_MOST_PROBLEMS]:
        print_error(f"warning: {problem}")
    if len(problems) > _MOST_PROBLEMS:
        print_error(f"warning: {len(problems) - _MOST_PROBLEMS} more problems; --json has all")
