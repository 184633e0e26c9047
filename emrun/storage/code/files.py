"""The files of the directory `code` of a run: what the run was made from, besides its config, and its first batches."""

from __future__ import annotations

import hashlib
import json
import os
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

from emrun.base.censor import Censor
from emrun.base.fields import TEXT, choice, fitting, mapping_of, optional, record, sequence_of, whole
from emrun.storage.files import (
    append_line,
    check_no_link,
    check_owner,
    flush_file,
    read_regular,
    storing,
    write_atomically,
)
from emrun.storage.lines import read_lines

RECORD = "record.json"
_MODULES = "modules"
_FORMAT = 1
_LARGEST = 64_000_000  # bytes of the record
KIND = record(
    {
        "format": choice(_FORMAT),
        "python": TEXT,
        "repositories": sequence_of(record({"directory": TEXT, "commit": optional(TEXT), "sha256": optional(TEXT)})),
        "modules": mapping_of(record({"sha256": optional(TEXT)})),
        "packages": mapping_of(TEXT),
        "problems": sequence_of(TEXT),
    }
)
BATCHES = "batches.jsonl"
_MOST = 10_000  # entries that are read
_LINE = record(
    {"stream": TEXT, "pass": whole(), "ranks": whole(1), "sources": mapping_of(optional(TEXT))}, may_lack=("ranks",)
)

Key = tuple[str, int, int]
"""A stream, the number of the pass, 0 for an evaluation, and how many ranks share a batch; the sources are rank 0's."""


@dataclass(frozen=True, slots=True)
class Module:
    """A module that was imported.

    Args:
        file: the path of its file.
        source: its source; None if it has none, or if it is left out.
        sha256: the checksum of the file if there is no source; None if it is not known.
    """

    file: str
    source: bytes | None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository with modules of the run.

    Args:
        directory: its path.
        commit: the commit that is checked out; None if there is none.
        diff: the changes since the commit, as a patch; None if they are not known.
        untracked: the names of files and directories that git does not know.
    """

    directory: str
    commit: str | None = None
    diff: bytes | None = None
    untracked: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Code:
    """What a run was made from.

    Args:
        python: the version of Python and the system.
        modules: name -> module.
        packages: name of a package -> version, followed by where it was installed from if that is known.
        repositories: the repositories.
        problems: what could not be found out, and why.
    """

    python: str
    modules: dict[str, Module] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    repositories: list[Repository] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def censored(self, censor: Censor) -> Code:
        """Return this without values of the environment."""
        modules, problems = {}, list(self.problems)
        for name, module in self.modules.items():
            if censor(name) == name:
                source = None if module.source is None else censored(module.source, censor, is_python=True)
                modules[name] = replace(module, file=censor(module.file), source=source)
            else:
                problems.append(f"the name of the module {name} contains a value of the environment")
        repositories = [
            Repository(
                censor(each.directory),
                each.commit,
                None if each.diff is None else censored(each.diff, censor),
                censor.plain(each.untracked),
            )
            for each in self.repositories
        ]
        packages = {censor(name): censor(version) for name, version in self.packages.items()}
        return Code(self.python, modules, packages, repositories, censor.plain(problems))

    def record(self) -> dict[str, Any]:
        """Return the content of `record.json`, without the number of iterations."""
        repositories = [
            {
                "directory": each.directory,
                "commit": each.commit,
                "diff": _patch(number) if each.diff else None,
                "sha256": None if each.diff is None else _digest(each.diff),
                "untracked": each.untracked,
            }
            for number, each in enumerate(self.repositories, 1)
        ]
        modules = {
            name: {"file": each.file, "sha256": each.sha256 if each.source is None else _digest(each.source)}
            for name, each in sorted(self.modules.items())
        }
        return {
            "format": _FORMAT,
            "python": self.python,
            "repositories": repositories,
            "modules": modules,
            "packages": self.packages,
            "problems": self.problems,
        }

    def files(self) -> dict[str, bytes]:
        """Return the sources, the patches and the list of packages: path in the directory -> content."""
        found = {}
        for name, module in self.modules.items():
            if module.source is not None:
                inner = "/__init__" if PurePath(module.file).stem == "__init__" else ""
                found[f"{_MODULES}/{name.replace('.', '/')}{inner}.py"] = module.source
        found.update((_patch(number), each.diff) for number, each in enumerate(self.repositories, 1) if each.diff)
        packages = "".join(f"{name}=={version}\n" for name, version in self.packages.items())
        return {**found, "packages.txt": packages.encode(errors="backslashreplace")} if packages else found


def make_code_directory(directory: Path) -> None:
    """Make a directory `code` unless it exists; what `write_code` returns flushes its name to disk.

    Raises:
        StorageError: it is a link, or it cannot be made.
    """
    with storing(directory, "create"):
        check_no_link(directory)
        check_owner(directory / RECORD, directory / BATCHES)
        directory.mkdir(exist_ok=True)  # not its parent: a run directory that was removed must not come back


def write_code(directory: Path, code: Code, iterations_done: int) -> Callable[[], None]:
    """Write the files of a directory `code`, but for `record.json`, which says that the others are complete.

    Args:
        directory: an existing directory.
        code: what to write, censored.
        iterations_done: the number of iterations that the run had done without this code.

    Returns:
        Flushes the files to disk, and writes `record.json`.
    """
    return _write(directory, code.files(), {**code.record(), "iterations_done": iterations_done})


def add_modules(directory: Path, recorded: Mapping[str, Any], code: Code) -> list[str]:
    """Add the modules that a directory `code` does not have, and return the new problems.

    Args:
        directory: the directory.
        recorded: what `read_code` returned for it.
        code: what there is now, censored.
    """
    new = Code(code.python, {name: each for name, each in code.modules.items() if name not in recorded["modules"]})
    if not new.modules:
        return []
    problems = [each for each in code.problems if each not in recorded["problems"]]
    added = {"modules": {**recorded["modules"], **new.record()["modules"]}}
    _write(directory, new.files(), {**recorded, **added, "problems": [*recorded["problems"], *problems]})()
    return problems


def read_code(directory: Path) -> dict[str, Any] | None:
    """Return the content of `record.json`; None if it is missing, damaged or of another format.

    Raises:
        StorageError: it cannot be read.
    """
    with suppress(ValueError, RecursionError):
        if os.path.lexists(directory / RECORD):
            content: dict[str, Any] = json.loads(read_regular(directory / RECORD, _LARGEST, depth=2))
            return content if fitting(content, KIND) else None
    return None


def recorded_files(directory: Path) -> Iterator[PurePath]:
    """Yield the paths in a directory `code` that its record names; nothing without a readable record."""
    content = read_code(directory)
    if content is None:
        return
    yield from map(PurePath, (RECORD, "packages.txt", "batches.jsonl"))
    yield from (PurePath(_patch(number)) for number in range(1, len(content["repositories"]) + 1))
    for name in content["modules"]:
        path = PurePath(_MODULES, *name.split("."))
        if ".." not in path.parts and not PurePath(name).is_absolute():
            yield from (path.with_name(f"{path.name}.py"), path / "__init__.py")


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return what differs between two contents of `record.json`, in words.

    Modules of one side only do not count, because a module may be imported at any time.

    Returns:
        What a resume may be inexact by: changed modules, and other versions; and all other differences.
    """
    old, new = ({name: each["sha256"] for name, each in side["modules"].items()} for side in (before, now))
    severe = [f"module {name}" for name in new if None not in (new[name], old.get(name)) and new[name] != old[name]]
    severe += [f"Python {before['python']} -> {now['python']}"] if before["python"] != now["python"] else []
    old, new = before["packages"], now["packages"]
    severe += [f"{name} {old[name]} -> {new[name]}" for name in old if name in new and old[name] != new[name]]
    others = [f"{name} is not installed any more" for name in old if name not in new]
    others += [f"{name} is installed" for name in new if name not in old]
    known = {each["directory"]: each for each in before["repositories"]}
    there = [(known[each["directory"]], each) for each in now["repositories"] if each["directory"] in known]
    if known and now["repositories"] and not there:
        others.append("another git repository")
    for one, other in there:
        if one["commit"] != other["commit"]:
            others.append(f"git commit {str(one['commit'])[:10]} -> {str(other['commit'])[:10]}")
        elif None not in (one["sha256"], other["sha256"]) and one["sha256"] != other["sha256"]:
            others.append("uncommitted changes")
    return severe, others


def _write(directory: Path, files: Mapping[str, bytes], content: Mapping[str, Any]) -> Callable[[], None]:
    """Write files; return what flushes them to disk and then writes `record.json`."""
    check_owner(directory / RECORD, *(directory / path for path in files))
    text = json.dumps(content, indent=1) + "\n"
    folders = sorted({parent for path in files for parent in PurePath(path).parents})
    with storing(directory, "write"):
        for folder in folders[1:]:  # not `directory` itself, as in `make_code_directory`
            check_no_link(directory / folder)
            (directory / folder).mkdir(exist_ok=True)
        for path, data in files.items():
            (directory / path).unlink(missing_ok=True)
            (directory / path).write_bytes(data)

    def flush() -> None:
        with storing(directory, "write"):
            for path in (*map(PurePath, files), *folders, directory.parent):
                flush_file(directory / path)
        write_atomically(directory / RECORD, text)

    return flush


def _patch(number: int) -> str:
    return "diff.patch" if number == 1 else f"diff-{number}.patch"


def censored(data: bytes, censor: Censor, *, is_python: bool = False) -> bytes:
    """Return a text without values of the environment, in whatever encoding it is; otherwise its bytes stay.

    Args:
        data: the text.
        censor: replaces the values.
        is_python: whether the text may say which encoding it has.
    """
    encodings = {"utf-8": None, "latin-1": None}  # every value is found that is UTF-8, ASCII, or Latin-1
    if is_python:
        with suppress(SyntaxError):  # the file has changed since it was imported
            encodings[tokenize.detect_encoding(BytesIO(data).readline)[0]] = None
    for encoding in encodings:
        with suppress(UnicodeError):  # the file has changed since it was imported
            text = data.decode(encoding, "surrogateescape")
            shown = censor(text)
            if shown != text:
                data = shown.encode(encoding, "surrogateescape" if encoding == "utf-8" else "replace")
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class FirstBatches:
    """Writes the checksums, a line for each stream, unless a run that is resumed has them.

    Args:
        directory: the directory `code` of the run; it is created with the first line.
        censor: removes values of the environment from names.
    """

    def __init__(self, directory: Path, censor: Censor) -> None:
        self._path = directory / BATCHES
        self._censor = censor

    def note(self, stream: str, pass_number: int, sources: Mapping[str, str | None], ranks: int = 1) -> list[str]:
        """Write the checksums of a stream's first batch unless they are there; return the sources that then differ.

        Args:
            stream: the name of the stream.
            pass_number: the number of the pass, 0 for an evaluation.
            sources: name of a source -> checksum of its values; None for values that have none.
            ranks: how many ranks share the batch.

        Raises:
            StorageError: the file cannot be read or written.
        """
        stream = self._censor(stream)
        before = recorded_batches(self._path.parent).get((stream, pass_number, ranks))
        now = {self._censor(name): sha for name, sha in sources.items()}
        if before is None:
            several = {"ranks": ranks} if ranks > 1 else {}
            make_code_directory(self._path.parent)
            append_line(self._path, json.dumps({"stream": stream, "pass": pass_number, **several, "sources": now}))
        return [name for name in {**(before or now), **now} if (before or now).get(name) != now.get(name)]


def recorded_batches(directory: Path) -> dict[Key, dict[str, str | None]]:
    """Return the checksums that are in a directory `code`; lines of another form are left out.

    Raises:
        StorageError: the file cannot be read.
    """
    found: dict[Key, dict[str, str | None]] = {}
    for line in read_lines(directory / BATCHES):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if fitting(entry, _LINE) and len(found) < _MOST:
            found.setdefault((entry["stream"], entry["pass"], entry.get("ranks", 1)), entry["sources"])
    return found
