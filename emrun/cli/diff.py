"""`emrun diff`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from emrun.base.arguments import expanded
from emrun.base.types import Json
from emrun.base.wording import counted, in_one_line, listed
from emrun.cli.console import GivenPath, complete_runs
from emrun.cli.output import print_json, table, with_json
from emrun.runs.comparison import compare
from emrun.runs.finding import find_run

_MOST_ROWS = 30
_MOST_LINES = 60  # of all unified diffs
_LONGEST = 60  # characters of a value

_Row = Sequence[str]


@click.command()
@click.argument("a", metavar="RUN_A", type=GivenPath(path_type=Path), shell_complete=complete_runs)
@click.argument("b", metavar="RUN_B", type=GivenPath(path_type=Path), shell_complete=complete_runs)
@with_json
def diff(a: Path, b: Path, as_json: bool) -> int:
    """Say in what two runs differ, and from which iteration on their recorded values do.

    Compared are the configs by meaning, the modules of your code, the versions of packages, the device, the first
    batches of the streams, the statistics of the epochs, and the values of every recorded step, exactly. Nothing is
    run, and neither PyTorch nor your code is imported.

    Exit status, as that of diff: 0 the runs are equal, 1 they differ, 2 wrong usage, 74 a directory cannot be read.
    """
    comparison = compare(find_run(expanded(a)), find_run(expanded(b)))
    if as_json:
        print_json(comparison)
    else:
        click.echo("\n".join(_report(comparison)))
    return 0 if comparison["equal"] else 1


def _report(comparison: Json) -> Iterator[str]:
    """Yield the lines of the report; all text of a run is made printable."""
    for name, run in zip("ab", comparison["runs"], strict=True):
        yield (
            f"{name}: {in_one_line(run['directory'])} ({run['status']}, "
            f"{counted(run['epochs_done'], 'epoch')}, {counted(run['iterations_done'], 'iteration')})"
        )
    was_long = True
    parts = {
        "config": _config,
        "code": _modules,
        "packages": _packages,
        "device": _device,
        "data": _data,
        "statistics": _statistics,
        "steps": _steps,
    }
    for title, section in parts.items():
        reason = comparison["not_compared"].get("code" if title == "packages" else title)
        lines = list(section(comparison)) if reason is None else [f"{title}: not compared: {reason}"]
        if was_long or len(lines) > 1:
            yield ""
        yield from lines
        was_long = len(lines) > 1
    if was_long:
        yield ""
    yield "the runs are equal" if comparison["equal"] else "the runs differ"


def _config(comparison: Json) -> Iterator[str]:
    rows = [
        [difference["key"], *(_side(difference[name]) for name in "ab"), _origin(difference)]
        for difference in comparison["config"]
    ]
    order = comparison["hooks_order"]
    if order is not None:
        rows.append(["order of hooks", *(listed(order[name]) for name in "ab"), ""])
    yield from _table("config", rows, ["key", "a", "b", "from"])


def _side(value: Json | None) -> str:
    if value is None:
        return "(not there)"
    content = value["value"]
    return in_one_line(content if isinstance(content, str) else json.dumps(content, default=str), _LONGEST)


def _origin(row: Json) -> str:
    origins = {name: row[name]["origin"] for name in "ab" if row[name] is not None}
    if len(set(origins.values())) == 1:
        return str(next(iter(origins.values())))
    return "; ".join(f"{name}: {origin}" for name, origin in origins.items())


def _packages(comparison: Json) -> Iterator[str]:
    versions = [["Python", comparison["python"]["a"], comparison["python"]["b"]]] if comparison["python"] else []
    versions += [[package["name"], package["a"], package["b"]] for package in comparison["packages"]]
    yield from _table(
        "packages",
        [["(not there)" if cell is None else cell for cell in row] for row in versions],
        ["package", "a", "b"],
    )
    if comparison["repositories"] is not None:
        for name in "ab":
            yield f"git {name}: {listed([_repository(repository) for repository in comparison['repositories'][name]])}"


def _device(comparison: Json) -> Iterator[str]:
    pair = comparison["device"]
    yield "device: " + ("equal" if pair is None else " and ".join(in_one_line(pair[name]) for name in "ab"))


def _repository(entry: Json) -> str:
    commit = "no commit" if entry["commit"] is None else f"commit {in_one_line(entry['commit'][:12])}"
    changes = "" if entry["changes"] is None else f" with changes {in_one_line(entry['changes'][:12])}"
    return f"{in_one_line(entry['directory'])} {commit}{changes}"


def _modules(comparison: Json) -> Iterator[str]:
    modules = comparison["modules"]
    yield from _table("code", [[module["name"], module["change"]] for module in modules], ["module", ""])
    left = _MOST_LINES
    for module in modules:
        lines = module["diff"].split("\n") if module["diff"] else []
        yield from (f"  {in_one_line(line.expandtabs(4))}" for line in lines[:left])
        if len(lines) > left:
            yield f"  ... {counted(len(lines) - left, 'more line')} of {in_one_line(module['name'])}"
        left = max(0, left - len(lines))


def _data(comparison: Json) -> Iterator[str]:
    yield from _table(
        "data",
        [[batch["stream"], str(batch["pass"]), listed(batch["sources"])] for batch in comparison["data"]],
        ["stream", "pass", "sources that differ in its first batch"],
    )


def _statistics(comparison: Json) -> Iterator[str]:
    if comparison["epochs"] is None:
        yield "statistics: equal"
    else:
        epochs = comparison["epochs"]
        differ = epochs["a"] != epochs["b"]
        counts = f" (the last is {epochs['a']} in a and {epochs['b']} in b)" if differ else ""
        yield f"statistics: they differ from epoch {epochs['first']} on{counts}"
        columns = [(which, side) for which in ("last", "lowest", "highest") for side in "ab"]
        rows = [
            [address, *(_entry(sides[side], which) for which, side in columns)]
            for address, sides in comparison["statistics"].items()
            if sides["a"] != sides["b"]
        ]
        if rows:
            yield from _cut(rows, ["statistic (epoch)", *(f"{which} {side}" for which, side in columns)])


def _entry(summary: Json | None, which: str) -> str:
    return "" if summary is None else f"{summary[which][0]:.6g} ({summary[which][1]})"


def _steps(comparison: Json) -> Iterator[str]:
    steps = comparison["steps"]
    last = [None if iteration is None else f"{iteration:,}" for iteration in steps["last"]]
    first = steps["first"]
    count = f"{steps['compared']:,}"
    if None in last:
        whose = " and ".join(name for name, iteration in zip("ab", last, strict=True) if iteration is None)
        yield f"steps: not compared: {whose} recorded none"
    elif first is not None:
        values = "; ".join(
            f"{'the loss' if name == 'loss' else in_one_line(name)} differs: {_pair(*pair)}"
            for name, pair in first["values"].items()
        )
        thinned = f" (every {first['every']:,}th iteration is recorded)" if first["every"] > 1 else ""
        equal = f"equal for {count} iterations" if steps["compared"] else "not equal from the beginning"
        yield f"steps: {equal}; at {first['iteration']:,} {values}{thinned}"
    elif steps["equal"]:
        yield f"steps: equal for all {count} iterations"
    else:
        alone = [f"{n:,} only in {name}" for name, n in zip("ab", steps["alone"], strict=True) if n]
        more = f"; of those before, {listed(alone)}" if alone else ""
        yield f"steps: equal for {count} iterations; the last is {last[0]} in a and {last[1]} in b{more}"


def _pair(one: float | None, other: float | None) -> str:
    """Return two values with as many digits as are needed to tell them apart."""
    if one is None or other is None:
        return " and ".join("nothing" if value is None else f"{value:.6g}" for value in (one, other))
    for digits in (4, 6, 8, 10, 12, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            return " and ".join(texts)
    return f"{one!r} and {other!r}"


def _table(name: str, rows: Sequence[_Row], headers: Sequence[str]) -> Iterator[str]:
    """Yield a heading and a table; without rows, that the part is equal."""
    if rows:
        yield f"{name}: {counted(len(rows), 'difference')}"
        yield from _cut(rows, headers)
    else:
        yield f"{name}: equal"


def _cut(rows: Sequence[_Row], headers: Sequence[str]) -> Iterator[str]:
    yield table([[in_one_line(cell) for cell in row] for row in rows[:_MOST_ROWS]], headers)
    if len(rows) > _MOST_ROWS:
        yield f"... {len(rows) - _MOST_ROWS} more (--json has all)"
