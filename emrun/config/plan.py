"""Checks a config as a whole, and finds the classes that it names, before anything is built."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from emrun.base.arguments import expanded
from emrun.base.errors import ConfigError, Problem
from emrun.base.slow_start import without_collections
from emrun.base.user_modules import find_user_modules
from emrun.base.wording import NO_OPTIMIZER, meant_of
from emrun.config.config import Config
from emrun.config.import_finder import Imported
from emrun.config.names import same_class
from emrun.config.overrides import hook_entry, is_hook
from emrun.config.planner import ADDED, Planner
from emrun.config.recipe import Recipe
from emrun.config.sections import DEFAULT_MODEL, check_sections
from emrun.config.source_finder import Unimported
from emrun.config.yaml_tree import Node, list_in, mapping_in


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked config with its interpolations replaced, and the recipes of its objects; nothing is called yet."""

    config: Node
    dataset: Recipe
    model: Recipe
    hooks: list[Recipe]

    @classmethod
    def of(cls, config: Config, finder: Imported | None = None, added: Sequence[str] = ()) -> Plan:
        """Check a config and find the classes that it names.

        Args:
            config: the config.
            finder: finds classes in their sources; None to import them.
            added: hooks that are added, besides `SaveLatest`, if the config does not list them.

        Raises:
            ConfigError: the config has mistakes.
            BaseException: the error that importing a module raises.
        """
        tree = config.tree
        finder = finder or Imported()
        find_user_modules(*code_directories(tree))
        planner = Planner(finder)
        planner.problems += check_sections(tree)
        recipes = planner.config(tree, hook_entries(tree, "SaveLatest", *added), {})
        if recipes["dataset"] is not None:
            planner.problems += _check_streams(tree, recipes["dataset"].target, finder)
        problems = [*planner.problems, *_missing_directory(tree, planner.lacks_module)]
        if problems:
            raise ConfigError(problems)
        return cls(tree, recipes["dataset"], recipes["model"], recipes["hooks"])

    @classmethod
    def with_evaluations(cls, config: Config, finder: Imported | None = None) -> Plan:
        """Check a config for training as `of` does, alone and with each of its sections under `eval` merged over it."""
        problems: list[Problem] = []
        plans: list[Plan] = []
        for stream in (None, *(name for name in mapping_in(config.root.get("eval")) if isinstance(name, str))):
            laid_over = config if stream is None else config.overlaid(stream)
            try:
                plans.append(cls.of(laid_over, finder))
            except ConfigError as error:
                known = list(map(_spot, problems))
                new = [problem for problem in error.problems if _spot(problem) not in known]
                if stream:
                    new = [replace(problem, key=f"eval.{stream}.{problem.key}") for problem in new]
                problems += new
        problems = problems or plans[0]._without_optimizer()
        if problems:
            raise ConfigError(problems)
        return plans[0]

    @property
    def is_made_of_runs(self) -> bool:
        """Whether the model gets its weights from runs when it is built; see `AbstractModel.is_loaded`."""
        return bool(getattr(self.model.target, "is_loaded", False))

    def check_trainable(self) -> None:
        """Check that the model is not made of runs.

        Raises:
            ConfigError: it is.
        """
        if self.is_made_of_runs:
            kind = self.model.target.__name__
            place = self.model.node.value["class"].position
            raise ConfigError(
                Problem(
                    place,
                    "model",
                    f"{kind} is made of finished runs and cannot be trained; use emrun eval or emrun predict",
                    "config.wrong-class",
                )
            )

    def _without_optimizer(self) -> list[Problem]:
        """Return the problem of a `TorchModel` that has no optimizer and that no hook gets, which could set one."""
        optimizer = self.config.get("model", "optimizer")
        model = self.model
        is_set = optimizer is not None and optimizer.value is not None
        may_be_set = any(hook is None or hook.wants("model") for hook in self.hooks)
        is_unknown = model is None or not same_class(model.node.value["class"].value, DEFAULT_MODEL)
        if is_set or may_be_set or is_unknown:  # without imports, the model or a hook may be unknown
            return []
        return [Problem(model.node.key_position, "model.optimizer", NO_OPTIMIZER, "config.missing-key")]

    @property
    def on_bad_example(self) -> Any:
        """What `main_loop.on_bad_example` says, which is supplied to datasets."""
        return self.get("main_loop", {}).get("on_bad_example", "error")

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key of the config, or the default when the key is missing or null."""
        node = self.config.get(key)
        return default if node is None or node.value is None else node.plain()


def _spot(problem: Problem) -> object:
    """Return what shows that a problem is known: its position in a file, or else what its message begins with."""
    position = problem.position
    return position if position is not None and position.line else problem.message.partition(";")[0]


def defaults_of(config: Config) -> list[tuple[str, Any, str]]:
    """Return the defaults that a config leaves unset, read from sources: (key, value, class); nothing is checked.

    The keys have the form of override keys.
    """
    try:
        tree = config.tree
    except ConfigError:  # e.g. an environment variable is not set here
        tree = config.root
    find_user_modules(*code_directories(tree))
    planner = Planner(Unimported())
    planner.config(tree, hook_entries(tree), {})
    return [(re.sub(r"\[(\d+)\]", r".\1", key), value, kind) for key, value, kind in planner.defaults]


def check_statically(config: Config, *, evaluations: bool = False) -> None:
    """Run phase one of the check, which finds mistakes in a config without importing the classes that it names.

    Args:
        config: the config.
        evaluations: check the sections under `eval` too, and that the model can be trained.

    Raises:
        ConfigError: the config has mistakes.
    """
    with without_collections():
        if evaluations:
            Plan.with_evaluations(config, Unimported())
        else:
            Plan.of(config, Unimported())


def with_statistics(config: Config) -> Config:
    """Return the config as commands train it: with the hook `ComputeStats`, unless the config lists this hook.

    The hook comes first, so that the others find what it computes. A class of one's own, which may have no loss, is
    left alone.
    """
    hooks = config.root.get("hooks")
    model = config.root.get("model", "class")
    entries = [] if hooks is None or hooks.value is None else hooks.value
    is_plain = model is None or any(same_class(model.value, name) for name in (DEFAULT_MODEL, "Ensemble", "Sequence"))
    if not (is_plain and isinstance(entries, list)) or _lists(entries, "ComputeStats"):
        return config
    changed = replace(hooks or Node(None, ADDED, ADDED), value=[Node("ComputeStats", ADDED), *entries])
    return config.with_root(replace(config.root, value={**config.root.value, "hooks": changed}))


def code_directories(config: Node) -> list[str]:
    """Return the `code_directory` of a config in a list, an empty list when the config has none."""
    node = config.get("code_directory")
    return [str(expanded(node.value))] if node is not None and isinstance(node.value, str) else []


def _missing_directory(config: Node, lacks_module: bool) -> list[Problem]:
    """Return a problem if the directory of the modules is not there.

    That where a run was started, which the config of the run has, must be there only for a module that was not found.
    """
    node = config.get("code_directory")
    if node is None or all(os.path.isdir(folder) for folder in code_directories(config)):  # noqa: PTH112 - never raises
        return []
    if not lacks_module and os.path.isfile(Path(node.position.source).with_name("trace.yaml")):  # noqa: PTH113
        return []
    return [
        Problem(
            node.position,
            "code_directory",
            f"there is no directory {node.shown()!r}, in which the modules are looked for first; set code_directory",
            "config.file",
        )
    ]


def named_streams(config: Node) -> list[tuple[str, Node]]:
    """Return the names of the streams that the main loop runs, each with its node in the config."""
    section = config.get("main_loop")
    train = config.get("main_loop", "train_stream_name") or Node("train", (section or config).position)
    named = [(train.value, train)] if isinstance(train.value, str) else []
    for entry in list_in(config.get("main_loop", "extra_streams")):
        names = list(entry.value) if isinstance(entry.value, dict) else [entry.value]
        named += [(name, entry) for name in names if isinstance(name, str)]  # the main loop reports the others
    return named


def hook_entries(config: Node, *added: str) -> list[Node]:
    """Return the entries of the list of hooks, followed by the hooks in `added` that the list does not have."""
    entries = list_in(config.get("hooks"))
    return [*entries, *(Node(name, config.position) for name in added if not _lists(entries, name))]


def _lists(entries: Sequence[Node], hook: str) -> bool:
    return any(is_hook(hook, str(hook_entry(entry)[0])) for entry in entries)


def _check_streams(config: Node, dataset: Any, finder: Imported) -> list[Problem]:
    """Return a problem for each stream of the main loop that the dataset's class does not have."""
    streams = finder.streams(dataset)
    if streams is None:
        return []
    kind = str(config.value["dataset"].value["class"].shown()).rpartition(".")[2]
    return [
        Problem(node.position, "main_loop", text, "config.unknown-stream")
        for name, node in named_streams(config)
        if name not in streams and (text := f"{kind} has no stream {name!r}{meant_of(name, streams)}")
    ]
