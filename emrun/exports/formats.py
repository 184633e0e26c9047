"""The formats that `emrun export` writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from emrun.base.types import Json


@dataclass(frozen=True, slots=True)
class Options:
    """What is exported, and how.

    Args:
        directory: the run directory.
        to: the name of the format.
        place: the folder or file to write, where nothing is yet, or an empty folder.
        stream: the stream whose batches the export is compared on; None for the default.
        overrides: overrides of the config.
        checkpoint_name: a name such as `latest`; by default `best`, or `latest` if there is no `best`.
        dynamic: `NAME:DIMENSION` of inputs whose length may differ, besides that of the batch.
        probabilities: whether the outputs are probabilities, by the loss, or by a function that is named.
        tolerance: the largest difference of an output; None for the default.
        license: the identifier of the licence, for the model card.
    """

    directory: Path
    to: str
    place: Path
    stream: str | None = None
    overrides: Sequence[str] = ()
    checkpoint_name: str | None = None
    dynamic: Sequence[str] = ()
    probabilities: bool | str = False
    tolerance: float | None = None
    license: str | None = None


@dataclass(frozen=True, slots=True)
class Export:
    """What was written.

    Args:
        place: the folder or file.
        files: the names of the files in a folder.
        facts: what `--json` prints beside these: the checkpoint, the comparison.
        lines: the same for people, each a line.
    """

    place: Path
    files: Sequence[str] = ()
    facts: Json = field(default_factory=dict)
    lines: Sequence[str] = ()


class Format(NamedTuple):
    """A format: the path of its function, which gets `Options` and returns an `Export`, and what else it takes.

    `takes` has the names of those `Options` that only some formats have; `ending` is that of a file, or empty for a
    folder.
    """

    function: str
    takes: frozenset[str] = frozenset()
    ending: str = ""


_OF_PROGRAMS = frozenset({"stream", "dynamic", "probabilities", "tolerance", "license"})
_OF_WEIGHTS = frozenset({"stream", "tolerance", "license"})
FORMATS: dict[str, Format] = {
    "onnx": Format("emrun.exports.programs.write_onnx", _OF_PROGRAMS),
    "torch-export": Format("emrun.exports.programs.write_torch_export", _OF_PROGRAMS),
    **dict.fromkeys(("safetensors", "adapter"), Format("emrun.exports.weights.write_weights_or_adapter", _OF_WEIGHTS)),
    "archive": Format("emrun.exports.archive.write_archive", ending=".zip"),
}
"""The formats by the names that `--to` takes."""


def default_place(directory: Path, to: str) -> Path:
    """Return where an export is written by default: `NAME-FORMAT`, or a file, in the current directory."""
    ending = FORMATS[to].ending
    return Path.cwd() / (f"{directory.name}{ending}" if ending else f"{directory.name}-{to}")


def given(options: Options) -> dict[str, Any]:
    """Return those options, by name, that only some formats take and that have a value."""
    names = frozenset().union(*(each.takes for each in FORMATS.values()))
    return {name: value for name in sorted(names) if (value := getattr(options, name)) not in (None, (), [], False)}
