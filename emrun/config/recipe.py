"""Builds objects by one rule: the class of a mapping with the key `class` is called with the other keys."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from emrun.base.errors import ArgumentError, ConfigError, HookError, MissingExtra, Problem
from emrun.base.preparations import PREPARATION
from emrun.base.types import Factory, Form
from emrun.base.wording import did_you_mean
from emrun.config.data_numbers import DataNumber
from emrun.config.signatures import parameters_of
from emrun.config.type_hints import takes_tensor
from emrun.config.yaml_tree import Node, of_each

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'|'(\w+)' is an invalid keyword argument")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The target of a mapping with `class` or `import`, with checked arguments, not called yet."""

    target: Any
    node: Node
    key: str
    is_import: bool = False
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()
    form: Form | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, supplied: Mapping[str, Any]) -> Any:
        """Build the object: call the target, or return it if it is an import.

        Args:
            supplied: the arguments that emrun supplies to this recipe and to all below it, where they have parameters
                of that name; a dataset with a parameter `preparation` gets its own, see `Preparations`.

        Raises:
            ConfigError: the target reports a wrong argument.
            BaseException: any other error of the target, with a note that gives its position in the config.
        """
        if self.is_import and self.form is None:
            return self.target
        prepared = supplied.get(PREPARATION) if PREPARATION in self.takes else None
        unused = set()
        if prepared is not None and not prepared.trains:
            unused = {"augment"}.intersection(getattr(self.target, "train_only", ()))
        args = build(self.args, supplied)
        kwargs = build({name: each for name, each in self.kwargs.items() if name not in unused}, supplied)
        given = {name: supplied[name] for name in self.takes if name in supplied}
        if prepared is not None:
            given[PREPARATION] = prepared.of(self.key)
        kwargs |= given
        if self.form is None:
            made = self.call(*args, **kwargs)
            if prepared is not None:
                prepared.add(self.key, made)
            return made
        options = build(self.options, supplied)
        if self.is_import:
            return Factory(self.target, options=options, is_import=True)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        functools.update_wrapper(call, self.target, assigned=(), updated=())  # for its signature
        call.__qualname__ = getattr(self.target, "__qualname__", str(self.target))
        factory = Factory(call, *args, options=options)
        factory.kwargs = kwargs  # they may have any names
        return factory

    def wants(self, name: str) -> bool:
        """Return whether this recipe, or one below it, takes an argument that emrun supplies."""
        return name in self.takes or any(part.wants(name) for part in _parts((self.args, self.kwargs, self.options)))

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the target; an error gets the position of the call in the config.

        A class of emrun whose derived classes must call its constructor has, as `_set_by_init`, what this sets last.
        """
        try:
            made = self.target(*args, **self._with_tensors(kwargs))
        except ArgumentError as error:
            raise ConfigError(self.problem(error)) from error
        except (HookError, MissingExtra) as error:
            raise ConfigError(Problem(self.node.key_position, self.key, str(error), error.code, error.fix)) from error
        except BaseException as error:
            problem = self._refused(error, kwargs)
            if problem is not None:
                raise ConfigError(problem) from error
            error.add_note(f"while building {self.key} ({self.node.key_position})")
            raise
        if getattr(type(made), "_set_by_init", None) not in (None, *getattr(made, "__dict__", ())):
            base = next(cls.__name__ for cls in type(made).__mro__ if cls.__module__.startswith("emrun."))
            raise ConfigError(
                Problem(
                    self.node.key_position,
                    self.key,
                    f"{type(made).__name__}.__init__ does not call super().__init__(), which sets what {base} "
                    "needs; call it first",
                )
            )
        return made

    def _with_tensors(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments in which a list is a tensor if only a tensor is allowed.

        Raises:
            ArgumentError: it is not a list of numbers.
        """
        parameters = parameters_of(self.target) if list in map(type, kwargs.values()) else None
        if parameters is None:
            return kwargs
        found = dict(kwargs)
        for name, value in kwargs.items():
            if takes_tensor(value, parameters.hint(name)):
                torch: Any = sys.modules["torch"]  # imported by the hint
                try:
                    found[name] = torch.tensor(value, dtype=torch.get_default_dtype())
                except (ValueError, TypeError) as error:
                    raise ArgumentError(name, f"{value!r} is not a list of numbers for a tensor: {error}") from error
        return found

    def problem(self, error: ArgumentError) -> Problem:
        """Return the problem of an argument, or of a value in an argument: `groups[0].match`."""
        keys = re.sub(r"\[(\d+)\]", r".\1", error.argument).split(".")
        nodes = [self.node.get(*keys[:count]) for count in range(len(keys), 0, -1)]  # the last may be a default
        node = next((candidate for candidate in nodes if candidate is not None), None)
        position = node.position if node else self.node.key_position
        if node is not None and node.position.is_of_base:  # the message is about a value that is set in another file
            inner = [
                each
                for _, each, _ in node.places()
                if not each.position.is_of_base and repr(each.value) in error.message
            ]
            position = inner[-1].position if inner else position
        key = f"{self.key}.{error.argument}"
        fix = error.fix
        if nodes[0] is None and fix.startswith("set "):
            fix = f"override {key}={fix.removeprefix('set ')}"
        return Problem(position, key, error.message, error.code, fix)

    def _refused(self, error: BaseException, kwargs: Mapping[str, Any]) -> Problem | None:
        """Return the problem when an error is about an unknown argument that only `**kwargs` accepted, else None."""
        match = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
        name = next(filter(None, match.groups()), "") if match is not None else ""
        node = self.node.get(name)
        if node is None or name not in kwargs:
            return None
        parameters = parameters_of(self.target)
        named = list(parameters.named) if parameters is not None else []
        if name in named:
            return None
        hint = did_you_mean(name, [option for option in named if option not in self.takes])
        return Problem(node.key_position, self.key, f"unknown argument {name!r}{hint} ({error})", "config.unknown-key")


def build(value: Any, supplied: Mapping[str, Any]) -> Any:
    """Build all recipes in a value, and find its numbers of the data."""
    if isinstance(value, Recipe):
        return value.build(supplied)
    if isinstance(value, DataNumber):
        return value.of(supplied)
    return of_each(value, lambda child: build(child, supplied))


def _parts(value: Any) -> Iterator[Recipe | DataNumber]:
    """Yield the recipes in a value, without those inside them, and its numbers of the data."""
    if isinstance(value, Recipe | DataNumber):
        yield value
    elif isinstance(value, dict | list | tuple):
        children = value.values() if isinstance(value, dict) else value
        for child in children:
            yield from _parts(child)
