"""The parameters of a sweep: what is set in the config of a trial, and to which values."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from emrun.base.arguments import check_flag, check_number
from emrun.base.errors import ArgumentError, ConfigError, Position, Problem
from emrun.base.wording import meant_of
from emrun.config.sections import SECTIONS
from emrun.config.yaml_tree import Node, node_of, parse_typed, read_scalar

_RANGE = ("low", "high", "log", "step")
_NOT_SWEPT = {
    "seed": "is not a parameter: repeats trains each combination with several seeds; set repeats: 3, or --repeats 3",
    "name": "is not a parameter: it does not change a run",
    "code_directory": "is not a parameter: all trials have the same code",
    "sweep": "is not a parameter: the section is not part of the config of a trial",
}
_NOT_A_KEY = "is not a key, such as model.optimizer.lr; a name for several keys has a list of mappings: [{KEY: VALUE}]"
_MOST_STEPS = 2**53  # of a range; a float64 has no more whole numbers
_WORD = re.compile(r"[\w./+-]+")
_UNUSUAL = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")  # YAML reads them otherwise, or not at all

Value = Any
"""The value of a parameter: the index of a choice, or a number in a range."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of numbers.

    Args:
        low: the smallest value.
        high: the largest value.
        log: whether the logarithm of the value is what varies evenly.
        step: the distance between two values; None for any value, or any whole number if `low` and `high` are whole.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        numbers = {"low": self.low, "high": self.high}
        if self.step is not None:
            numbers["step"] = self.step
        for name, value in numbers.items():
            check_number(name, value, "a number; a range needs low and high")
        check_flag("log", self.log)
        if not self.low < self.high:
            raise ArgumentError("low", f"{self.low} must be less than high, {self.high}")
        if self.log and self.low <= 0:
            raise ArgumentError("low", f"{self.low} must be greater than 0 in a range with log")
        width = self.high - self.low
        if width > sys.float_info.max:
            raise ArgumentError(
                "high", f"high - low is too large for a number; high is {self.high}, and low {self.low}"
            )
        if self.step is not None and (self.log or not 0 < self.step <= width < self.step * _MOST_STEPS):
            raise ArgumentError(
                "step",
                "must be greater than 0 and at most high - low, no tiny part of it, and a range with log "
                f"has none; it is {self.step}",
            )

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int) and isinstance(self.step, int | None)

    @property
    def count(self) -> int:
        """The number of values of a range with steps."""
        return int((Decimal(str(self.high)) - Decimal(str(self.low))) // Decimal(str(self.step))) + 1

    def values(self) -> list[float]:
        """Return all values of a range with steps."""
        return [self._at(index) for index in range(self.count)]

    def nearest(self, value: float) -> float:
        """Return the value of the range that a number stands for, which is off by its rounding if there are steps."""
        return value if self.step is None else self._at(round((value - self.low) / self.step))

    def _at(self, index: int) -> float:
        """Return a value as it would be written: 0.1 + 2 * 0.1 is 0.3."""
        exact = Decimal(str(self.low)) + index * Decimal(str(self.step))
        return int(exact) if self.is_whole else float(exact)


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a sweep varies.

    Args:
        name: the key that is set; or the name of a list of mappings from keys to values.
        choices: each is key -> value; empty for a range.
        span: the range; None for choices.
        positions: key -> where its value stands, in the order of the choices.
    """

    name: str
    choices: tuple[Mapping[str, Any], ...] = ()
    span: Span | None = None
    positions: tuple[Mapping[str, Position], ...] = field(default=(), compare=False)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the config that it sets."""
        return tuple(dict.fromkeys(key for choice in self.choices for key in choice)) or (self.name,)

    @property
    def values(self) -> Sequence[Value]:
        """All values, for a grid."""
        return self.span.values() if self.span is not None else range(len(self.choices))

    def setting(self, value: Value) -> Mapping[str, Any]:
        """Return key -> value of the config."""
        return {self.name: value} if self.span is not None else self.choices[value]

    def overrides(self, value: Value) -> dict[str, Position]:
        """Return override -> the position to which an error about it belongs."""
        positions = self.positions[0 if self.span is not None else value]
        return {f"{key}={text_of(setting)}": positions[key] for key, setting in self.setting(value).items()}

    def shown(self, value: Value) -> str:
        """Return a value for a table."""
        setting = self.setting(value)
        if list(setting) == [self.name]:
            return text_of(setting[self.name])
        return ", ".join(f"{key.rpartition('.')[2]}={text_of(part)}" for key, part in setting.items())

    def nearest(self, value: Value) -> Value:
        """Return the value that a proposal stands for; see `Span.nearest`."""
        return value if self.span is None else self.span.nearest(value)

    def value_in(self, config: Mapping[str, Any]) -> Value | None:
        """Return the value that a config has; None if it has none of this parameter.

        Args:
            config: key -> the value of the config, for all of `keys`.
        """
        if self.span is None:
            for index, choice in enumerate(self.choices):
                if all(type(config[key]) is type(wanted) and config[key] == wanted for key, wanted in choice.items()):
                    return index
            return None
        value = config[self.name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number and self.span.low <= value <= self.span.high else None


def read_parameters(config: Node, given: Sequence[str]) -> list[Parameter]:
    """Read the parameters of a config and of the option `-p`, which replaces one of the same name.

    Args:
        config: the config, before interpolation.
        given: `KEY=VALUES` of each option.

    Raises:
        ConfigError: a parameter has no values, or is malformed.
    """
    section = config.get("sweep", "parameters")
    nodes: dict[Any, Node] = dict(section.value) if section is not None and isinstance(section.value, dict) else {}
    for text in given:
        here = Position(f"-p {text!r}")
        name, equals, values = text.partition("=")
        if not equals or not name:
            raise _wrong(here, "", "must be KEY=VALUES, such as 'model.optimizer.lr=[1.0e-4, 3.0e-4]'")
        nodes[name] = node_of(parse_typed(values, here.source, "put texts in double quotes").plain(), here)
    problems: list[Problem] = []
    parameters: list[Parameter] = []
    for name, node in nodes.items():
        try:
            parameters.append(_parameter(str(name), node))
        except ConfigError as error:
            problems += error.problems
    owners: dict[str, str] = {}
    for parameter in parameters:
        for key in parameter.keys:
            if owners.setdefault(key, parameter.name) != parameter.name:
                position = next(iter(parameter.positions[0].values()))
                problems.append(
                    Problem(
                        position, key, f"is set by two parameters: {owners[key]} and {parameter.name}", "config.sweep"
                    )
                )
    if problems:
        raise ConfigError(problems)
    return parameters


def _parameter(name: str, node: Node) -> Parameter:
    section = name.partition(".")[0]
    if section in _NOT_SWEPT:
        raise _wrong(node.key_position, name, _NOT_SWEPT[section])
    is_key = "." in name or section in SECTIONS
    if not is_key and not isinstance(node.value, list):
        raise _wrong(node.key_position, name, _NOT_A_KEY)
    if isinstance(node.value, dict):
        return Parameter(name, (), _span(name, node), ({name: node.position},))
    if not isinstance(node.value, list):
        raise _wrong(
            node.position,
            name,
            f"{node.shown()!r} is neither a list of values nor a range {{low: 1.0e-5, high: 1.0e-2, log: true}}",
        )
    if not node.value:
        raise _wrong(node.position, name, "the list of values is empty")

    # a list of values, or of mappings that set several keys
    if is_key:
        choices: list[dict[str, Node]] = [{name: child} for child in node.value]
    else:
        choices = [_several(name, child) for child in node.value]
    plain = tuple({key: child.plain() for key, child in choice.items()} for choice in choices)
    texts = [{key: repr(value) for key, value in choice.items()} for choice in plain]
    for index, choice in enumerate(texts):
        if choice in texts[:index]:
            raise _wrong(node.value[index].position, name, "the list has this value twice")
    return Parameter(name, plain, None, tuple({key: child.position for key, child in one.items()} for one in choices))


def _several(name: str, node: Node) -> dict[str, Node]:
    """Return key -> value of a mapping that sets several keys."""
    if not isinstance(node.value, dict) or not node.value:
        raise _wrong(node.position, name, _NOT_A_KEY)
    for key, child in node.value.items():
        if (section := str(key).partition(".")[0]) in _NOT_SWEPT:
            raise _wrong(child.key_position, str(key), _NOT_SWEPT[section])
    return {str(key): child for key, child in node.value.items()}


def _span(name: str, node: Node) -> Span:
    """Return the range that a mapping describes."""
    for key, child in node.value.items():
        if key not in _RANGE:
            raise _wrong(child.key_position, name, f"unknown key {key!r} of a range{meant_of(key, _RANGE)}")
    try:
        return Span(**{"low": None, "high": None, **node.plain()})
    except ArgumentError as error:
        place = node.get(error.argument) or node
        raise _wrong(place.position, name, str(error)) from error


def _wrong(position: Position | None, name: str, message: str) -> ConfigError:
    return ConfigError(Problem(position, name, message, "config.sweep"))


def text_of(value: Any) -> str:
    """Return a plain value as YAML in one line, as overrides have it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{text_of(key)}: {text_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, str):
        is_word = _WORD.fullmatch(value) and read_scalar(value) == value
        quoted = json.dumps(value, ensure_ascii=False)
        return value if is_word else _UNUSUAL.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return ".nan"
        return ".inf" if value > 0 else "-.inf"
    return json.dumps(value)
