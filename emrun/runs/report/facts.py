"""What a run directory says besides its curves: checkpoints, failures, pictures, the log, the code."""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from emrun.base.errors import StateError, StorageError
from emrun.base.fields import TEXT, fitting, record
from emrun.base.wording import size_of
from emrun.record.rows import newest_shown
from emrun.runs.code_comparison import newest_code
from emrun.runs.stored_run import StoredRun
from emrun.shown import Picture, Written
from emrun.storage.checkpoints.manifest import Contents, readable_manifest
from emrun.storage.files import opened_regular, read_regular
from emrun.storage.run import ROWS
from emrun.storage.sealed import read_seal

_FAILURES = "failures"
_LOG = "train.log"
_MOST_ENTRIES = 200  # checkpoints, failures
_MOST_LOG = 300_000  # bytes of each end of the log
_MOST_FILES = 20_000  # that are looked at to find pictures
_DEEPEST = 4
_MOST_OF_FOLDER = 4  # pictures
_PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".svg": "image/svg+xml"}
_NOT_PICTURES = ("checkpoints", "code", _FAILURES)
_EPOCH = re.compile(r"epoch_(\d{1,15})")
_TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: "
_LINE = re.compile(rf"^{_TIME}(\w+) +@(\S+) *: (.*(?:\n(?!{_TIME}\w+ +@\S+ *: ).*)*)", re.MULTILINE)
_FAILURE = record({"error": TEXT, "message": TEXT})


class LogLine(NamedTuple):
    """A line of the log, with the lines that follow it and have no time of their own."""

    level: str
    source: str
    text: str


class Checkpoint(NamedTuple):
    """A checkpoint, as a row of a table; of a damaged one, only its directory and its names are known."""

    directory: str
    epoch: int | str
    iteration: int | None
    size: str | None
    names: str


class Failure(NamedTuple):
    """A step that failed or was skipped, as a row of a table; a command repeats the step from its capsule."""

    number: str
    error: str
    where: str
    repeat: Mapping[str, str]


def checkpoints_of(run: StoredRun) -> list[Checkpoint]:
    """Return the checkpoints of a run, the newest first."""
    root = run.directory / "checkpoints"
    checkpoints: list[Checkpoint] = []
    try:
        contents = Contents.of(root)
        for name in sorted(contents.checkpoints, reverse=True)[:_MOST_ENTRIES]:
            manifest = readable_manifest(root / name)
            names = ", ".join(sorted(link for link, target in contents.links.items() if target == name))
            if manifest is None:
                run.note(f"checkpoint {name} is damaged")
                checkpoints.append(Checkpoint(name, "damaged", None, None, names))
            else:
                checkpoints.append(
                    Checkpoint(
                        name,
                        manifest.epoch,
                        manifest.iteration,
                        size_of(sum(entry["size"] for entry in manifest.files.values())),
                        names,
                    )
                )
    except (OSError, StorageError, StateError) as error:
        run.note(f"the checkpoints cannot be read: {error}")
    return checkpoints


def failures_of(run: StoredRun) -> list[Failure]:
    """Return the steps of a run that failed or were skipped, the first one first."""
    root = run.directory / _FAILURES
    failures: list[Failure] = []
    with suppress(OSError):
        names = sorted((entry.name for entry in root.iterdir() if entry.name.isdecimal()), key=int)
        for name in names[:_MOST_ENTRIES]:
            place = root / name
            content: Any = None
            with suppress(OSError, ValueError, RecursionError):
                content, _ = read_seal(place / "failure.json")
            if not fitting(content, _FAILURE):
                run.note(f"{_FAILURES}/{name} is damaged")
                continue
            step: Any = content.get("step") if isinstance(content.get("step"), dict) else {}
            keys = ("stream", "epoch", "iteration", "batch", "event")
            where = [f"{key} {step[key]}" for key in keys if step.get(key) is not None]
            replay = shlex.join(["emrun", "replay", str(place)])
            failures.append(
                Failure(
                    name, f"{content['error']}: {cut(content['message'], 1_000)}", ", ".join(where), {"command": replay}
                )
            )
    return failures


def shown_of(run: StoredRun) -> dict[str, Written]:
    """Return what hooks have shown, of each name the newest; nothing if the file cannot be read."""
    with suppress(StorageError):
        return newest_shown(run.directory / ROWS)
    return {}


def pictures_of(run: StoredRun, most: int, shown: Mapping[str, Written]) -> tuple[dict[str, str], int]:
    """Return path -> address of the newest pictures that hooks wrote or showed, and the number of those left out.

    Pictures are of one kind if they are in the same folder and, apart from the number of an epoch, have the same path.

    Args:
        run: the run.
        most: how many bytes the pictures have at most in all.
        shown: what hooks have shown.
    """
    epochs = {path: max(map(int, _EPOCH.findall(path)), default=-1) for path in _picture_files(str(run.directory))}
    newest = {_EPOCH.sub("epoch_*", path): path for path in sorted(epochs, key=epochs.__getitem__)}
    folders: dict[str, list[str]] = {}
    for path in sorted(newest.values()):
        folders.setdefault(str(Path(path).parent), []).append(path)

    # pictures in files
    addresses: dict[str, str] = {}
    size = left_out = 0
    for paths in folders.values():
        for path in paths[:_MOST_OF_FOLDER]:
            try:
                content = read_regular(run.directory / path, most - size, len(Path(path).parts))
            except StorageError:
                left_out += 1
                continue
            size += len(content)
            addresses[path] = _url(_PICTURES[Path(path).suffix.lower()], content)
        left_out += len(paths[_MOST_OF_FOLDER:])

    # pictures that were shown and have no file
    for name, item in shown.items():
        if not isinstance(item, Picture):
            continue
        address = _url("image/png", item.png)
        if address in addresses.values():
            continue
        if size + len(item.png) > most:
            left_out += 1
        else:
            size += len(item.png)
            addresses[name] = address
    return addresses, left_out


def _url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _picture_files(root: str) -> Iterator[str]:
    """Yield the paths of pictures in a run, relative to it; links are not followed."""
    waiting = [("", 0)]
    looked = 0
    while waiting:
        folder, depth = waiting.pop()
        with suppress(OSError), os.scandir(os.path.join(root, folder)) as entries:  # noqa: PTH118 - may be thousands
            for entry in entries:
                looked += 1
                if looked > _MOST_FILES:
                    return
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if depth < _DEEPEST and path not in _NOT_PICTURES and not entry.name.startswith("."):
                        waiting.append((path, depth + 1))
                elif Path(entry.name).suffix.lower() in _PICTURES and entry.is_file(follow_symlinks=False):
                    yield path


def log_of(run: StoredRun) -> list[LogLine]:
    """Return the log of a run; of a long log, its beginning and its end."""
    try:
        with opened_regular(run.directory / _LOG) as file:
            content = file.read(_MOST_LOG)
            size = file.seek(0, os.SEEK_END)
            if size > _MOST_LOG:
                file.seek(max(_MOST_LOG, size - _MOST_LOG))
                content += b"\n[...]\n" + file.read(_MOST_LOG)
    except StorageError:
        return []
    text = "\n".join(content.decode("utf-8", "replace").splitlines())
    return [LogLine(*fields) for fields in _LINE.findall(text)]


def code_of(run: StoredRun) -> Mapping[str, Any]:
    """Return the newest record of the code of a run; empty if there is none, or it cannot be read."""
    with suppress(OSError, StorageError):
        return newest_code(run.directory)[0]
    return {}


def config_text_of(run: StoredRun) -> str:
    """Return the text of the config; empty if it cannot be read."""
    try:
        return run.config_text
    except StorageError as error:
        run.note(str(error))
        return ""


def cut(text: str, most: int) -> str:
    """Return a text that is not longer than `most` characters, with what is left out said at its end."""
    return text if len(text) <= most else f"{text[:most]}\n... {len(text) - most:,} more characters"
