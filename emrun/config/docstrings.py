"""What a docstring tells those who write a config: what a class does, YAML to paste, arguments with their defaults."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from emrun.config.import_finder import Imported
from emrun.config.sections import SUPPLIED
from emrun.config.yaml_tree import read_scalar
from emrun.hook import AbstractHook
from emrun.model import AbstractModel

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_RAISES = re.compile(r"\n*^Raises:\n(?:[ ]+.*(?:\n|\Z)|\n)*", re.MULTILINE)
_YAML = {
    "hook": "hooks:\n  - {path}: {{{arguments}}}",
    "model": "model: {{class: {path}, {arguments}}}",
    "dataset": "dataset: {{class: {path}, {arguments}}}",
    "module": "model:\n  module: {{class: {path}, {arguments}}}",
}
"""Kind of a class -> the YAML that names it."""


def with_defaults(text: str, parameters: Mapping[str, inspect.Parameter], inherited: Mapping[str, str] = {}) -> str:
    """Return a docstring without its section `Raises`, and with the default of each argument; null is left out.

    Args:
        text: the docstring.
        parameters: the parameters of the class, of which those without a description are added.
        inherited: name -> description in the docstring of a base class.
    """
    before, _, described = ("\n" + _RAISES.sub("\n\n", text)).partition("\nArgs:\n")
    for name, parameter in parameters.items():
        default = _written(parameter.default) if parameter.default is not None else ""
        note = f" (default {default})" if default else ""
        entry = re.compile(rf"^( {{4}}{name})(?: \(.*?\))?:(?P<text>.*)", re.MULTILINE)
        found = entry.search(described)
        if found is None:
            required = " (required)" if parameter.default is parameter.empty else note
            added = f"{name}{required}: {inherited.get(name, '')}".rstrip(": ")
            added = textwrap.fill(added, 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
            described = f"{described.rstrip()}\n{added}"
        elif "default:" not in found["text"].lower():
            described = f"{described[: found.end(1)]}{note}{described[found.end(1) :]}"
    described = described.strip("\n")
    return f"{before.strip()}\n\nArgs:\n{described}".strip() if described else before.strip()


def explained(path: str, found: Any, kind: str | None = None) -> str:
    """Return what a class or function does, with YAML to paste if it is known what the class is for.

    Args:
        path: the dotted path.
        found: what the path names.
        kind: what a config uses a built-in class for, whose docstring has its YAML; by default judged by its bases.
    """
    text = inspect.cleandoc(found.__doc__ or "") if inspect.isclass(found) else inspect.getdoc(found) or ""
    kind, is_complete = kind or _kind_of(found), kind is not None
    if kind is None:
        return text or f"{path} has no docstring"
    known = Imported().parameters(found)
    supplied = SUPPLIED.get(kind, ("optimizer",))
    own = {name: each for name, each in known.named.items() if name not in supplied} if known else {}
    explained = with_defaults(text, own, argument_texts(found) if is_complete else {})
    if is_complete or re.search(rf"^ +.*\b{found.__name__}\b", text, re.MULTILINE):  # the docstring has its YAML
        return explained
    values = {name: "VALUE" if each.default is each.empty else _written(each.default) for name, each in own.items()}
    arguments = ", ".join(f"{name}: {value}" for name, value in values.items() if value)
    yaml = _YAML[kind].format(path=path, arguments=arguments).replace(": {}", "").replace(", }", "}")
    first, _, rest = explained.partition("\n\n")
    first, rest = ("", explained) if first.startswith("Args:\n") else (first, rest)
    return "\n\n".join(filter(None, (first or f"{path} has no docstring", textwrap.indent(yaml, " " * 4), rest)))


def _kind_of(found: Any) -> str | None:
    """Return what a config uses a class for; None if that is not known."""
    bases = found.__mro__ if inspect.isclass(found) else ()
    if AbstractHook in bases or AbstractModel in bases:
        return "hook" if AbstractHook in bases else "model"
    if "torch.nn.modules.module.Module" in [f"{base.__module__}.{base.__qualname__}" for base in bases]:
        return "module"
    return "dataset" if bases and any(name.endswith("_stream") for name in dir(found)) else None


def _written(value: Any) -> str:
    """Return a value as YAML, an empty string if YAML cannot write it."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and read_scalar(value) == value:
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return ""


def argument_texts(source: Any) -> Mapping[str, str]:
    """Return name -> description of the arguments in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for each in inspect.getmro(source) if inspect.isclass(source) else ():
        section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", inspect.cleandoc(each.__doc__ or ""), re.MULTILINE)
        entries = re.split(r"^ {4}(\w+)(?: \(.*\))?:", section[1] if section else "", flags=re.MULTILINE)
        for name, text in zip(entries[1::2], entries[2::2], strict=True):
            found.setdefault(name, " ".join(text.split()))
    return found
