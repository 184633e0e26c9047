"""A config as a whole: what it names found and checked, before anything is made."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from typing import Any

from emrun.arguments import expanded
from emrun.config.finder import Finder
from emrun.config.interpolation import interpolate
from emrun.config.names import normalised
from emrun.config.overrides import hook_entry, overlay
from emrun.config.planner import Planner
from emrun.config.recipe import Recipe
from emrun.config.sections import DEFAULT_MODEL, SECTIONS, SUPPLIED, SUPPLIED_TO_LOOP, check_main_loop, check_sections
from emrun.config.signatures import Parameters
from emrun.config.source_finder import Sources
from emrun.config.yaml_tree import Node
from emrun.errors import ConfigError, Problem
from emrun.user_modules import find_user_modules
from emrun.wording import did_you_mean, listed, same

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """A config that was found to be usable, with what it names; nothing is called yet."""

    config: Node
    dataset: Recipe
    model: Recipe
    hooks: list[Recipe]

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key of the config, or the default where it has none."""
        node = self.config.get(key)
        return default if node is None or node.value is None else node.plain()


def prepare(merged: Node, finder: Finder) -> Plan:
    """Check a config, before interpolation, and find what it names.

    Raises:
        ConfigError: it cannot be used.
        BaseException: what importing a module raises.
    """
    config = interpolate(merged)
    elsewhere = _Places(config, finder)
    found = Planner(finder, elsewhere)
    found.problems += check_sections(config, elsewhere)
    if not isinstance(config.value, dict):
        raise ConfigError(found.problems)
    find_user_modules(*code_directories(config))
    found.problems += check_main_loop(config.get("main_loop"), _main_loop_parameters(finder), elsewhere)
    dataset = found.section(config.get("dataset"), "dataset", SUPPLIED["dataset"])
    model = found.section(config.get("model"), "model", SUPPLIED["model"], default=DEFAULT_MODEL)
    section = config.get("hooks")
    entries = list(section.value) if section is not None and isinstance(section.value, list) else []
    if not any(normalised(str(hook_entry(entry)[0])) == "savelatest" for entry in entries):
        entries.append(Node("SaveLatest", config.position))
    hooks = found.hooks(Node(entries, config.position))
    if dataset is not None:
        found.problems += _check_streams(config, dataset.target, finder)
    if found.problems:
        raise ConfigError(found.problems)
    return Plan(config, dataset, model, hooks)


def prepare_all(merged: Node, finder: Finder) -> None:
    """Check a config and, laid over it, each of its sections under `eval`.

    Raises:
        ConfigError: one of them cannot be used.
        BaseException: what importing a module raises.
    """
    problems: list[Problem] = []
    overlays = merged.get("eval")
    streams = overlays.value if overlays is not None and isinstance(overlays.value, dict) else {}
    for stream in (None, *(each for each in streams if isinstance(each, str))):
        try:
            prepare(merged if stream is None else overlay(merged, stream), finder)
        except ConfigError as error:
            known = {(problem.position, problem.message) for problem in problems}
            lines = {problem.position for problem in problems if problem.position and problem.position.line}
            new = [each for each in error.problems if (each.position, each.message) not in known]
            new = [each for each in new if each.position not in lines] if stream else new
            problems += [replace(each, key=f"eval.{stream}.{each.key}") for each in new] if stream else new
    if problems:
        raise ConfigError(problems)


def defaults_of(merged: Node) -> list[tuple[str, Any, str]]:
    """Return what a config leaves to the defaults, as far as sources tell: (key, value, class); nothing is checked.

    The keys are written as overrides write them.
    """
    try:
        config = interpolate(merged)
    except ConfigError:  # a name of the environment that is not set here
        config = merged
    find_user_modules(*code_directories(config))
    finder = Sources()
    found = Planner(finder)
    for name, default in (("dataset", None), ("model", DEFAULT_MODEL)):
        found.section(config.get(name), name, SUPPLIED[name], default)
    hooks = config.get("hooks")
    if hooks is not None and isinstance(hooks.value, list):
        found.hooks(hooks)
    main_loop = _main_loop_parameters(finder)
    given = config.get("main_loop")
    for name, parameter in (main_loop.named if main_loop is not None else {}).items():
        if name not in SUPPLIED_TO_LOOP and (given is None or given.get(name) is None):
            found.defaults.append((f"main_loop.{name}", parameter.default, "MainLoop"))
    return [(re.sub(r"\[(\d+)\]", r".\1", key), value, kind) for key, value, kind in found.defaults]


def check_statically(merged: Node, *, evaluations: bool = False) -> None:
    """Do phase one of the check: what can be known of a config without importing what it names.

    Args:
        merged: the config, before interpolation.
        evaluations: check its sections under `eval` too.

    Raises:
        ConfigError: it cannot be used.
    """
    (prepare_all if evaluations else prepare)(merged, Sources())


def code_directories(config: Node) -> list[str]:
    """Return the directory in which a run was started, if the config tells it."""
    node = config.get("code_directory")
    return [str(expanded(node.value))] if node is not None and isinstance(node.value, str) else []


def named_streams(config: Node) -> list[tuple[str, Node]]:
    """Return the streams that the main loop runs, with where they are named."""
    section = config.get("main_loop")
    train = config.get("main_loop", "train_stream_name")
    extra = config.get("main_loop", "extra_streams")
    named = [("train", section or config)] if train is None else []
    named += [(train.value, train)] if train is not None and isinstance(train.value, str) else []
    for entry in extra.value if extra is not None and isinstance(extra.value, list) else []:
        names = list(entry.value) if isinstance(entry.value, dict) else [entry.value]
        named += [(name, entry) for name in names if isinstance(name, str)]  # the main loop refuses the others
    return named


def _main_loop_parameters(finder: Finder) -> Parameters | None:
    main_loop = finder.find("emrun.loop.main_loop.MainLoop")
    return finder.parameters(main_loop) if main_loop is not None else None


def _check_streams(config: Node, dataset: Any, finder: Finder) -> list[Problem]:
    """Return the streams of the main loop that the dataset's class does not have."""
    there = finder.streams(dataset)
    if there is None:
        return []
    problems = []
    kind = str(config.value["dataset"].value["class"].shown()).rpartition(".")[2]
    for name, node in named_streams(config):
        if name not in there:
            message = f"{kind} has no stream {name!r}{did_you_mean(name, there)} (it has {listed(there)})"
            problems.append(Problem(node.position, "main_loop", config.censored(message)))
    return problems


class _Places:
    """Tells where else in a config a key has its place; looked for when the first unknown key comes up."""

    def __init__(self, config: Node, finder: Finder) -> None:
        self._config = config
        self._finder = finder
        self._paths: dict[str, set[str]] | None = None

    def __call__(self, name: str) -> str | None:
        """Return the path of the key of this name, or else of one that means the same; None where several may be meant.

        Of several, the one that is nearest to the top counts: `model.device`, not that of a module's layer.
        """
        if self._paths is None:
            self._paths = {}
            for path in self._find():
                self._paths.setdefault(normalised(path.rpartition(".")[2]), set()).add(path)
        for each in (normalised(name), *same(name)):
            found = sorted(self._paths.get(each, ()), key=_depth)
            if found and (len(found) == 1 or _depth(found[0]) < _depth(found[1])):
                return found[0]
        return None

    def _find(self) -> list[str]:
        found = Planner(self._finder)
        main_loop = None
        find_user_modules(*code_directories(self._config))
        try:
            main_loop = _main_loop_parameters(self._finder)
            for kind, default in (("dataset", None), ("model", DEFAULT_MODEL)):
                section = self._config.get(kind)
                if section is not None and isinstance(section.value, dict):
                    found.section(section, kind, SUPPLIED[kind], default)
            hooks = self._config.get("hooks")
            entries = list(hooks.value) if hooks is not None and isinstance(hooks.value, list) else []
            entries.append(Node("StopAfter", self._config.position))  # may be added by an override
            for entry in entries:
                name, arguments = hook_entry(entry)
                found.hook(str(name), arguments, entry, f"hooks.{name}")
        except KeyboardInterrupt:
            raise
        except BaseException:  # what importing a module raises is reported where the module is needed
            _LOG.debug("cannot look for where keys have their place", exc_info=True)
        loop = main_loop.named if main_loop is not None else ()
        places = found.places | {("main_loop", name) for name in loop if name not in SUPPLIED_TO_LOOP}
        paths = [re.sub(r"\[(\d+)\]", r".\1", f"{key}.{name}") for key, name in places]
        return [*paths, *SECTIONS]


def _depth(path: str) -> int:
    return path.count(".")
