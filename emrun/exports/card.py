"""The model card of an export, `README.md`: made from the run by the template `card.md`, and read by the Hub."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from emrun.base.censor import hidden
from emrun.base.types import Json
from emrun.base.wording import counted, short, span
from emrun.epoch_data import brief_statistics, is_rate
from emrun.exports.measured import Measured, Statistic, interval_of_share
from emrun.runs.looks import looks_by_config, looks_of
from emrun.runs.stored_run import StoredRun, number
from emrun.storage.lock import EVALUATIONS

_MARKUP = re.compile(r"([\\`*_\[\]|~$#!{}])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
_LONGEST = 200  # characters of a field
_LIBRARIES = {"torch-export": "pytorch", "safetensors": "pytorch", "adapter": "peft"}
_TASKS = {
    ("Digits", True): "image-classification",
    ("ImageFolder", True): "image-classification",
    ("Pictures", True): "image-segmentation",
    ("Table", True): "tabular-classification",
    ("Table", False): "tabular-regression",
    ("Text", True): "text-classification",
    ("TokenWindows", True): "text-generation",
}
"""The class of the dataset, and whether a loss compares classes -> what the Hub calls the task."""
_PLACES = re.compile(r"^code_directory:.*\n|(?<![\w.}:/-])~?/(?:[^\s'\"/,]+/)+", re.MULTILINE)
"""What the config has of this machine: where the code is, and the folders of absolute paths."""


class _Safe(str):
    """A text of a card that has no markup of others."""

    __slots__ = ()


def escaped(value: object) -> str:
    """Return a value that may be anybody's as Markdown that shows it: on one line, without markup, not too long."""
    if isinstance(value, _Safe):
        return value
    text = _MARKUP.sub(r"\\\1", _plain(value))
    shown = "".join(_ENTITIES.get(each, each) for each in text)
    shown = shown.replace("://", ":&#47;&#47;").replace("www.", "www&#46;")
    return re.sub(r"^([-+=]|\d+[.)](?= |$))", r"&#8203;\1", shown)  # no list, and no line across


def _plain(value: object) -> str:
    printable = "".join(each if each.isprintable() else " " for each in hidden(str(value)))
    text = " ".join(printable.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _in_json(value: Any) -> str:
    """Return a value as JSON in one line, which is YAML and Python too."""
    return _Safe("".join(filter(str.isprintable, hidden(json.dumps(value, ensure_ascii=False)))))


def card_of(measured: Measured, license_id: str | None, facts: Json) -> str:
    """Return the text of the card.

    Args:
        measured: the run's model on a stream.
        license_id: the identifier of the licence; None if nobody has said one.
        facts: what `export.json` has.
    """
    # what the Hub reads
    run = measured.run
    statistics = list(_statistics(measured))
    data = _data(measured)
    task = _task(measured)
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
    environment.filters |= {"json": _in_json, "raw": _Safe, "short": short, "counted": counted}
    config = hidden(_PLACES.sub("", run.config_text)).strip()
    classes = facts["classes"] or {}
    return environment.get_template("card.md").render(
        front={key: value for key, value in front.items() if value is not None},
        facts=facts,
        license=license_id,
        classes=classes if isinstance(classes, dict) else {"": classes},
        data=data,
        rows=measured.rows,
        statistics=statistics,
        looks=[(stream, count, of_config[stream]) for stream, count in looks.items()],
        training=training,
        config=config,
        fence="`" * (3 + config.count("`")),
    )


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
    """Return the name of the data: the class of the dataset, and the first file, folder or name that the config has."""
    section = measured.in_config("dataset")
    given = section.items() if isinstance(section, dict) else ()
    places = [Path(value).name for key, value in given if key != "class" and isinstance(value, str)]
    return " ".join([type(measured.training.dataset).__name__, *places[:1]])


def _task(measured: Measured) -> str | None:
    """Return what the Hub calls the task, where the dataset tells it."""
    has_classes = any(each.activation for each in measured.training.model.targets)
    return _TASKS.get((type(measured.training.dataset).__name__, has_classes))
