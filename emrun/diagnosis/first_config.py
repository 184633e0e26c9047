"""A first config for data that were looked at: a base with its `vars`, and a comment for each choice."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from emrun.base.errors import UsageError
from emrun.base.tables import Table
from emrun.base.wording import counted, few, listed
from emrun.config.interpolation import escaped
from emrun.diagnosis.first_look import (
    LINES,
    Column,
    Pictures,
    Rows,
    Talks,
    is_category,
    is_of_classes,
    lengths_of,
    longest_text,
    names_of,
    target_of,
)  # fmt: skip

Task = Literal["classification", "regression", "forecast", "segmentation", "text_classification", "chat"]
_SHARES = {"valid": 0.15, "test": 0.15}
_MOST_SIDE = 224  # pixels
_IGNORED = 255  # of masks: pixels without a class
_PAST, _FUTURE = 48, 24  # rows
_LATE = 1.5  # times the usual distance of two rows, from which on rows are missing
_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan"}  # of YAML, old and new
_WEIGHTS = "resnet18-*.pth"
_LABELS = {
    "image_classification": "label",
    "tabular": "target",
    "text_classification": "label",
}  # base -> the source of its classes
_PATIENCE = "ends before if `valid` gets no better"
_CHARACTERS = 12  # of texts, at the mean, that are not names
_DATE = "left out: a date"
Setting = tuple[Any, str]
"""A value and its comment."""
Vars = dict[str, Setting]
_FROM_NOTHING: Vars = {
    "tokenizer": ({"learn": 4000}, "tokens, from the train rows; or a directory or a name of transformers"),
    "model": ("small", "with random weights; or the directory or name that the tokenizer has"),
}


@dataclass
class FirstConfig:
    """A config and what is said of the data.

    Args:
        base: the base.
        about: what it does, for the first line.
        vars: key -> value and comment.
        seen: what is said of the data.
    """

    base: str
    about: str
    vars: Vars
    seen: Sequence[str | Table]

    @property
    def predicting(self) -> str:
        """The command that predicts new data."""
        output = {"segmentation": "masks/", "chat": "answers.jsonl --generate 5"}.get(self.base, "new.csv")
        if "classification" in self.base or self.base == "tabular":
            output += " --probabilities"
        return f"emrun predict RUN_DIR --data PATH -o {output}"

    @property
    def evaluated(self) -> str:
        """The stream to evaluate at the end."""
        has_test = "test" in self.vars or (self.vars["split"][0] or {}).get("test") is not None
        return "test" if has_test else "valid"

    def text(self, directory: Path) -> str:
        """Return the YAML of a file in a directory, with relative paths of data beside or below the directory."""
        about = f"# {self.about}; what else can be set: emrun show emrun:{self.base}"
        lines = [about, f"extends: emrun:{self.base}", "seed: 1", "vars:"]
        for key, (value, comment) in self.vars.items():
            is_near = isinstance(value, Path) and value.is_relative_to(directory.parent)
            shown = f"${{here}}/{os.path.relpath(value, directory)}" if is_near else value
            setting = f"{key}: {_flow(shown)}"
            lines.append(f"  {setting:44}  # {comment}")
        labels = _LABELS.get(self.base)
        if labels is not None and find_spec("matplotlib"):
            streams = _flow(list(dict.fromkeys(["valid", self.evaluated])))
            matrix = f"{{predictions_name: logits, labels_name: {labels}, streams: {streams}}}"
            lines += [
                "hooks:  # beside those of the base",
                f"  SaveConfusionMatrix: {matrix}  # in the page of the run",
            ]
        return "\n".join(lines) + "\n"


def first_config(seen: Pictures | Rows | Talks, target: str | None, task: Task | None) -> FirstConfig:
    """Return a config for data.

    Args:
        seen: the data.
        target: the column to predict; None for the one that looks like it.
        task: what to learn; None for what the data look like.

    Raises:
        UsageError: the data do not fit the task, or nothing can be learnt.
    """
    if isinstance(seen, Talks):
        if target is not None or task not in (None, "chat"):
            raise UsageError(f"{seen.path.name} has chats in {seen.column!r}; leave out --target and --task")
        return _chat(seen)
    if isinstance(seen, Rows):
        if task in ("segmentation", "chat"):
            raise UsageError(f"rows have no {'masks' if task == 'segmentation' else 'messages'}; leave out --task")
        column = target_of(seen, target)
        return _forecast(seen, column) if task == "forecast" else _tabular(seen, column, task)
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
    if isinstance(value, Path):
        return json.dumps(escaped(str(value)), ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


# Pictures


def _classification(seen: Pictures) -> FirstConfig:
    classes = few([f"{name} {count}" for name, count in seen.classes.items()])
    count = counted(len(seen.classes), "class", "es")
    values: Vars = {"root": (seen.parts["train"], f"{count}: {classes}")}
    others = {part: folder for part, folder in seen.parts.items() if part != "train"}
    values |= {part: (folder, "to evaluate on") for part, folder in others.items()}
    shares = _shares(seen.root.name, min(seen.classes.values()), "label")
    values["split"] = (None, "these folders are the parts") if others else shares
    values |= _of_size(seen)
    values["flip"] = (True, "false if left and right mean something, as in texts and arrows")
    values |= _network()
    values["epochs"] = (30, _PATIENCE)
    about = f"Classifies the pictures of {seen.root.name}"
    return FirstConfig("image_classification", about, values, [f"{seen.root}: {count}: {classes}", _sizes_of(seen)])


def _segmentation(seen: Pictures) -> FirstConfig:
    is_binary = seen.values == {0, _IGNORED}
    numbers = seen.values if is_binary else range(max(seen.values - {_IGNORED}, default=0) + 1)
    classes = [f"class{number}" for number in range(len(numbers))]
    if len(classes) < 2:
        raise UsageError(f"{seen.masks} has one class, 0, so that there is nothing to tell apart")
    values: Vars = {
        "image": (seen.parts["train"], counted(seen.sizes.total(), "picture")),
        "mask": (seen.masks, "of the same names"),
        "classes": (classes, "the names of the pixels 0, 1, ...; write better ones"),
        "split": (_SHARES, "shares to evaluate on, drawn"),
        "size": (max(16, _side(seen) // 16 * 16), "pixels of each side that pictures are resized to"),
        "epochs": (40, _PATIENCE),
    }
    if is_binary:
        values["values"] = ([0, _IGNORED], "of the classes in the masks")
    said = f"{seen.root}: pictures with masks of {len(classes)} classes"
    return FirstConfig(
        "segmentation", f"Finds classes in the pixels of {seen.root.name}", values, [said, _sizes_of(seen)]
    )


def _shares(place: str, fewest: int, by: str) -> Setting:
    """Return the shares of valid and test that have each class, of which the smallest has so many rows.

    Raises:
        UsageError: a class has one row.
    """
    if fewest < 2:
        raise UsageError(f"{place}: a class of {by!r} has one row; leave the row out, or add others")
    shares: dict[str, Any] = dict(_SHARES)
    if fewest * _SHARES["valid"] < 1:
        shares = {"valid": 0.25 if fewest >= 4 else 0.5, "test": None}
    return {**shares, "by": by}, "shares to evaluate on, of each class"


def _of_size(seen: Pictures) -> Vars:
    found: Vars = {"size": (_side(seen), "pixels of each side that pictures are resized to")}
    if seen.is_grey:
        found["image_mode"] = ("L", "the pictures are grey")
        found["mean"] = ([0.5], "of grey, where white is 1")
        found["std"] = ([0.25], "of grey")
    return found


def _side(seen: Pictures) -> int:
    sides = sorted(min(size) for size in seen.sizes.elements())
    return max(8, min(_MOST_SIDE, sides[len(sides) // 2]))


def _sizes_of(seen: Pictures) -> str:
    shown = few([f"{height} x {width}" for (height, width), _ in seen.sizes.most_common()])
    return f"sizes (height x width): {shown}; {'grey' if seen.is_grey else 'colours'}"


def _network() -> Vars:
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


# Chats


def _chat(seen: Talks) -> FirstConfig:
    roles = Counter(message["role"] for chat in seen.chats for message in chat)
    if "assistant" not in roles:
        raise UsageError(f"{seen.path.name} has no answers, of role assistant (the roles are {listed([*roles])})")
    lengths = lengths_of("".join(message.get("content", "") for message in chat) for chat in seen.chats)
    shown = few([f"{role} {count}" for role, count in roles.items()])
    values: Vars = {
        "train": (seen.path, counted(len(seen.chats), "chat")),
        "messages": (seen.column, f"roles: {shown}"),
        "split": ({"valid": 0.1 if len(seen.chats) >= 10 else 0.5}, "a share to evaluate on, drawn"),
        **_FROM_NOTHING,
        "epochs": (20, _PATIENCE),
    }
    said = [f"{seen.path}: {values['train'][1]}", f"messages: {shown}", lengths]
    return FirstConfig("chat", f"Answers as in the chats of {seen.path.name}", values, said)


# Rows


def _tabular(seen: Rows, target: Column, task: Task | None) -> FirstConfig:
    is_asked = task == "text_classification" or seen.path.suffix.lower() in LINES  # for texts
    is_classes = task == "classification" or (task != "regression" and is_of_classes(target, seen.count))
    if is_classes and len(target.counts) > max(2, seen.count // 2):
        what = f"column {target.name!r} has {len(target.counts)} different values in {counted(seen.count, 'row')}"
        raise UsageError(f"{what}, so that classes have hardly any rows; choose another by --target")
    if not is_classes and target.kind not in ("whole", "number"):
        raise UsageError(f"column {target.name!r} has {target.kind}s, no numbers; leave out --task regression")
    uses = {column.name: _use(column, seen, target) for column in seen.columns}
    numbers = [column for column in seen.columns if uses[column.name] == "numbers"]
    categories = [column for column in seen.columns if uses[column.name] == "categories"]
    text = None
    if is_asked or not numbers + categories:
        text = longest_text(seen, target, 0 if is_asked else _CHARACTERS) if is_classes else None
        if text is None:
            what = "no column of texts" if is_asked else "no column"
            raise UsageError(f"{seen.path.name} has {what} from which {target.name!r} can be predicted")
        if text.gaps and seen.path.suffix.lower() != ".csv":
            what = f"{seen.path.name}, row {text.first_gap}: column {text.name!r} is missing"
            raise UsageError(f"{what}; write a text, or leave the row out")
    if seen.count < 8:
        raise UsageError(f"{seen.path.name} has {counted(seen.count, 'row')}; too few to train and to evaluate on")
    classes = few([f"{name} {count}" for name, count in target.counts.items()])
    kind = f"{len(target.counts)} classes: {classes}" if is_classes else "numbers"
    values: Vars = {"train": (seen.path, counted(seen.count, "row"))}
    if text is None:
        values |= {
            "target": (target.name, kind),
            "numbers": (names_of(numbers), "scaled to mean 0 and deviation 1"),
            "categories": (names_of(categories), "texts, and whole numbers that are names"),
            **_fill(numbers, categories),
        }
    else:
        lengths = lengths_of(each or "" for each in seen.table.column(text.name).to_pylist())
        values |= {"text": (text.name, lengths), "label": (target.name, kind), **_FROM_NOTHING}
        uses |= {each.name: "left out" for each in numbers + categories} | {text.name: "text"}
    for name in [name for name, use in uses.items() if use == "id"]:
        values["id"] = (name, "different in each row; names them")
    said = _said(seen, uses)
    if text is not None:
        said += [f"{text.name}: {lengths}", f"{target.name}: {kind}"]
    values["split"] = (_SHARES, "shares to evaluate on, drawn")
    if is_classes:
        values["split"] = _shares(seen.path.name, min(target.counts.values()), target.name)
    for column in [column for column in seen.columns if uses[column.name] == _DATE][:1]:
        hints = [f"`split: {{by: null, time: {_flow(column.name)}}}` evaluates on the last rows"] if is_classes else []
        able = [each for each in (target, *reversed(numbers)) if each.kind in ("whole", "number") and not each.gaps]
        if able and _may_be_forecast(seen, able[0], column):
            hints.append(f"--task forecast --target {shlex.quote(able[0].name)} predicts the next rows")
        if hints:
            said.append(f"hint: {column.name} has dates; {', and '.join(hints)}")
        if not is_classes:
            values["split"] = {**_SHARES, "time": column.name}, "shares to evaluate on, the last in time"
    values["epochs"] = (50 if text is None else 20, _PATIENCE)
    base = "tabular" if is_classes else "tabular_regression"
    if text is not None:
        base = "text_classification"
    about = f"Predicts {target.name} in the rows of {seen.path.name}"
    return FirstConfig(base, about, values, said)


def _said(seen: Rows, uses: Mapping[str, str]) -> list[str | Table]:
    """Return what is said of rows: how many, and a table of the columns."""
    cells = []
    for column in seen.columns:
        where = f" (row {column.first_gap})" if column.gaps else ""
        gaps = f"{column.gaps}{where}"
        cells.append([column.name, column.kind, gaps, str(len(column.counts)), uses[column.name]])
    table = Table(cells, ["column", "kind", "gaps", "different", "use"])
    return [f"{seen.path}: {counted(seen.count, 'row')}, {counted(len(seen.columns), 'column')}", table]


def _use(column: Column, seen: Rows, target: Column) -> str:
    """Return what a column is used for: a key of the config, or why it is left out."""
    if column is target:
        return "target"
    ids = [each for each in seen.columns if each.names_rows(seen.count)]
    if column in ids:
        return "id" if column is ids[0] else "left out: different in each row"
    if column.kind in ("empty", "other"):
        return "left out: no values" if column.kind == "empty" else "left out: neither numbers nor texts"
    if column.kind == "date":
        return _DATE
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


def _fill(numbers: Sequence[Column], categories: Sequence[Column]) -> Vars:
    filled: dict[str, Any] = {each.name: {"by": "median"} for each in numbers if each.gaps}
    filled |= {each.name: "?" for each in categories if each.gaps}
    return {"fill": (filled, "gaps get the median of the train rows, or are a category")} if filled else {}


# Time


def _forecast(seen: Rows, target: Column) -> FirstConfig:
    if target.kind not in ("whole", "number"):
        raise UsageError(f"column {target.name!r} has {target.kind}s, but a forecast needs numbers; see --target")
    able = [each for each in seen.columns if not each.gaps and (each.kind == "date" or each.is_counter)]
    if not able:
        what = f"{seen.path.name} has no column of times without gaps"
        raise UsageError(f"{what}; a forecast needs one, such as 2020-01-31 or 2020-01-31 12:00:00")
    order = min(able, key=lambda each: each.is_counter)
    numbers = [each for each in seen.columns if each.kind in ("whole", "number") and len(each.counts) > 1]
    known = [each for each in numbers if each is not order and not each.names_rows(seen.count)]
    known = [target, *(each for each in known if each is not target)]
    group, length, is_even = _series(seen, order)
    if length < 20:
        raise UsageError(f"{seen.path.name} has {counted(length, 'row')} in time; a forecast needs 20 or more")
    future = max(1, min(_FUTURE, length // 10))
    past = max(2, min(_PAST, length // 4))
    values: Vars = {
        "train": (seen.path, counted(seen.count, "row")),
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
    values["epochs"] = (30, _PATIENCE)
    uses = {**{each.name: "left out" for each in seen.columns}, **dict.fromkeys(names_of(known), "columns")}
    uses |= {order.name: "order", target.name: "columns and targets"}
    if group is not None:
        uses[group.name] = "group"
    return FirstConfig("forecast", f"Forecasts {target.name} of {seen.path.name}", values, _said(seen, uses))


def _may_be_forecast(seen: Rows, target: Column, order: Column) -> bool:
    """Return whether `--task forecast` can be done, with the dates of a column as its times."""
    with suppress(UsageError):
        return bool(_forecast(seen, target).vars["split"][0]["time"] == order.name)
    return False


def _series(seen: Rows, order: Column) -> tuple[Column | None, int, bool]:
    """Return the column of the series, if there are several, the rows of the shortest, and whether rows are even.

    Raises:
        UsageError: rows of one time are not told apart, or are neither even nor in order.
    """
    times = seen.table.column(order.name).to_numpy().astype("int64" if order.is_counter else "datetime64[us]")
    for group in (None, *(each for each in seen.columns if is_category(each, seen.count) and not each.gaps)):
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
