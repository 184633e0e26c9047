"""A run from its config to its end, told from top to bottom."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emrun import checkpoint
from emrun.build import Preparation, Recipe
from emrun.check import check_main_loop, check_sections
from emrun.config import hook_entry, interpolate, overlay, override, read_config, with_defaults
from emrun.errors import ArgumentError, ConfigError, HookError, Problem, StorageError, UsageError, did_you_mean, listed
from emrun.hook import AbstractHook
from emrun.main_loop import MainLoop
from emrun.model import AbstractModel
from emrun.outcome import Outcome
from emrun.randomness import draw_seed, seed_everything
from emrun.run_dir import CHECKPOINTS, CONFIG, Run, create_evaluation, create_run, holds_run
from emrun.types import EpochData
from emrun.yaml_tree import Node, dump, parse

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Training:
    """All that a config describes, built and ready: `training.main_loop.run_training()`."""

    output_dir: Path
    dataset: Any
    model: AbstractModel
    hooks: tuple[AbstractHook, ...]
    main_loop: MainLoop


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A config that was found to be usable, with what it names; nothing is called yet."""

    config: Node
    dataset: Recipe
    model: Recipe
    hooks: list[Recipe]

    def get(self, key: str, default: Any) -> Any:
        node = self.config.get(key)
        return default if node is None or node.value is None else node.plain()


def create_training(
    config: str | Path | Mapping[str, Any],
    output_root: str | Path = "log",
    output_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    command: Sequence[str] = (),
) -> Training:
    """Make a run directory and build everything that a config describes.

    Args:
        config: a file, a directory that holds `config.yaml`, or a mapping.
        output_root: the directory in which the run directory is made.
        output_dir: the run directory itself; it must not hold a run.
        overrides: `key.path=value`, `~key.path` to delete.
        command: the command line, for the trace.

    Raises:
        ConfigError: the config cannot be used; nothing is left behind.
        UsageError: the directory holds a run.
        StorageError: the directory cannot be written.
        BaseException: what a dataset, model or hook raises while it is built; the trace tells of it.
    """
    source = config if isinstance(config, Mapping) else Path(config)
    merged = read_config(source, overrides)
    merged = with_defaults(merged, {"seed": draw_seed(), "code_directory": str(Path.cwd())})
    prepared = _prepare(merged)
    existed = output_dir is not None and Path(output_dir).exists()
    run = create_run(
        dump(merged, _template(source)),
        prepared.get("name", None) or _name_of(source),
        output_root=Path(output_root),
        output_dir=None if output_dir is None else Path(output_dir),
        seed=prepared.get("seed", 0),
        command=command,
    )
    with _kept_or_removed(run, existed), run.logging():
        _LOG.info("run directory: %s", run.directory)
        return _build(prepared, run)


def train(training: Training) -> Outcome:
    """Run a training to its end, with its log in the run directory.

    Raises:
        BaseException: what made it fail.
    """
    run = training.main_loop.run
    assert run is not None  # create_training made one
    with run.logging():
        if not any(_can_end(hook) for hook in training.hooks):
            _LOG.warning(
                "no hook ends the training, only an interrupt will; add for example `- StopAfter: {epochs: 20}`"
            )
        outcome = training.main_loop.run_training()
        _LOG.info("%s: %s", outcome.status, outcome.reason)
        return outcome


def evaluate(
    run_directory: str | Path,
    stream: str,
    overrides: Sequence[str] = (),
    config: str | Path | None = None,
    checkpoint_name: str | None = None,
    command: Sequence[str] = (),
) -> EpochData:
    """Evaluate a checkpoint of a run on a stream; the results also go to `eval/<stream>-<n>` in its directory.

    Args:
        run_directory: the directory of the run.
        stream: the name of the stream; the config's `eval.<stream>` is laid over it.
        overrides: laid over that.
        config: a config to use instead of the run's own.
        checkpoint_name: a name such as `latest`; by default `best`, or else `latest`.
        command: the command line, for the trace.

    Returns:
        The stream's statistics: stream -> variable -> a number or a mapping aggregation -> number.

    Raises:
        UsageError: there is no such run, checkpoint or stream.
        ConfigError: the config cannot be used.
        StorageError: the checkpoint is damaged or does not fit.
        BaseException: what a dataset, model or hook raises.
    """
    directory = Path(run_directory)
    if not holds_run(directory):
        raise UsageError(f"{directory} is no run directory: it has no {CONFIG}")
    source = Path(config) if config is not None else directory / CONFIG
    merged = override(overlay(read_config(source), stream), overrides)
    prepared = _prepare(merged)
    checkpoint.find(directory / CHECKPOINTS, checkpoint_name)
    run = create_evaluation(directory, stream, dump(merged), command)
    with _kept_or_removed(run, existed=False), run.logging():
        training = _build(prepared, run, is_evaluation=True)
        if not callable(getattr(training.dataset, f"{stream}_stream", None)):
            raise _unknown_stream(training.dataset, stream)
        manifest = _load(training.model, directory / CHECKPOINTS, checkpoint_name)
        training.main_loop.start_from(manifest.epoch, manifest.iteration)
        return training.main_loop.run_evaluation(stream)


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


def _prepare(merged: Node) -> _Prepared:
    """Check a config and find what it names."""
    config = interpolate(merged)
    problems = check_sections(config)
    if problems:
        raise ConfigError(problems)
    directory = config.get("code_directory")
    for path in (str(Path.cwd()), directory.value if directory else None):
        if path and path not in sys.path:
            sys.path.append(path)
    found = Preparation()
    found.problems += check_main_loop(config.get("main_loop"), MainLoop)
    dataset = found.section(config.value["dataset"], "dataset", ("output_dir",))
    model = found.section(config.value["model"], "model", ("dataset", "output_dir"), default="TorchModel")
    hooks = []
    section = config.get("hooks")
    entries = list(section.value or ()) if section is not None else []
    if not any(hook_entry(entry)[0] in ("SaveLatest", "save_latest") for entry in entries):
        entries.append(Node("SaveLatest", config.position))
    for index, entry in enumerate(entries):
        name, arguments = hook_entry(entry)
        hooks.append(found.hook(str(name), arguments, entry, f"hooks[{index}].{name}"))
    if dataset is not None:
        found.problems += _check_streams(config, dataset.target)
    if found.problems:
        raise ConfigError(found.problems)
    return _Prepared(config, dataset, model, hooks)


def _build(prepared: _Prepared, run: Run, is_evaluation: bool = False) -> Training:
    """Build dataset, model, hooks and main loop, each with random numbers of its own."""
    seed = prepared.get("seed", 0)
    supplied: dict[str, Any] = {"output_dir": str(run.directory)}
    seed_everything(seed, "dataset")
    supplied["dataset"] = prepared.dataset.build(supplied)
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
        raise ConfigError(
            Problem(node.position if node else None, f"main_loop.{error.argument}", error.message)
        ) from error
    except HookError as error:
        raise ConfigError(_hook_problem(error, prepared)) from error
    return Training(run.directory, supplied["dataset"], supplied["model"], hooks, main_loop)


def _load(model: AbstractModel, checkpoints: Path, name: str | None) -> checkpoint.Manifest:
    """Load a checkpoint; when the name moved to a newer one meanwhile, load that."""
    while True:
        place = checkpoint.find(checkpoints, name)
        try:
            manifest = checkpoint.verify(place)
            model.load(place)
            return manifest
        except StorageError:
            if checkpoint.find(checkpoints, name) == place:
                raise


@contextmanager
def _kept_or_removed(run: Run, existed: bool) -> Iterator[None]:
    """Remove the directory of a run whose config cannot be used; tell in the trace of any other failure."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError | UsageError) and not existed:
            run.remove()
        else:
            outcome = Outcome.of(error)
            run.end(outcome.status, outcome.exit_status, outcome.reason)
        raise


def _check_streams(config: Node, dataset: Any) -> list[Problem]:
    """Return the streams of the main loop that the dataset's class does not have."""
    section = config.get("main_loop")
    if not inspect.isclass(dataset) or hasattr(dataset, "__getattr__") or section is None or not section.value:
        return []
    train, extra = section.get("train_stream_name"), section.get("extra_streams")
    named = [(train.value, train)] if train is not None else []
    for entry in extra.value if extra is not None and isinstance(extra.value, list) else []:
        names = list(entry.value) if isinstance(entry.value, dict) else [entry.value]
        named += [(name, entry) for name in names]
    there = [name.removesuffix("_stream") for name in dir(dataset) if name.endswith("_stream")]
    return [
        Problem(
            node.position,
            "main_loop",
            f"{dataset.__name__} has no stream {name!r}{did_you_mean(str(name), there)}; it has {listed(there)}",
        )
        for name, node in named
        if name not in there
    ]


def _unknown_stream(dataset: Any, stream: str) -> UsageError:
    there = [name.removesuffix("_stream") for name in dir(dataset) if name.endswith("_stream")]
    near = did_you_mean(stream, there)
    return UsageError(f"dataset {type(dataset).__name__} has no stream {stream!r}{near}; it has {listed(there)}")


def _hook_problem(error: HookError, prepared: _Prepared) -> Problem:
    if error.hook_index is None or error.hook_index >= len(prepared.hooks):
        return Problem(None, "hooks" if error.hook_index is None else "model", str(error))
    recipe = prepared.hooks[error.hook_index]
    return Problem(recipe.node.key_position, recipe.key, str(error))


def _can_end(hook: AbstractHook) -> bool:
    """Tell whether a hook's code names `TrainingTerminated`."""
    functions = [each for cls in type(hook).__mro__ for each in vars(cls).values() if inspect.isfunction(each)]
    return any("TrainingTerminated" in function.__code__.co_names for function in functions)


def _template(source: Path | Mapping[str, Any]) -> str | None:
    """Return the text of a single config file, whose comments are kept; several files have no common text."""
    if isinstance(source, Mapping):
        return None
    path = source / CONFIG if source.is_dir() else source
    text = path.read_text(encoding="utf-8-sig")
    return text if parse(text, str(path)).get("extends") is None else None


def _name_of(source: Path | Mapping[str, Any]) -> str:
    return "run" if isinstance(source, Mapping) else source.resolve().stem
