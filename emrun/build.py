"""The one rule that turns a config into objects: a mapping with a `class` key is called with its other keys."""

from __future__ import annotations

import importlib
import inspect
import itertools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from emrun.check import check_call, constructors, parameters_of
from emrun.errors import ArgumentError, ConfigError, HookError, Problem, did_you_mean, listed
from emrun.hook import AbstractHook, check_events
from emrun.model import AbstractModel
from emrun.names import FORMER, dotted_path, normalised, short_names
from emrun.type_hints import mismatch
from emrun.types import Factory, Form
from emrun.yaml_tree import Node

_KEYS = ("class", "import", "args")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a `class` or `import` form names, found and checked against its signature, but not called yet."""

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
        """Call it.

        Args:
            supplied: arguments that it gets, and so does whatever is below it, where it has parameters of that name.

        Raises:
            ConfigError: it finds that an argument is wrong.
            BaseException: whatever else it raises, with a note that tells where it stands in the config.
        """
        if self.is_import and self.form is None:
            return self.target
        args = build(self.args, supplied)
        kwargs = {name: build(value, supplied) for name, value in self.kwargs.items()}
        kwargs.update({name: supplied[name] for name in self.takes})
        if self.form is None:
            return self.call(*args, **kwargs)
        options = build(self.options, supplied)
        if self.is_import:
            return Factory(self.target, options=options, is_import=True)

        def call(*first: Any) -> Any:
            return self.call(*first, *args, **kwargs)

        call.__qualname__ = getattr(self.target, "__qualname__", str(self.target))
        return Factory(call, options=options)

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the target, and tell where it stands in the config when that fails."""
        try:
            return self.target(*args, **kwargs)
        except ArgumentError as error:
            node = self.node.get(error.argument)
            position = node.position if node else self.node.key_position
            message = self.node.censored(error.message)
            raise ConfigError(Problem(position, f"{self.key}.{error.argument}", message)) from error
        except HookError as error:
            message = self.node.censored(str(error))
            raise ConfigError(Problem(self.node.key_position, self.key, message)) from error
        except Exception as error:
            error.add_note(f"while building {self.key} ({self.node.key_position})")
            raise


def build(value: Any, supplied: Mapping[str, Any]) -> Any:
    """Build all recipes in a value."""
    if isinstance(value, Recipe):
        return value.build(supplied)
    if isinstance(value, dict):
        return {key: build(child, supplied) for key, child in value.items()}
    if isinstance(value, list):
        return [build(child, supplied) for child in value]
    return value


class Preparation:
    """Finds what a config names and checks the arguments, without calling anything.

    All problems are collected in `problems`; what has one is prepared as None.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def section(self, node: Node, kind: str, supplied: tuple[str, ...], default: str | None = None) -> Any:
        """Prepare a section that is one object, such as `dataset`.

        Args:
            node: the section.
            kind: `dataset` or `model`.
            supplied: the arguments that emrun supplies to it and whatever is below it.
            default: the class when none is given.
        """
        if default is not None and "class" not in node.value:
            node = Node({"class": Node(default, node.position, node.key), **node.value}, node.position, node.key)
        if "class" not in node.value:
            self._problem(node, kind, f"missing key 'class'; built-in: {listed(short_names(kind))}")
            return None
        for name in supplied:
            if name in node.value:
                self._problem(node.value[name], kind, f"{name!r} is supplied by emrun; remove it")
                return None
        earlier = len(self.problems)
        recipe = self._call(node, kind, kind, supplied)
        problem = _no_model(recipe) if recipe is not None and kind == "model" else None
        if problem is not None:
            self.problems[earlier:] = [problem]  # what is wrong with the arguments of no model does not matter
        return recipe

    def hook(self, name: str, arguments: Node | None, entry: Node, key: str) -> Any:
        """Prepare an entry of the list of hooks."""
        supplied = ("model", "dataset", "output_dir")
        entries = dict(arguments.value) if arguments is not None and isinstance(arguments.value, dict) else {}
        position = arguments.key_position if arguments is not None else entry.position
        node = Node({"class": Node(name, position, position), **entries}, position, position)
        for argument in ("class", "import"):
            if argument in entries:
                self._problem(entries[argument], key, f"unknown argument {argument!r}; the entry's key is the class")
                return None
        for argument in supplied:
            if argument in entries:
                self._problem(entries[argument], key, f"{argument!r} is supplied by emrun; remove it")
                return None
        earlier = len(self.problems)
        recipe = self._call(node, key, "hook", supplied)
        if recipe is None:
            return None
        if not (inspect.isclass(recipe.target) and issubclass(recipe.target, AbstractHook)):
            message = f"{name} is no subclass of emrun.AbstractHook"
            self.problems[earlier:] = [Problem(position, key, message)]
            return None
        try:
            check_events(recipe.target)
        except HookError as error:
            self._problem(node, key, str(error))
            return None
        return recipe

    def value(self, node: Node, key: str, supplied: tuple[str, ...], hint: Any = None) -> Any:
        """Prepare any value: a form, a mapping, a list or a scalar.

        Args:
            node: the value.
            key: its key in the config, for messages.
            supplied: the arguments that emrun supplies to what is below.
            hint: the type of the parameter that it is for; a `Factory` is not built.
        """
        form = _form_in(hint)
        if form is not None:
            return self._form(node, key, supplied, form, allows_mapping=_allows_mapping(hint))
        if isinstance(node.value, dict):
            if "class" in node.value or "import" in node.value:
                return self._call(node, key, "", supplied)
            return {name: self.value(child, f"{key}.{name}", supplied) for name, child in node.value.items()}
        if isinstance(node.value, list):
            return [self.value(child, f"{key}[{index}]", supplied) for index, child in enumerate(node.value)]
        return node.value

    def _form(self, node: Node, key: str, supplied: tuple[str, ...], form: Form, *, allows_mapping: bool) -> Any:
        if node.value is None:
            return None
        if isinstance(node.value, dict) and ("class" in node.value or "import" in node.value):
            return self._call(node, key, "", supplied, form)
        if isinstance(node.value, dict) and allows_mapping:
            return {
                name: self._form(child, f"{key}.{name}", supplied, form, allows_mapping=False)
                for name, child in node.value.items()
            }
        self._problem(node, key, f"{node.shown()!r} is no form; write {{class: NAME, argument: value}}")
        return None

    def _call(
        self, node: Node, key: str, kind: str, supplied: tuple[str, ...], form: Form | None = None
    ) -> Recipe | None:
        is_import = "import" in node.value
        if is_import and "class" in node.value:
            self._problem(node, key, "has both 'class' and 'import'; 'class' is called, 'import' is not")
            return None
        target = self._find(node.value["import" if is_import else "class"], key, kind, form)
        if target is None:
            return None
        if not is_import and not callable(target):
            self._problem(node.value["class"], key, "is no class or function to call; 'import' names other objects")
            return None
        own_keys = form.keys if form else ()
        options = {k: self.value(v, f"{key}.{k}", supplied) for k, v in node.value.items() if k in own_keys}
        rest = {k: v for k, v in node.value.items() if k not in own_keys and k not in _KEYS}
        args = node.get("args")
        if is_import:
            self.problems += [
                Problem(v.key_position, key, f"unknown argument {k!r}; 'import' names an object that is not called")
                for k, v in {**rest, **({"args": args} if args else {})}.items()
            ]
            return Recipe(target, node, key, True, form=form, options=options)
        if args is not None and not isinstance(args.value, list):
            self._problem(args, f"{key}.args", f"{args.shown()!r} is no list of positional arguments")
            return None
        positional = (form.supplied if form else 0) + len(args.value if args else ())
        self.problems += check_call(
            target, rest, key=key, node=node, positional=positional, supplied=supplied, own_keys=own_keys
        )
        hints = _hints(target)
        try:
            parameters = parameters_of(target)[0]
        except (TypeError, ValueError):
            parameters = {}
        taken = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY][:positional]
        given = list(args.value if args else ())
        by_position = zip(taken[positional - len(given) :], itertools.count(), given, strict=False)
        values = [(name, f"args[{index}]", value) for name, index, value in by_position]
        for name, where, value in [*values, *((name, name, value) for name, value in rest.items())]:
            hint = hints.get(name) if name in parameters else None
            problem = mismatch(value, hint, parameters[name].default) if hint and _form_in(hint) is None else None
            if problem is not None:
                self.problems.append(Problem(value.position, f"{key}.{where}", value.censored(problem)))
        return Recipe(
            target,
            node,
            key,
            args=self.value(args, f"{key}.args", supplied) if args else [],
            kwargs={k: self.value(v, f"{key}.{k}", supplied, hints.get(k)) for k, v in rest.items()},
            takes=frozenset(name for name in supplied if name in parameters and name not in (*rest, *taken)),
            form=form,
            options=options,
        )

    def _find(self, name: Node, key: str, kind: str, form: Form | None) -> Any:
        """Return what a name means, None when that is a problem."""
        if not isinstance(name.value, str) or not name.value:
            self._problem(name, key, f"{name.shown()!r} is no name of a class")
            return None
        text: str = name.value
        if "." not in text:
            if kind == "hook" and normalised(text) in FORMER:
                self._problem(name, key, f"emrun has no hook {text!r}: {FORMER[normalised(text)]}")
                return None
            package = form.package if form else ""
            if package:
                members = _classes(package)
                found = {normalised(member): member for member in members}.get(normalised(text))
                if found is None:
                    hint = did_you_mean(text, members) or f"; it has {listed(sorted(members))}."
                    self._problem(name, key, f"{package} has no class {text!r}{hint} Another class has a dotted path")
                    return None
                return members[found]
            path = dotted_path(text, kind)
            if path is None:
                names = short_names(kind)
                hint = did_you_mean(text, names) or (f"; built-in: {listed(names)}." if names else ".")
                noun = f"{kind} " if kind else "class "
                self._problem(
                    name, key, f"unknown {noun}{text!r}{hint} A class of your own has a dotted path: my_module.{text}"
                )
                return None
            text = path
        try:
            return locate(text)
        except LookupError as error:
            self._problem(name, key, str(error.args[0]))
            return None
        except Exception as error:
            error.add_note(f"while importing {text} for {key} ({name.position})")
            raise

    def _problem(self, node: Node, key: str, message: str) -> None:
        self.problems.append(Problem(node.key_position, key, node.censored(message)))


def _no_model(recipe: Recipe) -> Problem | None:
    """Return the problem that a class under `model` is no model, if it is none."""
    target = recipe.target
    if not inspect.isclass(target) or issubclass(target, AbstractModel):
        return None
    name = f"{target.__module__}.{target.__qualname__}"
    bases = {f"{base.__module__}.{base.__qualname__}" for base in target.__mro__}
    if "torch.nn.modules.module.Module" in bases:
        message = f"{name} is a torch.nn.Module; write it under model.module: {{class: {name}, ...}}"
    else:
        message = f"{name} is no subclass of emrun.AbstractModel"
    return Problem(recipe.node.value["class"].key_position, "model", message)


def locate(path: str) -> Any:
    """Import what a dotted path names.

    Raises:
        LookupError: there is no such module, or it has no such name; the message says where a module was found.
        BaseException: what importing the module raises.
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise LookupError(f"{path!r} is no dotted path such as my_module.MyClass")
    found: Any = None
    for index, part in enumerate(parts):
        if found is not None and hasattr(found, part):
            found = getattr(found, part)
            continue
        if found is not None and not inspect.ismodule(found):
            raise LookupError(_missing(found, part, path))
        module = ".".join(parts[: index + 1])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, but something that it imports is not
            if found is not None:
                raise LookupError(_missing(found, part, path)) from error
            message = f"no module {module!r}; it is looked for in the current directory, then among installed packages"
            raise LookupError(message) from error
    return found


def _missing(owner: Any, part: str, path: str) -> str:
    place = getattr(owner, "__file__", None)
    name = getattr(owner, "__name__", str(owner))
    near = did_you_mean(part, [each for each in dir(owner) if not each.startswith("_")])
    found_at = f" (found at {place})" if place else ""
    return f"{path}: {name}{found_at} has no {part!r}{near}"


def _classes(package: str) -> dict[str, Any]:
    members = vars(importlib.import_module(package))
    return {
        name: each
        for name, each in members.items()
        if inspect.isclass(each) and not name.startswith("_") and f"{each.__module__}.".startswith(f"{package}.")
    }


def _hints(target: Any) -> dict[str, Any]:
    """Return the types of the parameters, those of a base to which `**kwargs` can be handed on included."""
    found: dict[str, Any] = {}
    try:
        functions = constructors(target) if inspect.isclass(target) else [target]
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


def _form_in(hint: Any) -> Form | None:
    """Return how a parameter's `Factory` is written, None when it is no factory."""
    if hint is Factory:
        return Form()
    if typing.get_origin(hint) is typing.Annotated and typing.get_args(hint)[0] is Factory:
        return next((each for each in hint.__metadata__ if isinstance(each, Form)), Form())
    return next((form for each in typing.get_args(hint) if (form := _form_in(each)) is not None), None)


def _allows_mapping(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return True
    return any(_allows_mapping(each) for each in typing.get_args(hint))
