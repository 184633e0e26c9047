"""Compares what two runs were made from: the newest of the directories `code`, `code-2`, ... of each."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path, PurePath

from emrun.base.errors import StorageError
from emrun.base.types import Json
from emrun.storage.code.files import RECORD, module_path, read_code, sha256_of
from emrun.storage.code.snapshot import code_snapshots
from emrun.storage.files import read_regular

_LARGEST_SOURCE = 1_000_000  # bytes
_LARGEST_FILE = 50_000_000  # of a module that may be compiled
_MOST_LINES = 5_000  # of a source that is compared line by line
_MOST = 1_000  # modules or packages that differ
_MOST_DIFFED = 200  # modules


def compare_code(a: Path, b: Path) -> Json:
    """Return the parts `modules`, `packages`, `python` and `repositories` of a comparison; see `compare`.

    Raises:
        StorageError: a run has no readable record of its code.
    """
    one, first = newest_code(a)
    other, second = newest_code(b)
    left = one["packages"]
    right = other["packages"]
    python = [code["python"] for code in (one, other)]
    repositories = [[_repository(repository) for repository in code["repositories"]] for code in (one, other)]
    states = [[(repository["commit"], repository["changes"]) for repository in side] for side in repositories]
    return {
        "modules": _modules(one["modules"], other["modules"], first, second),
        "packages": [
            {"name": name, "a": left.get(name), "b": right.get(name)}
            for name in {**left, **right}
            if left.get(name) != right.get(name)
        ][:_MOST],
        "python": None if python[0] == python[1] else {"a": python[0], "b": python[1]},
        "repositories": None if states[0] == states[1] else {"a": repositories[0], "b": repositories[1]},
    }


def newest_code(directory: Path) -> tuple[Json, Path]:
    """Return the content of the newest record of the code of a run, and the directory of the record.

    Raises:
        StorageError: the run has no record, or it cannot be read.
    """
    records = code_snapshots(directory)
    if not records:
        raise StorageError(0, f"the code of {directory} is not recorded")
    return _read(records[-1][1]), records[-1][1]


class CodeNow:
    """The code of the user as it is now, for a comparison with what runs have recorded."""

    def __init__(self) -> None:
        self._now = cache(self._read_now)

    def changed(self, directory: Path) -> tuple[str, ...] | None:
        """Return the modules whose code is not that with which a run was trained; None if that is not recorded.

        Sources are compared by their syntax trees. A module that is not found now does not count.

        Args:
            directory: the run directory.
        """
        try:  # a run that was resumed has used all of its records
            records = [(snapshot, _read(snapshot)["modules"].items()) for _, snapshot in code_snapshots(directory)]
        except OSError:
            return None
        if not records:
            return None
        changed: dict[str, None] = {}
        for snapshot, modules in records:
            for name, module in modules:
                if not self._is_same(snapshot, name, module):
                    changed[name] = None
        return tuple(changed)

    def _is_same(self, place: Path, name: str, module: Json) -> bool:
        content, digest, tree = self._now(name, module["file"])
        if content is None or module["sha256"] in (None, digest):
            return True
        source = _source(place, name, module)
        return source is not None and tree is not None and _tree(source) == tree

    def _read_now(self, name: str, recorded: str) -> tuple[bytes | None, str, str | None]:
        """Return the file of a module, its checksum and its syntax tree."""
        file = _file_of(name) or recorded
        try:
            content = read_regular(Path(file), _LARGEST_FILE)
        except (StorageError, ValueError):
            return None, "", None
        is_source = file.endswith(".py")
        return content, sha256_of(content), _tree(content) if is_source else None


def _file_of(name: str) -> str | None:
    """Return the file that an import of a module would read; nothing is imported."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for part in rest:
            top = f"{top}.{part}"
            spec = PathFinder.find_spec(top, spec.submodule_search_locations if spec else ())
    except (ImportError, ValueError, AttributeError, KeyError, TypeError):  # custom finders may raise these
        return None
    return spec.origin if spec is not None and spec.has_location else None


def _tree(source: bytes) -> str | None:
    """Return the syntax tree of a source, which has no comments and no positions; None if it has none."""
    try:
        return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read(place: Path) -> Json:
    content = read_code(place)
    if content is None:
        raise StorageError(0, f"{place / RECORD} is damaged, or a newer emrun wrote it")
    return content


def _repository(entry: Json) -> Json:
    return {"directory": entry["directory"], "commit": entry["commit"], "changes": entry["sha256"]}


def _modules(a: Json, b: Json, first: Path, second: Path) -> list[Json]:
    differing: list[Json] = []
    for name in {**a, **b}:
        if name in a and name in b and a[name]["sha256"] == b[name]["sha256"]:
            continue
        change = "changed"
        if name not in b:
            change = "only in a"
        elif name not in a:
            change = "only in b"
        is_diffed = change == "changed" and len(differing) < _MOST_DIFFED
        diff = _diff(name, [_source(first, name, a[name]), _source(second, name, b[name])]) if is_diffed else None
        differing.append({"name": name, "change": change, "diff": diff})
    return differing[:_MOST]


def _diff(name: str, sources: list[bytes | None]) -> str | None:
    """Return a unified diff of a module; None if one of the sources is missing or too large."""
    if None in sources:
        return None
    lines = [source.decode(errors="backslashreplace").splitlines() for source in sources if source is not None]
    if any(len(source_lines) > _MOST_LINES for source_lines in lines):
        return None
    return "\n".join(difflib.unified_diff(lines[0], lines[1], f"a/{name}", f"b/{name}", lineterm="", n=2))


def _source(place: Path, name: str, module: Json) -> bytes | None:
    """Return the source of a module in a directory `code`; None without one."""
    path = PurePath(module_path(name, module["file"]))
    with suppress(StorageError):
        return read_regular(place / path, _LARGEST_SOURCE, 1 + len(path.parts))
    return None
