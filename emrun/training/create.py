"""A run from its config to its end, told from top to bottom."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from emrun.arguments import expanded
from emrun.censor import Censor
from emrun.config.config import load_config, read_config
from emrun.config.import_finder import Imported
from emrun.config.interpolation import escaped
from emrun.config.overrides import overlay, override, with_defaults
from emrun.config.places import copies_left
from emrun.config.plan import prepare
from emrun.config.yaml_tree import Node, dump
from emrun.errors import ConfigError, StateError, StorageError, UsageError
from emrun.fields import ANOTHER_CHECKPOINT, reading
from emrun.hook import AbstractHook
from emrun.loop.outcome import Outcome
from emrun.model import AbstractModel
from emrun.randomness import draw_seed
from emrun.storage import checkpoints as checkpoint
from emrun.storage.lock import EVALUATIONS
from emrun.storage.run import CHECKPOINTS, CONFIG, Run, create_evaluation, create_run, holds_run, no_run
from emrun.training.build import Training, assemble, build_dataset, build_hooks, build_model
from emrun.types import EpochData
from emrun.wording import did_you_mean, listed

_LOG = logging.getLogger(__name__)

DRAWN = ("seed", "code_directory")
"""The keys that are written to a run's config when the given one does not have them."""

_WORLD_SIZE = "WORLD_SIZE"  # how many processes torch's launcher started


def create_training(
    config: str | Path | Mapping[str, Any],
    output_root: str | Path = "log",
    output_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    command: Sequence[str] = (),
    remove_failed: bool = False,
) -> Training:
    """Make a run directory and build everything that a config describes.

    Args:
        config: a file, a directory that holds `config.yaml`, or a mapping.
        output_root: the directory in which the run directory is made.
        output_dir: the run directory itself; it must not hold a run, but for one whose start failed.
        overrides: `key.path=value`, `~key.path` to delete.
        command: the command line, for the trace.
        remove_failed: delete the run directory again when building fails, whatever the reason.

    Raises:
        ConfigError: the config cannot be used; nothing is left behind.
        UsageError: this process is one of several that `torchrun` started.
        RunExists: the directory holds a run (a `UsageError`).
        StorageError: the directory cannot be written.
        BaseException: what a dataset, model or hook raises while it is built; the trace tells of it.
    """
    refuse_ranks()
    root = expanded(output_root)
    place = None if output_dir is None else expanded(output_dir)
    loaded = load_config(config, overrides)
    merged = with_defaults(loaded.root, dict(zip(DRAWN, (draw_seed(), escaped(str(Path.cwd()))), strict=True)))
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
        censor=Censor(prepared.config.secrets()),
    )
    try:
        with _kept_or_removed(run, existed, remove_failed), run.logging():
            _LOG.info("run directory: %s", run.directory)
            warn_of(loaded.notes)
            return assemble(prepared, run.directory, run, is_new=True)
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
    _, manifest = _load(training.model, directory / CHECKPOINTS, checkpoint_name)
    training.main_loop.start_from(manifest.epoch, manifest.iteration)
    return training


def train(training: Training) -> Outcome:
    """Run a training to its end.

    Raises:
        BaseException: what made it fail.
    """
    return training.main_loop.run_training()


def evaluate(
    run_directory: str | Path,
    stream: str,
    overrides: Sequence[str] = (),
    config: str | Path | None = None,
    checkpoint_name: str | None = None,
    command: Sequence[str] = (),
    output_dir: str | Path | None = None,
) -> EpochData:
    """Evaluate a checkpoint of a run on a stream; the results also go to `eval/<stream>-<n>` in its directory.

    Args:
        run_directory: the directory of the run.
        stream: the name of the stream; the config's `eval.<stream>` is laid over it.
        overrides: laid over that.
        config: a config to use instead of the run's own.
        checkpoint_name: a name such as `latest`; by default `best`, or else `latest`.
        command: the command line, for the trace.
        output_dir: a directory for `<stream>-<n>`, instead of `eval` in the run's, which is only read then.

    Returns:
        The stream's statistics: stream -> variable -> a number or a mapping aggregation -> number.

    Raises:
        UsageError: there is no such run, checkpoint or stream; or this process is one of several of `torchrun`.
        ConfigError: the config cannot be used.
        StorageError: the checkpoint is damaged or does not fit, or the results cannot be written.
        BaseException: what a dataset, model or hook raises.
    """
    refuse_ranks()
    directory = expanded(run_directory)
    own = _config_of(directory)
    laid_over = overlay(own if config is None else read_config(expanded(config)), stream)
    merged = override(laid_over, overrides)
    prepared = prepare(merged, Imported())
    checkpoint.find(directory / CHECKPOINTS, checkpoint_name)
    root = directory / EVALUATIONS if output_dir is None else expanded(output_dir)
    try:
        run = create_evaluation(
            root, stream, dump(merged), command, censor=Censor(prepared.config.secrets(), [directory])
        )
    except StorageError as error:
        if output_dir is None and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            error.add_note("the results of somebody else's run can be kept elsewhere: --output-dir DIR")
        raise
    with _kept_or_removed(run, existed=False), run.logging():
        warn_of(copies_left(laid_over, merged, unread=("vars", "eval")))
        training = assemble(prepared, run.directory, run, is_evaluation=True)
        if not callable(getattr(training.dataset, f"{stream}_stream", None)):
            raise _unknown_stream(training.dataset, stream)
        name = checkpoint_name or _default_checkpoint(directory / CHECKPOINTS)
        place, manifest = _load(training.model, directory / CHECKPOINTS, name)
        where = {"directory": place.name, "epoch": manifest.epoch, "iteration": manifest.iteration}
        run.add_to_trace(checkpoint={"name": name, **where})
        _LOG.info(
            "checkpoint %s (%s): %d epochs, %d iterations done; results in %s", name, *where.values(), run.directory
        )
        training.main_loop.start_from(manifest.epoch, manifest.iteration)
        try:
            return training.main_loop.run_evaluation(stream)
        except BaseException:
            if training.main_loop.capsule is not None:
                place = training.main_loop.capsule
                _LOG.warning("the batch that failed is kept; do its step again with: emrun replay %s", place)
            raise


def refuse_ranks() -> None:
    """Refuse to be one of several processes that are meant to train together: each would make a run of its own.

    Raises:
        UsageError: the environment, as `torchrun` sets it, says that there are several.
    """
    size, rank = os.environ.get(_WORLD_SIZE, ""), os.environ.get("RANK", "unknown")
    if size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"{_WORLD_SIZE}={size}: this is one of {size} processes (RANK={rank}) that torchrun or another launcher "
            "started to train together. emrun does not support ranks yet, each process would make a run of its own; "
            f"start emrun without a launcher, with one process (--nproc-per-node 1), or with {_WORLD_SIZE} unset"
        )


def _config_of(directory: Path) -> Node:
    """Return the config of a run, before interpolation."""
    if not holds_run(directory):
        raise no_run(directory)
    return read_config(directory / CONFIG)


def _default_checkpoint(checkpoints: Path) -> str:
    """Return the name of the checkpoint that is evaluated when none is given."""
    return next((name for name in checkpoint.DEFAULTS if (checkpoints / name).is_dir()), checkpoint.DEFAULTS[-1])


def _load(model: AbstractModel, checkpoints: Path, name: str | None) -> tuple[Path, checkpoint.Manifest]:
    """Load a checkpoint, return its directory too; when the name moved to a newer one meanwhile, load that."""
    while True:
        place = checkpoint.find(checkpoints, name)
        try:
            manifest = checkpoint.verify(place)
            with reading(f"weights of checkpoint {place}", ANOTHER_CHECKPOINT, model.load):
                model.load(place)
            return place, manifest
        except StorageError:
            if checkpoint.find(checkpoints, name) == place:
                raise


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # another run is there by now
        directory.rmdir()


@contextmanager
def _kept_or_removed(run: Run, existed: bool, remove_failed: bool = False) -> Iterator[None]:
    """Remove a run whose config cannot be used, but not what was in its directory; keep one that fails otherwise.

    Args:
        run: the run.
        existed: whether its directory was there before.
        remove_failed: remove a run that fails otherwise, too.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError | UsageError | StateError):
            run.remove(only_own_files=existed)
        elif remove_failed:
            run.remove(only_own_files=existed)
            _LOG.info("deleted %s, as building failed", run.directory)
        else:
            outcome = Outcome.of(error)
            run.end(outcome.status, outcome.exit_status, outcome.reason)
        raise


def _unknown_stream(dataset: Any, stream: str) -> UsageError:
    there = [name.removesuffix("_stream") for name in dir(dataset) if name.endswith("_stream")]
    near = did_you_mean(stream, there)
    if stream.removesuffix("_eval") in there:  # how the loop calls a train stream that it evaluates
        near = f"; did you mean {stream.removesuffix('_eval')!r}?"
    return UsageError(f"dataset {type(dataset).__name__} has no stream {stream!r}{near} (it has {listed(there)})")


def warn_of(notes: Sequence[str]) -> None:
    """Log what is to be said about a config; a terminal shows the same only once."""
    for note in notes:
        _LOG.warning("%s", note, extra={"once": True})
