"""A config against the sections that emrun knows and the signatures of what it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from emrun.config import hook_entry
from emrun.errors import ArgumentError, Problem, did_you_mean, listed
from emrun.files import safe_component
from emrun.hook import AbstractHook
from emrun.yaml_tree import Node

_SECTIONS: dict[str, tuple[type, ...]] = {
    "seed": (int,),
    "deterministic": (bool,),
    "name": (str,),
    "code_directory": (str,),
    "dataset": (dict,),
    "model": (dict,),
    "main_loop": (dict,),
    "hooks": (list,),
    "eval": (dict,),
}
_REQUIRED = ("dataset", "model")
_OVERLAY = ("dataset", "model", "main_loop", "hooks", "seed", "deterministic")
_WORDS = {dict: "a mapping", list: "a list", int: "a whole number", bool: "true or false", str: "a text"}
_SUPPLIED_TO_LOOP = ("self", "model", "dataset", "hooks", "run", "seed")


def check_sections(config: Node) -> list[Problem]:
    """Return what is wrong with the structure of a config: its sections, their kinds, the entries of its lists."""
    if not isinstance(config.value, dict):
        return [Problem(config.position, "", "a config is a mapping with the keys dataset, model, ...")]
    problems = _check_kinds(config, "", tuple(_SECTIONS))
    problems += [
        Problem(config.position, "", f"missing section {name!r}") for name in _REQUIRED if config.get(name) is None
    ]
    problems += _check_hooks(config.get("hooks"), "hooks")
    seed = config.get("seed")
    if seed is not None and isinstance(seed.value, int) and seed.value < 0:
        problems.append(Problem(seed.position, "seed", f"{seed.shown()} is negative"))
    name = config.get("name")
    if name is not None and isinstance(name.value, str) and name.value:
        try:
            safe_component("name", name.value)
        except ArgumentError as error:
            problems.append(Problem(name.position, "name", name.censored(error.message)))
    overlays = config.get("eval")
    for stream, overlay in (overlays.value if overlays and isinstance(overlays.value, dict) else {}).items():
        if isinstance(overlay.value, dict):
            problems += _check_kinds(overlay, f"eval.{stream}", _OVERLAY)
            problems += _check_hooks(overlay.get("hooks"), f"eval.{stream}.hooks")
        elif overlay.value is not None:
            problems.append(
                Problem(overlay.position, f"eval.{stream}", f"{overlay.shown()!r} is no mapping of sections")
            )
    return problems


def check_main_loop(section: Node | None, main_loop: type) -> list[Problem]:
    """Return what is wrong with the keys of `main_loop`; its constructor checks the values."""
    if section is None or not isinstance(section.value, dict):
        return []
    policy = section.get("on_incorrect_config")
    lenient = policy is not None and policy.value in ("warn", "ignore")
    parameters, _ = parameters_of(main_loop)
    allowed = [name for name in parameters if name not in _SUPPLIED_TO_LOOP]
    return [
        _unknown(node, "main_loop", key, allowed)
        for key, node in section.value.items()
        if key not in allowed and not (lenient and isinstance(key, str) and key not in _SUPPLIED_TO_LOOP)
    ]


def parameters_of(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the named parameters of what a config names, and whether it takes any others.

    A hook that hands `**kwargs` on to its base has the parameters of the base.

    Raises:
        ValueError: it has no signature that can be read.
        TypeError: likewise.
    """
    if not (inspect.isclass(target) and issubclass(target, AbstractHook)):
        return _named(inspect.signature(target))
    found, takes_any = _named(inspect.signature(target))
    for constructor in constructors(target)[1:]:
        named, takes_any = _named(inspect.signature(constructor))
        for name, parameter in list(named.items())[1:]:  # without self; the subclass may hand it on itself
            found.setdefault(name, parameter.replace(kind=parameter.KEYWORD_ONLY, default=None))
    return found, takes_any


def constructors(target: Any) -> list[Any]:
    """Return the constructor of a class, and those of its bases to which `**kwargs` can be handed on."""
    found = []
    for constructor in [cls.__dict__["__init__"] for cls in target.__mro__[:-1] if "__init__" in cls.__dict__]:
        found.append(constructor)
        if not _named(inspect.signature(constructor))[1]:
            break
    return found


def check_call(
    target: Callable[..., Any],
    arguments: Mapping[Any, Node],
    *,
    key: str,
    node: Node,
    positional: int,
    supplied: Collection[str],
    own_keys: Collection[str] = (),
) -> list[Problem]:
    """Return what is wrong with a call as a config writes it.

    Args:
        target: what is called.
        arguments: the keyword arguments that the config gives.
        key: the key in the config, for the message.
        node: where the call stands.
        positional: how many positional arguments come before the keyword arguments.
        supplied: the keyword arguments that emrun supplies if the target has a parameter of that name.
        own_keys: keys of the form that are no arguments, for the list of what is allowed.
    """
    try:
        parameters, takes_any = parameters_of(target)
        all_parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # written in C: the call itself will tell
        return []
    problems = []
    by_position = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if positional > len(by_position) and not any(p.kind is p.VAR_POSITIONAL for p in all_parameters):
        problems.append(Problem(node.key_position, key, f"takes at most {len(by_position)} positional arguments"))
    taken = by_position[:positional]
    keywords = [name for name, p in parameters.items() if p.kind is not p.POSITIONAL_ONLY and name not in taken]
    allowed = [*(name for name in keywords if name not in supplied), *own_keys]
    for name, value in arguments.items():
        if not isinstance(name, str):
            problems.append(Problem(value.key_position, key, f"{name!r} is no name of an argument"))
        elif name in taken:
            problems.append(Problem(value.key_position, key, f"argument {name!r} is given by position already"))
        elif name not in keywords and not takes_any:
            problems.append(_unknown(value, key, name, allowed))
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and name not in taken
        if needed and name not in arguments and name not in supplied:
            problems.append(Problem(node.key_position, key, f"missing argument {name!r}"))
    return problems


def _named(signature: inspect.Signature) -> tuple[dict[str, inspect.Parameter], bool]:
    parameters = signature.parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {parameter.name: parameter for parameter in parameters if parameter.kind not in variable}, takes_any


def _check_kinds(section: Node, prefix: str, allowed: Collection[str]) -> list[Problem]:
    problems = []
    for name, node in section.value.items():
        where = f"{prefix}.{name}" if prefix else str(name)
        if name not in allowed:
            problems.append(_unknown(node, prefix, name, list(allowed), "key"))
            continue
        kinds = _SECTIONS[name]
        wrong = not isinstance(node.value, kinds) or (isinstance(node.value, bool) and bool not in kinds)
        optional = name not in _REQUIRED and node.value is None
        if wrong and not optional:
            problems.append(Problem(node.position, where, f"{node.shown()!r} is not {_WORDS[kinds[0]]}"))
    return problems


def _check_hooks(hooks: Node | None, where: str) -> list[Problem]:
    if hooks is None or not isinstance(hooks.value, list):
        return []
    problems = []
    for index, entry in enumerate(hooks.value):
        name, arguments = hook_entry(entry)
        if name is None:
            message = f"{entry.shown()!r} is no hook; write `- Name` or `- Name: {{argument: value}}`"
            problems.append(Problem(entry.position, f"{where}[{index}]", message))
        elif arguments is not None and arguments.value is not None and not isinstance(arguments.value, dict):
            message = f"{arguments.shown()!r} is no mapping of arguments"
            problems.append(Problem(arguments.position, f"{where}[{index}].{name}", message))
    return problems


def _unknown(node: Node, key: str, name: object, allowed: list[str], word: str = "argument") -> Problem:
    hint = did_you_mean(str(name), allowed) or f"; allowed: {listed(allowed)}"
    return Problem(node.key_position, key, f"unknown {word} {name!r}{hint}")
