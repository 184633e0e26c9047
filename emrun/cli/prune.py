"""`emrun prune`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from emrun.base.arguments import expanded
from emrun.base.wording import counted, from_here, in_one_line, size_of
from emrun.cli.failures import print_error
from emrun.cli.ls import choosing_runs, runs_table
from emrun.cli.output import print_json
from emrun.runs.columns import FACTS, Column, Row, column
from emrun.runs.conditions import Condition, chosen, time_of
from emrun.runs.finding import find_runs
from emrun.runs.pruning import ERRORS, Removal, What, better, without_best
from emrun.runs.stored_run import MISSING


@click.command()
@choosing_runs
@click.option("--epochs", type=click.IntRange(1), metavar="N", help="Only runs with fewer than N finished epochs.")
@click.option("--older", metavar="TIME", help="Only runs that ended longer ago, e.g. 30d or 12h.")
@click.option("--status", "statuses", metavar="STATUS", multiple=True, help="Only runs that are finished, failed, ...")
@click.option("--keep-best", "kept", type=click.IntRange(1), metavar="N", help="Of these runs, keep the best N.")
@click.option(
    "--by", metavar="STATISTIC", help="What --keep-best compares, e.g. min:valid/loss; by default that of SaveBest.",
)  # fmt: skip
@click.option("--checkpoints", is_flag=True, help="Remove only the checkpoints, and keep the records.")
@click.option(
    "--optimizer-states", is_flag=True,
    help="Remove only what a resume needs: the runs can be evaluated, but not resumed.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; needs --dry-run or --yes.")
def prune(
    directory: Path, conditions: tuple[str, ...], recursive: bool, epochs: int | None, older: str | None,
    statuses: tuple[str, ...], kept: int | None, by: str | None, checkpoints: bool, optimizer_states: bool,
    dry_run: bool, yes: bool, as_json: bool,
) -> int:  # fmt: skip
    """Remove runs in DIRECTORY (by default log), or parts of them, after showing them and asking.

    The options that choose runs are combined; at least one is needed, unless DIRECTORY is itself a run. A run that is
    in use stays, and so does everything that is not surely a run: damaged ones, results of evaluations, links.
    """
    if checkpoints and optimizer_states:
        raise click.UsageError("--checkpoints removes the optimizer states too; leave out --optimizer-states")
    if as_json and not (dry_run or yes):
        raise click.UsageError("--json cannot ask; add --dry-run or --yes")
    if by is not None and kept is None:
        raise click.UsageError("--by says what --keep-best compares; add --keep-best N")
    what: What = "checkpoints" if checkpoints else "optimizer states" if optimizer_states else "runs"

    # what is removed, and what must stay
    given = expanded(directory)
    root = from_here(given.parent.resolve() / given.name)  # a link of this name is refused
    rows, statistic = _chosen(root, conditions, recursive, epochs, older, statuses, kept, by)
    removals = [(row, Removal.of(row.run, what)) for row in rows]
    going = []
    for row, removal in removals:
        refusal = removal.refusal()
        if refusal is not None:
            print_error(f"{in_one_line(row.name)} stays: it {in_one_line(refusal)}")
        elif removal.size:
            going.append((row, removal))
    if as_json:
        print_json(_in_json(going, what))
    elif going:
        click.echo(f"{_table(going, statistic)}\n{_said(going, what)}")
    if not going:
        print_error("nothing to remove")

    # the removal
    if dry_run or not going:
        return 0
    if not (yes or _agrees()):
        print_error("nothing was removed")
        return 0
    removed = 0
    failures = []
    for row, removal in going:
        try:
            size = removal.size
            removal.carry_out()
            removed += size
        except ERRORS as error:
            failures.append(f"{in_one_line(row.name)}: {in_one_line(str(error))}")
    click.echo(f"removed {size_of(removed)}", err=as_json)
    for failure in failures:
        print_error(f"error: {failure}")
    return 74 if failures else 0


def _chosen(
    root: Path, conditions: Sequence[str], recursive: bool, epochs: int | None, older: str | None,
    statuses: Sequence[str], kept: int | None, by: str | None,
) -> tuple[list[Row], Column]:  # fmt: skip
    """Return the runs that all options choose, and the column by which they are judged."""
    wanted = [Condition.parse(text) for text in conditions]
    if epochs is not None:
        wanted.append(Condition(FACTS["epochs"], "<", epochs))
    if older is not None:
        ended = Column("end", lambda row: MISSING if row.run.end is None else (row.now - row.run.end).total_seconds())
        wanted.append(Condition(ended, ">", time_of(older, "--older")))
    standing = [Condition.parse(f"status={status}") for status in statuses]
    compared = [] if by is None else [column(by)]
    statistic = FACTS["best"]
    every_row, rows = chosen(find_runs(root, deep=recursive), root, wanted, [FACTS["best"], *compared])
    is_run = len(every_row) == 1 and every_row[0].run.directory == root
    if not (is_run or wanted or standing or kept is not None):
        raise click.UsageError(
            "say which runs: --epochs, --older, --status, --where, --keep-best, or the path of a run"
        )
    rows = [row for row in rows if not standing or any(condition.holds(row) for condition in standing)]
    if kept is not None and rows:
        address, which = better(rows, by)
        statistic = statistic if by is None else column(f"{which}:{address}")
        rows = without_best(rows, kept, statistic, which)
    return rows, statistic


def _table(going: Sequence[tuple[Row, Removal]], statistic: Column) -> str:
    sizes = {row.name: removal.size for row, removal in going}
    removes = Column("removes", lambda row: sizes[row.name], "bytes", is_number=True)
    return runs_table(
        [row for row, _ in going],
        [*(FACTS[name] for name in ("name", "status", "epochs")), statistic, FACTS["age"], removes],
    )


def _said(going: Sequence[tuple[Row, Removal]], what: What) -> str:
    """Return what will be removed, how much this is, and what is not possible afterwards."""
    size = size_of(sum(removal.size for _, removal in going))
    count = counted(len(going), "run")
    return {
        "runs": f"removes {count}, {size}",
        "checkpoints": f"removes all checkpoints of {count}, {size}: they cannot be resumed or evaluated any more",
        "optimizer states": f"removes the optimizer states of {count}, {size}: they cannot be resumed any more",
    }[what]


def _agrees() -> bool:
    try:
        return click.confirm("remove them?", err=True)
    except click.Abort:  # there is no answer; Ctrl-C is one
        print_error("")
        return False


def _in_json(going: Sequence[tuple[Row, Removal]], what: What) -> dict[str, object]:
    removes = [{"directory": str(row.run.directory), "size_bytes": removal.size} for row, removal in going]
    return {"what": what, "removes": removes, "size_bytes": sum(removal.size for _, removal in going)}
