"""Whole numbers of the data in a config, `${data:classes}`, whose values are known once the dataset is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from emrun.base.errors import ConfigError, Position, Problem
from emrun.base.preparations import PREPARATION, data_numbers
from emrun.base.wording import did_you_mean, listed
from emrun.config.yaml_tree import Node

OF_DATA = "data:"
"""What the name of such a number begins with in an interpolation."""
_KINDS = {"classes": "classes, classes.SOURCE", "embeddings": "embeddings.SOURCE", "width": "width.SOURCE"}
_SECTIONS = ("model", "hooks")


class DataNumber(str):
    """A whole number of the data, the text of the config until the dataset is built."""

    name: str
    position: Position

    @classmethod
    def read(cls, node: Node) -> DataNumber:
        """Return the number that a node with the text `${data:NAME}` stands for.

        Raises:
            ConfigError: there are no such numbers.
        """
        number = cls(node.value)
        number.name = node.value[2:-1].removeprefix(OF_DATA)
        number.position = node.position
        kind, dot, source = number.name.partition(".")
        if kind not in _KINDS or bool(source) != bool(dot) or (kind != "classes" and not dot):
            known = f"{did_you_mean(kind, _KINDS)} (there are {listed(list(_KINDS.values()))})"
            raise number.error(f"{node.value} is not a number of the data{known}")
        return number

    def of(self, supplied: Mapping[str, Any]) -> int:
        """Return the number: that which the run keeps, or else that of the dataset, which the run keeps from now on.

        Args:
            supplied: what emrun supplies, with the dataset and the preparations.

        Raises:
            ConfigError: the dataset does not have such a number.
        """
        kept: dict[str, int] = supplied[PREPARATION].numbers
        if self.name not in kept:
            dataset = supplied.get("dataset")
            if dataset is None:
                raise self.error(f"{self} is a number of the dataset, which is not given; pass dataset=...")
            known = data_numbers(dataset)
            if self.name not in known:
                there = listed([f"${{{OF_DATA}{name}}}" for name in known])
                near = did_you_mean(self.name, known)
                what = f"{type(dataset).__name__} does not have the number {self}{near} (it has {there})"
                raise self.error(what)
            kept[self.name] = known[self.name]
        return kept[self.name]

    def wants(self, name: str) -> bool:
        """Return whether the number needs an argument that emrun supplies: the dataset."""
        return name == "dataset"

    def error(self, message: str) -> ConfigError:
        """Return the error for a problem with the number."""
        return ConfigError(Problem(self.position, "", message, "config.interpolation"))


def with_numbers(value: Any, numbers: Mapping[str, int]) -> Any:
    """Return a value of a config in plain types with the numbers of the data in it, as far as they are known."""
    if isinstance(value, DataNumber):
        return numbers.get(value.name, value)
    if isinstance(value, dict):
        return {key: with_numbers(each, numbers) for key, each in value.items()}
    if isinstance(value, list):
        return [with_numbers(each, numbers) for each in value]
    return value


def misplaced(tree: Node) -> Iterator[Problem]:
    """Yield the problems of numbers of the data outside the sections that are built after the dataset."""
    for path, node, _ in tree.places():
        section = path[2] if path[0] == "eval" and len(path) > 2 else path[0]
        if isinstance(node.value, DataNumber) and section not in _SECTIONS:
            where = ".".join(map(str, path))
            what = f"{node.value} is known once the dataset is built; only {' and '.join(_SECTIONS)} may have it"
            yield Problem(node.position, where, what, "config.interpolation")
