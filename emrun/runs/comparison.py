"""Compares two runs: `compare` says in what their directories differ, as a mapping for JSON.

`compare_steps` finds the first iteration in which their step records differ.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, groupby, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

from emrun.base.errors import ConfigError, StorageError
from emrun.base.types import Json
from emrun.base.wording import in_one_line
from emrun.record.steps import Chunk
from emrun.runs.code_comparison import compare_code
from emrun.runs.config_comparison import compare_configs
from emrun.runs.stored_run import StoredRun, numbers_of
from emrun.runs.summaries import Summary
from emrun.storage.code.files import recorded_batches

_MOST = 10_000  # entries of a file that are compared
_Row = tuple[int, int, int, dict[str, Any]]  # iteration, side, distance to the previous one, the values

PARTS = ("config", "hooks_order", "modules", "packages", "python", "repositories", "device", "data", "epochs", "steps")
"""The parts of a comparison; a part without differences is None or an empty list."""


def compare(a: StoredRun, b: StoredRun) -> Json:
    """Return in what two runs differ, in plain types.

    Returns:
        `runs`: for both, `directory`, `status`, `epochs_done`, `iterations_done`, `problems`. `equal`: whether no part
        differs. `not_compared`: part -> why it could not be compared. `statistics`: address -> `a` and `b`, each None
        or a mapping of `last`, `lowest` and `highest` to the value and its epoch. And the parts, see `PARTS`:

        - `config`: a list of `key`, `a` and `b`, each None where the key is not there, or with `value` and `origin`.
        - `hooks_order`: the names of the hooks that both have, in the order of `a` and of `b`.
        - `modules`: a list of `name`, `change` (`changed`, `only in a`, `only in b`) and `diff`, a unified diff.
        - `packages`: a list of `name`, `a` and `b`, the versions; `python` and `device`: `a` and `b`.
        - `repositories`: for `a` and `b` a list of `directory`, `commit` and `changes`, the checksum of a patch.
        - `data`: a list of `stream`, `pass` and `sources`, whose values in the first batch differ.
        - `epochs`: `first`, the first epoch whose statistics differ, and `a` and `b`, their last epochs.
        - `steps`: see `compare_steps`.
    """
    # the parts, or why one cannot be compared
    comparison: Json = dict.fromkeys(PARTS)
    reasons: dict[str, str] = {}
    for name, part in (
        ("config", lambda: compare_configs(a, b)),
        ("code", lambda: compare_code(a.directory, b.directory)),
        ("device", lambda: {"device": _device(a, b)}),
        ("data", lambda: {"data": _compare_batches(a.directory, b.directory)}),
        ("statistics", lambda: _compare_epochs(a, b)),
        ("steps", lambda: {"steps": compare_steps(a.steps(), b.steps())}),
    ):
        try:
            comparison.update(part())
        except NotCompared as error:
            reasons[name] = str(error)
        except (ConfigError, StorageError) as error:
            reasons[name] = in_one_line(str(error).partition("\n")[0])

    # what is said of both runs
    is_equal = not any(comparison[part] for part in PARTS if part != "steps")
    is_equal = is_equal and (comparison["steps"] is None or comparison["steps"]["equal"])
    runs = [
        {
            "directory": str(run.directory),
            "status": run.status,
            "epochs_done": run.epochs_done,
            "iterations_done": run.iterations_done,
            "problems": run.problems,
        }
        for run in (a, b)
    ]
    return {"runs": runs, "equal": is_equal, "not_compared": reasons, **comparison}


class NotCompared(Exception):
    """A part that at least one of the runs does not have."""


def _device(a: StoredRun, b: StoredRun) -> dict[str, str] | None:
    one = a.trace.get("device")
    other = b.trace.get("device")
    if one is None or other is None:
        lacking = " and ".join(name for name, device in (("a", one), ("b", other)) if device is None)
        raise NotCompared(f"the device of {lacking} is not recorded")
    return None if one == other else {"a": one, "b": other}


def _compare_batches(a: Path, b: Path) -> list[Json]:
    """Return the first batches of streams, recorded in both runs, that differ."""
    one = recorded_batches(a / "code")
    other = recorded_batches(b / "code")
    if not one.keys() & other.keys():
        raise NotCompared("no batch of the same stream is recorded in both")
    differing = []
    for key in [key for key in one if key in other]:
        stream, index, _ = key
        mine = one[key]
        theirs = other[key]
        sources = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        if sources:
            differing.append({"stream": stream, "pass": index, "sources": sources})
    return differing


def _compare_epochs(a: StoredRun, b: StoredRun) -> Json:
    """Return the first epoch that differs, and the last, lowest and highest values of all statistics, side by side."""
    sides: list[dict[str, Summary]] = [{}, {}]
    last: list[int | None] = [None, None]
    first = None
    for pair in zip_longest(a.epochs(), b.epochs()):
        for index, epoch in enumerate(pair):
            if epoch is not None:
                last[index] = epoch["epoch"]
                for address, value in numbers_of(epoch):
                    if address in sides[index] or len(sides[index]) < _MOST:
                        sides[index].setdefault(address, Summary()).add(value, epoch["epoch"])
        one, other = pair
        if first is None and (not one or not other or any(one[key] != other[key] for key in ("epoch", "streams"))):
            first = (one or other or {})["epoch"]
    addresses = {**sides[0], **sides[1]}
    rows = {address: {"a": _shown(sides[0].get(address)), "b": _shown(sides[1].get(address))} for address in addresses}
    epochs = None if first is None else {"first": first, "a": last[0], "b": last[1]}
    return {"epochs": epochs, "statistics": rows}


def _shown(summary: Summary | None) -> Json | None:
    if summary is None:
        return None
    return {"last": summary.last, "lowest": summary.min or summary.last, "highest": summary.max or summary.last}


def compare_steps(a: Iterable[Chunk], b: Iterable[Chunk]) -> Json:
    """Compare the values of all iterations that both runs have recorded, exactly; memory is constant.

    Returns:
        `equal`: whether the records are the same. `compared`: the number of equal iterations before the first
        difference. `last_equal`: the last of them, or None. `first`: None, or the first difference, with `iteration`,
        `every` (the distance of recorded iterations there) and `values`, name -> the values of a and b. `last`: the
        last recorded iterations of a and b, None where there are none. `alone`: the numbers of iterations between the
        others that only a and only b have recorded.
    """
    # whole chunks, as long as they are equal
    last: list[int | None] = [None, None]
    sides = [_noted(chunks, side, last) for side, chunks in enumerate((a, b))]
    compared = 0
    last_equal = None
    first = None
    for one, other in zip_longest(*sides):
        if one is None or one != other:
            break
        compared += len(one)
        last_equal = last[0]
    else:
        one = other = None

    # then the iterations of both sides in their order
    rows = []
    for side, chunk in enumerate((one, other)):
        rest = sides[side] if chunk is None else chain([chunk], sides[side])
        rows.append(_rows(side, rest))
    alone = [0, 0]  # how many iterations only one side has
    ahead = [0, 0]  # how many it has behind the last of the other
    for iteration, same_iteration in groupby(merge(*rows, key=itemgetter(0)), itemgetter(0)):
        by_side = {side: (every, values) for _, side, every, values in same_iteration}
        for side in by_side:
            alone[1 - side] += ahead[1 - side]
            ahead[1 - side] = 0
        if len(by_side) == 1:
            (only,) = by_side
            ahead[only] += 1
            continue
        every, mine = by_side[0]
        theirs = by_side[1][1]
        differing = [name for name in {**mine, **theirs} if not _same(mine.get(name), theirs.get(name))]
        if differing:
            values = {name: [mine.get(name), theirs.get(name)] for name in differing}
            first = {"iteration": iteration, "every": every, "values": values}
            break
        compared += 1
        last_equal = iteration

    # what follows is read for its last iteration
    deque(chain(*sides), maxlen=0)
    is_equal = first is None and last[0] == last[1] and not any(alone)
    result = {"equal": is_equal, "compared": compared, "last_equal": last_equal, "first": first}
    return {**result, "last": last, "alone": alone}


def _noted(chunks: Iterable[Chunk], side: int, last: list[int | None]) -> Iterator[Chunk]:
    """Yield the chunks that have iterations, after noting the last one."""
    for chunk in chunks:
        if len(chunk):
            last[side] = chunk.first + chunk.every * (len(chunk) - 1)
            yield chunk


def _rows(side: int, chunks: Iterable[Chunk]) -> Iterator[_Row]:
    for chunk in chunks:
        for index in range(len(chunk)):
            values = {name: column[index] for name, column in chunk.columns.items()}
            yield chunk.first + chunk.every * index, side, chunk.every, values


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
