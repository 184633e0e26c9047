"""Replaces interpolations, `${...}`, by the values they refer to, and finds free values that are never used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from emrun.base.censor import hide
from emrun.base.errors import ConfigError, Problem
from emrun.base.wording import did_you_mean, listed
from emrun.config.data_numbers import OF_DATA, DataNumber, misplaced
from emrun.config.yaml_tree import MAX_DEPTH, MAX_NODES, Node, mapping_in, of_each, read_scalar

_INTERPOLATION = re.compile(r"(?P<escape>\$\$\{)|\$\{(?P<name>[^{}]*)\}|\$\{")


def interpolate(config: Node, *, reads_environment: bool = True) -> Node:
    """Replace every `${key.path}`, `${env:NAME}` and `${env:NAME,default}`; `$${` stands for `${`.

    `${data:NAME}`, a whole value in the sections `model` and `hooks`, becomes a `DataNumber`.

    A value that is exactly one interpolation gets the type of the value it refers to; a value from the environment is
    read as a YAML scalar. Where the environment is not to be read, `${env:...}` stays as it is.

    Raises:
        ConfigError: a name is unknown or in a wrong place, keys refer to each other in a cycle, or the result is too
            large or too deep.
    """
    tree = _Interpolation(config, reads_environment).of(config, (), 1)
    if problems := list(misplaced(tree)):
        raise ConfigError(problems)
    return tree


def unread_vars(config: Node) -> list[str]:
    """Return a note for each free value, under `vars`, that is never used; files that it extends may be shared.

    Args:
        config: the config before interpolation.
    """
    unread = [entry for entry in unread_values(config) if entry[1].position.source == config.position.source]
    return [f"${{{name_of(path)}}} is never used ({node.key_position})" for path, node in unread]


def check_vars(config: Node) -> None:
    """Check that each free value of the files over a base is used: another one is a mistake.

    Raises:
        ConfigError: some are not.
    """
    known = sorted({name.split(".")[1] for name in _references(config) if name.startswith("vars.")})
    unread = [path for path, node in unread_values(config) if not node.position.is_of_base]
    problems = []
    for path in dict.fromkeys(path[: 4 if path[0] == "eval" else 2] for path in unread):
        *above, name = path
        hint = did_you_mean(str(name), known) or f"; there are {listed(known)}"
        node = config.get(*path) or config
        where = ".".join(map(str, above))
        problems.append(Problem(node.key_position, where, f"unknown variable {name!r}{hint}", "config.unknown-key"))
    if problems:
        raise ConfigError(problems)


def _references(config: Node) -> Iterator[str]:
    """Yield the names that interpolations have."""
    for _, node, _ in config.places():
        if isinstance(node.value, str):
            yield from (match["name"] for match in _INTERPOLATION.finditer(node.value) if match["name"])


def unread_values(config: Node) -> Iterator[tuple[tuple[Any, ...], Node]]:
    """Yield the free values, under `vars`, that are never used, with their paths."""
    free: list[tuple[tuple[Any, ...], Node]] = []
    names = {*_references(config)}
    copied = set()
    for path, node, _ in config.places():
        depth = 3 if path[0] == "eval" else 1
        is_in_list = any(isinstance(part, int) for part in path[depth:])  # a list is one value
        if path[depth - 1 : depth] != ("vars",):
            copied.add(node.position)
        elif len(path) > depth and not mapping_in(node) and not is_in_list:
            free.append((path, node))
    for path, node in free:
        name = f"{name_of(path)}."
        is_named = any(f"{reference}.".startswith(name) or name.startswith(f"{reference}.") for reference in names)
        if not is_named and (node.position not in copied or not node.position.line):
            yield path, node


def name_of(path: Sequence[Any]) -> str:
    """Return the name by which an interpolation refers to a free value."""
    return ".".join(map(str, path[2:] if path[0] == "eval" else path))


class _Interpolation:
    """Replaces each `${...}` and counts the resulting values: like aliases, references can multiply."""

    def __init__(self, root: Node, reads_environment: bool) -> None:
        self._root = root
        self._count = 0
        self._reads_environment = reads_environment

    def of(self, node: Node, active: tuple[str, ...], depth: int) -> Node:
        """Return a tree with its interpolations replaced; `active` are the names that are being looked up."""
        self._count += 1
        if self._count > MAX_NODES or depth > MAX_DEPTH:
            limit = f"{MAX_NODES} values" if self._count > MAX_NODES else f"{MAX_DEPTH} levels"
            raise node.error(f"has more than {limit} after its references are replaced", code="config.interpolation")
        if isinstance(node.value, dict | list):
            return replace(node, value=of_each(node.value, lambda child: self.of(child, active, depth + 1)))
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        whole = _INTERPOLATION.fullmatch(node.value)
        if whole and whole["name"] is not None:
            if whole["name"].startswith(OF_DATA):
                return replace(node, value=DataNumber.read(node))
            target = self._named(whole["name"], node, active, depth)
            is_read = whole["name"].startswith("env:") and self._reads_environment
            if is_read:
                target = replace(target, value=read_scalar(target.value), text=target.value)
            return target if node.position.is_of_base else replace(target, position=node.position, key=node.key)
        return self._text(node, active, depth)

    def _text(self, node: Node, active: tuple[str, ...], depth: int) -> Node:
        """Return a string that contains interpolations as one string."""
        parts: list[Node] = []

        def text(match: re.Match[str]) -> str:
            if match["escape"]:
                return "${"
            if match["name"] is None:
                raise node.error("'${' has no closing '}'; write '$${' for a literal '${'", code="config.interpolation")
            target = self._named(match["name"], node, active, depth)
            if isinstance(target.value, DataNumber):
                message = f"{match.group()} is a number of the data, which cannot be part of a string"
                raise node.error(message, code="config.interpolation")
            if isinstance(target.value, dict | list):
                raise node.error(
                    f"{match.group()} is a mapping or a list, which cannot be part of a string",
                    code="config.interpolation",
                )
            parts.append(target)
            return str(target.value)

        value = _INTERPOLATION.sub(text, node.value)
        spelling = node.value if any(part.spelling is not None for part in parts) else None
        own = next((part for part in parts if node.position.is_of_base and not part.position.is_of_base), node)
        return replace(own, value=value, spelling=spelling, text=None)

    def _named(self, name: str, node: Node, active: tuple[str, ...], depth: int) -> Node:
        """Return the value that an interpolation refers to."""
        if name.startswith(OF_DATA):
            message = f"${{{name}}} cannot be part of a string; it is the whole value of a key"
            raise node.error(message, code="config.interpolation")
        if name.startswith("env:"):
            return _environment(name, node) if self._reads_environment else replace(node, value=f"${{{name}}}")
        if name in active:
            circle = " -> ".join((*active[active.index(name) :], name))
            raise node.error(f"${{{name}}} refers to itself: {circle}", code="config.interpolation")
        active = (*active, name)
        target = self._root
        for part in name.split("."):
            if isinstance(target.value, str):
                target = self.of(target, active, depth + 1)
            children = target.children()
            if part not in children:
                if node.position.is_of_base and name.startswith("vars."):
                    raise self._unset()
                raise node.error(
                    f"${{{name}}} does not exist: there is no key {part!r}{did_you_mean(part, children)}",
                    code="config.interpolation",
                )
            target = children[part]
        return self.of(target, active, depth + 1)

    def _unset(self) -> ConfigError:
        """Return the error of free values that a base needs and that are not set."""
        there = self._root.get("vars") or self._root
        place = self._root if there.position.is_of_base else there
        names = [name.removeprefix("vars.") for name in _references(self._root) if name.startswith("vars.")]
        missing = [name for name in dict.fromkeys(names) if self._root.get("vars", *name.split(".")) is None]
        message = f"the base needs {listed(missing)}; set {listed([f'vars.{name}' for name in missing])}"
        return ConfigError(Problem(place.key_position, "vars", message, "config.missing-key"))


def _environment(name: str, node: Node) -> Node:
    """Return the string of `env:NAME` or `env:NAME,default`; what emrun writes shows `${env:NAME}` instead."""
    variable, comma, default = name.removeprefix("env:").partition(",")
    value = os.environ.get(variable)
    if value is not None:
        for text in (value, str(read_scalar(value))):  # it may be in quotes
            hide(text, f"${{{name}}}")
        return replace(node, value=value, spelling=node.value)
    if not comma:
        raise node.error(
            f"the environment variable {variable!r} is not set; set it, or write ${{{name},default}}",
            code="config.interpolation",
        )
    return replace(node, value=default)


def escaped(text: str) -> str:
    """Return a string, such as a path, escaped so that a config does not interpolate it."""
    return text.replace("${", "$${")
