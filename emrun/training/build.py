"""Build a dataset, a model, hooks and a main loop from a config, after the whole config has been checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from emrun.base.arguments import expanded
from emrun.base.errors import ArgumentError, ConfigError, HookError, Position, Problem, fitting_torchvision
from emrun.base.preparations import PREPARATION, Preparations, data_numbers
from emrun.base.randomness import seed_everything, sole_use
from emrun.base.slow_start import NamedWhenSlow
from emrun.base.terminal import restore_logging
from emrun.config.plan import Plan, named_streams
from emrun.config.recipe import Recipe
from emrun.config.yaml_tree import Node
from emrun.dataset import asks_model, stream_function
from emrun.hook import AbstractHook
from emrun.loop.determinism import DeterministicKernels
from emrun.loop.main_loop import MainLoop
from emrun.model import AbstractModel
from emrun.ranks.group import ranks
from emrun.schedule_plan import SchedulePlan
from emrun.storage.class_names import restore_classes, warn_of_other_classes
from emrun.storage.log import RunLog
from emrun.storage.preparation import read_preparation
from emrun.storage.run import Run
from emrun.training.members import load_model

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Training:
    """All objects that a config describes; `training.main_loop.run_training()` starts the training."""

    output_dir: Path
    dataset: Any
    model: AbstractModel
    hooks: tuple[AbstractHook, ...]
    main_loop: MainLoop
    recipe: Recipe
    """The recipe of the model."""
    prepared: Preparations
    """What the datasets have learnt from the train rows."""

    def located(self, error: BaseException) -> BaseException:
        """Return an error of the training; that of an argument of the model has its position in the config."""
        if not isinstance(error, ArgumentError) or self.main_loop.parts.failures.failed_hook() is not None:
            return error
        config_error = ConfigError(self.recipe.problem(error))
        config_error.__cause__ = error
        return config_error


@sole_use("building")
def assemble(
    plan: Plan,
    output_dir: Path,
    run: Run | None,
    rank_log: RunLog | None = None,
    *,
    is_evaluation: bool = False,
    is_new: bool = False,
    dataset: Any = None,
    classes: Path | None = None,
    is_new_data: bool = False,
) -> Training:
    """Build the dataset, the model, the hooks and the main loop, each with its own random numbers.

    Args:
        plan: the checked config.
        output_dir: the directory for the files that the dataset, the model and the hooks write.
        run: the run that the loop writes to; None for none.
        rank_log: see `MainLoop`.
        is_evaluation: whether the loop will only evaluate, possibly on streams that the config does not name.
        is_new: whether the loop will train from the start.
        dataset: the dataset, if it is built already.
        classes: the directory of the run whose classes and preparation the dataset has; None for a new run.
        is_new_data: whether the dataset will only read data that the run has not seen.

    Raises:
        ConfigError: an argument is wrong.
        BaseException: an error of the dataset, the model or a hook.
    """
    # the dataset and the model; a dataset that takes the model is built after it
    seed = plan.get("seed", 0)
    started = plan.get("code_directory", None)
    supplied: dict[str, Any] = {"output_dir": output_dir, "on_bad_example": plan.on_bad_example}
    supplied["load_model"] = partial(load_model, supplied, [])
    if plan.dataset.wants("model"):
        supplied["model"] = _built("model", plan.model, seed, supplied, started)
    prepared = _begin_preparation(plan, classes)
    prepared.is_new_data = is_new_data
    prepared.trains = not is_evaluation
    supplied[PREPARATION] = prepared
    supplied["dataset"] = _built("dataset", plan.dataset, seed, supplied, started) if dataset is None else dataset
    if dataset is None and plan.dataset.wants(PREPARATION) and ranks().is_first:
        numbers = data_numbers(supplied["dataset"]) | prepared.numbers  # on other ranks, the dataset reads no rows yet
        ranks().from_first(PREPARATION, (prepared.made, numbers))
    if classes is not None:
        restore_classes(supplied["dataset"], classes)
    if not is_evaluation:
        _check_dataset(supplied["dataset"], plan)
    if "model" not in supplied:
        supplied["model"] = _built("model", plan.model, seed, supplied, started)

    # the weights to begin with
    _load_initial(supplied["model"], plan, is_new)
    begins_with = plan.model.kwargs.get("init_from") if is_new else None
    if begins_with and not isinstance(begins_with, list):
        begins_with = [begins_with]
    for source in begins_with or ():
        warn_of_other_classes(supplied["dataset"], expanded(source["path"] if isinstance(source, Mapping) else source))

    # the hooks
    seed_everything(seed, "hooks")
    hooks = tuple(recipe.build(supplied) for recipe in plan.hooks)
    if plan.get("deterministic", False):
        hooks = (*hooks, DeterministicKernels())

    # the main loop
    rank = ranks().rank
    seed_everything(seed, "training", *(("rank", rank) if rank else ()))
    arguments = dict(plan.get("main_loop", {}))
    if is_evaluation:  # reads whole streams, unless the command gives a size; one that asks the model has no end
        node = plan.config.get("main_loop", "fixed_epoch_size")
        is_asked = node is not None and node.position.source.startswith("override ")
        kept = {"fixed_epoch_size"} if is_asked or asks_model(supplied["dataset"]) else set()
        arguments |= dict.fromkeys(arguments.keys() & {"fixed_epoch_size", "overfit"} - kept)
    try:
        main_loop = MainLoop(
            supplied["model"], supplied["dataset"], hooks, run=run, rank_log=rank_log, seed=seed, **arguments
        )
        main_loop.check_hooks(any_stream=is_evaluation)
    except ArgumentError as error:
        if error.argument.partition(".")[0] in plan.model.kwargs.keys() - arguments.keys():
            raise ConfigError(plan.model.problem(error)) from error
        node = plan.config.get("main_loop", error.argument)
        place = node.position if node else None
        raise ConfigError(
            Problem(place, f"main_loop.{error.argument}", error.message, error.code, error.fix)
        ) from error
    except HookError as error:
        raise ConfigError(_hook_problem(error, plan)) from error
    restore_logging()
    return Training(output_dir, supplied["dataset"], supplied["model"], hooks, main_loop, plan.model, prepared)


def _begin_preparation(plan: Plan, directory: Path | None) -> Preparations:
    """Return the preparations to build the objects with: those of the run in a directory, if there is one.

    If the dataset has one, the other ranks wait for what that of rank 0 has then.
    """
    if plan.dataset.wants(PREPARATION) and not ranks().is_first:
        return Preparations(*ranks().from_first(PREPARATION, ({}, {})))
    return Preparations() if directory is None else read_preparation(directory)


def plan_schedule(training: Training, plan: Plan) -> SchedulePlan | None:
    """Return the plan of the learning rates; None if the model does not have one.

    Raises:
        ConfigError: the schedule does not fit the length of the run.
    """
    try:
        return training.model.schedule_plan()
    except ArgumentError as error:
        raise ConfigError(replace(plan.model.problem(error), code="config.horizon")) from error


def _built(what: str, recipe: Recipe, seed: int, supplied: dict[str, Any], started: str | None) -> Any:
    """Build the dataset or the model with its own random numbers.

    `started` is the directory in which the run was started, for an error about a file.
    """
    began = perf_counter()
    seed_everything(seed, what)
    try:
        with NamedWhenSlow(f"building the {what}"), fitting_torchvision(f"the {what}"):
            built = recipe.build(supplied)
    except FileNotFoundError as error:
        if started is not None and Path(started) != Path.cwd():
            error.add_note(f"the run was started in {started}; relative paths begin in the current directory")
        raise
    _LOG.debug("built the %s in %.2f s", what, perf_counter() - began)
    return built


def _load_initial(model: AbstractModel, plan: Plan, is_new: bool) -> None:
    """Load the weights that a new run begins with; any other run gets its weights from a checkpoint.

    Raises:
        ConfigError: the weights cannot be read, or do not fit the model.
    """
    if is_new and model.load_initial is not None:
        with NamedWhenSlow("loading the weights to begin with"):
            try:
                model.load_initial()
            except ArgumentError as error:
                raise ConfigError(plan.model.problem(error)) from error
    model.load_initial = None


def _check_dataset(dataset: Any, plan: Plan) -> None:
    """Check that a dataset has the streams of the main loop; before the build, only classes could be checked."""
    for name, node in named_streams(plan.config):
        try:
            stream_function(dataset, name)
        except AttributeError as error:
            raise ConfigError(Problem(node.position, "main_loop", str(error), "config.unknown-stream")) from error


def _hook_problem(error: HookError, plan: Plan) -> Problem:
    if error.hook_index is None:
        return Problem(None, "hooks", str(error), error.code, error.fix)
    recipe = plan.hooks[error.hook_index] if error.hook_index < len(plan.hooks) else plan.model
    return Problem(
        next(filter(None, (_place_of(each, recipe.node) for each in error.about)), recipe.node.key_position),
        recipe.key,
        str(error),
        error.code,
        error.fix,
    )


def _place_of(value: str, node: Node) -> Position | None:
    """Return the position of an argument with this value, or of this key in an argument; None if there is none."""
    for path, child, _ in node.places():
        if child.value == value:
            return child.position
        if len(path) > 1 and path[-1] == value:
            return child.key_position
    return None
