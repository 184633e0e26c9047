"""Reads a config from its files and overrides into one tree that knows the position of each value."""

from __future__ import annotations

import errno
import re
import reprlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from emrun.base.arguments import expanded
from emrun.base.errors import OF_BASE, TIMED_OUT, ConfigError, Position, Problem, ReadTimeout, is_timeout
from emrun.base.wording import did_you_mean, from_here, listed
from emrun.config.interpolation import check_vars, escaped, interpolate
from emrun.config.names import bases
from emrun.config.overrides import copies_left, merge, override, stream_of_eval, with_hooks, words_in
from emrun.config.sections import REQUIRED, SECTIONS
from emrun.config.type_hints import with_texts
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import Node, list_in, mapping_in, node_of, parse

_MAX_EXTENDS = 100  # files in a chain of `extends`
_HERE = re.compile(r"(?<!\$)\$\{here\}")  # the directory of a file, in its text
_MAX_BYTES = 40_000_000  # of a file; `parse` limits the characters


class Config(Mapping[str, Any]):
    """A config, merged from the files that it extends and its overrides: a read-only mapping of plain values.

    For a config with other values, use `load_config(config, ["model.optimizer.lr=0.1"])`.

    Args:
        root: the merged tree, before interpolation.
        name: the name of the config: the stem of its file.
        text: the text of its file, None when several files were merged or there is no file.
        notes: messages about overrides that may not have had the intended effect.
        overrides: the overrides that were applied, which name a run.
    """

    def __init__(
        self,
        root: Node,
        name: str,
        text: str | None = None,
        notes: Sequence[str] = (),
        overrides: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.name = name
        self.text = text
        self.notes = tuple(notes)
        self.overrides = tuple(overrides)

    @cached_property
    def tree(self) -> Node:
        """The tree with all interpolations replaced.

        Raises:
            ConfigError: a `${...}` refers to a missing key or environment variable.
        """
        tree = interpolate(self.root)
        texts = {key: with_texts(node, str) for key, node in tree.value.items() if SECTIONS.get(key) is str}
        return replace(tree, value={**tree.value, **texts})

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
        """Return the config with overrides applied.

        Raises:
            ConfigError: an override cannot be applied.
        """
        if not overrides:
            return self
        root = override(self.root, overrides)
        notes = *self.notes, *copies_left(self.root, root), *words_in(overrides)
        return Config(root, self.name, self.text, notes, (*self.overrides, *overrides))

    def with_root(self, root: Node) -> Config:
        """Return the config with another tree."""
        return Config(root, self.name, self.text, self.notes, self.overrides)

    def overlaid(self, stream: str, overrides: Sequence[str] = ()) -> Config:
        """Return the config for the evaluation of a stream: this config with `eval.<stream>` merged over it.

        Mappings are merged; `hooks` is a list and replaces the hooks. Overrides of `eval` are applied before, and the
        other overrides afterwards.

        Raises:
            ConfigError: an override cannot be applied.
        """
        config = self.overridden([text for text in overrides if stream_of_eval(text) is not None])
        section = config.root.get("eval", stream)
        if section is not None and mapping_in(section):
            config = config.with_root(merge(config.root, section))
        return config.overridden([text for text in overrides if stream_of_eval(text) is None])

    def without(self, *sections: str) -> Config:
        """Return the config without sections that it may have."""
        kept = {key: node for key, node in self.root.value.items() if key not in sections}
        return self if len(kept) == len(self.root.value) else self.with_root(replace(self.root, value=kept))

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        """Return the config with defaults for top-level keys that are missing or null."""
        has = {key: node for key, node in self.root.value.items() if key not in defaults or node.value is not None}
        added = {key: node_of(value, Position("emrun")) for key, value in defaults.items() if key not in has}
        return self.with_root(replace(self.root, value={**added, **has})) if added else self


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read a config, apply overrides and replace interpolations.

    Args:
        source: a file, a directory with a `config.yaml`, a mapping, or a config that was loaded before.
        overrides: `key.path=value` to set a value, `~key.path` to delete a key.

    Raises:
        ConfigError: a file cannot be read, an override cannot be applied, a `${...}` refers to something missing, or a
            mapping has a value that YAML cannot hold, such as a number of NumPy or an object.
    """
    config = read_config(source, overrides)
    _ = config.tree
    return config


def read_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read a config as `load_config` does, but without replacing interpolations: they may refer to something missing.

    Raises:
        ConfigError: a file cannot be read, or an override cannot be applied.
    """
    if isinstance(source, Config):
        return source.overridden(overrides)
    if isinstance(source, Mapping):
        tree = node_of(source, Position("config"))
        if problems := list(_not_plain(tree)):
            raise ConfigError(problems)
        return Config(tree, "run").overridden(overrides)
    path, text = _read_text(expanded(source))
    node = parse(text, str(path))
    known: dict[Path, Node] = {}
    root = _extended(node, path, known)
    if not known.keys().isdisjoint(bases().values()):
        check_vars(root)
    is_whole = node.get("extends") is None
    return Config(root, Path(source).resolve().stem, text if is_whole else None).overridden(overrides)


def read_over(directory: Path, over: str | Path | None) -> Config:
    """Read the config of a run, or another config instead; one without dataset or model is merged over that of the run.

    Raises:
        ConfigError: a file cannot be read.
    """
    config = read_config(directory if over is None else over)
    if over is None or all(name in config.root.value for name in REQUIRED):
        return config
    own = read_config(directory)
    return own.with_root(_over(own.root, config.root))


def _not_plain(tree: Node) -> Iterator[Problem]:
    """Yield the values of a mapping that a config file cannot hold."""
    for path, node, _ in tree.places():
        kind = type(node.value)
        if kind not in (str, int, float, bool, NoneType, dict, list) and not kind.__module__.startswith("ruamel."):
            key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
            what = "a text, a whole number, a float, a boolean, None, a list or a mapping"
            yield Problem(
                node.position,
                key,
                f"{reprlib.repr(node.value)} is a {kind.__name__}, not {what}; convert it, or write {{class: "
                f"...}} or {{import: ...}}",
                "config.type",
            )


def _read_text(path: Path, name: str | None = None) -> tuple[Path, str]:
    """Return the file of a config and its text; messages show the file as `name`, by default its path.

    The config given to a command (no `name`) may also be an open pipe: `/dev/stdin`, or `<(...)` of a shell.
    """

    def refused(message: str, line: int = 0, column: int = 0) -> ConfigError:
        return ConfigError(Problem(Position(name or str(path), line, column), "", message, "config.file"))

    try:
        if name is None and path.is_dir():
            path = path / "config.yaml"
        is_open = str(path) == "/dev/stdin" or str(path.parent) in ("/dev/fd", "/proc/self/fd")  # does not block
        if not (stat.S_ISREG(path.stat().st_mode) or (name is None and is_open)):
            raise refused("is not a regular file")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        if is_timeout(error):
            raise ReadTimeout(errno.ETIMEDOUT, f"cannot read {name or path}: {TIMED_OUT}") from error
        others = [file.name for file in path.parent.glob("*.y*ml")] if isinstance(error, FileNotFoundError) else ()
        raise refused(f"cannot be read: {error.strerror}{did_you_mean(path.name, others)}") from error
    if len(content) > _MAX_BYTES:
        raise refused(f"is larger than {_MAX_BYTES} bytes")
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8").removeprefix("\ufeff").split("\n")
        message = "is not encoded in UTF-8; save the file as UTF-8"
        raise refused(message, len(before), len(before[-1]) + 1) from error
    return path, _HERE.sub(lambda _: escaped(str(path.parent.absolute())), text)


def _extended(node: Node, path: Path, known: dict[Path, Node], readers: tuple[Path, ...] = ()) -> Node:
    """Return the tree of a file merged over the files that it extends.

    Args:
        node: the tree of the file itself.
        path: the file.
        known: the results for files that were read before: each file is read once, however many others extend it.
        readers: the files that extend this one, directly or through others.
    """
    if not isinstance(node.value, dict):
        raise node.error("a config must be a mapping with the keys dataset, model, ...", code="config.structure")
    extends = node.value.get("extends")
    if extends is None:
        return node
    node = replace(node, value={key: value for key, value in node.value.items() if key != "extends"})
    below: Node | None = None
    readers = (*readers, path.resolve())
    names = extends.value if isinstance(extends.value, list) else [extends]
    for name in names:
        other = _extended_file(name, path)
        if other in readers:
            circle = " -> ".join(str(from_here(reader)) for reader in (*readers[readers.index(other) :], other))
            raise name.error(f"{name.value} extends itself: {circle}", "extends", "config.extends")
        if len(readers) > _MAX_EXTENDS:
            raise name.error(
                f"more than {_MAX_EXTENDS} files extend each other in a chain, up to {from_here(other)}",
                "extends",
                "config.extends",
            )
        if other not in known:
            shown = next((base for base, file in bases().items() if file == other), str(from_here(other)))
            known[other] = _extended(parse(_read_text(other, shown)[1], shown), other, known, readers)
        below = known[other] if below is None else _over(below, known[other])
    return node if below is None else _over(below, node)


def _over(below: Node, node: Node) -> Node:
    """Return a config merged over another one, which it extends; a mapping of hooks changes hooks, or adds some.

    Raises:
        ConfigError: a hook cannot be changed, or a list or a mapping is replaced by nothing.
    """
    for key, replacement in node.value.items():
        old = below.get(key)
        lost = mapping_in(old) or list_in(old)
        if replacement.is_empty and lost:
            how = f"to drop them, write {type(lost)()}, or else remove the key"
            message = f"is empty, which drops {len(lost)} entries of the extended file; {how}"
            raise replacement.error(message, key, "config.extends")
        if (
            key == "hooks"
            and isinstance(replacement.value, dict)
            and (old is None or isinstance(old.value, list | None))
        ):
            node = replace(node, value={**node.value, key: with_hooks(list_in(old), replacement)})
    return merge(below, node)


def _extended_file(name: Node, path: Path) -> Path:
    """Return the file that an entry of `extends` names."""
    if not isinstance(name.value, str):
        raise name.error(f"{name.shown()!r} is not a file name", "extends", "config.extends")
    if name.value.startswith(OF_BASE):
        if name.value in bases():
            return bases()[name.value]
        near = did_you_mean(name.value, bases()) or f"; there are {listed(list(bases()))}."
        message = f"emrun has no base {name.value!r}{near} For a file of that name, write ./{name.value}"
        raise name.error(message, "extends", "config.extends")
    try:
        other = (path.parent / expanded(name.value)).resolve(strict=True)
        return (other / "config.yaml").resolve(strict=True) if other.is_dir() else other
    except (OSError, RuntimeError, ValueError) as error:  # a missing file; a cycle of links; a null byte
        missing = path.parent / expanded(name.value)
        near = did_you_mean(missing.name, [file.name for file in missing.parent.glob("*.yaml")])
        raise name.error(f"there is no file {str(missing)!r}{near}", "extends", "config.extends") from error
