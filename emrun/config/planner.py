"""Turns the parts of a config into recipes: finds the classes that they name and checks the arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from emrun.base.errors import HookError, MissingExtra, Position, Problem
from emrun.base.preparations import PREPARATION
from emrun.base.types import Factory, Form
from emrun.base.wording import did_you_mean, listed, normalised, sure
from emrun.config.calls import check_call
from emrun.config.data_numbers import DataNumber
from emrun.config.import_finder import Imported, not_installed
from emrun.config.names import (
    LAYERS,
    SUPPLIED,
    NoModule,
    NotThere,
    beside_config,
    built_ins,
    dotted_path,
    instead,
    is_supplied,
    short_names,
)
from emrun.config.overrides import hook_entry
from emrun.config.recipe import Recipe
from emrun.config.sections import DEFAULT_MODEL, SUPPLIED_TO_LOOP, check_main_loop
from emrun.config.signatures import UNREAD, takes_text
from emrun.config.type_hints import allows_mapping, alternatives, form_in, with_texts
from emrun.config.yaml_tree import Node, mapping_in
from emrun.events import check_events

SWEEP = "emrun.launch.settings.Sweep"
"""The class whose constructor is the schema of the section `sweep`."""
ADDED = Position("emrun")
"""The position of a hook that emrun adds before those of the config."""


METRICS = "emrun.metrics"
"""The module of the metrics that a config names by the key alone."""
_BASES = {"Optimizer", "LRScheduler"}  # of the classes of torch


class Planner:
    """Finds the classes that a config names and checks the arguments, without calling anything.

    All problems are collected in `problems`; when there are any, nothing may be built. A part that was not found or
    could not be read is None instead of a recipe. `defaults` has the defaults that the config leaves unset: (key,
    value, class).

    Args:
        finder: finds classes by importing them or in their sources.
    """

    def __init__(self, finder: Imported) -> None:
        self.problems: list[Problem] = []
        self.defaults: list[tuple[str, Any, str]] = []
        self.lacks_module = False
        """Whether a module was not found."""
        self.places: set[tuple[str, str]] = set()
        """All arguments that a config may have: (key of the call, name of the argument)."""
        self._finder = finder

    def config(self, tree: Node, hooks: Sequence[Node], known: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare the sections of a config: section -> recipe, recipes or None.

        Args:
            tree: the config.
            hooks: the entries of the list of hooks, including hooks that emrun adds.
            known: the results for sections that were prepared before.
        """
        sections = dict(known)
        if "main_loop" not in sections:
            self._main_loop(tree.get("main_loop"))
        if "sweep" not in sections and tree.get("sweep") is not None:
            self.problems += check_main_loop(tree.get("sweep"), self._parameters_of(SWEEP), "sweep")
        sections |= {kind: self.section(tree.get(kind), kind) for kind in ("dataset", "model") if kind not in sections}
        self.check_circle(sections["dataset"], sections["model"])
        if "hooks" not in sections:
            sections["hooks"] = self.hooks(hooks)
        policy = tree.get("main_loop", "on_bad_example")
        dataset = sections["dataset"]
        leaves_out = policy is not None and policy.value in ("warn", "ignore")
        if policy is not None and leaves_out and dataset is not None and not dataset.wants("on_bad_example"):
            name = getattr(dataset.target, "__name__", dataset.target)
            self._problem(
                policy,
                "main_loop.on_bad_example",
                f"has no effect: {name} has no parameter 'on_bad_example', so it does not leave out examples",
                "config.no-effect",
                "delete",
            )
        return sections

    def check_circle(self, dataset: Recipe | None, model: Recipe | None) -> None:
        """Refuse a dataset that takes the model, of which a part takes the dataset: neither can be built first."""
        if dataset is not None and model is not None and dataset.wants("model") and model.wants("dataset"):
            cls = dataset.node.value["class"].shown()
            number = next((node for _, node, _ in model.node.places() if isinstance(node.value, DataNumber)), None)
            if number is not None:
                message = f"{cls} takes the model, so that {number.value} is not known yet; write the number itself"
                self._problem(replace(number, key=None), model.key, message, "config.structure")
                return
            message = f"{cls} takes the model, and a part of the model takes the dataset; one must do without the other"
            self._problem(dataset.node, dataset.key, message, "config.structure")

    def _main_loop(self, section: Node | None) -> None:
        parameters = self._parameters_of("emrun.loop.main_loop.MainLoop")
        self.problems += check_main_loop(section, parameters)
        for name, parameter in (parameters.named if parameters is not None else {}).items():
            if name not in SUPPLIED_TO_LOOP:
                self.places.add(("main_loop", name))
                if section is None or section.get(name) is None:
                    self.defaults.append((f"main_loop.{name}", parameter.default, "MainLoop"))

    def _parameters_of(self, path: str) -> Any:
        target = self._finder.find(path)
        return self._finder.parameters(target) if target is not None else None

    def section(self, node: Node | None, kind: str) -> Any:
        """Prepare the section `dataset` or `model`; None if it is not a mapping, which `check_sections` reports."""
        if node is None or not isinstance(node.value, dict):
            return None
        if kind == "model" and "class" not in node.value:
            node = replace(node, value={"class": Node(DEFAULT_MODEL, node.position, node.key), **node.value})
        if "class" not in node.value:
            self._problem(
                node, kind, f"missing key 'class'; built-in: {listed(short_names(kind))}", "config.missing-key"
            )
            return None
        recipe = self._whole(node, kind, kind)
        return self._with_events(recipe, node, kind) if kind == "model" else recipe

    def hooks(self, entries: Sequence[Node]) -> list[Any]:
        """Prepare the entries of the list of hooks; an entry that `check_hooks` reports becomes None."""
        recipes: list[Any] = []
        index = 0  # in the list as it was given
        for entry in entries:
            name, arguments = hook_entry(entry)
            is_usable = name is not None and (arguments is None or isinstance(arguments.value, dict | None))
            recipes.append(self.hook(str(name), arguments, entry, f"hooks[{index}].{name}") if is_usable else None)
            if entry.position != ADDED:
                index += 1
        return recipes

    def hook(self, name: str, arguments: Node | None, entry: Node, key: str) -> Any:
        """Prepare an entry of the list of hooks."""
        entries = dict(mapping_in(arguments))
        for argument in ("class", "import"):
            if argument in entries:
                self._problem(
                    entries.pop(argument),
                    key,
                    f"unknown argument {argument!r}; the class is the key: `- {name}: {{...}}`",
                    "config.unknown-key",
                    "delete",
                )
        position = arguments.key_position if arguments is not None else entry.position
        node = Node({"class": Node(name, position, position), **entries}, position, position)
        return self._with_events(self._whole(node, key, "hook"), node, key)

    def _with_events(self, recipe: Recipe | None, node: Node, key: str) -> Recipe | None:
        """Check the methods of a model or of a hook."""
        try:
            if recipe is not None and isinstance(recipe.target, type):
                check_events(recipe.target)
        except HookError as error:
            self._problem(node, key, str(error), "config.event")
        return recipe

    def _whole(self, node: Node, key: str, kind: str) -> Recipe | None:
        """Prepare a dataset, a model or a hook; an argument that emrun supplies is a problem."""
        for name in SUPPLIED[kind]:
            if name in node.value:
                self._supplied(node.value[name], key, name)
        given = {name: child for name, child in node.value.items() if name not in SUPPLIED[kind]}
        return self._call(replace(node, value=given), key, kind, SUPPLIED[kind])

    def value(
        self, node: Node, key: str, supplied: tuple[str, ...], hint: Any = None, outer: Form | None = None
    ) -> Any:
        """Prepare any value: a form (a mapping with `class` or `import`), a mapping, a list or a scalar.

        Args:
            node: the value.
            key: the key of the value in the config, for messages.
            supplied: the arguments that emrun supplies to calls in the value.
            hint: the type of the parameter that gets the value; a `Factory` is not built.
            outer: the form that has the value among its arguments and shares an argument with forms below it.
        """
        if hint is UNREAD:
            return None
        form = form_in(hint)
        if node.is_form:
            return self._call(node, key, "", supplied, form, outer if form is None else None)
        for name, child in mapping_in(node).items():
            if form is not None and isinstance(child.value, str) and sure(str(name), ["class"]):
                self._problem(child, key, f"unknown key {name!r}; did you mean 'class'?", "config.unknown-key")
                return None

        # a mapping of values or of forms
        kinds = dict | list if key.endswith(".metrics") else dict  # a list has the inputs of a metric of emrun
        has_forms = any(isinstance(child.value, kinds) for child in mapping_in(node).values())
        may_be_forms = form is None or (allows_mapping(hint) and (has_forms or not (form.package or node.value)))
        if isinstance(node.value, dict) and may_be_forms:
            inner = None if form is None else Annotated[Factory, form]  # each value is a form, not a mapping of forms
            return {
                name: self.value(child, f"{key}.{name}", supplied, inner, outer) for name, child in node.value.items()
            }

        # the inputs of a metric of emrun
        section, _, name = key.rpartition(".")
        if form is not None and isinstance(node.value, list) and section.endswith(".metrics"):
            target = replace(node, value=f"{METRICS}.{name}", position=node.key_position)
            return self._call(
                Node({"import": target, "inputs": node}, node.position, node.key), key, "", supplied, form
            )

        # a value where only a form can be
        if form is not None and node.value is not None:
            name = node.value if isinstance(node.value, str) and node.value.isidentifier() else "NAME"
            how = (
                "{class: NAME, inputs: [NAME, ...]}" if "inputs" in form.keys else f"{{class: {name}, argument: value}}"
            )
            what = f"with 'class'; write {how}"
            if all(sort == "mapping" or kind is type(None) for sort, kind, _ in alternatives(hint)):
                what = "from names to objects; write {NAME: {import: emrun.metrics.accuracy, inputs: [NAME, ...]}}"
            self._problem(node, key, f"{node.shown()!r} is not a mapping {what}", "config.structure")
            return None
        if isinstance(node.value, list):
            return [
                self.value(child, f"{key}[{index}]", supplied, outer=outer) for index, child in enumerate(node.value)
            ]
        return node.value

    def _call(
        self,
        node: Node,
        key: str,
        kind: str,
        supplied: tuple[str, ...],
        form: Form | None = None,
        outer: Form | None = None,
    ) -> Recipe | None:
        # the class or the function that is called, or the object that is imported
        is_import = "class" not in node.value
        if not is_import and "import" in node.value:
            self._problem(
                node,
                key,
                "has both 'class' and 'import'; keep 'class' to call the object, or 'import' to pass it uncalled",
                "config.structure",
            )
        target = self._find(node.value["import" if is_import else "class"], key, kind, form or outer)
        if target is None:
            return None
        refusal = None if is_import else self._finder.refusal(target, kind)
        if refusal is not None:
            self._problem(node.value["class"], key, refusal, "config.wrong-class")
            return None

        # the keys of the form apart from the arguments
        parameters = None if is_import else self._finder.parameters(target)
        named = parameters.named if parameters is not None else {}
        if outer is not None and outer.shared in named:
            form = outer
        own_keys = form.own_keys(named) if form else ()
        options = {k: self.value(v, f"{key}.{k}", supplied) for k, v in node.value.items() if k in own_keys}
        below = tuple(name for name in supplied if (kind, name) != ("dataset", "model"))
        rest = {k: v for k, v in node.value.items() if k not in (*own_keys, "class", "import")}
        if parameters is not None:
            rest = {k: with_texts(v, parameters.hint(k)) for k, v in rest.items()}
        if is_import:
            for name, child in rest.items():
                what = f"unknown argument {name!r}; 'import' names an object that is not called"
                if "inputs" in own_keys:  # of a function that is called with each batch
                    call = f"class: functools.partial, args: [{{import: {node.value['import'].shown()}}}]"
                    what += f"; write {{{call}, {name}: {child.shown()}, inputs: [...]}}"
                self._problem(
                    child,
                    key,
                    what,
                    "config.unknown-key",
                    "delete",
                )
            return Recipe(target, node, key, True, form=form, options=options)

        # the positional arguments, those that emrun supplies among them
        args = rest.pop("args", None)
        given: list[Node] | None = []
        if args is not None:
            given = args.value
            if not isinstance(given, list):
                given = None
                message = f"{args.shown()!r} is not a list of positional arguments"
                self._problem(args, f"{key}.args", message, "config.type")
        first = form.supplied if form else 0
        hidden = supplied
        inner = None
        is_known = False
        if form is not None and form.shared:
            if form.shared in rest:
                self._supplied(rest[form.shared], key, form.shared)
                return None
            if form.is_by_name(named):
                first = 0
                hidden = (*supplied, form.shared)
            inner = replace(form, keys=(), built_in="")
            name = str(node.value["class"].value)
            is_known = "." not in name or name.startswith(f"{form.package}.")  # it has no `Factory`

        # the arguments against the signature, and the defaults that the config leaves
        what = "class" if isinstance(target, type) else "function"
        if form is None:
            is_value = not kind and key != "model.module"
        else:
            is_value = what == "function" and "inputs" in form.keys
        self.problems += check_call(
            parameters, rest, key=key, node=node, args=given, first=first, supplied=hidden,
            own_keys=own_keys, itself=what if is_value else "",
        )  # fmt: skip
        positional_names = parameters.by_position(first + len(given or ())) if parameters is not None else []
        self.places |= {(key, name) for name in (*named, *own_keys) if name not in (*supplied, *positional_names)}
        self.defaults += [
            (f"{key}.{name}", parameter.default, str(node.value["class"].shown()))
            for name, parameter in named.items()
            if name not in (*rest, *positional_names, *hidden, *own_keys)
            if parameter.default is not parameter.empty and parameter.default is not UNREAD
        ]

        takes = frozenset(name for name in supplied if name in named and name not in (*rest, *positional_names))
        is_told = any((problem.key, problem.code) == (key, "config.supplied-key") for problem in self.problems)
        for name in sorted(takes & {"model", "dataset", PREPARATION}):
            if takes_text(named[name]) and not is_told:
                other = "" if kind else f", or write {key}.{name}: TEXT"
                self._problem(
                    node.value["class"],
                    key,
                    f"its parameter {name!r} is for a text, but emrun supplies the {name} of the run; rename it{other}",
                    "config.supplied-key",
                )

        def hint(name: str) -> Any:
            annotation = parameters.hint(name) if parameters is not None else None
            return None if annotation is UNREAD and is_known else annotation

        return Recipe(
            target,
            node,
            key,
            args=self.value(args, f"{key}.args", below, outer=inner) if args else [],
            kwargs={k: self.value(v, f"{key}.{k}", below, hint(k), inner) for k, v in rest.items()},
            takes=takes,
            form=form,
            options=options,
        )

    def _find(self, name: Node, key: str, kind: str, form: Form | None) -> Any:
        """Return the object that a name refers to, None after a problem."""
        path: str | None = name.value
        if not isinstance(path, str) or not path:
            self._problem(name, key, f"{name.shown()!r} is not the name of a class", "config.type")
            return None
        try:
            path = path if "." in path else self._short_name(path, kind, form)
            return self._finder.find(path) if path is not None else None
        except NotThere as error:
            self.lacks_module = self.lacks_module or isinstance(error, NoModule)
            self._problem(name, key, f"{error}{beside_config(error, name.position.source)}", "config.unknown-class")
        except MissingExtra as error:
            self._problem(name, key, str(error), error.code, error.fix)
        except ModuleNotFoundError as error:  # of what the module imports
            self._problem(name, key, not_installed(error, str(path)), "extra.missing")
        except BaseException as error:
            error.add_note(f"while importing {path} for {key} ({name.position})")
            raise
        return None

    def _short_name(self, text: str, kind: str, form: Form | None) -> str | None:
        """Return the dotted path that a name without a dot refers to, None where only an import could find it.

        Raises:
            NotThere: the name is unknown or ambiguous.
        """
        if form is not None and form.package:
            homes = dict.fromkeys(self._finder.classes(form.package) or (), form.package)
            if not homes:
                return None
            if form.built_in:
                homes |= dict.fromkeys(self._finder.classes(form.built_in) or (), form.built_in)
            for class_name, home in homes.items():
                if normalised(class_name) == normalised(text):
                    return f"{home}.{class_name}"
            if form.built_in and (advice := instead(text, "schedule")) is not None:
                raise NotThere(f"neither emrun nor torch has a schedule {text!r}: {advice}")
            names = sorted(homes.keys() - _BASES)
            hint = did_you_mean(text, names) or f"; there are {listed(names)}."
            raise NotThere(f"unknown class {text!r}{hint} For another class, write its dotted path")
        if not kind:
            homes = dict.fromkeys(self._finder.classes(LAYERS) or (), "torch.nn")
            known = {**{name: f"{home}.{name}" for name, home in homes.items()}, **built_ins(kind)}
            if text in known:
                return known[text]
            advice = f"; write its dotted path, such as torch.nn.{text} or my_module.{text}"
            raise NotThere(f"unknown class {text!r}{did_you_mean(text, known) or advice}")
        if (path := dotted_path(text, kind)) is not None:
            return path
        if kind == "hook" and (advice := instead(text, "hook")) is not None:
            raise NotThere(f"emrun has no hook {text!r}: {advice}")
        names = short_names(kind)
        hint = did_you_mean(text, names) or f"; built-in: {listed(names)}."
        raise NotThere(f"unknown {kind} {text!r}{hint} For your own class, write its dotted path: my_module.{text}")

    def _supplied(self, node: Node, key: str, name: str) -> None:
        self._problem(node, key, is_supplied(name, key), "config.supplied-key", "delete")

    def _problem(self, node: Node, key: str, message: str, code: str, fix: str = "") -> None:
        self.problems.append(Problem(node.key_position, key, message, code, fix))
