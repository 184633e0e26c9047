"""Load a checkpoint of a run, to inspect it or to evaluate it on a stream."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from emrun.base.arguments import resolved
from emrun.base.errors import StorageError, StreamError, UsageError
from emrun.base.types import EpochData, Json
from emrun.base.wording import counted, from_here, progress
from emrun.config.overrides import copies_left
from emrun.config.plan import Plan, with_statistics
from emrun.config.yaml_text import dump
from emrun.dataset import stream_function
from emrun.epoch_data import read_of_others
from emrun.ranks.group import Exchange, join, ranks
from emrun.storage.checkpoints.finding import DEFAULTS, find, kept, note_intact
from emrun.storage.checkpoints.manifest import Manifest
from emrun.storage.class_names import check_classes
from emrun.storage.lock import EVALUATIONS
from emrun.storage.run import CHECKPOINTS, create_evaluation
from emrun.training.build import Training, assemble
from emrun.training.create import assemble_alike, check_alike, claim_files, follow, kept_or_removed, warn_of
from emrun.training.members import config_of, load_weights
from emrun.training.user_code import log_code_directory, warn_of_changed_code

_LOG = logging.getLogger(__name__)


def load_run(run_directory: str | Path, checkpoint_name: str | None = None) -> Training:
    """Build the dataset and the model of a run, and load the weights of a checkpoint, without changing the run.

    The main loop of the returned object has no hooks and writes nothing, and the module of a `TorchModel` is in
    evaluation mode. See `evaluate` for the statistics of a stream.

    Args:
        run_directory: the directory of the run.
        checkpoint_name: a name such as `latest`; by default `best`, or `latest` if there is no `best`.

    Raises:
        UsageError: there is no such run or checkpoint.
        ConfigError: the config of the run cannot be used.
        StorageError: the checkpoint is damaged or does not fit.
        BaseException: an error of the dataset or the model.
    """
    directory = resolved(run_directory)
    plan = replace(Plan.of(config_of(directory)), hooks=[])
    find_checkpoint(plan, directory, checkpoint_name)
    training = assemble(plan, directory, run=None, is_evaluation=True, classes=directory)
    load_checkpoint(training, directory / CHECKPOINTS, checkpoint_name)
    if isinstance(module := getattr(training.model, "module", None), torch.nn.Module):
        module.eval()
    return training


def evaluate(
    run_directory: str | Path,
    stream: str,
    overrides: Sequence[str] = (),
    config: str | Path | None = None,
    checkpoint_name: str | None = None,
    command: Sequence[str] = (),
    output_dir: str | Path | None = None,
    *,
    as_trained: bool = False,
) -> EpochData:
    """Evaluate a checkpoint of a run on a stream, and save the results in `eval/<stream>-<n>` of the run directory.

    Args:
        run_directory: the directory of the run.
        stream: the name of the stream. The section `eval.<stream>` of the config overrides the other sections.
        overrides: overrides that are applied afterwards.
        config: a config to use instead of the config of the run; one without dataset or model is merged over it.
        checkpoint_name: a name such as `latest`; by default `best`, or `latest` if there is no `best`.
        command: the command line, for the trace.
        output_dir: a directory for `<stream>-<n>` instead of `eval` of the run directory, which is then only read.
        as_trained: evaluate as the training does: without `eval.<stream>`, and as many batches as `main_loop` says.

    Returns:
        The statistics of the stream: stream -> variable -> a number or a mapping aggregation -> number.

    Raises:
        UsageError: there is no such run, checkpoint or stream; or the ranks cannot meet, or have different configs.
        ConfigError: the config cannot be used.
        StorageError: the checkpoint is damaged or does not fit, or the results cannot be written.
        BaseException: an error of the dataset, the model or a hook.
    """
    joined = join()
    directory = resolved(run_directory)
    run = None
    with joined.in_step() as exchange:
        # the plan: the config of the run, or another one, with `eval.<stream>`
        base = config_of(directory, config)
        merged = base.overridden(overrides) if as_trained else base.overlaid(stream, overrides)
        if merged.root.get("hooks") is None:
            merged = with_statistics(merged)
        plan = Plan.of(merged)
        check_alike(plan, exchange)

        # rank 0 writes the results; the others follow
        if joined.is_first:
            root = directory / CHECKPOINTS
            find_checkpoint(plan, directory, checkpoint_name)
            results = directory / EVALUATIONS if output_dir is None else resolved(output_dir)
            try:
                run = create_evaluation(results, stream, dump(merged.root), command, plain=merged.root.plain())
            except StorageError as error:
                if output_dir is None and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                    error.add_note("to save the results of a read-only run in another directory, use --output-dir DIR")
                raise
            with kept_or_removed(run, existed=False), run.log:
                warn_of(copies_left(base.overlaid(stream).root, merged.root, unread=("vars", "eval")))
                log_code_directory(plan)
                exchange("run directory", str(run.directory))
                training = assemble_alike(
                    plan, exchange, run.directory, run, is_evaluation=not as_trained, classes=directory
                )
                claim_files(training, run)
                warn_of_changed_code(plan, directory)
                check_stream(training.dataset, training.main_loop.streams.source_of(stream))
                name = name_of_checkpoint(root, checkpoint_name)
                loaded = load_checkpoint(training, root, name, exchange)
                used = ""
                if loaded is not None:
                    place, manifest = loaded
                    where = {"directory": place.name, "epoch": manifest.epoch, "iteration": manifest.iteration}
                    run.trace.write(checkpoint={"name": name, **where})
                    used = f"checkpoint {name} ({place.name}): {progress(manifest.epoch, manifest.iteration)}; "
                _LOG.info("%sresults in %s", used, from_here(run.directory))
                if not as_trained:
                    _name_size(training, stream, plan)
                exchange("all is ready", None)
        else:
            load = partial(load_checkpoint, root=directory / CHECKPOINTS, name=checkpoint_name, exchange=exchange)
            place = Path(exchange("run directory", None))
            training = follow(plan, place, exchange, load, is_evaluation=not as_trained, classes=directory)

    # the evaluation
    if run is None:
        return _evaluate(training, stream, as_trained)
    with kept_or_removed(run, existed=False), run.log:
        return _evaluate(training, stream, as_trained)


def kept_checkpoints(run_directory: Path) -> list[Json]:
    """Return the checkpoints of a run, as rank 0 finds them; see `finding.kept`."""
    joined = join()
    root = resolved(run_directory) / CHECKPOINTS
    with joined.in_step() as exchange:
        found: list[Json] = exchange("checkpoints", kept(root) if joined.is_first else [])
    return found


def is_kept(run_directory: Path, checkpoint: Json) -> bool:
    """Return whether a run has not deleted one of `kept_checkpoints` meanwhile."""
    place = resolved(run_directory) / CHECKPOINTS / checkpoint["directory"]
    return bool(join().from_first("whether the checkpoint is there", place.is_dir()))


def _evaluate(training: Training, stream: str, as_trained: bool) -> EpochData:
    _leave_out(training, stream)
    try:
        return training.main_loop.run_evaluation(stream, as_trained=as_trained)
    except BaseException as error:
        if isinstance(error, StreamError) and re.search("forward of|neither an output nor a source", str(error)):
            error.add_note("for a stream without labels there is `emrun predict`, not an evaluation")
        if training.main_loop.capsule is not None:
            _LOG.warning("repeat the step that failed with: emrun replay %s", from_here(training.main_loop.capsule))
        raise


def find_checkpoint(plan: Plan, directory: Path, name: str | None) -> None:
    """Check that a run has a checkpoint, unless its model is made of other runs.

    Raises:
        UsageError: there is no such checkpoint, or a checkpoint is named for such a model.
    """
    if not plan.is_made_of_runs:
        find(directory / CHECKPOINTS, name)
    elif name is not None:
        raise UsageError(f"checkpoint {name!r}: the model is made of runs; name their checkpoints in model.runs")


def load_checkpoint(
    training: Training, root: Path, name: str | None, exchange: Exchange | None = None
) -> tuple[Path, Manifest] | None:
    """Load a checkpoint and return its directory and manifest; if the name moves meanwhile, load the newer one.

    A model that is made of runs has no checkpoint: nothing is loaded, and the result is None.

    Args:
        training: the objects.
        root: the directory of the run's checkpoints.
        name: the name of the checkpoint.
        exchange: see `Ranks.in_step`; all ranks load what rank 0 has loaded. None to load it in this process alone.
    """
    check_classes(training.dataset, root.parent)
    if training.model.is_loaded:
        return None
    follows = exchange is not None and not ranks().is_first
    while True:
        if exchange is not None and follows:
            place = Path(exchange("checkpoint to load", None))
        else:
            place = find(root, name)
        try:
            manifest = load_weights(training.model, place)
            training.main_loop.start_from(manifest.epoch, manifest.iteration)
            break
        except StorageError as error:
            if follows or find(root, name) == place:
                note_intact(error, root)
                raise
    if exchange is not None and not follows:
        exchange("checkpoint to load", str(place))
    return place, manifest


def name_of_checkpoint(root: Path, name: str | None) -> str:
    """Return the name of the checkpoint that is used if the command names `name`, or none."""
    *others, last = DEFAULTS
    return name or next((each for each in others if (root / each).is_dir()), last)


def _name_size(training: Training, stream: str, plan: Plan) -> None:
    """Log that the whole stream is read, if the training evaluates or trains on a part of it."""
    loop = training.main_loop
    epoch = plan.get("main_loop", {}).get("fixed_epoch_size")
    if stream != loop.train_stream_name:
        if (size := loop.stream_sizes.get(stream)) is not None:
            _LOG.info(
                "stream %r is read whole; the training evaluates its first %s", stream, counted(size, "batch", "es")
            )
    elif epoch is not None and loop.fixed_epoch_size is None:
        what = f"stream {stream!r} is read whole, not {epoch} batches as in an epoch of the training"
        _LOG.info("%s; if it has no end, add an override: main_loop.fixed_epoch_size=%s", what, epoch)


def _leave_out(training: Training, stream: str) -> None:
    """Leave out the user's hooks that read statistics of a stream that the evaluation does not run."""
    loop = training.main_loop
    kept = []
    for hook in loop.hooks:
        is_own = type(hook).__module__.startswith("emrun.")  # emrun's hooks know what an evaluation lacks
        address = None if is_own else read_of_others(hook, [*loop.hooks, loop.model], stream)
        if address is None:
            kept.append(hook)
        else:
            _LOG.info("hook %s is left out: it monitors %s, but only %s is run", type(hook).__name__, address, stream)
    loop.change_hooks(kept)


def check_stream(dataset: Any, stream: str, path: Path | None = None) -> None:
    """Check that a dataset has a stream; see `stream_function`.

    Raises:
        UsageError: it has not.
    """
    try:
        stream_function(dataset, stream, path)
    except AttributeError as error:
        raise UsageError(str(error)) from error
