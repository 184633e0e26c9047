"""A config against the sections that emrun knows, and the main loop's against its constructor."""

from __future__ import annotations

from collections.abc import Collection

from emrun.arguments import safe_component
from emrun.config.calls import Elsewhere, check_type, nowhere, unknown
from emrun.config.overrides import hook_entry
from emrun.config.signatures import Parameters
from emrun.config.yaml_tree import Node
from emrun.errors import ArgumentError, Problem

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


def check_sections(config: Node, elsewhere: Elsewhere = nowhere) -> list[Problem]:
    """Return what is wrong with the structure of a config: its sections, their kinds, the entries of its lists."""
    if not isinstance(config.value, dict):
        return [Problem(config.position, "", "a config is a mapping with the keys dataset, model, ...")]
    problems = _check_kinds(config, "", tuple(SECTIONS), elsewhere)
    missing = [name for name in REQUIRED if config.get(name) is None]
    problems += [Problem(config.position, "", f"missing section {name!r}") for name in missing]
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
            message = f"{overlay.shown()!r} is no mapping of sections"
            problems.append(Problem(overlay.position, f"eval.{stream}", message))
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
                message = node.censored("nothing is built in main_loop; write the value itself")
                problems.append(Problem(node.position, f"main_loop.{key}", message))
            else:
                problems += check_type(node, main_loop.named[key], f"main_loop.{key}")
        elif not (lenient and isinstance(key, str) and key not in SUPPLIED_TO_LOOP):
            problems.append(unknown(node, "main_loop", key, allowed, elsewhere))
    return problems


def _check_kinds(section: Node, prefix: str, allowed: Collection[str], elsewhere: Elsewhere) -> list[Problem]:
    problems = []
    for name, node in section.value.items():
        where = f"{prefix}.{name}" if prefix else str(name)
        if name not in allowed:
            problems.append(unknown(node, prefix, name, list(allowed), elsewhere, "key"))
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
