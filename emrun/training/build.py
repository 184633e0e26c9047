"""From a merged config to a dataset, a model, hooks and a main loop: checked as a whole first, then built."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from emrun.config.import_finder import Imported
from emrun.config.interpolation import interpolate
from emrun.config.plan import Plan, code_directories, named_streams
from emrun.config.planner import Planner
from emrun.config.recipe import Recipe
from emrun.config.sections import DEFAULT_MODEL, SUPPLIED, check_hooks
from emrun.config.yaml_tree import Node
from emrun.dataset import stream_function
from emrun.errors import ArgumentError, ConfigError, HookError, Problem
from emrun.hook import AbstractHook
from emrun.loop.main_loop import MainLoop
from emrun.model import AbstractModel
from emrun.models.built_apart import BuiltApart
from emrun.models.torch_model import TorchModel
from emrun.randomness import seed_everything
from emrun.slow_start import NamedWhenSlow
from emrun.storage.run import Run
from emrun.user_modules import find_user_modules

_LOG = logging.getLogger(__name__)
_LONGEST_WAIT = 1.0  # seconds, for the module that is built apart


@dataclass(frozen=True, slots=True)
class Training:
    """All that a config describes, built and ready: `training.main_loop.run_training()`."""

    output_dir: Path
    dataset: Any
    model: AbstractModel
    hooks: tuple[AbstractHook, ...]
    main_loop: MainLoop


def build_dataset(config: Node) -> Any:
    """Build the dataset of a config alone, with whatever else the config says unread.

    Args:
        config: the merged config, before interpolation; likewise below.

    Raises:
        ConfigError: its section cannot be used.
    """
    config, section, found = _begin(config, "dataset")
    recipe = _checked(found, found.section(section, "dataset", SUPPLIED["dataset"]))
    _seed(config, "dataset")
    return recipe.build({"output_dir": None})


def build_model(config: Node, dataset: Any = None) -> AbstractModel:
    """Build the model of a config alone; the dataset too where the model takes it and none is given.

    Raises:
        ConfigError: its section cannot be used.
    """
    merged = config
    config, section, found = _begin(config, "model")
    recipe = _checked(found, found.section(section, "model", SUPPLIED["model"], default=DEFAULT_MODEL))
    if dataset is None and recipe.wants("dataset"):
        dataset = build_dataset(merged)
    _seed(config, "model")
    model: AbstractModel = recipe.build({"dataset": dataset, "output_dir": None})
    return model


def build_hooks(config: Node, model: Any = None, dataset: Any = None) -> tuple[AbstractHook, ...]:
    """Build the hooks of a config alone.

    Raises:
        ConfigError: their section cannot be used.
    """
    config, section, found = _begin(config, "hooks")
    found.problems += check_hooks(section, "hooks")
    recipes = _checked(found, found.hooks(section))
    _seed(config, "hooks")
    return tuple(recipe.build({"model": model, "dataset": dataset, "output_dir": None}) for recipe in recipes)


def _begin(config: Node, name: str) -> tuple[Node, Node, Planner]:
    """Return the config without interpolations, one of its sections, and what prepares it."""
    config = interpolate(config)
    section = config.get(name)
    kind = list if name == "hooks" else dict
    if section is None or section.value is None:
        raise ConfigError(Problem(config.position, "", f"missing section {name!r}"))
    if not isinstance(section.value, kind):
        word = "a list" if kind is list else "a mapping"
        raise ConfigError(Problem(section.position, name, f"{section.shown()!r} is not {word}"))
    find_user_modules(*code_directories(config))
    return config, section, Planner(Imported())


def _checked(found: Planner, recipe: Any) -> Any:
    if found.problems:
        raise ConfigError(found.problems)
    return recipe


def _seed(config: Node, purpose: str) -> None:
    seed = config.get("seed")
    seed_everything(seed.value if seed is not None and isinstance(seed.value, int) else 0, purpose)


def assemble(
    prepared: Plan, output_dir: Path, run: Run | None, *, is_evaluation: bool = False, is_new: bool = False
) -> Training:
    """Build dataset, model, hooks and main loop, each with random numbers of its own.

    Args:
        prepared: the config.
        output_dir: the directory for what dataset, model and hooks write.
        run: the run that the loop writes, if it writes one.
        is_evaluation: the loop will only evaluate, perhaps on streams that the config does not name.
        is_new: the loop will train from the start, so that a module which a resume could not build again is refused.

    Raises:
        ConfigError: something finds that an argument is wrong.
        BaseException: what a dataset, model or hook raises.
    """
    seed = prepared.get("seed", 0)
    supplied: dict[str, Any] = {"output_dir": output_dir}
    began = perf_counter()
    seed_everything(seed, "dataset")
    with NamedWhenSlow("building the dataset"):
        supplied["dataset"] = prepared.dataset.build(supplied)
    _LOG.debug("built the dataset in %.2f s", perf_counter() - began)
    if not is_evaluation:
        _check_dataset(supplied["dataset"], prepared)
    apart = _build_module_apart(prepared, dict(supplied)) if is_new else None
    try:
        began = perf_counter()
        seed_everything(seed, "model")
        with NamedWhenSlow("building the model"):
            supplied["model"] = prepared.model.build(supplied)
        seconds = perf_counter() - began
        _LOG.debug("built the model in %.2f s", seconds)
    except BaseException:
        if apart is not None:
            apart.end()
        raise
    if apart is not None:
        supplied["model"].built_apart = partial(apart.structure, min(seconds, _LONGEST_WAIT))
    seed_everything(seed, "hooks")
    hooks = tuple(recipe.build(supplied) for recipe in prepared.hooks)
    if prepared.get("deterministic", False):
        hooks = (*hooks, DeterministicKernels())
    seed_everything(seed, "training")
    section = prepared.config.get("main_loop")
    arguments = section.plain() if section is not None and section.value else {}
    try:
        main_loop = MainLoop(supplied["model"], supplied["dataset"], hooks, run=run, seed=seed, **arguments)
        main_loop.check_hooks(any_stream=is_evaluation)
    except ArgumentError as error:
        node = section.get(error.argument) if section is not None else None
        message = prepared.config.censored(error.message)
        raise ConfigError(Problem(node.position if node else None, f"main_loop.{error.argument}", message)) from error
    except HookError as error:
        raise ConfigError(_hook_problem(error, prepared)) from error
    return Training(output_dir, supplied["dataset"], supplied["model"], hooks, main_loop)


def _build_module_apart(prepared: Plan, supplied: dict[str, Any]) -> BuiltApart | None:
    """Begin to build the module once more, where that is a class and not a function, which may load or download much.

    Call it before anything of the model is built.
    """
    recipe = prepared.model.kwargs.get("module")
    is_compared = getattr(prepared.model.target, "__init__", None) is TorchModel.__init__
    if not is_compared or not isinstance(recipe, Recipe) or not recipe.is_of_classes():
        return None
    seed = prepared.get("seed", 0)

    def build() -> Any:
        seed_everything(seed, "model")
        return recipe.build(supplied)

    return BuiltApart.begin(build)


class DeterministicKernels(AbstractHook):
    """Switches torch's deterministic algorithms on for a training, and back at its end."""

    def before_training(self) -> None:
        """Switch them on."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it
        self._before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    def after_training(self, success: bool) -> None:
        """Switch them back."""
        torch.use_deterministic_algorithms(self._before[0])
        torch.backends.cudnn.benchmark = self._before[1]


def _check_dataset(dataset: Any, prepared: Plan) -> None:
    """Check that a dataset has the streams of the main loop; one that is no class shows them only when it is built."""
    for name, node in named_streams(prepared.config):
        try:
            stream_function(dataset, name)
        except AttributeError as error:
            message = prepared.config.censored(str(error))
            raise ConfigError(Problem(node.position, "main_loop", message)) from error


def _hook_problem(error: HookError, prepared: Plan) -> Problem:
    if error.hook_index is None:
        return Problem(None, "hooks", prepared.config.censored(str(error)))
    recipe = prepared.hooks[error.hook_index] if error.hook_index < len(prepared.hooks) else prepared.model
    return Problem(recipe.node.key_position, recipe.key, prepared.config.censored(str(error)))
