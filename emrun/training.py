"""A run from its config to its end, told from top to bottom."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from emrun import checkpoint
from emrun.assembly import Training, assemble, build_dataset, build_hooks, build_model
from emrun.build import Imported
from emrun.config import copies_left, load_config, overlay, override, read_config, with_defaults
from emrun.errors import ConfigError, StorageError, UsageError, did_you_mean, listed
from emrun.files import expanded
from emrun.hook import AbstractHook
from emrun.model import AbstractModel
from emrun.outcome import Outcome
from emrun.preparation import prepare
from emrun.randomness import draw_seed
from emrun.run_dir import CHECKPOINTS, CONFIG, Run, create_evaluation, create_run, holds_run
from emrun.types import EpochData
from emrun.yaml_tree import Node, dump

_LOG = logging.getLogger(__name__)

DRAWN = ("seed", "code_directory")
"""The keys that are written to a run's config when the given one does not have them."""


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
        RunExists: the directory holds a run (a `UsageError`).
        StorageError: the directory cannot be written.
        BaseException: what a dataset, model or hook raises while it is built; the trace tells of it.
    """
    root = expanded(output_root)
    place = None if output_dir is None else expanded(output_dir)
    loaded = load_config(config, overrides)
    merged = with_defaults(loaded.root, dict(zip(DRAWN, (draw_seed(), str(Path.cwd())), strict=True)))
    prepared = prepare(merged, Imported())
    existed = place is not None and place.exists()
    had_root = place is not None or root.exists()
    run = create_run(
        dump(merged, loaded.text),
        prepared.get("name", None) or loaded.name,
        output_root=root,
        output_dir=place,
        seed=prepared.get("seed", 0),
        command=command,
    )
    try:
        with _kept_or_removed(run, existed), run.logging():
            _LOG.info("run directory: %s", run.directory)
            warn_of(loaded.notes)
            return assemble(prepared, run.directory, run)
    except (ConfigError, UsageError):
        if not had_root:
            _remove_if_empty(run.directory.parent)
        raise


def create_dataset(config: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Any:
    """Build the dataset of a config, with random numbers from the config's seed and without a run directory.

    Args:
        config: a file, a directory that holds `config.yaml`, or a mapping.
        overrides: as on the command line.

    Raises:
        ConfigError: the config cannot be used.
        BaseException: what the dataset raises while it is built.
    """
    return build_dataset(load_config(config, overrides).root)


def create_model(
    config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), dataset: Any = None
) -> AbstractModel:
    """Build the model of a config, with random numbers from the config's seed and without a run directory.

    Args:
        config: a file, a directory that holds `config.yaml`, or a mapping, of which only the model's section is needed.
        overrides: as on the command line.
        dataset: for a model that takes it; by default that of the config is built.

    Raises:
        ConfigError: the config cannot be used.
        BaseException: what the model raises while it is built.
    """
    return build_model(load_config(config, overrides).root, dataset)


def create_hooks(
    config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), model: Any = None, dataset: Any = None
) -> tuple[AbstractHook, ...]:
    """Build the hooks of a config, without a run directory: those that write into one say so when they begin.

    Args:
        config: a file, a directory that holds `config.yaml`, or a mapping, of which only the hooks' section is needed.
        overrides: as on the command line.
        model: for hooks that take it.
        dataset: likewise.

    Raises:
        ConfigError: the config cannot be used.
        BaseException: what a hook raises while it is built.
    """
    return build_hooks(load_config(config, overrides).root, model, dataset)


def load_run(run_directory: str | Path, checkpoint_name: str | None = None) -> Training:
    """Return a run's dataset and its model with the weights of a checkpoint, to look at; the run stays as it is.

    Its main loop has no hooks and writes nothing; `evaluate` has the statistics of a stream.

    Args:
        run_directory: the directory of the run.
        checkpoint_name: a name such as `latest`; by default `best`, or else `latest`.

    Raises:
        UsageError: there is no such run or checkpoint.
        ConfigError: its config cannot be used.
        StorageError: the checkpoint is damaged or does not fit.
        BaseException: what the dataset or the model raises.
    """
    directory = expanded(run_directory)
    prepared = replace(prepare(_config_of(directory), Imported()), hooks=[])
    checkpoint.find(directory / CHECKPOINTS, checkpoint_name)
    training = assemble(prepared, directory, run=None, is_evaluation=True)
    manifest = _load(training.model, directory / CHECKPOINTS, checkpoint_name)
    training.main_loop.start_from(manifest.epoch, manifest.iteration)
    return training


def train(training: Training) -> Outcome:
    """Run a training to its end, with its log in the run directory.

    Raises:
        BaseException: what made it fail.
    """
    run = training.main_loop.run
    assert run is not None  # create_training made one
    with run.logging():
        warn_of_no_end(training.hooks)
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
    directory = expanded(run_directory)
    own = _config_of(directory)
    laid_over = overlay(own if config is None else read_config(expanded(config)), stream)
    merged = override(laid_over, overrides)
    prepared = prepare(merged, Imported())
    checkpoint.find(directory / CHECKPOINTS, checkpoint_name)
    run = create_evaluation(directory, stream, dump(merged), command)
    with _kept_or_removed(run, existed=False), run.logging():
        warn_of(copies_left(laid_over, merged, unread=("vars", "eval")))
        training = assemble(prepared, run.directory, run, is_evaluation=True)
        if not callable(getattr(training.dataset, f"{stream}_stream", None)):
            raise _unknown_stream(training.dataset, stream)
        manifest = _load(training.model, directory / CHECKPOINTS, checkpoint_name)
        training.main_loop.start_from(manifest.epoch, manifest.iteration)
        try:
            return training.main_loop.run_evaluation(stream)
        except Exception:
            if training.main_loop.capsule is not None:
                place = training.main_loop.capsule
                _LOG.warning("the batch that failed is kept; do its step again with: emrun replay %s", place)
            raise


def _config_of(directory: Path) -> Node:
    """Return the config of a run, before interpolation."""
    if not holds_run(directory):
        raise UsageError(f"{directory} is no run directory: it has no {CONFIG}")
    return read_config(directory / CONFIG)


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


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # another run is there by now
        directory.rmdir()


@contextmanager
def _kept_or_removed(run: Run, existed: bool) -> Iterator[None]:
    """Remove a run whose config cannot be used, but not what was in its directory; tell of any other failure."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError | UsageError):
            run.remove(only_own_files=existed)
        else:
            outcome = Outcome.of(error)
            run.end(outcome.status, outcome.exit_status, outcome.reason)
        raise


def _unknown_stream(dataset: Any, stream: str) -> UsageError:
    there = [name.removesuffix("_stream") for name in dir(dataset) if name.endswith("_stream")]
    near = did_you_mean(stream, there)
    return UsageError(f"dataset {type(dataset).__name__} has no stream {stream!r}{near} (it has {listed(there)})")


def warn_of(notes: Sequence[str]) -> None:
    """Log what is to be said about a config; a terminal shows the same only once."""
    for note in notes:
        _LOG.warning("%s", note, extra={"once": True})


def warn_of_no_end(hooks: Sequence[AbstractHook]) -> None:
    """Log a warning when no hook can end a training."""
    if not any(_can_end(hook) for hook in hooks):
        _LOG.warning("no hook ends the training, only an interrupt will; add for example `- StopAfter: {epochs: 20}`")


def _can_end(hook: AbstractHook) -> bool:
    """Tell whether a hook's code names `TrainingTerminated`."""
    functions = [each for cls in type(hook).__mro__ for each in vars(cls).values() if inspect.isfunction(each)]
    return any("TrainingTerminated" in function.__code__.co_names for function in functions)
