"""Checks a call in a config against the signature of the class or function that is called."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from emrun.base.errors import Problem
from emrun.base.types import BALANCED
from emrun.base.wording import did_you_mean, listed, nearest, sure
from emrun.config.names import instead
from emrun.config.signatures import Parameters
from emrun.config.type_hints import form_in, mismatch, values_of_mapping
from emrun.config.yaml_tree import Node


def check_call(
    parameters: Parameters | None,
    arguments: Mapping[Any, Node],
    *,
    key: str,
    node: Node,
    args: Sequence[Node] | None = (),
    first: int = 0,
    supplied: Collection[str] = (),
    own_keys: Collection[str] = (),
    itself: str = "",
) -> Iterator[Problem]:
    """Yield the problems of a call in a config.

    Args:
        parameters: the parameters of the callable; None when they are not known, then there are no problems.
        arguments: the keyword arguments that the config gives.
        key: the key of the call in the config, for messages.
        node: the call in the config.
        args: the positional arguments that the config gives; None when unknown, then no argument is missing.
        first: how many positional arguments emrun passes before those.
        supplied: the keyword arguments that emrun supplies when there is a parameter of that name.
        own_keys: more keys that are allowed, such as `inputs` of a loss; messages list them too.
        itself: what the config may mean instead of the result of the call: the `class` or the `function`.
    """
    if parameters is None:
        return
    misspelt = set()
    positional = first + len(args or ())
    positional_names = parameters.by_position(positional)
    if positional > len(positional_names) and not parameters.takes_more:
        message = f"too many positional arguments: {positional}, at most {len(positional_names)} are allowed"
        yield Problem(node.key_position, key, message, "config.unknown-key")
    named = parameters.named
    keywords = [name for name, p in named.items() if p.kind is not p.POSITIONAL_ONLY and name not in positional_names]
    allowed = [*(name for name in keywords if name not in supplied), *own_keys]
    for name, value in arguments.items():
        if not isinstance(name, str):
            message = f"the name of an argument must be a string, not {name!r}"
            yield Problem(value.key_position, key, message, "config.type")
        elif name in positional_names and not (
            parameters.takes_any and named[name].kind is inspect.Parameter.POSITIONAL_ONLY
        ):
            message = f"argument {name!r} is already given by position; remove it"
            yield Problem(value.key_position, key, message, "config.unknown-key", "delete")
        elif name not in keywords and not parameters.takes_any:
            cls = node.get("class")
            is_left_over = cls is not None and not cls.position.line and value.position.line
            if is_left_over and sure(name, allowed) is None:
                message = (
                    f"{node.value['class'].shown()} has no argument {name!r}, which was written for another "
                    f"class; delete it with ~{key}.{name}"
                )
                yield Problem(value.key_position, key, message, "config.unknown-key", "delete")
            else:
                yield unknown(value, key, name, allowed)
                misspelt.add(nearest(name, allowed))
    for name, parameter in named.items():
        needed = parameter.default is parameter.empty and name not in positional_names and name not in misspelt
        if needed and args is not None and name not in arguments and name not in supplied:
            message = f"missing argument {name!r}"
            if itself and not (arguments or args):
                message += f"; if the {itself} itself is meant, write {{import: {node.value['class'].shown()}}}"
                itself = ""
            yield Problem(node.key_position, key, message, "config.missing-key")
    by_position = enumerate(zip(positional_names[first:], args or (), strict=False))
    values = [(name, f"{key}.args[{index}]", value) for index, (name, value) in by_position]
    for name, where, value in [*values, *((name, f"{key}.{name}", value) for name, value in arguments.items())]:
        yield from check_type(value, named.get(name), where)


def check_type(value: Node, parameter: inspect.Parameter | None, where: str) -> list[Problem]:
    """Return the problems of a value of the wrong type for its parameter; `where` is its key in the config."""
    if parameter is None or form_in(parameter.annotation) is not None:
        return []
    wrong = mismatch(value, parameter.annotation, parameter.default, parameter.name)
    if wrong is None or (value.value == BALANCED and parameter.name == "weight" and where.startswith("model.loss.")):
        return []
    inner = values_of_mapping(parameter.annotation)
    if isinstance(value.value, dict) and inner is not None:
        return [
            Problem(child.position, f"{where}.{name}", why, "config.type")
            for name, child in value.value.items()
            if (why := mismatch(child, inner)) is not None
        ]
    return [Problem(value.position, where, wrong, "config.type", _value_meant(value, wrong))]


def _value_meant(value: Node, wrong: str) -> str:
    """Return the fix of a value of the wrong type, if the message says which value is right."""
    texts = {"true": "true", "false": "false", "it in quotes": f"'{value.value}'"}
    texts["the number without quotes"] = str(value.value)
    advice = wrong.rpartition("; write ")[2]
    if not value.position.line and "=" in advice:
        return f"override {shlex.split(advice)[0]}"
    meant = texts.get(advice)
    return f"set {meant}" if meant is not None and value.spelling is None else ""


def unknown(node: Node, key: str, name: object, allowed: list[str], word: str = "argument") -> Problem:
    """Return the problem of a key that is not allowed, with a suggestion or the list of allowed keys."""
    text = str(name)
    advice = instead(text, "key") if sure(text, allowed) is None else None
    if advice is not None:
        hint = f"; {advice}"
    else:
        hint = did_you_mean(text, allowed) or f"; allowed: {listed(allowed)}"
    return Problem(node.key_position, key, f"unknown {word} {name!r}{hint}", "config.unknown-key")
