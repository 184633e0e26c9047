"""From a merged config to a dataset, a model, hooks and a main loop: checked as a whole first, then built."""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emrun.build import Preparation, Recipe
from emrun.check import check_main_loop, check_sections
from emrun.config import hook_entry, interpolate
from emrun.dataset import AbstractDataset, stream_function
from emrun.errors import ArgumentError, ConfigError, HookError, Problem, did_you_mean, listed
from emrun.hook import AbstractHook
from emrun.main_loop import MainLoop
from emrun.model import AbstractModel
from emrun.names import normalised
from emrun.randomness import seed_everything
from emrun.run_dir import Run
from emrun.yaml_tree import Node


@dataclass(frozen=True, slots=True)
class Training:
    """All that a config describes, built and ready: `training.main_loop.run_training()`."""

    output_dir: Path
    dataset: Any
    model: AbstractModel
    hooks: tuple[AbstractHook, ...]
    main_loop: MainLoop


@dataclass(frozen=True, slots=True)
class Prepared:
    """A config that was found to be usable, with what it names; nothing is called yet."""

    config: Node
    dataset: Recipe
    model: Recipe
    hooks: list[Recipe]

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key of the config, or the default where it has none."""
        node = self.config.get(key)
        return default if node is None or node.value is None else node.plain()


def prepare(merged: Node) -> Prepared:
    """Check a config and find what it names."""
    config = interpolate(merged)
    problems = check_sections(config)
    if problems:
        raise ConfigError(problems)
    find_user_modules(config)
    found = Preparation()
    found.problems += check_main_loop(config.get("main_loop"), MainLoop)
    dataset = found.section(config.value["dataset"], "dataset", ("output_dir",))
    model = found.section(config.value["model"], "model", ("dataset", "output_dir"), default="TorchModel")
    hooks = []
    section = config.get("hooks")
    entries = list(section.value or ()) if section is not None else []
    if not any(normalised(str(hook_entry(entry)[0])) == "savelatest" for entry in entries):
        entries.append(Node("SaveLatest", config.position))
    for index, entry in enumerate(entries):
        name, arguments = hook_entry(entry)
        hooks.append(found.hook(str(name), arguments, entry, f"hooks[{index}].{name}"))
    if dataset is not None:
        found.problems += _check_streams(config, dataset.target)
    if found.problems:
        raise ConfigError(found.problems)
    return Prepared(config, dataset, model, hooks)


def find_user_modules(config: Node) -> None:
    """Let modules be imported from where a run was started, and from the current directory."""
    directory = config.get("code_directory")
    for path in (directory.value if directory else None, str(Path.cwd())):
        if isinstance(path, str) and path and path not in sys.path:
            sys.path.append(path)


def build_dataset(config: Node) -> Any:
    """Build the dataset of a config alone, with whatever else the config says unread.

    Raises:
        ConfigError: its section cannot be used.
    """
    config = interpolate(config)
    section = config.get("dataset") if isinstance(config.value, dict) else None
    if section is None or not isinstance(section.value, dict):
        raise ConfigError(Problem(config.position, "", "missing section 'dataset'"))
    find_user_modules(config)
    found = Preparation()
    recipe = found.section(section, "dataset", ("output_dir",))
    if found.problems:
        raise ConfigError(found.problems)
    seed = config.get("seed")
    seed_everything(seed.value if seed is not None and isinstance(seed.value, int) else 0, "dataset")
    return recipe.build({"output_dir": None})


def assemble(prepared: Prepared, run: Run, is_evaluation: bool = False) -> Training:
    """Build dataset, model, hooks and main loop, each with random numbers of its own."""
    seed = prepared.get("seed", 0)
    supplied: dict[str, Any] = {"output_dir": str(run.directory)}
    seed_everything(seed, "dataset")
    supplied["dataset"] = prepared.dataset.build(supplied)
    if not is_evaluation:
        _check_dataset(supplied["dataset"], prepared)
    seed_everything(seed, "model")
    supplied["model"] = prepared.model.build(supplied)
    seed_everything(seed, "hooks")
    hooks = tuple(recipe.build(supplied) for recipe in prepared.hooks)
    if prepared.get("deterministic", False):
        hooks = (*hooks, _DeterministicKernels())
    seed_everything(seed, "training")
    section = prepared.config.get("main_loop")
    arguments = section.plain() if section is not None and section.value else {}
    try:
        main_loop = MainLoop(supplied["model"], supplied["dataset"], hooks, run=run, seed=seed, **arguments)
        if not is_evaluation:
            main_loop.check_hooks()
    except ArgumentError as error:
        node = section.get(error.argument) if section is not None else None
        message = prepared.config.censored(error.message)
        raise ConfigError(Problem(node.position if node else None, f"main_loop.{error.argument}", message)) from error
    except HookError as error:
        raise ConfigError(_hook_problem(error, prepared)) from error
    return Training(run.directory, supplied["dataset"], supplied["model"], hooks, main_loop)


class _DeterministicKernels(AbstractHook):
    """Switches torch's deterministic algorithms on for a training, and back at its end."""

    def before_training(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it
        self._before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    def after_training(self, success: bool) -> None:
        torch.use_deterministic_algorithms(self._before[0])
        torch.backends.cudnn.benchmark = self._before[1]


def _named_streams(config: Node) -> list[tuple[str, Node]]:
    """Return the streams that the main loop runs, with where they are named."""
    section = config.get("main_loop")
    train = config.get("main_loop", "train_stream_name")
    extra = config.get("main_loop", "extra_streams")
    named = [("train", section or config) if train is None else (str(train.value), train)]
    for entry in extra.value if extra is not None and isinstance(extra.value, list) else []:
        names = list(entry.value) if isinstance(entry.value, dict) else [entry.value]
        named += [(name, entry) for name in names if isinstance(name, str)]  # the main loop refuses the others
    return named


def _check_streams(config: Node, dataset: Any) -> list[Problem]:
    """Return the streams of the main loop that the dataset's class does not have."""
    if not inspect.isclass(dataset) or hasattr(dataset, "__getattr__") or _may_make_streams(dataset):
        return []
    there = [name.removesuffix("_stream") for name in dir(dataset) if name.endswith("_stream")]
    problems = []
    for name, node in _named_streams(config):
        if name not in there:
            message = f"{dataset.__name__} has no stream {name!r}{did_you_mean(name, there)}; it has {listed(there)}"
            problems.append(Problem(node.position, "main_loop", config.censored(message)))
    return problems


def _may_make_streams(dataset: type) -> bool:
    """Tell whether a class's code names attributes that may be streams; then only a built dataset shows what it has."""
    classes = [cls for cls in dataset.__mro__ if cls is not AbstractDataset]
    functions = [each for cls in classes for each in vars(cls).values() if inspect.isfunction(each)]
    names = {name for function in functions for name in function.__code__.co_names}
    return any(name in ("setattr", "__dict__") or name.endswith("_stream") for name in names)


def _check_dataset(dataset: Any, prepared: Prepared) -> None:
    """Check that a dataset has the streams of the main loop; one that is no class shows them only when it is built."""
    for name, node in _named_streams(prepared.config):
        try:
            stream_function(dataset, name)
        except AttributeError as error:
            message = prepared.config.censored(str(error))
            raise ConfigError(Problem(node.position, "main_loop", message)) from error


def _hook_problem(error: HookError, prepared: Prepared) -> Problem:
    if error.hook_index is None or error.hook_index >= len(prepared.hooks):
        return Problem(None, "hooks" if error.hook_index is None else "model", prepared.config.censored(str(error)))
    recipe = prepared.hooks[error.hook_index]
    return Problem(recipe.node.key_position, recipe.key, prepared.config.censored(str(error)))
