"""Checks the sections of a config, and the sections `main_loop` and `sweep` against their constructors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from emrun.base.arguments import safe_component
from emrun.base.errors import ArgumentError, Problem
from emrun.config.calls import check_type, unknown
from emrun.config.overrides import hook_entry
from emrun.config.signatures import Parameters
from emrun.config.type_hints import describe, mismatch
from emrun.config.yaml_tree import Node, list_in, mapping_in
from emrun.extra_streams import read_extra_streams

SECTIONS: dict[str, type] = {
    "seed": int,
    "deterministic": bool,
    "name": str,
    "code_directory": str,
    "vars": dict,
    "dataset": dict,
    "model": dict,
    "main_loop": dict,
    "hooks": list,
    "eval": dict,
    "sweep": dict,
}
"""The sections of a config -> the type of their values."""

REQUIRED = ("dataset", "model")
"""The sections that a config must have."""

OVERLAY = ("vars", "dataset", "model", "main_loop", "hooks", "seed", "deterministic")
"""The sections that are allowed under `eval.<stream>`."""

DEFAULT_MODEL = "TorchModel"
"""The class of the section `model` when the section has no key `class`."""

SUPPLIED_TO_LOOP = ("self", "model", "dataset", "hooks", "run", "rank_log", "seed")
"""The parameters of the main loop that are not keys of its section."""

_A_HOOK = "write `- Name` or `- Name: {argument: value}`, or each argument on a line indented further than the name"


def check_sections(config: Node) -> Iterator[Problem]:
    """Yield the problems in the structure of a config: its sections, their types and the entries of lists."""
    yield from _check_kinds(config, "", tuple(SECTIONS))
    for name in REQUIRED:
        if config.get(name) is None:
            yield Problem(config.position, "", f"missing section {name!r}", "config.missing-key")
    yield from check_hooks(config.get("hooks"), "hooks")
    seed = config.get("seed")
    if seed is not None and isinstance(seed.value, int) and seed.value < 0:
        yield Problem(seed.position, "seed", f"must be 0 or greater, not {seed.shown()}")
    named = config.get("name")
    if named is not None and isinstance(named.value, str) and named.value:
        try:
            safe_component("name", named.value)
        except ArgumentError as error:
            yield Problem(named.position, "name", error.message)
    for stream, overlay in mapping_in(config.get("eval")).items():
        if isinstance(overlay.value, dict):
            yield from _check_kinds(overlay, f"eval.{stream}", OVERLAY)
            yield from check_hooks(overlay.get("hooks"), f"eval.{stream}.hooks")
        elif overlay.value is not None:
            yield Problem(
                overlay.position,
                f"eval.{stream}",
                f"{overlay.shown()!r} is not a mapping of sections",
                "config.structure",
            )


def check_main_loop(section: Node | None, main_loop: Parameters | None, name: str = "main_loop") -> Iterator[Problem]:
    """Yield the problems of the section `main_loop` or `sweep`: unknown keys, and values of the wrong type.

    Args:
        section: the section, None when the config has none.
        main_loop: the parameters of its constructor.
        name: the name of the section.
    """
    if section is None or not isinstance(section.value, dict) or main_loop is None:
        return
    policy = section.get("on_incorrect_config")
    lenient = policy is not None and policy.value in ("warn", "ignore")
    allowed = [option for option in main_loop.named if option not in SUPPLIED_TO_LOOP]
    for key, node in section.value.items():
        if key in allowed:
            if node.is_form:
                yield Problem(
                    node.position,
                    f"{name}.{key}",
                    f"{name} does not build objects; write the value without 'class' or 'import'",
                    "config.type",
                )
            else:
                wrong = check_type(node, main_loop.named[key], f"{name}.{key}")
                yield from wrong or (_check_extra_streams(section, node) if key == "extra_streams" else [])
        elif not (lenient and isinstance(key, str) and key not in SUPPLIED_TO_LOOP):
            yield unknown(node, name, key, allowed)


def _check_extra_streams(section: Node, node: Node) -> list[Problem]:
    train = section.get("train_stream_name")
    name = str(train.value) if train is not None else "train"
    try:
        read_extra_streams(node.plain() or (), name, f"{name}_eval")
    except ArgumentError as error:
        return [Problem(node.position, "main_loop.extra_streams", error.message, "config.value")]
    return []


def _check_kinds(section: Node, prefix: str, allowed: Collection[str]) -> Iterator[Problem]:
    for name, node in section.value.items():
        where = f"{prefix}.{name}" if prefix else str(name)
        if name not in allowed:
            yield unknown(node, prefix, name, list(allowed), "key")
            continue
        kind = SECTIONS[name]
        wrong = not isinstance(node.value, kind) or (isinstance(node.value, bool) and kind is not bool)
        if wrong and (name in REQUIRED or node.value is not None):
            shown = "it is empty, and" if node.is_empty else repr(node.shown())
            message = (not node.is_empty and mismatch(node, kind)) or f"{shown} is not {describe(kind)}"
            if name in REQUIRED and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.shown()):
                message += f"; write {{class: {node.shown()}}}"
            if name == "hooks":
                message += f" of hooks: {_A_HOOK}"
            fix = f"set {text}" if (text := message.partition("; write ")[2]) else ""
            yield Problem(node.position, where, message, "config.type", fix)


def check_hooks(hooks: Node | None, where: str) -> Iterator[Problem]:
    """Yield the problems in the structure of a list of hooks.

    Args:
        hooks: the list.
        where: the key of the list in the config.
    """
    for index, entry in enumerate(list_in(hooks)):
        name, arguments = hook_entry(entry)
        is_mapping = arguments is None or isinstance(arguments.value, dict | None)
        if name in (None, "class") or not is_mapping or " {" in str(name):
            yield Problem(
                entry.position, f"{where}[{index}]", f"{entry.shown()!r} is not a hook; {_A_HOOK}", "config.structure"
            )
