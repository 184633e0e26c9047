"""What can be asked of a run by name: a fact such as `epochs`, a value of its config, or a statistic."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from emrun.base.errors import ConfigError, StorageError, UsageError
from emrun.base.wording import did_you_mean, in_one_line, size_of, span
from emrun.epoch_data import statistics
from emrun.runs.looks import looks_by_config, looks_of
from emrun.runs.stored_run import MISSING, StoredRun
from emrun.runs.summaries import Summaries, Which

_WIDEST = 60  # characters of a value in a table
_STATISTIC = re.compile(r"(?:(last|min|max):)?([^./:]+/.+)")
Unit = Literal["seconds", "bytes", "time", "status", "class", ""]
"""What the values of a column are, where this matters for how they are shown and compared."""


@dataclass(frozen=True, slots=True)
class Row:
    """A run of a list, with what is read of it once.

    Args:
        run: the run.
        name: how the list names it.
        summaries: its statistics.
        now: the time, for ages.
        config_looks: returns the looks of the config of each run of the list; see `looks_by_config`.
    """

    run: StoredRun
    name: str
    summaries: Summaries
    now: datetime
    config_looks: Callable[[], Mapping[Path, Counter[str]]] = dict


@dataclass(frozen=True, slots=True)
class Column:
    """Something that each run has.

    Args:
        name: how the user names it.
        of: returns the value of a run in plain types; `MISSING` if the run has none.
        unit: what the values are.
        is_number: whether a table aligns the values to the right.
        address: the statistic that it is, if it is one.
        which: of a statistic, which value.
    """

    name: str
    of: Callable[[Row], Any]
    unit: Unit = ""
    is_number: bool = False
    address: str | None = None
    which: Which = "last"

    def text(self, value: Any) -> str:
        """Return a value as a table shows it, in one line without control characters."""
        if value is MISSING:
            return ""
        if isinstance(value, datetime):
            return f"{value:%Y-%m-%d %H:%M}"
        if self.unit in ("seconds", "bytes"):
            return span(value) if self.unit == "seconds" else size_of(value)
        if isinstance(value, float):
            return f"{value:.6g}"
        return in_one_line(value if isinstance(value, str) else json.dumps(value, default=str), _WIDEST)


def _or_missing(value: Any) -> Any:
    return MISSING if value is None else value


def _age(row: Row) -> Any:
    return MISSING if row.run.begin is None else (row.now - row.run.begin).total_seconds()


def _class_of(*keys: str) -> Callable[[Row], Any]:
    def class_in(row: Row) -> Any:
        for key in keys:
            value = row.run.value(key)
            if value is not MISSING:
                return value
        return MISSING

    return class_in


FACTS = {
    column.name: column
    for column in (
        Column("name", lambda row: row.name),
        Column("status", lambda row: row.run.status, "status"),
        Column("epochs", lambda row: row.run.epochs_done, is_number=True),
        Column("iterations", lambda row: row.run.iterations_done, is_number=True),
        Column("best", lambda row: row.summaries.best[0] if row.summaries.best else MISSING, is_number=True),
        Column("best_epoch", lambda row: row.summaries.best[1] if row.summaries.best else MISSING, is_number=True),
        Column("age", _age, "seconds", is_number=True),
        Column("duration", lambda row: _or_missing(row.run.seconds(row.now)), "seconds", is_number=True),
        Column("size", lambda row: row.run.size, "bytes", is_number=True),
        Column("looks", lambda row: looks_of(row.run).total(), is_number=True),
        Column("config_looks", lambda row: row.config_looks()[row.run.directory].total(), is_number=True),
        Column("begin", lambda row: _or_missing(row.run.begin), "time"),
        Column("end", lambda row: _or_missing(row.run.end), "time"),
        Column("reason", lambda row: _or_missing(row.run.reason)),
        Column("host", lambda row: _or_missing(row.run.trace.get("host"))),
        Column("model", _class_of("model.module.class", "model.class"), "class"),
        Column("dataset", _class_of("dataset.class"), "class"),
    )
}
"""The facts about a run that have a name of their own."""


def column(name: str) -> Column:
    """Return what a name stands for.

    Args:
        name: a fact such as `epochs`; a statistic, `stream/variable` or `stream/variable/aggregation`, its last value,
            with `min:` or `max:` before it its lowest or highest; or the key of a value of the config.
    """
    if name in FACTS:
        return FACTS[name]
    match = _STATISTIC.fullmatch(name)
    if match is None:
        unit: Unit = "class" if name.rpartition(".")[2] == "class" else ""
        return Column(name, lambda row: row.run.value(name), unit)
    address = match[2]
    which: Which = "min" if match[1] == "min" else "max" if match[1] == "max" else "last"

    def value(row: Row) -> Any:
        best = row.summaries.of(address, which)
        return MISSING if best is None else best[0]

    return Column(name, value, is_number=True, address=address, which=which)


def rows_of(runs: Iterable[StoredRun], root: Path, columns: Sequence[Column], now: datetime | None = None) -> list[Row]:
    """Return runs as rows of a list.

    Args:
        runs: the runs.
        root: the directory that they are in; names are relative to it.
        columns: all that will be asked for.
        now: the time; by default that of the system.
    """
    addresses = [wanted.address for wanted in columns if wanted.address is not None]
    with_best = any(wanted.name in ("best", "best_epoch") for wanted in columns)
    now = datetime.now().astimezone() if now is None else now
    runs = list(runs)
    looks = functools.cache(lambda: looks_by_config(runs))
    return [
        Row(run, _name_of(run.directory, root), Summaries(run, addresses, with_best=with_best), now, looks)
        for run in runs
    ]


def _name_of(directory: Path, root: Path) -> str:
    return directory.resolve().name if directory == root else str(directory.relative_to(root))


def check_known(columns: Iterable[Column], rows: Sequence[Row]) -> None:
    """Check that each value is there in at least one run: otherwise its name is probably a mistake.

    Raises:
        UsageError: no run has one of them; the message has the nearest name.
    """
    for wanted in columns:
        if wanted.name not in FACTS and rows and all(wanted.of(row) is MISSING for row in rows):
            names = {*FACTS, *_names_in(rows[0].run)}
            bare = wanted.name.removeprefix(f"{wanted.which}:")
            what = "recorded the statistic" if wanted.address else "a value in its config with the key"
            if any(known.endswith(f"/{bare}") for known in names):
                what = "a value in its config, or a statistic with its stream,"
            ends = [name for name in names if name.endswith(f".{bare}")]
            meant = f"; did you mean {ends[0]!r}?" if len(ends) == 1 else did_you_mean(bare, names)
            raise UsageError(f"no run has {what} {in_one_line(bare)!r}{meant}")


def _names_in(run: StoredRun) -> list[str]:
    """Return the names of all values of the config and all statistics of a run."""
    names: list[str] = []
    try:
        names += [".".join(map(str, path)) for path, _, _ in run.config.root.places()]
        for epoch in run.epochs():
            names += [
                f"{stream}/{name}"
                for stream, variables in epoch["streams"].items()
                for name, _ in statistics(variables)
            ]
            if len(names) > 10_000:
                break
    except (ConfigError, StorageError):
        pass
    return list(dict.fromkeys(names))
