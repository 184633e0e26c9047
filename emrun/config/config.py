"""From files, what they extend, and overrides to a config: one tree that knows where each value comes from."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from emrun.arguments import expanded
from emrun.config.interpolation import interpolate
from emrun.config.overrides import copies_left, merge, override
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import Node, node_of, parse
from emrun.errors import TIMED_OUT, ConfigError, Position, Problem, ReadTimeout, is_timeout

_MAX_EXTENDS = 100  # files in a row
_MAX_BYTES = 40_000_000  # of a file; how many characters it may have says `parse`


class Config(Mapping[str, Any]):
    """A config that was read, with what it extends and its overrides: a mapping of plain values.

    It is read-only; for one with other values, `load_config(config, ["model.optimizer.lr=0.1"])`.

    Args:
        root: the merged tree, before interpolation.
        name: what the config is called: the stem of its file.
        text: the text of its file, where it is a single one.
        notes: what its overrides may not have done as they were meant.
    """

    def __init__(self, root: Node, name: str, text: str | None = None, notes: Sequence[str] = ()) -> None:
        self.root = root
        self.name = name
        self.text = text
        self.notes = tuple(notes)

    @cached_property
    def tree(self) -> Node:
        """The tree without interpolations.

        Raises:
            ConfigError: a `${...}` names nothing.
        """
        return interpolate(self.root)

    @cached_property
    def _plain(self) -> dict[str, Any]:
        return dict(self.tree.plain())

    def __getitem__(self, key: str) -> Any:
        return self._plain[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def __repr__(self) -> str:
        return dump(node_of(self.root.shown(), self.root.position))

    def overridden(self, overrides: Sequence[str]) -> Config:
        """Return the config with overrides.

        Raises:
            ConfigError: one of them does not fit.
        """
        if not overrides:
            return self
        root = override(self.root, overrides)
        return Config(root, self.name, self.text, (*self.notes, *copies_left(self.root, root)))

    def overlaid(self, stream: str) -> Config:
        """Return the config with which a stream is evaluated: `eval.<stream>` laid over it.

        Its sections are merged; its `hooks`, being a list, replace the hooks.
        """
        section = self.root.get("eval", stream)
        if section is None or not isinstance(section.value, dict):
            return self
        return Config(merge(self.root, section), self.name, self.text, self.notes)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        """Return the config with top-level keys added that it does not have, or has as null."""
        has = {key: node for key, node in self.root.value.items() if key not in defaults or node.value is not None}
        added = {key: node_of(value, Position("emrun")) for key, value in defaults.items() if key not in has}
        return Config(replace(self.root, value={**added, **has}), self.name, self.text, self.notes) if added else self


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read a config, to look at it or to build from it.

    Args:
        source: a file, or a directory that holds `config.yaml`, or a mapping, or a config that was loaded before.
        overrides: `key.path=value`, `~key.path` to delete.

    Raises:
        ConfigError: a file cannot be read, or an override does not fit, or a `${...}` names nothing.
    """
    config = read_config(source, overrides)
    _ = config.tree
    return config


def read_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read a config as `load_config` does, but leave it open whether its `${...}` name something.

    Raises:
        ConfigError: a file cannot be read, or an override does not fit.
    """
    if isinstance(source, Config):
        return source.overridden(overrides)
    if isinstance(source, Mapping):
        return Config(node_of(source, Position("config")), "run").overridden(overrides)
    path, text = _read_text(expanded(source))
    node = parse(text, str(path))
    extends = isinstance(node.value, dict) and node.get("extends") is not None
    root, _ = _extended(node, path, {})
    return Config(root, Path(source).resolve().stem, None if extends else text).overridden(overrides)


def _read_text(path: Path, name: str | None = None) -> tuple[Path, str]:
    """Return the file of a config, and its text; messages call the file `name`, or else as its path is.

    The config that a command names may also be an open pipe: `/dev/stdin`, or `<(...)` of a shell.
    """
    try:
        if name is None and path.is_dir():
            path = path / "config.yaml"
        is_read = stat.S_ISREG(path.stat().st_mode) or (name is None and _is_descriptor(path))
        if not is_read:
            raise ConfigError(Problem(Position(name or str(path)), "", "is not a regular file"))
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        if is_timeout(error):
            raise ReadTimeout(errno.ETIMEDOUT, f"cannot read {name or path}: {TIMED_OUT}") from error
        raise ConfigError(Problem(Position(name or str(path)), "", f"cannot be read: {error.strerror}")) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(Problem(Position(name or str(path)), "", f"is larger than {_MAX_BYTES} bytes"))
    try:
        return path, content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8").removeprefix("\ufeff").split("\n")
        position = Position(name or str(path), len(before), len(before[-1]) + 1)
        raise ConfigError(Problem(position, "", "is not UTF-8")) from error


def _is_descriptor(path: Path) -> bool:
    """Tell whether a path names what this process has open already, so that opening it does not wait for a writer."""
    return str(path) == "/dev/stdin" or str(path.parent) in ("/dev/fd", "/proc/self/fd")


def _extended(
    node: Node, path: Path, known: dict[Path, tuple[Node, int]], readers: tuple[Path, ...] = ()
) -> tuple[Node, int]:
    """Return what a file says, merged with what it extends, and how deep that is.

    Args:
        node: what it says.
        path: the file.
        known: what was returned for files that were read already: each is read once, however many others extend it.
        readers: the files that extend it, directly or not.
    """
    if not isinstance(node.value, dict):
        raise node.error("a config is a mapping with the keys dataset, model, ...")
    extends = node.value.get("extends")
    if extends is None:
        return node, 0
    node = replace(node, value={key: value for key, value in node.value.items() if key != "extends"})
    names = extends.value if isinstance(extends.value, list) else [extends]
    merged: Node | None = None
    deepest = 0
    readers = (*readers, path.resolve())
    for name in names:
        other = _extended_file(name, path)
        if other in readers:
            raise name.error(f"{name.value} extends itself", "extends")
        if other not in known and len(readers) <= _MAX_EXTENDS:
            _, text = _read_text(other, _shown(other))
            known[other] = _extended(parse(text, _shown(other)), other, known, readers)
        base, depth = known.get(other, (node, 0))
        deepest = max(deepest, depth + 1)
        if len(readers) - 1 + deepest > _MAX_EXTENDS:
            message = f"more than {_MAX_EXTENDS} files in a row extend one another, up to {_shown(other)}"
            raise name.error(message, "extends")
        merged = base if merged is None else merge(merged, base)
    return (node if merged is None else merge(merged, node)), deepest


def _extended_file(name: Node, path: Path) -> Path:
    """Return the file that is extended."""
    if not isinstance(name.value, str):
        raise name.error(f"{name.shown()!r} is no file name", "extends")
    try:
        other = (path.parent / expanded(name.value)).resolve(strict=True)
        return (other / "config.yaml").resolve(strict=True) if other.is_dir() else other
    except (OSError, RuntimeError, ValueError) as error:  # not there; a circle of links; a null byte
        raise name.error(f"there is no file {str(path.parent / expanded(name.value))!r}", "extends") from error


def _shown(path: Path) -> str:
    """Return a path as a message shows it: relative where it is below the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
