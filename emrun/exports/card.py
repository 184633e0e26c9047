"""The model card of an export, `README.md`: made from the run by the template `card.md`, and read by the Hub."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from emrun.base.censor import hidden
from emrun.base.errors import Position
from emrun.base.types import Json
from emrun.base.wording import counted, short, span
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import node_of
from emrun.epoch_data import brief_statistics, is_rate
from emrun.exports.measured import Measured, Statistic, interval_of_share
from emrun.runs.looks import looks_by_config, looks_of
from emrun.runs.stored_run import StoredRun, number
from emrun.storage.lock import EVALUATIONS

_MARKUP = re.compile(r"([\\`*_\[\]|~$#!{}])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
_LONGEST = 200  # characters of a field
_LIBRARIES = {"torch-export": "pytorch", "safetensors": "pytorch", "adapter": "peft"}
_TASKS = {"Table": "tabular", "TokenWindows": "text-generation", "Text": "text-classification"}


class _Safe(str):
    """A text of a card that has no markup of others."""

    __slots__ = ()


def escaped(value: object) -> str:
    """Return a value that may be anybody's as Markdown that shows it: on one line, without markup, not too long."""
    if isinstance(value, _Safe):
        return value
    text = _plain(value)
    shown = _MARKUP.sub(r"\\\1", "".join(_ENTITIES.get(each, each) for each in text))
    shown = shown.replace("://", ":&#47;&#47;").replace("www.", "www&#46;")
    return re.sub(r"^([-+=]|\d+[.)](?= |$))", r"&#8203;\1", shown)  # no list, and no line across


def _plain(value: object) -> str:
    printable = "".join(each if each.isprintable() else " " for each in hidden(str(value)))
    text = " ".join(printable.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _in_json(value: Any) -> str:
    """Return a value as JSON, which is YAML and Python too."""

    def plain(each: Any) -> Any:
        if isinstance(each, Mapping):
            return {key: plain(item) for key, item in each.items()}
        if isinstance(each, list):
            return list(map(plain, each))
        return _plain(each) if isinstance(each, str) else each

    return _Safe(json.dumps(plain(value), ensure_ascii=False))


def _fenced(text: str, language: str) -> str:
    """Return a text as a block of code, whose fence is longer than any in the text."""
    fence = "`" * max(3, *(len(each) + 1 for each in re.findall("`+", text)), 3)
    return _Safe(f"{fence}{language}\n{text.rstrip()}\n{fence}")


def _example(value: Any) -> str:
    """Return the shape or the dtype of an input as the code that makes zeros has it."""
    if isinstance(value, str):
        return _Safe(re.sub(r"\W", "", value))
    return _Safe(tuple(each if isinstance(each, int) else 2 for each in value))


def card_of(measured: Measured, license_id: str | None, facts: Json) -> str:
    """Return the text of the card.

    Args:
        measured: the run's model on a stream.
        license_id: the identifier of the licence; None if nobody has said one.
        facts: what `export.json` has.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # what the Hub reads
    run = measured.run
    statistics = list(_statistics(measured))
    data = _data(measured)
    task = _task(measured, facts)
    front: Json = {"license": license_id, "library_name": _LIBRARIES.get(facts["kind"], facts["kind"])}
    front |= {"pipeline_tag": task, "tags": ["emrun", facts["kind"]]}
    results = [
        {
            "task": {"type": task or "other"},
            "dataset": {"name": data, "type": re.sub(r"[^a-z0-9]+", "-", data.lower()), "split": each.stream},
            "metrics": [{"type": each.name, "value": each.value}],
        }
        for each in statistics
        if math.isfinite(each.value)
    ]
    front["model-index"] = [{"name": facts["run"]["name"], "results": results}] if results else None

    # how often streams were looked at, and how the run was trained
    looks = looks_of(run)
    every = looks_by_config(StoredRun(trace.parent) for trace in run.directory.parent.glob("*/trace.yaml"))
    of_config = every.get(run.directory, looks)
    trace = run.trace
    seconds = run.seconds(datetime.now(UTC))
    training = {name: trace.get(name) for name in ("device", "ranks", "seed", "python", "git_commit")}
    training |= {"time": seconds and f"{seconds:.0f} s ({span(seconds)})", "status of the run": run.status}
    training |= {"epochs": run.epochs_done, "iterations": run.iterations_done}

    # the text
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        finalize=escaped,  # what makes HTML of values is not for Markdown
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"json": _in_json, "fenced": _fenced, "example": _example, "raw": _Safe, "short": short}
    environment.filters |= {"counted": counted}
    classes = facts["classes"] or {}
    text = environment.get_template("card.md").render(
        front={key: value for key, value in front.items() if value is not None},
        facts=facts,
        license=license_id,
        classes=classes if isinstance(classes, dict) else {"": classes},
        data=data,
        rows=measured.rows,
        statistics=statistics,
        looks=[(stream, count, of_config[stream]) for stream, count in looks.items()],
        training=training,
        config=_config(run),
    )
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


def _statistics(measured: Measured) -> Iterator[Statistic]:
    """Yield those that this export has measured, of the recorded epoch of the checkpoint, and of newer evaluations."""
    known = {(each.stream, each.name): each for each in measured.statistics}
    yield from measured.statistics
    if measured.checkpoint is None:
        return
    run = measured.run
    iteration = measured.checkpoint[1].iteration
    epochs = [epoch["streams"] for epoch in run.epochs() if epoch["iteration"] == iteration]
    recorded = dict(epochs[-1]) if epochs else {}
    for stream, count in looks_of(run).items():
        newest = StoredRun(run.directory / EVALUATIONS / f"{stream}-{count}").last_epoch
        if newest.get("iteration") == iteration:
            recorded |= newest["streams"]
    shares = {each.name for each in measured.statistics if each.is_share}
    for stream, variables in recorded.items():
        is_trained = stream == measured.training.main_loop.train_stream_name
        for name, given in brief_statistics(variables):
            value = number(given)
            if value is None or (stream, name) in known or is_rate(name):
                continue
            count = measured.rows.get(stream, 0)
            is_share = name in shares and not is_trained and count > 0 and 0 <= value <= 1
            interval = interval_of_share(value, count) if is_share else None
            yield Statistic(stream, name, value, count, interval, is_share)


def _data(measured: Measured) -> str:
    """Return the name of the data: the class of the dataset, with the name of its file or folder."""
    given = measured.run.written.get("dataset")
    keys = ("path", "file", "folder", "train", "name")
    places = [given[key] for key in keys if isinstance(given.get(key), str)] if isinstance(given, dict) else []
    return " ".join([type(measured.training.dataset).__name__, *(Path(place).name for place in places[:1])])


def _config(run: StoredRun) -> str:
    """Return the config without the directory of the code; of an absolute path, only its last part is kept."""

    def shown(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: shown(each) for key, each in value.items() if key != "code_directory"}
        if isinstance(value, list):
            return list(map(shown, value))
        return Path(value).name if isinstance(value, str) and re.match("[~/]", value) else value

    return hidden(dump(node_of(shown(run.written), Position("config.yaml"))))


def _task(measured: Measured, facts: Json) -> str | None:
    """Return what the Hub calls the task, where the data and the outputs tell it."""
    is_of_classes = any(each.activation for each in measured.training.model.targets)
    kinds = [each.__name__ for each in type(measured.training.dataset).__mro__]
    task = next((_TASKS[kind] for kind in kinds if kind in _TASKS), None)
    if task == "tabular":
        return "tabular-classification" if is_of_classes else "tabular-regression"
    sizes = "".join(str(len(each["shape"])) for each in (*facts.get("inputs", ()), *facts.get("outputs", ())[:1]))
    of_pictures = {"42": "image-classification", "44": "image-segmentation"}
    return task or (of_pictures.get(sizes) if is_of_classes else None)
