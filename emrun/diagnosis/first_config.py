"""A first config for data that were looked at: a base with its `vars`, and a comment for each choice."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from emrun.base.errors import UsageError
from emrun.base.tables import Table
from emrun.base.wording import counted, few
from emrun.diagnosis.first_look import Column, Pictures, Rows, is_category, is_of_classes, names_of, target_of

Task = Literal["classification", "regression", "forecast", "segmentation"]
_SHARES = {"valid": 0.15, "test": 0.15}
_MOST_SIDE = 224  # pixels
_PAST, _FUTURE = 48, 24  # rows
_LATE = 1.5  # times the usual distance of two rows, from which on rows are missing
_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan"}  # of YAML, old and new
_WEIGHTS = "resnet18-*.pth"


@dataclass
class FirstConfig:
    """A config and what is said of the data.

    Args:
        base: the base.
        about: what it does, for the first line.
        vars: key -> value and comment.
        seen: what is said of the data.
        table: the columns, for a file of rows.
        hints: what else can be done.
    """

    base: str
    about: str
    vars: dict[str, tuple[Any, str]]
    seen: list[str]
    table: Table | None
    hints: list[str]

    @property
    def predictions(self) -> str:
        """What follows -o in a command that predicts."""
        if self.base == "segmentation":
            return "masks/"
        return "new.csv --probabilities" if "classification" in self.base or self.base == "tabular" else "new.csv"

    def text(self) -> str:
        """Return the YAML."""
        lines = [f"# {self.about}", f"extends: emrun:{self.base}", "seed: 1", "vars:"]
        body = [f"  {key}: {_flow(value)}" for key, (value, _) in self.vars.items()]
        width = min(60, max(map(len, body), default=0))
        comments = [comment for _, comment in self.vars.values()]
        lines += [f"{line:{width}}  # {comment}" for line, comment in zip(body, comments, strict=True)]
        return "\n".join(lines) + "\n"


def first_config(seen: Pictures | Rows, target: str | None, task: Task | None) -> FirstConfig:
    """Return a config for data.

    Args:
        seen: the data.
        target: the column to predict; None for the one that looks like it.
        task: what to learn; None for what the data look like.

    Raises:
        UsageError: the data do not fit the task, or nothing can be learnt.
    """
    if isinstance(seen, Rows):
        if task == "segmentation":
            raise UsageError("rows have no masks; leave out --task")
        column = target_of(seen, target)
        return _forecast(seen, column) if task == "forecast" else _tabular(seen, column, task, target is None)
    if target is not None:
        raise UsageError(f"{seen.root} is a folder of pictures, which have no column {target!r}; leave out --target")
    if task not in (None, "segmentation" if seen.masks else "classification"):
        what = "pictures with masks" if seen.masks else "pictures of classes"
        raise UsageError(f"{seen.root} has {what}; --task {task} needs other data")
    return _segmentation(seen) if seen.masks else _classification(seen)


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_flow(key)}: {_flow(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


# Pictures


def _classification(seen: Pictures) -> FirstConfig:
    counts = ", ".join(f"{name} {count}" for name, count in list(seen.classes.items())[:10])
    more = ", ..." if len(seen.classes) > 10 else ""
    fewest = min(seen.classes.values())
    values: dict[str, tuple[Any, str]] = {
        "root": (str(seen.parts["train"]), f"{counted(len(seen.classes), 'class', 'es')}: {counts}{more}"),
        **_divided(seen.parts, fewest, "label"),
        **_of_size(seen),
        "flip": (True, "false if left and right mean something, as in texts and arrows"),
        **_network(),
        "epochs": (30, "ends before if `valid` gets no better"),
    }
    about = f"Classifies the pictures of {seen.root.name}; what else can be set: emrun show emrun:image_classification"
    said = [
        f"{seen.root}: {counted(sum(seen.classes.values()), 'picture')} of {len(seen.classes)} classes: {counts}{more}",
        _sizes_of(seen),
    ]
    return FirstConfig("image_classification", about, values, said, None, [])


def _segmentation(seen: Pictures) -> FirstConfig:
    raise UsageError(f"{seen.root}: pictures with masks have no base yet")


def _divided(folders: Mapping[str, Path], fewest: int, by: str | None) -> dict[str, tuple[Any, str]]:
    """Return the keys for the parts: their folders, or shares of the train rows."""
    others: dict[str, tuple[Any, str]] = {
        part: (str(folder), "to evaluate on") for part, folder in folders.items() if part != "train"
    }
    if others:
        return {**others, "split": (None, "these folders are the parts")}
    return {"split": _shares(fewest, by)}


def _shares(fewest: int, by: str | None) -> tuple[Any, str]:
    """Return the shares of valid and test, so that each class is in each part, with a comment."""
    shares: dict[str, Any] = dict(_SHARES)
    if fewest * _SHARES["valid"] < 1:
        shares = {"valid": 0.25 if fewest >= 4 else 0.5, "test": None}
    said = "of each class" if by else "drawn"
    return {**shares, "by": by} if by else shares, f"shares of the rows to evaluate on, {said}"


def _of_size(seen: Pictures) -> dict[str, tuple[Any, str]]:
    sides = sorted(min(size) for size, count in seen.sizes.items() for _ in range(count))
    side = max(8, min(_MOST_SIDE, sides[len(sides) // 2]))
    found: dict[str, tuple[Any, str]] = {"size": (side, "pixels of each side that pictures are resized to")}
    if seen.is_grey:
        found |= {
            "image_mode": ("L", "the pictures are grey"),
            "mean": ([0.5], "of grey, where white is 1"),
            "std": ([0.25], "of grey"),
        }
    return found


def _sizes_of(seen: Pictures) -> str:
    shown = few([f"{height} x {width}" for (height, width), _ in seen.sizes.most_common()])
    return f"sizes (height x width): {shown}; {'grey' if seen.is_grey else 'colours'}"


def _network() -> dict[str, tuple[Any, str]]:
    """Return the network: one whose weights are on this machine, or else a small one; nothing is downloaded."""
    home = os.environ.get("TORCH_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "torch")
    there = list(Path(home, "hub", "checkpoints").expanduser().glob(_WEIGHTS))
    if there and find_spec("torchvision"):
        return {
            "model": ("resnet18", "of torchvision"),
            "pretrained": (True, f"begins with {there[0].name}, which is on this machine"),
        }
    return {
        "model": ("small", "or a model of torchvision, such as resnet18"),
        "pretrained": (False, "true downloads weights of torchvision, if they are not on this machine"),
    }


# Rows


def _tabular(seen: Rows, target: Column, task: Task | None, is_guessed: bool) -> FirstConfig:
    is_classes = task == "classification" or (task is None and is_of_classes(target, seen.count))
    if is_classes and len(target.counts) > max(2, seen.count // 2):
        what = f"column {target.name!r} has {len(target.counts)} different values in {counted(seen.count, 'row')}"
        raise UsageError(f"{what}, so that classes have hardly any rows; choose another by --target")
    if not is_classes and target.kind not in ("whole", "number"):
        raise UsageError(f"column {target.name!r} has {target.kind}s, no numbers; leave out --task regression")
    uses = {column.name: _use(column, seen, target) for column in seen.columns.values()}
    by_use = {
        use: [column for column in seen.columns.values() if uses[column.name] == use]
        for use in ("numbers", "categories", "id", "date")
    }
    if not by_use["numbers"] + by_use["categories"]:
        raise UsageError(f"{seen.path.name} has no column from which {target.name!r} can be predicted")
    fewest = min(target.counts.values())
    classes = few([f"{name} {count}" for name, count in target.counts.items()])
    span = f"{len(target.counts)} classes: {classes}" if is_classes else "numbers"
    values: dict[str, tuple[Any, str]] = {
        "train": (str(seen.path), counted(seen.count, "row")),
        "target": (target.name, f"{span}{'; chosen as nothing was said' if is_guessed else ''}"),
        "numbers": (names_of(by_use["numbers"]), "scaled to mean 0 and deviation 1"),
        "categories": (names_of(by_use["categories"]), "texts, and whole numbers that are names"),
        **_fill(by_use["numbers"], by_use["categories"]),
    }
    if by_use["id"]:
        values["id"] = (by_use["id"][0].name, "different in each row; names the rows of predictions")
    dates = names_of(by_use["date"])
    values["split"] = _split_of_rows(seen, fewest if is_classes else None, target.name, dates)
    values["epochs"] = (50, "ends before if `valid` gets no better")
    base = "tabular" if is_classes else "tabular_regression"
    verb = "Classifies" if is_classes else "Predicts numbers for"
    about = f"{verb} the rows of {seen.path.name} by {target.name}; what else can be set: emrun show emrun:{base}"
    hints = [
        f"{name} has dates: for rows that follow each other in time, `split: {{by: null, time: {_flow(name)}}}` "
        f"evaluates on the last ones, and --task forecast predicts the next ones"
        for name in dates[:1]
    ]
    return FirstConfig(base, about, values, _said(seen), _columns(seen, uses, target), hints)


def _said(seen: Rows) -> list[str]:
    return [f"{seen.path}: {counted(seen.count, 'row')}, {counted(len(seen.columns), 'column')}"]


def _use(column: Column, seen: Rows, target: Column) -> str:
    """Return what a column is used for: a key of the config, or why it is left out."""
    if column is target:
        return "target"
    ids = [each for each in seen.columns.values() if each.names_rows(seen.count)]
    if column in ids:
        return "id" if column is ids[0] else "left out: different in each row"
    if column.kind in ("empty", "other"):
        return "left out: no values" if column.kind == "empty" else "left out: neither numbers nor texts"
    if column.kind == "date":
        return "date"
    if len(column.counts) < 2:
        return "left out: one value only"
    words = [value for value in column.counts if not _is_number(value)]
    if column.kind == "text" and sum(map(column.counts.get, words)) * 2 < seen.count - column.gaps:  # type: ignore[arg-type]
        return f"left out: numbers, but also {words[0]!r}; leave such cells empty"
    if column.kind in ("whole", "number"):
        return "numbers"
    return "categories" if is_category(column, seen.count) else "left out: too many different texts"


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return bool(np.isfinite(float(text)))
    return False


def _fill(numbers: Sequence[Column], categories: Sequence[Column]) -> dict[str, tuple[Any, str]]:
    filled: dict[str, Any] = {each.name: {"by": "median"} for each in numbers if each.gaps}
    filled |= {each.name: "?" for each in categories if each.gaps}
    return {"fill": (filled, "gaps get the median of the train rows, or are a category")} if filled else {}


def _split_of_rows(seen: Rows, fewest: int | None, target: str, dates: Sequence[str]) -> tuple[Any, str]:
    if seen.count < 8:
        raise UsageError(f"{seen.path.name} has {counted(seen.count, 'row')}; too few to train and to evaluate on")
    if fewest is None and dates and not seen.columns[dates[0]].gaps:
        return {**_SHARES, "time": dates[0]}, "shares of the rows to evaluate on, the last in time"
    if fewest is None:
        return _SHARES, "shares of the rows to evaluate on, drawn"
    if fewest < 2:
        return {**_SHARES, "by": None}, "drawn; a class has one row, so not by: " + target
    return _shares(fewest, target)


def _columns(seen: Rows, uses: Mapping[str, str], target: Column) -> Table:
    rows = []
    for column in seen.columns.values():
        where = f" (row {column.first_gap})" if column.gaps else ""
        shown = "left out: a date" if uses[column.name] == "date" else uses[column.name]
        rows.append([column.name, column.kind, f"{column.gaps}{where}", str(len(column.counts)), shown])
    return Table(rows, ["column", "kind", "gaps", "different", "use"])


# Time


def _forecast(seen: Rows, target: Column) -> FirstConfig:
    if target.kind not in ("whole", "number"):
        raise UsageError(f"column {target.name!r} has {target.kind}s, but a forecast needs numbers; see --target")
    order = _order(seen)
    numbers = [each for each in seen.columns.values() if each.kind in ("whole", "number") and len(each.counts) > 1]
    known = [each for each in numbers if each is not order and not each.names_rows(seen.count)]
    known = [target, *(each for each in known if each is not target)]
    group, length, is_even = _series(seen, order)
    if length < 20:
        raise UsageError(f"{seen.path.name} has {counted(length, 'row')} in time; a forecast needs 20 or more")
    future = max(1, min(_FUTURE, length // 10))
    past = max(2, min(_PAST, length // 4))
    values: dict[str, tuple[Any, str]] = {
        "train": (str(seen.path), counted(seen.count, "row")),
        "columns": (names_of(known), "what is known of the past"),
        "targets": ([target.name], "what is forecast"),
        "past": (past, "rows that are known"),
        "future": (future, "rows to forecast"),
        "order": (order.name if is_even else None, "the time" if is_even else "rows are not evenly apart"),
    }
    if group is not None:
        values["group"] = (group.name, f"{len(group.counts)} series")
    values |= _fill([each for each in known if each is not target], [])
    values["split"] = ({**_SHARES, "time": order.name}, "the last rows are to evaluate on")
    values["epochs"] = (30, "ends before if `valid` gets no better")
    about = f"Forecasts {target.name} of {seen.path.name}; what else can be set: emrun show emrun:forecast"
    uses = {**dict.fromkeys(seen.columns, "left out"), **dict.fromkeys(names_of(known), "columns"), order.name: "order"}
    if group is not None:
        uses[group.name] = "group"
    uses[target.name] = "columns and targets"
    return FirstConfig("forecast", about, values, _said(seen), _columns(seen, uses, target), [])


def _order(seen: Rows) -> Column:
    """Return the column of the time."""
    able = [each for each in seen.columns.values() if not each.gaps]
    dates = [each for each in able if each.kind == "date"]
    counters = [each for each in able if each.is_counter]
    if not dates + counters:
        what = f"{seen.path.name} has no column of times without gaps"
        raise UsageError(f"{what}; a forecast needs one, such as 2020-01-31 or 2020-01-31 12:00:00")
    return (dates + counters)[0]


def _series(seen: Rows, order: Column) -> tuple[Column | None, int, bool]:
    """Return the column of the series, if there are several, the rows of the shortest, and whether rows are even.

    Raises:
        UsageError: rows of one time are not told apart, or are neither even nor in order.
    """
    times = seen.table.column(order.name).to_numpy().astype("int64" if order.is_counter else "datetime64[us]")
    for group in (None, *(each for each in seen.columns.values() if is_category(each, seen.count) and not each.gaps)):
        names = [""] * seen.count if group is None else list(map(str, seen.table.column(group.name).to_pylist()))
        numbers = np.unique(names, return_inverse=True)[1]
        own = [times[numbers == number].astype("int64") for number in range(numbers.max() + 1)]
        apart = np.concatenate([np.diff(np.sort(each)) for each in own])
        is_sorted = all((np.diff(each) > 0).all() for each in own)
        is_even = len(apart) > 0 and bool((apart <= _LATE * np.median(apart)).all())
        if len(apart) and (apart > 0).all() and (is_even or is_sorted):
            return group, min(map(len, own)), is_even
    what = f"{seen.path.name}: {order.name!r} has a time twice, or its rows are neither evenly apart nor in order"
    raise UsageError(f"{what}; sort them, and write each time of a series once")
