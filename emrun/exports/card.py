"""The model card of an export, `README.md`: made from the run, and read by the Hub of Hugging Face."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from emrun.base.censor import hidden
from emrun.base.errors import Position, StorageError
from emrun.base.types import Json
from emrun.base.wording import counted, short, span
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import node_of
from emrun.epoch_data import brief_statistics, is_rate
from emrun.exports.measured import Measured, interval_of_share
from emrun.runs.looks import looks_by_config, looks_of
from emrun.runs.stored_run import StoredRun, number
from emrun.storage.lock import EVALUATIONS

_MARKUP = re.compile(r"([\\`*_\[\]|~$#!{}])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_LONGEST = 200  # characters of a field
_TASKS = {"Table": "tabular", "TokenWindows": "text-generation", "Text": "text-classification"}
_LIBRARIES = {"torch-export": "pytorch"}
_MOST_STATISTICS = 50
_LOADING = {
    "onnx": """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{program}", providers=["CPUExecutionProvider"])
inputs = {{{inputs}}}
outputs = dict(zip([each.name for each in session.get_outputs()], session.run(None, inputs)))
""",
    "torch-export": """\
import torch

program = torch.export.load("{program}").module()
inputs = {{{inputs}}}
with torch.no_grad():
    outputs = program(inputs)
""",
}


class Row(NamedTuple):
    """A statistic of a stream, as the card shows it."""

    stream: str
    name: str
    value: float
    examples: int | None
    interval: tuple[float, float] | None


def escaped(text: object) -> str:
    """Return a text that may be anybody's as Markdown that shows it: on one line, without markup, not too long."""
    plain = " ".join("".join(each if each.isprintable() else " " for each in str(text)).split())
    plain = plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]}..."
    shown = _MARKUP.sub(r"\\\1", "".join(_ENTITIES.get(each, each) for each in hidden(plain)))
    shown = shown.replace("://", ":&#47;&#47;").replace("www.", "www&#46;").replace("@", "&#64;")
    return re.sub(r"^([-+=]|\d+[.)](?= |$))", r"&#8203;\1", shown)  # no list, and no line across


def fenced(text: str, language: str) -> str:
    """Return a text as a block of code, whose fence is longer than any in the text."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def front_matter(fields: Mapping[str, Any]) -> str:
    """Return fields as YAML between two lines `---`; each value is written as JSON, which is YAML."""
    lines = [f"{key}: {json.dumps(_printable(value), ensure_ascii=False)}" for key, value in fields.items()]
    return "\n".join(["---", *lines, "---", ""])


def _printable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _printable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, str):
        return " ".join("".join(each if each.isprintable() else " " for each in hidden(value)).split())[:_LONGEST]
    return value


def card_of(measured: Measured, license_id: str | None, facts: Json) -> str:
    """Return the text of the card.

    Args:
        measured: the run's model on a stream.
        license_id: the identifier of the licence; None if nobody has said one.
        facts: what `export.json` has.
    """
    run = measured.run
    name = str(facts["run"]["name"])
    rows = _rows(measured)
    task = _task(measured, facts)
    data = _data_name(measured)
    fields: Json = {} if license_id is None else {"license": license_id}
    fields |= {
        "library_name": _LIBRARIES.get(facts["kind"], facts["kind"]),
        **({} if task is None else {"pipeline_tag": task}),
        "tags": ["emrun", facts["kind"]],
        "model-index": _model_index(name, task, data, rows),
    }
    parts = [
        front_matter(fields),
        f"# {escaped(name)}",
        f"A model that was trained and exported by emrun, as {facts['kind']}: the file `{facts['program']}`. "
        "`export.json` describes its inputs and outputs.",
        _license(license_id),
        "## Use",
        *_use(facts),
        "## Data",
        *_data(measured, data),
        "## Metrics",
        *_metrics(rows, measured, facts),
        "## Training",
        *_training(run),
        "## How it is reproduced",
        *_reproduction(measured, facts),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _license(license_id: str | None) -> str:
    if license_id is None:
        return "No licence was given: nobody but its makers may use the model. `emrun export --license ID` names one."
    return f"The licence is {escaped(license_id)}."


def _use(facts: Json) -> Iterator[str]:
    kind = facts["kind"]
    pairs = []
    for each in facts["inputs"]:
        shape = tuple(2 if size == "batch" else size if isinstance(size, int) else 8 for size in each["shape"])
        made = f"torch.zeros({shape}, dtype=torch.{each['dtype']})"
        if kind == "onnx":
            made = f"np.zeros({shape}, dtype=np.{each['dtype']})"
        pairs.append(f"{json.dumps(each['name'])}: {made}")
    yield fenced(_LOADING[kind].format(program=facts["program"], inputs=", ".join(pairs)), "python")
    yield _table(
        ["", "name", "dtype", "shape"],
        [
            [what, escaped(each["name"]), each["dtype"], escaped(" x ".join(map(str, each["shape"])))]
            for what, entries in (("input", facts["inputs"]), ("output", facts["outputs"]))
            for each in entries
        ],
    )
    if facts["classes"]:
        named = facts["classes"] if isinstance(facts["classes"], dict) else {"": facts["classes"]}
        for source, names in named.items():
            of = f" of {escaped(source)}" if source else ""
            more = f", ... ({len(names)} in all; `export.json` has them)" if len(names) > 20 else ""
            yield f"Classes{of}, from 0: {', '.join(map(escaped, names[:20]))}{more}."
    if facts["preparation"]["before"] or facts["preparation"]["hooks"]:
        yield "The data have to be prepared as in the training; `preparation` of `export.json` says how."
    else:
        yield "The inputs are the sources of the data as they are; `scale`, `mean` and `std` are inside."


def _data_name(measured: Measured) -> str:
    """Return the name of the data: the class of the dataset, with the name of its file or folder."""
    given: Any = measured.plan.config.plain().get("dataset")
    given = given if isinstance(given, dict) else {}
    keys = ("path", "file", "folder", "train", "name")
    place = next((value for key in keys if isinstance(value := given.get(key), str) and value), None)
    return type(measured.training.dataset).__name__ + (f" {Path(place).name}" if place else "")


def _data(measured: Measured, name: str) -> Iterator[str]:
    yield f"{escaped(name)}:"
    counts = {stream: f"{count:,}" for stream, count in measured.rows.items()}
    yield _table(["stream", "examples"], [[escaped(stream), count] for stream, count in counts.items()])


def _rows(measured: Measured) -> list[Row]:
    """Return the statistics of the checkpoint: those that this export has measured, and those that are recorded."""
    found = [
        Row(measured.stream, name, each.value, each.examples, each.interval)
        for name, each in measured.statistics.items()
    ]
    known = {(row.stream, row.name) for row in found}
    shares = {name for name, each in measured.statistics.items() if each.is_share}
    train = measured.training.main_loop.train_stream_name
    for stream, variables in _recorded(measured):
        for name, value in brief_statistics(variables):
            finite = number(value)
            if finite is not None and (stream, name) not in known and not is_rate(name):
                known.add((stream, name))
                count = measured.rows.get(stream)
                interval = None
                if count and name in shares and stream != train and 0 <= finite <= 1:
                    interval = interval_of_share(finite, count)
                found.append(Row(stream, name, finite, count, interval))
    return found[:_MOST_STATISTICS]


def _recorded(measured: Measured) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the streams of the epoch of the checkpoint, and of the newest evaluation of each other stream."""
    if measured.checkpoint is None:
        return
    run = measured.run
    iteration = measured.checkpoint[1].iteration
    lines: list[Any] = []
    try:
        lines = [epoch["streams"] for epoch in run.epochs() if epoch["iteration"] == iteration]
    except StorageError as error:
        run.note(str(error))
    if lines:
        yield from lines[-1].items()
    for stream, count in looks_of(run).items():
        results = StoredRun(run.directory / EVALUATIONS / f"{stream}-{count}").last_epoch
        if results.get("iteration") == iteration:
            yield stream, results.get("streams", {}).get(stream, {})


def _metrics(rows: Sequence[Row], measured: Measured, facts: Json) -> Iterator[str]:
    checkpoint = facts["run"].get("checkpoint")
    where = "" if checkpoint is None else f" of the checkpoint of epoch {checkpoint['epoch']}"
    if rows:
        yield f"The statistics{where}; the interval is that of 95 % of samples of so many examples:"
        shown = [
            [
                escaped(row.stream),
                escaped(row.name),
                short(row.value),
                f"{row.examples:,}" if row.examples else "not known",
                f"{short(row.interval[0])} to {short(row.interval[1])}" if row.interval else "not known",
            ]
            for row in rows
        ]
        yield _table(["stream", "statistic", "value", "examples", "95 % interval"], shown)
    else:
        yield f"The run has recorded no statistics{where}."
    yield from _looks(measured.run)
    compared = facts["comparison"]
    sentences = [
        f"{escaped(name)} differs by {short(each['largest'])} at most (largest value {short(each['largest_value'])})"
        for name, each in compared["differences"].items()
    ]
    yield (
        "The program was compared with the model outside of emrun on "
        f"{counted(len(compared['batches']), 'batch', 'es')} of {escaped(compared['stream'])}: {'; '.join(sentences)}."
    )


def _looks(run: StoredRun) -> Iterator[str]:
    looks = looks_of(run)
    if not looks:
        yield "No stream that the training does not use was evaluated."
        return
    every = looks_by_config(StoredRun(trace.parent) for trace in run.directory.parent.glob("*/trace.yaml"))
    of_config = every.get(run.directory, looks)
    for stream, count in looks.items():
        yield (
            f"{escaped(stream)} was evaluated {counted(count, 'time')} by this run, and "
            f"{counted(of_config[stream], 'time')} by all runs of its config: each look makes the result weaker."
        )


def _training(run: StoredRun) -> Iterator[str]:
    trace = run.trace
    seconds = run.seconds(datetime.now(UTC))
    known = [
        ("device", trace.get("device")),
        ("processes", trace.get("ranks")),
        ("time", None if seconds is None else f"{seconds:.0f} seconds ({span(seconds)})"),
        ("epochs", run.epochs_done),
        ("iterations", run.iterations_done),
        ("status of the run", run.status),
        ("seed", trace.get("seed")),
        ("emrun", trace.get("emrun")),
        ("torch", trace.get("torch")),
        ("python", trace.get("python")),
    ]
    yield _table(["", ""], [[name, escaped(value)] for name, value in known if value is not None])


def _reproduction(measured: Measured, facts: Json) -> Iterator[str]:
    run = measured.run
    trace = run.trace
    name = shlex.quote(run.directory.name)
    yield (
        f"With the config below as `config.yaml`, emrun {escaped(trace.get('emrun'))}, torch "
        f"{escaped(trace.get('torch'))} and the same data, the training is repeated and checked by:"
    )
    yield fenced(f"emrun train config.yaml --output-dir {name}\nemrun verify-run {name}", "sh")
    if commit := trace.get("git_commit"):
        yield f"The commit of the code is {escaped(commit)}."
    config = {key: value for key, value in measured.run.written.items() if key != "code_directory"}
    text = hidden(dump(node_of(_without_places(config), Position("config"))))
    yield f"<details><summary>config.yaml</summary>\n\n{fenced(text, 'yaml')}\n\n</details>"


def _without_places(value: Any) -> Any:
    """Return a config in which an absolute path is only its last part."""
    if isinstance(value, Mapping):
        return {key: _without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    is_place = isinstance(value, str) and re.match(r"(~|/|[A-Za-z]:\\)", value)
    return Path(value).name if is_place else value


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _task(measured: Measured, facts: Json) -> str | None:
    """Return what the Hub calls the task, where the data and the outputs tell it."""
    activations = {each.activation for each in measured.training.model.targets}
    kind = next(
        (_TASKS[cls.__name__] for cls in type(measured.training.dataset).__mro__ if cls.__name__ in _TASKS), None
    )
    if kind == "tabular":
        return f"tabular-{'classification' if activations & {'softmax', 'sigmoid', 'identity'} else 'regression'}"
    if kind is not None:
        return kind
    shapes = [len(each["shape"]) for each in facts["inputs"]]
    outputs = [len(each["shape"]) for each in facts["outputs"]]
    if shapes == [4] and "softmax" in activations:
        return {2: "image-classification", 4: "image-segmentation"}.get(outputs[0])
    return None


def _model_index(name: str, task: str | None, data: str, rows: Sequence[Row]) -> list[Json]:
    """Return the metrics as the Hub reads them."""
    results = []
    for stream in dict.fromkeys(row.stream for row in rows):
        metrics = [
            {"type": row.name, "name": f"{stream}/{row.name}", "value": row.value}
            for row in rows
            if row.stream == stream and math.isfinite(row.value)
        ]
        if metrics:
            dataset = {"name": data, "type": re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-"), "split": stream}
            results.append({"task": {"type": task or "other"}, "dataset": dataset, "metrics": metrics})
    return [{"name": name, "results": results}] if results else []
