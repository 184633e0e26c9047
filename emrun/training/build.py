"""From a merged config to a dataset, a model, hooks and a main loop: checked as a whole first, then built."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from emrun.config.plan import Plan, named_streams
from emrun.config.recipe import Recipe
from emrun.dataset import stream_function
from emrun.errors import ArgumentError, ConfigError, HookError, Problem
from emrun.hook import AbstractHook
from emrun.loop.determinism import DeterministicKernels
from emrun.loop.main_loop import MainLoop
from emrun.model import AbstractModel, BuiltApart
from emrun.randomness import seed_everything
from emrun.slow_start import NamedWhenSlow
from emrun.storage.run import Run

_LOG = logging.getLogger(__name__)
_LONGEST_WAIT = 1.0  # seconds, for what is built apart


@dataclass(frozen=True, slots=True)
class Training:
    """All that a config describes, built and ready: `training.main_loop.run_training()`."""

    output_dir: Path
    dataset: Any
    model: AbstractModel
    hooks: tuple[AbstractHook, ...]
    main_loop: MainLoop


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
    supplied["dataset"], _ = _built("dataset", prepared.dataset, seed, supplied)
    if not is_evaluation:
        _check_dataset(supplied["dataset"], prepared)
    apart = _build_apart(prepared, dict(supplied)) if is_new else None
    try:
        supplied["model"], seconds = _built("model", prepared.model, seed, supplied)
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
    arguments = prepared.get("main_loop", {})
    try:
        main_loop = MainLoop(supplied["model"], supplied["dataset"], hooks, run=run, seed=seed, **arguments)
        main_loop.check_hooks(any_stream=is_evaluation)
    except ArgumentError as error:
        node = prepared.config.get("main_loop", error.argument)
        message = prepared.config.censored(error.message)
        raise ConfigError(Problem(node.position if node else None, f"main_loop.{error.argument}", message)) from error
    except HookError as error:
        raise ConfigError(_hook_problem(error, prepared)) from error
    return Training(output_dir, supplied["dataset"], supplied["model"], hooks, main_loop)


def _built(what: str, recipe: Recipe, seed: int, supplied: dict[str, Any]) -> tuple[Any, float]:
    """Build the dataset or the model with random numbers of its own; return the seconds that it took, too."""
    began = perf_counter()
    seed_everything(seed, what)
    with NamedWhenSlow(f"building the {what}"):
        built = recipe.build(supplied)
    seconds = perf_counter() - began
    _LOG.debug("built the %s in %.2f s", what, seconds)
    return built, seconds


def _build_apart(prepared: Plan, supplied: dict[str, Any]) -> BuiltApart | None:
    """Let the model begin to build once more what it would compare; call it before anything of the model is built."""
    target = prepared.model.target
    if not inspect.isclass(target) or not issubclass(target, AbstractModel):
        return None

    def build(recipe: Recipe) -> Any:
        seed_everything(prepared.get("seed", 0), "model")
        return recipe.build(supplied)

    recipes = {name: each for name, each in prepared.model.kwargs.items() if isinstance(each, Recipe)}
    return target.build_apart({name: partial(build, each) for name, each in recipes.items() if each.is_of_classes()})


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
