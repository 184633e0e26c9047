"""The files of the directory `code` of a run: what the run was made from, besides its config."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tokenize
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

from emrun.censor import Censor
from emrun.fields import ANYTHING, TEXT, choice, fitting, mapping_of, optional, record, sequence_of
from emrun.storage.files import (
    check_guards,
    flush_directory,
    flush_file,
    make_directory,
    storing,
    write_atomically,
    written_aside,
)

RECORD, PACKAGES, MODULES = "record.json", "packages.txt", "modules"
_FORMAT = 1
_KIND = record(
    {
        "format": choice(_FORMAT),
        "python": TEXT,
        "repositories": sequence_of(record({"directory": TEXT, "commit": optional(TEXT), "sha256": optional(TEXT)})),
        "modules": mapping_of(record({"sha256": optional(TEXT)})),
        "problems": ANYTHING,
    }
)


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
        """Return this without values of the environment; sources and patches get the checksums of what is left."""
        modules, problems = {}, list(self.problems)
        for name, module in self.modules.items():
            if censor(name) == name:
                source = None if module.source is None else _censored(module.source, censor, is_python=True)
                sha256 = module.sha256 if source is None else _digest(source)
                modules[name] = Module(censor(module.file), source, sha256)
            else:
                problems.append(f"the name of the module {name} contains a value of the environment")
        repositories = [
            replace(
                each,
                directory=censor(each.directory),
                diff=None if each.diff is None else _censored(each.diff, censor),
                untracked=censor.plain(each.untracked),
            )
            for each in self.repositories
        ]
        packages = {censor(name): censor(version) for name, version in self.packages.items()}
        return Code(self.python, modules, packages, repositories, censor.plain(problems))


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a directory `code` says, as far as it is compared: names and checksums; a value of None is not known."""

    python: str
    modules: dict[str, str | None]
    packages: dict[str, str]
    repositories: dict[str, tuple[str | None, str | None]]
    content: dict[str, Any]
    """The content of `record.json`."""


def make_code_directory(directory: Path) -> None:
    """Make a directory `code` unless it exists.

    Raises:
        StorageError: it is a link, or it cannot be made.
    """
    with storing(directory, "create"):
        if directory.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "it is a link")
        check_guards(directory / RECORD)
        make_directory(directory, exist_ok=True)


def write_code(directory: Path, code: Code, iterations_done: int) -> None:
    """Write the files of a directory `code`; `record.json` is written last, and says that the others are complete.

    Args:
        directory: an existing directory.
        code: what to write, censored.
        iterations_done: the number of iterations that the run had done without this code.
    """
    with storing(directory, "write"):
        check_guards(directory / RECORD)
        shutil.rmtree(directory / MODULES, ignore_errors=True)  # of a process that was killed
        if any(module.source is not None for module in code.modules.values()):
            with written_aside(directory / MODULES) as aside:
                aside.mkdir()
                for path, source in _sources(code.modules):
                    (aside / path).parent.mkdir(parents=True, exist_ok=True)
                    (aside / path).write_bytes(source)
                    flush_file(aside / path)
                for path in [aside, *(each for each in aside.rglob("*") if each.is_dir())]:
                    flush_directory(path)
    write_atomically(directory / PACKAGES, "".join(f"{line}\n" for line in _lines(code.packages)))
    repositories = []
    for number, each in enumerate(code.repositories, 1):
        name = "diff.patch" if number == 1 else f"diff-{number}.patch"
        if each.diff:
            write_atomically(directory / name, each.diff)
        sha256 = None if each.diff is None else _digest(each.diff)
        known = {"directory": each.directory, "commit": each.commit, "diff": name if each.diff else None}
        repositories.append({**known, "sha256": sha256, "untracked": each.untracked})
    content = {
        "format": _FORMAT,
        "iterations_done": iterations_done,
        "python": code.python,
        "repositories": repositories,
        "modules": _described(code.modules),
        "problems": code.problems,
    }
    write_atomically(directory / RECORD, _json(content))


def add_modules(directory: Path, recorded: Recorded, code: Code) -> None:
    """Add the modules of `code` that a directory `code` does not have."""
    new = {name: module for name, module in code.modules.items() if name not in recorded.modules}
    for path, source in _sources(new):
        with storing(directory, "write"):
            (directory / MODULES / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / MODULES / path, source)
    recorded.content["modules"].update(_described(new))
    recorded.content["problems"] += code.problems
    write_atomically(directory / RECORD, _json(recorded.content))


def read_code(directory: Path) -> Recorded | None:
    """Return what a directory `code` says; None if it is missing, incomplete, damaged or of another format."""
    try:
        content = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        lines = (directory / PACKAGES).read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError, RecursionError):
        return None
    if not fitting(content, _KIND) or not isinstance(content["problems"], list):
        return None
    return Recorded(
        content["python"],
        {name: module["sha256"] for name, module in content["modules"].items()},
        dict(_name_and_version(line) for line in lines),
        {each["directory"]: (each["commit"], each["sha256"]) for each in content["repositories"]},
        content,
    )


def changes(before: Recorded, code: Code) -> tuple[list[str], list[str]]:
    """Return what differs between recorded code and the code of now, in words.

    Modules of one side only do not count, because a module may be imported at any time.

    Args:
        before: what was recorded.
        code: what there is now, censored.

    Returns:
        What a resume may be inexact by: changed modules, and other versions; and all other differences.
    """
    now = {name: each["sha256"] for name, each in _described(code.modules).items()}
    both = [name for name in now if None not in (now[name], before.modules.get(name))]
    severe = [f"module {name}" for name in both if now[name] != before.modules[name]]
    severe += [f"Python {before.python} -> {code.python}"] if before.python != code.python else []
    old, new = before.packages, dict(_name_and_version(line) for line in _lines(code.packages))
    severe += [f"{name} {old[name]} -> {new[name]}" for name in old if name in new and old[name] != new[name]]
    others = [f"{name} is not installed any more" for name in old if name not in new]
    others += [f"{name} is installed" for name in new if name not in old]
    there = [each for each in code.repositories if each.directory in before.repositories]
    if code.repositories and before.repositories and not there:
        others.append("another git repository")
    for each in there:
        commit, sha256 = before.repositories[each.directory]
        if commit != each.commit:
            others.append(f"git commit {str(commit)[:10]} -> {str(each.commit)[:10]}")
        elif sha256 is not None and each.diff is not None and sha256 != _digest(each.diff):
            others.append("uncommitted changes")
    return severe, others


def _sources(modules: Mapping[str, Module]) -> Iterator[tuple[PurePath, bytes]]:
    """Yield the path below `modules` and the source of each module that has one."""
    for name, module in modules.items():
        if module.source is not None:
            parts = [*name.split("."), *(["__init__"] if PurePath(module.file).stem == "__init__" else [])]
            yield PurePath(*parts[:-1], f"{parts[-1]}.py"), module.source


def _described(modules: Mapping[str, Module]) -> dict[str, dict[str, str | None]]:
    return {
        name: {"file": each.file, "sha256": each.sha256 if each.source is None else _digest(each.source)}
        for name, each in sorted(modules.items())
    }


def _lines(packages: Mapping[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in sorted(packages.items(), key=lambda item: item[0].lower())]


def _name_and_version(line: str) -> tuple[str, str]:
    name, _, version = line.partition("==")
    return name, version


def _censored(data: bytes, censor: Censor, *, is_python: bool = False) -> bytes:
    """Return a text without values of the environment, in whatever encoding it is; otherwise its bytes stay."""
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


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"
