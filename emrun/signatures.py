"""What callables take: their parameters with types and defaults, read from the living object."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final

from emrun.hook import AbstractHook

UNREAD: Final = object()
"""A type or a default that stands in a source in a form that only running it would tell."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a callable takes.

    Args:
        named: its parameters. The `annotation` of each is the type itself, None without one that can be evaluated, or
            `UNREAD`; so is the `default`.
        takes_any: it takes any other keyword arguments.
        takes_more: it takes any number of positional arguments.
        others: types of arguments beside those named, which may be handed on to a base.
        unknown: the type of all others: None, or `UNREAD` when there may be more than could be read.
    """

    named: Mapping[str, inspect.Parameter]
    takes_any: bool
    takes_more: bool
    others: Mapping[str, Any] = field(default_factory=dict)
    unknown: Any = None

    @classmethod
    def of_signatures(cls, signatures: Sequence[inspect.Signature]) -> Parameters:
        """Return what a callable takes that hands its `**kwargs` on.

        Args:
            signatures: its own, then those of the constructors that get what the one before does not name.
        """
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found: dict[str, inspect.Parameter] = {}
        takes_any = False
        for index, signature in enumerate(signatures):
            parameters = signature.parameters.values()
            takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
            for each in parameters:
                if each.kind not in variable:
                    behind = each if index == 0 else each.replace(kind=each.KEYWORD_ONLY, default=None)
                    found.setdefault(each.name, behind)  # the one before may hand it on itself
        own = signatures[0].parameters.values()
        return cls(found, takes_any, any(each.kind is each.VAR_POSITIONAL for each in own))

    def hint(self, name: str) -> Any:
        """Return the type of an argument given by name."""
        return self.named[name].annotation if name in self.named else self.others.get(name, self.unknown)

    def by_position(self, count: int) -> list[str]:
        """Return the names of the first `count` parameters that can be given by position."""
        return [p.name for p in self.named.values() if p.kind is not p.KEYWORD_ONLY][:count]


def parameters_of(target: Callable[..., Any]) -> Parameters | None:
    """Return what the target of a config takes, None when it has no signature that can be read.

    A hook that hands `**kwargs` on to its base has the parameters of the base.
    """
    try:
        signatures = [inspect.signature(target)]
        if inspect.isclass(target) and issubclass(target, AbstractHook):
            for constructor in _constructors(target)[1:]:
                signature = inspect.signature(constructor)
                signatures.append(signature.replace(parameters=list(signature.parameters.values())[1:]))
    except (TypeError, ValueError):  # written in C
        return None
    hints = _hints(target)
    typed = [
        each.replace(parameters=[p.replace(annotation=hints.get(p.name)) for p in each.parameters.values()])
        for each in signatures
    ]
    return replace(Parameters.of_signatures(typed), others=hints)


def _constructors(target: Any) -> list[Any]:
    """Return the constructor of a class, and those of its bases to which `**kwargs` can be handed on."""
    found = []
    for constructor in [cls.__dict__["__init__"] for cls in target.__mro__[:-1] if "__init__" in cls.__dict__]:
        found.append(constructor)
        parameters = inspect.signature(constructor).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found


def _hints(target: Any) -> dict[str, Any]:
    """Return the types of the parameters, those of a base to which `**kwargs` can be handed on included."""
    found: dict[str, Any] = {}
    try:
        functions = _constructors(target) if inspect.isclass(target) else [target]
    except (TypeError, ValueError):  # written in C
        return {}
    for function in functions:
        for name, annotation in getattr(function, "__annotations__", {}).items():
            if name not in found:
                found[name] = _hint(annotation, getattr(inspect.unwrap(function), "__globals__", {}))
    return found


def _hint(annotation: Any, names: dict[str, Any]) -> Any:
    owner = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(owner, names, include_extras=True)["it"]
    except Exception:  # annotations are the user's code: whatever is wrong with them, they are only hints
        return None
