"""Writes a JSON schema of configs, with which editors complete and check configs.

Like phase one of the check, the schema is made from the signatures, type hints and docstrings in source files; nothing
is imported. The schema accepts every config that emrun accepts. It does not report missing arguments: a file that is
merged over another file may be incomplete, so required arguments are left to `emrun check`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from emrun.base.types import Form
from emrun.config.catalogue import argument_texts
from emrun.config.names import LAYERS, SUPPLIED, NotThere, bases, dotted_path, short_names
from emrun.config.planner import SWEEP
from emrun.config.sections import DEFAULT_MODEL, OVERLAY, REQUIRED, SECTIONS, SUPPLIED_TO_LOOP
from emrun.config.signatures import UNREAD
from emrun.config.source_finder import Unimported
from emrun.config.type_hints import allows_mapping, alternatives, contradicts, form_in

Schema = dict[str, Any]

_DESCRIPTIONS = {
    "seed": "The seed of all random numbers; without it, a seed is drawn and saved in the config of the run.",
    "deterministic": "Whether torch uses deterministic algorithms.",
    "name": "The name of the run, a part of the name of its directory; by default the name of the file.",
    "code_directory": "A folder from which your modules are imported, in addition to the current directory.",
    "vars": "Free values, for use as `${vars.NAME}`.",
    "dataset": "The class of the dataset, built-in or a dotted path, and its arguments.",
    "model": f"The class of the model, by default {DEFAULT_MODEL}, and its arguments.",
    "main_loop": "Arguments of the main loop.",
    "hooks": "The hooks, called in this order; each is `Name` or `Name: {argument: value}`.",
    "eval": "Stream -> changes to the config for its evaluation; `hooks` replace the hooks, other sections are merged.",
    "sweep": "What `emrun sweep` varies, and how it runs its trials; not part of the config of a run.",
}
_EXTENDS = (
    "A file, a base of emrun, or a list of these, over which this config is merged; paths are relative to this file."
)
_TYPES = {bool: "boolean", int: "integer", float: "number", complex: "number", str: "string", type(None): "null"}
_TYPES |= {dict: "object", list: "array"}
_WRITTEN = (str, int, type(None))  # types of a `Literal` that a config can write
_NOT_TEXT = ("object", "array", "number", "boolean")
_INTERPOLATION = r"\$\{"  # its value is not known yet
_ARGS = {"type": ["array", "string"], "pattern": _INTERPOLATION, "description": "Positional arguments."}
_IMPORT = {"type": "string", "description": "The dotted path of an object that is not called."}
_IS_FORM = {"anyOf": [{"required": ["class"]}, {"required": ["import"]}]}
_ANYTHING = {"$ref": "#/$defs/anything"}
_CLASS = {"$ref": "#/$defs/class"}
_OF_FORM = {"class": True, "args": _ARGS}


def config_schema() -> Schema:
    """Return the JSON schema of a config, draft 2020-12."""
    return _Writer().config()


def hint_schema(parameter: inspect.Parameter) -> Schema:
    """Return the schema of the values that the check accepts for a parameter that is not a `Factory`.

    A mapping is accepted everywhere: it may be a form, or a part of a form in a file to be merged.

    Args:
        parameter: its `annotation` is a type, None or `UNREAD`; its `default` may be `UNREAD` too.
    """
    is_wrong = contradicts(parameter.default, parameter.annotation)
    return _ANYTHING if is_wrong else _of_hint(parameter.annotation)


def _reference(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


_LIST_OF_HOOKS = {**_reference("hooks"), "type": ["array", "null", "string"]}


def _typed(*kinds: str) -> Schema:
    """Return the schema of values of some types, or of an interpolation."""
    schema: Schema = {"type": list(dict.fromkeys((*kinds, "string")))}
    message = f"must be of type {' or '.join(kinds)}, or contain ${{...}}"  # editors show it instead of the pattern
    return schema if "string" in kinds else {**schema, "pattern": _INTERPOLATION, "patternErrorMessage": message}


def _of_hint(hint: Any) -> Schema:
    allowed = [schema for alternative in alternatives(hint) for schema in _schemas(*alternative)]
    if not all(allowed):
        return _ANYTHING
    kinds = [kind for schema in allowed if list(schema) == ["type"] for kind in schema["type"]]
    others = [schema for schema in allowed if "enum" in schema or not set(kinds).issuperset(schema["type"])]
    inner: Schema = others.pop() if len(others) == 1 and "enum" not in others[0] else {}
    rest = {**inner, **_typed(*inner.get("type", ()), *kinds, "object"), **_ANYTHING}
    return {"anyOf": [*others, rest]} if others else rest


def _schemas(sort: str, kind: Any, arguments: tuple[Any, ...]) -> list[Schema]:
    """Return the schemas of an alternative of a hint; an empty schema allows any value."""
    match sort:
        case "literal":
            choices = [choice for choice in arguments if isinstance(choice, _WRITTEN)]
            return [{"enum": choices}] if choices else []
        case "scalar":
            return [{"type": [_TYPES[kind]]}]
        case "path":
            return [{"type": ["string"]}]
        case "mapping":
            return [{"type": ["object"]}]
        case "tuple":
            items = [_of_hint(argument) for argument in arguments]
            return [{"type": ["array"], "prefixItems": items, "minItems": len(items), "maxItems": len(items)}]
        case "sequence":
            array = {"type": ["array"], "items": _of_hint(arguments[0]) if arguments else _ANYTHING}
            return [array, {"type": ["string"]}] if inspect.isabstract(kind) else [array]
        case "no text":
            return [{"type": list(_NOT_TEXT)}]
    return [{}]


class _Writer:
    """Writes the schema; parts that are used more than once are in `$defs`."""

    def __init__(self) -> None:
        self._sources = Unimported()
        names = [*short_names(""), *(self._sources.classes(LAYERS) or ())]
        self._definitions: Schema = {
            "class": {
                "anyOf": [{"enum": names}, {"type": "string", "pattern": r"\.|" + _INTERPOLATION}],
                "description": "A class of torch.nn, or a dotted path: my_module.MyClass.",
            },
            "anything": {"properties": {"class": _CLASS, "import": _IMPORT, "args": {}}},
            "overlay": {
                **_typed("object", "null"),
                "properties": {name: _reference(name) for name in OVERLAY},
                "additionalProperties": False,
            },
        }

    def config(self) -> Schema:
        inner = {
            "seed": {"minimum": 0},
            "dataset": self._object("dataset"),
            "model": self._object("model", DEFAULT_MODEL),
            "main_loop": self._arguments(self._find("emrun.loop.main_loop.MainLoop"), {}, SUPPLIED_TO_LOOP),
            "hooks": self._hook(),
            "eval": {"additionalProperties": _reference("overlay")},
            "sweep": self._arguments(self._find(SWEEP), {}, ("self",)),
        }
        self._definitions["overlay"]["properties"]["hooks"] = _LIST_OF_HOOKS
        for name, kind in SECTIONS.items():
            allowed = [_TYPES[kind]] if name in REQUIRED else [_TYPES[kind], "null"]
            allowed += ["object"] if name == "hooks" else []  # in a file that extends another
            self._definitions[name] = {**_typed(*allowed), **inner.get(name, {})}
        one = {"anyOf": [{"enum": list(bases())}, {"type": "string"}]}  # so that editors complete the names
        several = {"type": ["array", "null"], "items": one}
        extends = {"anyOf": [*one["anyOf"], several], "description": _EXTENDS}
        sections = {name: {**_reference(name), "description": _DESCRIPTIONS[name]} for name in SECTIONS}
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "emrun config",
            "type": "object",
            "properties": {"extends": extends, **sections},
            "additionalProperties": False,
            "if": {"required": ["extends"], "properties": {"extends": {"not": {"type": "null"}}}},
            "else": {"required": list(REQUIRED), "properties": self._unextended()},
            "$defs": dict(sorted(self._definitions.items())),
        }

    def _unextended(self) -> Schema:
        """Return the further restrictions of sections in a config without `extends`."""
        known = dict.fromkeys(self._definitions["main_loop"]["properties"], True)
        return {
            "hooks": _LIST_OF_HOOKS,
            "dataset": {"required": ["class"]},
            "model": {"if": {"not": {"required": ["class"]}}, "then": _reference(f"model.{DEFAULT_MODEL}")},
            "main_loop": {
                "if": {"properties": {"on_incorrect_config": {"const": "error"}}},
                "then": {"properties": known, "additionalProperties": False},
            },
        }

    def _object(self, kind: str, default: str | None = None) -> Schema:
        """Return the schema of a section that is one object."""
        calls = {name: f"{kind}.{name}" for name in short_names(kind)}
        for name, call in calls.items():
            self._definitions[call] = self._arguments(self._find(name, kind), _OF_FORM, SUPPLIED[kind])
        return {"properties": {"class": _class(calls, default)}, **_cases(calls)}

    def _hook(self) -> Schema:
        """Return the schema of the entries of the list of hooks, and of a mapping that changes some."""
        known = {}
        for name in short_names("hook"):
            source = self._find(name, "hook")
            self._definitions[f"hook.{name}"] = self._arguments(source, {"args": _ARGS}, SUPPLIED["hook"])
            text = inspect.cleandoc(source.__doc__ or "") if inspect.isclass(source) else ""
            known[name] = {
                **_typed("object", "null"),
                **_reference(f"hook.{name}"),
                **_described(" ".join(text.partition("\n\n")[0].split())),
            }
        by_name = {"properties": known, "additionalProperties": _typed("object", "null")}
        self._definitions["hook"] = {
            "type": ["object", "string"],
            "minProperties": 1,
            "maxProperties": 1,
            "minLength": 1,
            **by_name,
            "anyOf": [{"enum": list(known)}, {"type": ["object", "string"]}],  # so that editors complete the names
        }
        return {"items": _reference("hook"), **by_name}

    def _form(self, form: Form) -> Schema:
        """Return a reference to the schema of a `Factory`, and of a list of them."""
        name = "-".join((f"form.{form.package}", *form.keys))
        if name not in self._definitions:
            self._definitions[name] = {}  # stops recursion while the schema is being written
            calls: dict[str, str] = {}
            packages = [home for home in (form.built_in, form.package) if home]
            paths = [f"{home}.{class_name}" for home in packages for class_name in self._sources.classes(home) or ()]
            for path in paths:
                source = self._find(path)
                if getattr(source, "__bases__", (object,)) != (object,):  # otherwise it is the base of the others
                    class_name = path.rpartition(".")[2]
                    calls[class_name] = "-".join((path, *form.keys))
                    self._definitions[calls[class_name]] = self._arguments(source, _OF_FORM, form=form)
            names = _class(calls) if form.package else _CLASS
            properties = {**dict.fromkeys(form.keys, True), "class": names, "import": _IMPORT}
            self._definitions[name] = {"properties": properties, **_cases(calls), "items": _reference(name)}
        return _reference(name)

    def _arguments(
        self, source: Any, more_keys: Schema, supplied: Iterable[str] = (), form: Form | None = None
    ) -> Schema:
        """Return the schema of the arguments of a class.

        Args:
            source: the class, None when it cannot be read.
            more_keys: the schemas of more keys that are allowed.
            supplied: the arguments that emrun supplies.
            form: the form whose class it is, if any.
        """
        parameters = self._sources.parameters(source) if source is not None else None
        if source is None or parameters is None:
            return {}
        hidden = list(supplied)
        if form is not None:
            is_by_name = form.is_by_name(parameters.named)
            hidden += [form.shared] if is_by_name else parameters.by_position(form.supplied)
            more_keys = {**more_keys, **dict.fromkeys(form.own_keys(parameters.named), True)}
        texts = argument_texts(source)
        properties = {
            parameter.name: {
                **self._argument(parameter),
                **_described(texts.get(parameter.name, "")),
                **_default(parameter.default),
            }
            for parameter in parameters.named.values()
            if parameter.name not in hidden and parameter.kind is not parameter.POSITIONAL_ONLY
        }
        if form is not None and form.shared:
            properties = _referring(properties, self._form(replace(form, keys=(), built_in=""))["$ref"])
        return {"properties": {**properties, **more_keys}, "additionalProperties": parameters.takes_any}

    def _argument(self, parameter: inspect.Parameter) -> Schema:
        form = form_in(parameter.annotation) if parameter.default is not UNREAD else None
        if form is None:
            return hint_schema(parameter)
        one = self._form(form)
        if not allows_mapping(parameter.annotation):
            return {**_typed("object", "null"), **one}
        several = {"additionalProperties": {"anyOf": [one, {}]}}  # or a part of a form
        return {**_typed("object", "null"), "if": _IS_FORM, "then": one, "else": several}

    def _find(self, name: str, kind: str = "") -> Any:
        """Return the class of a short name of a kind, or of a dotted path, None when it cannot be found."""
        try:
            path = dotted_path(name, kind) if kind else name
            return self._sources.find(path) if path is not None else None
        except NotThere:  # a plugin that is missing, or a name that several packages provide
            return None


def _cases(calls: Mapping[str, str]) -> Schema:
    """Return the part of a form's schema that depends on its class.

    Args:
        calls: name of each known class -> name of the definition of its arguments.
    """
    cases = [
        {"if": {"properties": {"class": {"const": name}}, "required": ["class"]}, "then": _reference(call)}
        for name, call in calls.items()
    ]
    return {"allOf": cases} if cases else {}


def _class(names: Iterable[str], default: str | None = None) -> Schema:
    """Return the schema of the key `class`: known names, for completion, or any other string."""
    text = "One of these names, or a dotted path: my_module.MyClass."
    return {"anyOf": [{"enum": list(names)}, {"type": "string"}], "description": text, **_default(default)}


def _referring(schema: Any, reference: str) -> Any:
    """Return a schema with each reference to `anything` replaced by another reference."""
    if isinstance(schema, dict):
        return {key: _referring(value, reference) for key, value in schema.items()}
    return reference if schema == _ANYTHING["$ref"] else schema


def _described(text: str) -> Schema:
    return {"description": text} if text else {}


def _default(value: Any) -> Schema:
    """Return the default of a parameter if JSON can write it; not null, which may mean the default of a base."""
    if value is None or value is inspect.Parameter.empty:
        return {}
    try:
        return {"default": json.loads(json.dumps(value, allow_nan=False))}
    except (TypeError, ValueError):
        return {}
