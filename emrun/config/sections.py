"""A config against the sections that emrun knows and the signatures of what it names."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from emrun.arguments import safe_component
from emrun.config.config import hook_entry
from emrun.config.names import instead
from emrun.config.signatures import UNREAD, Parameters
from emrun.config.type_hints import form_in, mismatch
from emrun.config.yaml_tree import Node
from emrun.errors import ArgumentError, Problem
from emrun.wording import listed, nearest, sure

SECTIONS: dict[str, tuple[type, ...]] = {
    "seed": (int,),
    "deterministic": (bool,),
    "name": (str,),
    "code_directory": (str,),
    "vars": (dict,),
    "dataset": (dict,),
    "model": (dict,),
    "main_loop": (dict,),
    "hooks": (list,),
    "eval": (dict,),
}
"""The sections of a config -> what their values may be."""

REQUIRED = ("dataset", "model")
"""The sections that a config must have."""

OVERLAY = ("vars", "dataset", "model", "main_loop", "hooks", "seed", "deterministic")
"""The sections that a stream under `eval` may have."""

DEFAULT_MODEL = "TorchModel"
"""The class of the section `model` when it names none."""

SUPPLIED_TO_LOOP = ("self", "model", "dataset", "hooks", "run", "seed")
"""The parameters of the main loop that are no keys of its section."""

SUPPLIED = {
    "dataset": ("output_dir",),
    "model": ("dataset", "output_dir"),
    "hook": ("model", "dataset", "output_dir"),
}
"""What a config names -> the arguments that emrun supplies to it where it has parameters of that name."""

_WORDS = {dict: "a mapping", list: "a list", int: "a whole number", bool: "true or false", str: "a text"}


Elsewhere = Callable[[str], str | None]
"""Returns where else in a config a key has its place, None when that is not known."""


def nowhere(name: str) -> str | None:
    """Know of no other place."""
    return None


def check_sections(config: Node, elsewhere: Elsewhere = nowhere) -> list[Problem]:
    """Return what is wrong with the structure of a config: its sections, their kinds, the entries of its lists."""
    if not isinstance(config.value, dict):
        return [Problem(config.position, "", "a config is a mapping with the keys dataset, model, ...")]
    problems = _check_kinds(config, "", tuple(SECTIONS), elsewhere)
    problems += [
        Problem(config.position, "", f"missing section {name!r}") for name in REQUIRED if config.get(name) is None
    ]
    problems += check_hooks(config.get("hooks"), "hooks")
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
            problems += _check_kinds(overlay, f"eval.{stream}", OVERLAY, elsewhere)
            problems += check_hooks(overlay.get("hooks"), f"eval.{stream}.hooks")
        elif overlay.value is not None:
            problems.append(
                Problem(overlay.position, f"eval.{stream}", f"{overlay.shown()!r} is no mapping of sections")
            )
    return problems


def check_main_loop(
    section: Node | None, main_loop: Parameters | None, elsewhere: Elsewhere = nowhere
) -> list[Problem]:
    """Return what is wrong with the section `main_loop`: keys, and values as far as their types tell.

    Args:
        section: the section, if the config has one.
        main_loop: what the constructor of the main loop takes.
        elsewhere: returns where else a key has its place.
    """
    if section is None or not isinstance(section.value, dict) or main_loop is None:
        return []
    policy = section.get("on_incorrect_config")
    lenient = policy is not None and policy.value in ("warn", "ignore")
    allowed = [name for name in main_loop.named if name not in SUPPLIED_TO_LOOP]
    problems = []
    for key, node in section.value.items():
        if key in allowed:
            if isinstance(node.value, dict) and ("class" in node.value or "import" in node.value):
                problem: str | None = "nothing is built in main_loop; write the value itself"
            else:
                problem = _check_type(node, main_loop.named[key])
            if problem is not None:
                problems.append(Problem(node.position, f"main_loop.{key}", node.censored(problem)))
        elif not (lenient and isinstance(key, str) and key not in SUPPLIED_TO_LOOP):
            problems.append(_unknown(node, "main_loop", key, allowed, elsewhere))
    return problems


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
    elsewhere: Elsewhere = nowhere,
) -> list[Problem]:
    """Return what is wrong with a call as a config writes it.

    Args:
        parameters: what the called takes; None when that is not known: the call itself will tell.
        arguments: the keyword arguments that the config gives.
        key: the key in the config, for the message.
        node: where the call stands.
        args: the positional arguments that the config gives; None when they are not known: nothing is missing then.
        first: how many positional arguments come before those.
        supplied: the keyword arguments that emrun supplies if there is a parameter of that name.
        own_keys: keys of the form that are no arguments, for the list of what is allowed.
        elsewhere: returns where else a key has its place.
    """
    if parameters is None:
        return []
    problems = []
    misspelt = set()
    positional = first + len(args or ())
    taken = parameters.by_position(positional)
    if positional > len(taken) and not parameters.takes_more:
        problems.append(Problem(node.key_position, key, f"takes at most {len(taken)} positional arguments"))
    named = parameters.named
    keywords = [name for name, p in named.items() if p.kind is not p.POSITIONAL_ONLY and name not in taken]
    allowed = [*(name for name in keywords if name not in supplied), *own_keys]
    for name, value in arguments.items():
        if not isinstance(name, str):
            problems.append(Problem(value.key_position, key, f"{name!r} is no name of an argument"))
        elif name in taken and not (parameters.takes_any and named[name].kind is inspect.Parameter.POSITIONAL_ONLY):
            problems.append(Problem(value.key_position, key, f"argument {name!r} is given by position already"))
        elif name not in keywords and not parameters.takes_any:
            left_over = _left_over(value, key, name, node)
            problems.append(left_over or _unknown(value, key, name, allowed, elsewhere))
            misspelt |= {nearest(name, allowed)} if left_over is None else set()
    for name, parameter in named.items():
        needed = parameter.default is parameter.empty and name not in taken and name not in misspelt
        if needed and args is not None and name not in arguments and name not in supplied:
            problems.append(Problem(node.key_position, key, f"missing argument {name!r}"))
    by_position = zip(taken[first:], itertools.count(), args or (), strict=False)
    values = [(name, f"{key}.args[{index}]", value) for name, index, value in by_position]
    for name, where, value in [*values, *((name, f"{key}.{name}", value) for name, value in arguments.items())]:
        problem = _check_type(value, named.get(name))
        if problem is not None:
            problems.append(Problem(value.position, where, value.censored(problem)))
    return problems


def _left_over(value: Node, key: str, name: str, call: Node) -> Problem | None:
    """Return the problem of an argument that was meant for a class that an override has replaced."""
    cls = call.get("class")
    if cls is None or cls.former is None or not value.position.line:
        return None
    with_what = f" with ~{key}.{name}" if "[" not in key else ""
    hint = f"it stood there for {cls.former}; delete it{with_what}"
    return Problem(value.key_position, key, f"{str(cls.shown()).rpartition('.')[2]} does not take {name!r}; {hint}")


def _check_type(value: Node, parameter: inspect.Parameter | None) -> str | None:
    """Return why a value cannot be that of a parameter, None when it may be."""
    if parameter is None or parameter.annotation is UNREAD or parameter.default is UNREAD:
        return None
    if form_in(parameter.annotation) is not None:
        return None
    return mismatch(value, parameter.annotation, parameter.default)


def _check_kinds(section: Node, prefix: str, allowed: Collection[str], elsewhere: Elsewhere) -> list[Problem]:
    problems = []
    for name, node in section.value.items():
        where = f"{prefix}.{name}" if prefix else str(name)
        if name not in allowed:
            problems.append(_unknown(node, prefix, name, list(allowed), elsewhere, "key"))
            continue
        kinds = SECTIONS[name]
        wrong = not isinstance(node.value, kinds) or (isinstance(node.value, bool) and bool not in kinds)
        optional = name not in REQUIRED and node.value is None
        if wrong and not optional:
            message = f"{node.shown()!r} is not {_WORDS[kinds[0]]}"
            if name == "hooks" and isinstance(node.value, dict) and node.value:
                first, child = next(iter(node.value.items()))
                arguments = "" if child.value is None else ": ..."
                message = f"each hook needs a dash before its name: - {first}{arguments}"
            problems.append(Problem(node.position, where, message))
    return problems


def check_hooks(hooks: Node | None, where: str) -> list[Problem]:
    """Return what is wrong with the structure of a list of hooks.

    Args:
        hooks: the list.
        where: its key in the config.
    """
    if hooks is None or not isinstance(hooks.value, list):
        return []
    problems = []
    for index, entry in enumerate(hooks.value):
        name, arguments = hook_entry(entry)
        if name is None:
            message = f"{entry.shown()!r} is no hook; write `- Name` or `- Name: {{argument: value}}`"
            if isinstance(entry.value, dict) and next(iter(entry.value.values()), entry).value is None:
                first = next(iter(entry.value))
                message = f"indent the arguments of {first} further than its name, or write `- {first}: {{...}}`"
            problems.append(Problem(entry.position, f"{where}[{index}]", message))
        elif arguments is not None and arguments.value is not None and not isinstance(arguments.value, dict):
            message = f"{arguments.shown()!r} is no mapping of arguments"
            problems.append(Problem(arguments.position, f"{where}[{index}].{name}", message))
    return problems


def _unknown(
    node: Node, key: str, name: object, allowed: list[str], elsewhere: Elsewhere, word: str = "argument"
) -> Problem:
    text = str(name)
    other = elsewhere(text) if (near := sure(text, allowed)) is None else None
    advice = instead(text, "key") if near is None and other is None else None
    near = near or nearest(text, allowed)
    if other is not None:
        hint = f"; did you mean {'' if '.' in other else 'the top-level key '}{other!r}?"
    else:
        hint = f"; {advice}" if advice else f"; did you mean {near!r}?" if near else f"; allowed: {listed(allowed)}"
    return Problem(node.key_position, key, f"unknown {word} {name!r}{hint}")
