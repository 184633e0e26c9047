"""A JSON schema of configs, with which editors complete and check them while they are written.

Like phase one of the check it is made from signatures, type hints and docstrings as they stand in the sources; nothing
is imported. It says no more than the check does: what emrun accepts, it accepts.
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from emrun.config.names import NotThere, dotted_path, short_names
from emrun.config.sections import DEFAULT_MODEL, OVERLAY, REQUIRED, SECTIONS, SUPPLIED, SUPPLIED_TO_LOOP
from emrun.config.signatures import UNREAD, Parameters
from emrun.config.source_finder import Source, Sources
from emrun.config.type_hints import NO_TEXT, SCALARS, SEQUENCES, allows_mapping, form_in, mismatch
from emrun.config.yaml_tree import node_of
from emrun.errors import Position
from emrun.types import Form

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DESCRIPTIONS = {
    "seed": "Of everything random; when absent one is drawn and written to the run's config.",
    "deterministic": "true switches torch's deterministic algorithms on.",
    "name": "Names the run directory; by default the name of the file.",
    "code_directory": "Where user modules are found beside the current directory.",
    "vars": "Free values, which nothing but `${vars.NAME}` reads.",
    "dataset": "The class of the dataset, a built-in or a dotted path, and its arguments.",
    "model": f"The class of the model, by default {DEFAULT_MODEL}, and its arguments.",
    "main_loop": "Arguments of the main loop.",
    "hooks": "What watches and steers the training: `Name` or `Name: {argument: value}`, called in this order.",
    "eval": "Stream -> how its evaluation differs; its `hooks` replace the hooks, other sections are merged.",
}
_EXTENDS = "A file or a list of files, relative to this one, that this one is merged over."
_TYPES = {bool: "boolean", int: "integer", float: "number", complex: "number", str: "string", type(None): "null"}
_KINDS = {**_TYPES, dict: "object", list: "array"}
_WRITTEN = (str, int, type(None))  # of what can be literal, what a config can write
_NOT_TEXT = ("object", "array", "number", "boolean", "null")
_INTERPOLATION = r"\$\{"  # what it stands for is known when it is replaced
_IS_FORM = {"anyOf": [{"required": ["class"]}, {"required": ["import"]}]}
_IS_FORM_OBJECT = {"type": "object", **_IS_FORM}
_ARGS = {"type": ["array", "string"], "pattern": _INTERPOLATION, "description": "Positional arguments."}
_IMPORT = {"type": "string", "description": "The dotted path of an object that is not called."}


def config_schema() -> Schema:
    """Return the JSON schema of a config, draft 2020-12."""
    return _Writer(Sources()).config()


def hint_schema(parameter: inspect.Parameter, *, is_partial: bool = False) -> Schema:
    """Return the schema of the values that the check accepts for a parameter that is no factory.

    Args:
        parameter: its `annotation` is a type, None or `UNREAD`, and so may be its `default`.
        is_partial: the value may be merged over another one: a mapping need not be complete.
    """
    hint, default = parameter.annotation, parameter.default
    if hint is None or hint is UNREAD or default is UNREAD:
        return _anything()
    is_given = default is not inspect.Parameter.empty
    if is_given and mismatch(node_of(default, Position("default")), hint) is not None:
        return _anything()  # the check takes the hint for wrong
    return _of_hint(hint, is_partial)


def _anything() -> Schema:
    return {"$ref": "#/$defs/anything"}


def _of_hint(hint: Any, is_partial: bool) -> Schema:
    alternatives = _alternatives(hint, is_partial)
    if not all(alternatives):
        return _anything()
    scalars = list(dict.fromkeys(kind for each in alternatives if _is_plain(each) for kind in each["type"]))
    allowed = frozenset(scalars)
    others = [each for each in alternatives if "enum" in each or not allowed.issuperset(each["type"])]
    if len(others) == 1 and "enum" not in others[0]:
        return _computed([*others[0]["type"], *scalars], others[0], is_partial)
    rest = _computed(scalars, {}, is_partial)
    return {"anyOf": [*others, rest]} if others else rest


def _is_plain(alternative: Schema) -> bool:
    return list(alternative) == ["type"]


def _computed(kinds: Sequence[str], inner: Schema, is_partial: bool) -> Schema:
    """Return the schema of values of some types, or of a form or an interpolation that becomes one.

    Args:
        kinds: the types.
        inner: what else holds for arrays and objects.
        is_partial: a mapping may be a part of a form, which what it is merged over completes.
    """
    schema: Schema = {**inner, "type": list(dict.fromkeys((*kinds, "object", "string")))}
    values = schema.pop("additionalProperties", None)
    if "string" not in kinds:
        schema["pattern"] = _INTERPOLATION
    if is_partial:
        schema["$ref"] = "#/$defs/anything"
    elif values is not None:
        schema.update(
            {"if": _IS_FORM_OBJECT, "then": {"$ref": "#/$defs/form"}, "else": {"additionalProperties": values}}
        )
    else:
        schema["$ref"] = "#/$defs/anything" if "object" in kinds else "#/$defs/form"
    return schema


def _alternatives(hint: Any, is_partial: bool) -> list[Schema]:
    """Return what a hint allows, as `emrun.config.type_hints` reads it; an empty schema allows anything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _alternatives(arguments[0], is_partial)
    if origin in (typing.Union, types.UnionType):
        return [each for argument in arguments for each in _alternatives(argument, is_partial)]
    if origin is typing.Literal:
        choices = [each for each in arguments if isinstance(each, _WRITTEN)]
        return [{"enum": choices}] if choices else []
    if hint in SCALARS:
        return [{"type": [_TYPES[hint]]}]
    kind = origin or hint
    if not inspect.isclass(kind):
        return [{}]
    if issubclass(kind, os.PathLike):
        return [{"type": ["string"]}]
    if issubclass(kind, collections.abc.Mapping):
        values = _of_hint(arguments[1], is_partial) if len(arguments) == 2 else _anything()
        return [{"type": ["object"], "additionalProperties": values}]
    if kind in SEQUENCES or issubclass(kind, collections.abc.Sequence):
        return _sequence(kind, arguments, is_partial)
    is_text = NO_TEXT.isdisjoint(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return [{}] if is_text else [{"type": list(_NOT_TEXT)}]


def _sequence(kind: type, arguments: tuple[Any, ...], is_partial: bool) -> list[Schema]:
    found: Schema = {"type": ["array"]}
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        items = [_of_hint(each, is_partial) for each in arguments]
        found.update({"prefixItems": items, "minItems": len(items), "maxItems": len(items)})
    else:
        found["items"] = _of_hint(arguments[0], is_partial) if arguments else _anything()
    if not inspect.isabstract(kind):
        return [found]
    if issubclass(kind, collections.abc.Sequence):
        return [found, {"type": ["string"]}]
    return [found, {"type": ["string", "object"]}]


class _Writer:
    """Writes the schema; what is used more than once stands in `$defs`."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._definitions: Schema = {
            "anything": {"properties": {"class": _class([]), "import": _IMPORT, "args": {}}},
            "form": {"$ref": "#/$defs/anything", **_IS_FORM},
        }

    def config(self) -> Schema:
        sections = {name: self._section(name) for name in SECTIONS}
        different = [name for name in SECTIONS if f"partial.{name}" in self._definitions]
        partial = {**sections, **{name: {"$ref": f"#/$defs/partial.{name}"} for name in different}}
        self._definitions["overlay"] = {
            "type": ["object", "null", "string"],
            "pattern": _INTERPOLATION,
            "properties": {name: partial[name] for name in OVERLAY},
            "additionalProperties": False,
        }
        extends: Schema = {"type": ["string", "array", "null"], "items": {"type": "string"}, "description": _EXTENDS}
        described = {name: {"description": _DESCRIPTIONS[name]} for name in different}
        return {
            "$schema": _DIALECT,
            "title": "emrun config",
            "type": "object",
            "properties": {"extends": extends, **{name: described.get(name, sections[name]) for name in SECTIONS}},
            "additionalProperties": False,
            "if": {"required": ["extends"], "properties": {"extends": {"not": {"type": "null"}}}},
            "then": {"properties": {name: partial[name] for name in different}},
            "else": {"properties": {name: sections[name] for name in different}, "required": list(REQUIRED)},
            "$defs": dict(sorted(self._definitions.items())),
        }

    def _section(self, name: str) -> Schema:
        kinds = [_KINDS[kind] for kind in SECTIONS[name]]
        kinds += [] if name in REQUIRED else ["null"]
        schema: Schema = {"description": _DESCRIPTIONS[name], "type": list(dict.fromkeys((*kinds, "string")))}
        if "string" not in kinds:
            schema["pattern"] = _INTERPOLATION
        if name == "seed":
            schema["minimum"] = 0
        elif name == "hooks":
            schema["items"] = self._hook()
        elif name == "eval":
            schema["additionalProperties"] = {"$ref": "#/$defs/overlay"}
        elif "object" in kinds and name != "vars":
            write = self._main_loop if name == "main_loop" else functools.partial(self._object, name)
            self._definitions[name] = {**schema, **write(is_partial=False)}
            self._definitions[f"partial.{name}"] = {**schema, **write(is_partial=True)}
            return {"$ref": f"#/$defs/{name}"}
        return schema

    def _object(self, kind: str, *, is_partial: bool) -> Schema:
        """Return the schema of a section that is one object."""
        default = DEFAULT_MODEL if kind == "model" else None
        names = short_names(kind)
        cases = []
        for name in names:
            call = self._call(f"{kind}.{name}", _path(name, kind), is_partial, supplied=SUPPLIED[kind])
            is_optional = name == default and not is_partial
            cases.append(_case(name, call, is_optional=is_optional))
        schema: Schema = {"properties": {"class": _class(names, default)}, "allOf": cases}
        if default is None and not is_partial:
            schema["required"] = ["class"]
        return schema

    def _main_loop(self, *, is_partial: bool) -> Schema:
        source = self._find("emrun.loop.main_loop.MainLoop")
        parameters = self._sources.parameters(source) if source is not None else None
        if source is None or parameters is None:
            return {}
        allowed = [each for each in parameters.named.values() if each.name not in SUPPLIED_TO_LOOP]
        properties = self._arguments(source, allowed, is_partial)
        policy: Schema = {"properties": {"on_incorrect_config": {"const": "error"}}}
        if is_partial:  # what it is merged over may have another policy
            policy["required"] = ["on_incorrect_config"]
        strict = {"properties": dict.fromkeys(properties, True), "additionalProperties": False}
        return {"properties": properties, "if": {"type": "object", **policy}, "then": strict}

    def _hook(self) -> Schema:
        """Return the schema of an entry of the list of hooks."""
        known = {}
        plain: list[str] = []  # can be written without arguments
        for name in short_names("hook"):
            path = _path(name, "hook")
            source = self._find(path)
            call = self._call(f"hook.{name}", path, False, supplied=SUPPLIED["hook"], own_keys=None)
            needs_arguments = "else" in self._definitions.get(f"hook.{name}", {})
            kinds = ["object", "string"] if needs_arguments else ["object", "null", "string"]
            known[name] = {"type": kinds, "pattern": _INTERPOLATION, **call, **_described(_summary(source))}
            plain += [] if needs_arguments else [name]
        self._definitions["hook"] = {
            "type": ["object", "string"],
            "minProperties": 1,
            "maxProperties": 1,
            "minLength": 1,
            "properties": known,
            "additionalProperties": {"type": ["object", "null", "string"], "pattern": _INTERPOLATION},
            "anyOf": [{"enum": plain}, {"type": ["object", "string"]}],  # the names are to be completed
        }
        return {"$ref": "#/$defs/hook"}

    def _form(self, form: Form, is_partial: bool, *, is_mapping: bool) -> Schema:
        """Return the schema of a `Factory`, or, `is_mapping`, of one or several by name."""
        name = f"{'partial.' if is_partial else ''}form.{'-'.join((form.package, *form.keys)).strip('-')}"
        if name not in self._definitions:
            self._definitions[name] = {}  # while it is being written
            self._definitions[name] = self._one_form(form, is_partial)
        one: Schema = {"$ref": f"#/$defs/{name}"}
        if not is_mapping:
            return one
        schema = {"type": ["object", "null", "string"], "pattern": _INTERPOLATION, "if": _IS_FORM_OBJECT, "then": one}
        return schema if is_partial else {**schema, "else": {"additionalProperties": one}}

    def _one_form(self, form: Form, is_partial: bool) -> Schema:
        schema: Schema = {"type": ["object", "null", "string"], "pattern": _INTERPOLATION}
        schema.update(self._classes_of(form, is_partial))
        schema["properties"].update({key: _anything() for key in form.keys})
        return schema if is_partial else {**schema, **_IS_FORM}

    def _classes_of(self, form: Form, is_partial: bool) -> Schema:
        """Return what holds for a form because of its class."""
        names = self._members(form.package)
        cases = []
        for name in names:
            path = f"{form.package}.{name}"
            call = self._call("-".join((path, *form.keys)), path, is_partial, own_keys=form.keys, form=form)
            cases.append(_case(name, call))
        schema: Schema = {
            "properties": {"class": _class(names, accepts_any=bool(form.package)), "import": _IMPORT, "args": _ARGS}
        }
        return {**schema, "allOf": cases} if cases else schema

    def _inner(self, form: Form, is_partial: bool) -> str:
        """Return a reference to the schema of what stands among the arguments of a form that shares, lists included."""
        name = f"{'partial.' if is_partial else ''}inner.{form.package}"
        reference = f"#/$defs/{name}"
        if name not in self._definitions:
            self._definitions[name] = {}  # while it is being written
            self._definitions[name] = {
                **self._classes_of(replace(form, keys=()), is_partial),
                "items": {"$ref": reference},
            }
        return reference

    def _members(self, package: str) -> list[str]:
        """Return the classes of a package that are no base of the others."""
        names = (self._sources.classes(package) if package else None) or ()
        found = {name: self._find(f"{package}.{name}") for name in names}
        return [name for name, source in found.items() if source is not None and source.bases]

    def _call(
        self,
        name: str,
        path: str | None,
        is_partial: bool,
        *,
        supplied: Sequence[str] = (),
        own_keys: Sequence[str] | None = (),
        form: Form | None = None,
    ) -> Schema:
        """Return a reference to the schema of a call of a class.

        Args:
            name: the name of its definition.
            path: its dotted path.
            is_partial: it is merged over another one: nothing is required.
            supplied: the arguments that emrun supplies.
            own_keys: keys of the form that are no arguments; None for a hook, whose class is not in the form.
            form: of what it is the class.
        """
        name = f"partial.{name}" if is_partial else name
        source = self._find(path)
        parameters = self._sources.parameters(source) if source is not None else None
        if source is None or parameters is None:
            return {}
        if name not in self._definitions:
            self._definitions[name] = self._arguments_of(source, parameters, is_partial, supplied, own_keys, form)
        return {"$ref": f"#/$defs/{name}"}

    def _arguments_of(
        self,
        source: Source,
        parameters: Parameters,
        is_partial: bool,
        supplied: Sequence[str],
        own_keys: Sequence[str] | None,
        form: Form | None,
    ) -> Schema:
        is_by_name = form is not None and form.is_by_name(parameters.named)
        first = 0 if form is None or is_by_name else form.supplied
        hidden = (*supplied, *parameters.by_position(first), *([form.shared] if form and is_by_name else []))
        found = parameters.named.values()
        named = [each for each in found if each.name not in hidden and each.kind is not each.POSITIONAL_ONLY]
        others: Schema = {} if own_keys is None else {"class": True, **dict.fromkeys(own_keys, True)}
        schema: Schema = {
            "properties": {**self._arguments(source, named, is_partial), **others, "args": _ARGS},
            "additionalProperties": parameters.takes_any,
        }
        if form is not None and form.shared:
            schema["properties"] = _referring(schema["properties"], self._inner(form, is_partial))
        required = [each.name for each in named if each.default is each.empty]
        if required and not is_partial:
            schema.update({"if": {"required": ["args"]}, "else": {"required": required}})
        return schema

    def _arguments(self, source: Source, named: Iterable[inspect.Parameter], is_partial: bool) -> Schema:
        texts = _argument_texts(source)
        return {
            each.name: {
                **self._argument(each, is_partial),
                **_described(texts.get(each.name, "")),
                **_default(each.default),
            }
            for each in named
        }

    def _argument(self, parameter: inspect.Parameter, is_partial: bool) -> Schema:
        is_read = parameter.annotation is not UNREAD and parameter.default is not UNREAD
        form = form_in(parameter.annotation) if is_read else None
        if form is not None:
            return self._form(form, is_partial, is_mapping=allows_mapping(parameter.annotation))
        schema = hint_schema(parameter, is_partial=is_partial)
        if not schema.keys() <= {"type", "pattern", "$ref"} or "type" not in schema:
            return schema
        name = "-or-".join(each for each in schema["type"] if (each != "string" or "pattern" not in schema))
        name = name.replace("-or-object", "") if schema["$ref"].endswith("form") else name
        name = f"{'partial.' if is_partial else ''}{name}"
        self._definitions.setdefault(name, schema)
        return {"$ref": f"#/$defs/{name}"}

    def _find(self, path: str | None) -> Source | None:
        try:
            return self._sources.find(path) if path is not None else None
        except NotThere:  # of a plugin that is not there
            return None


def _path(name: str, kind: str) -> str | None:
    try:
        return dotted_path(name, kind)
    except NotThere:  # several packages provide it
        return None


def _case(name: str, call: Schema, *, is_optional: bool = False) -> Schema:
    """Return the schema that holds for a form with a class of this name, or, `is_optional`, without a class."""
    condition: Schema = {"type": "object", "properties": {"class": {"const": name}}}
    return {"if": condition if is_optional else {**condition, "required": ["class"]}, "then": call}


def _class(names: Sequence[str], default: str | None = None, *, accepts_any: bool = False) -> Schema:
    """Return the schema of the key `class`: known names, to be completed, and others."""
    if not names and not accepts_any:
        return {
            "type": "string",
            "pattern": r"\.|" + _INTERPOLATION,
            "description": "A dotted path: my_module.MyClass.",
        }
    if not names:
        return {"type": "string"}
    text = "One of these names, or a dotted path: my_module.MyClass."
    return {"anyOf": [{"enum": list(names)}, {"type": "string"}], "description": text, **_default(default)}


def _referring(schema: Any, reference: str) -> Any:
    """Return a schema with another reference in place of that to anything."""
    if isinstance(schema, dict):
        return {key: _referring(value, reference) for key, value in schema.items()}
    return reference if schema == _anything()["$ref"] else schema


def _described(text: str) -> Schema:
    return {"description": text} if text else {}


def _default(value: Any) -> Schema:
    """Return the default of a parameter, where it can be written; null may stand for that of a base."""
    if value is None or value is inspect.Parameter.empty:
        return {}
    try:
        return {"default": json.loads(json.dumps(value, allow_nan=False))}
    except (TypeError, ValueError):
        return {}


def _summary(source: Source | None) -> str:
    """Return the first paragraph of a class's docstring."""
    text = ast.get_docstring(source.definitions[0]) if source is not None and source.definitions else None
    return " ".join((text or "").partition("\n\n")[0].split())


def _argument_texts(source: Source) -> Mapping[str, str]:
    """Return what the docstrings of a class and its bases say about arguments."""
    found: dict[str, str] = {}
    for definition in source.definitions:
        section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", ast.get_docstring(definition) or "", re.MULTILINE)
        entries = re.split(r"^ {4}(\w+)(?: \(.*\))?:", section[1] if section else "", flags=re.MULTILINE)
        for name, text in zip(entries[1::2], entries[2::2], strict=True):
            found.setdefault(name, " ".join(text.split()))
    return found
