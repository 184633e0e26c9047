"""Resume a run: its config with changes, and its newest intact checkpoint."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emrun.base.arguments import expanded, resolved
from emrun.base.errors import Position, StateError, StorageError, UsageError
from emrun.base.preparations import PREPARATION
from emrun.base.wording import counted, from_here, progress
from emrun.config.config import Config, read_config
from emrun.config.plan import Plan, with_statistics
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import Node, node_of
from emrun.ranks.group import Exchange, join, ranks
from emrun.record.metrics_log import MetricsLog
from emrun.record.rows import Reader
from emrun.record.sinks import AbstractSink
from emrun.runs.config_comparison import differences, order_of_hooks
from emrun.runs.report.page import complete
from emrun.schedule_plan import log_plan
from emrun.storage.checkpoints.finding import check_names, find, is_unfinished, newest, note_intact
from emrun.storage.checkpoints.manifest import check_resumable, is_of_earlier_version, verify
from emrun.storage.class_names import check_classes, record_classes
from emrun.storage.files import write_atomically
from emrun.storage.lock import RunLock
from emrun.storage.plain import plain_of, write_with_plain
from emrun.storage.preparation import read_preparation, record_preparation
from emrun.storage.run import CHECKPOINTS, CONFIG, Run, check_links
from emrun.storage.trace import read_trace
from emrun.training.build import Training, plan_schedule
from emrun.training.create import (
    DRAWN,
    FOUND,
    assemble_alike,
    check_alike,
    connected,
    device_of,
    follow,
    warn_of,
)
from emrun.training.directories import check_run
from emrun.training.user_code import log_code_directory, record_code

_LOG = logging.getLogger(__name__)

_INIT_FROM = "model.init_from."
_OF_DATA = ("dataset.", "seed.", "vars.", "main_loop.overfit.")  # keys that may change the batches


def resume_training(
    run_directory: str | Path,
    overrides: Sequence[str] = (),
    checkpoint_name: str | None = None,
    command: Sequence[str] = (),
    added_hooks: Sequence[str] = (),
) -> Training | None:
    """Build the objects of a run again and load a checkpoint, so that the training continues exactly from there.

    Args:
        run_directory: the directory of the run.
        overrides: overrides that become part of the config. The old config is saved as `config-<n>.yaml`.
        checkpoint_name: a name such as `best`, or a path; by default the newest intact checkpoint. A run that was
            killed before its first checkpoint starts from the beginning.
        command: the command line, for the trace.
        added_hooks: see `create_training`.

    Returns:
        The training, or None if the run is finished, nothing was changed, and no checkpoint is named.

    Raises:
        UsageError: there is no such run or checkpoint, the run has lost its checkpoints, or the ranks cannot meet.
        RunInUse: another process is writing the run.
        ConfigError: the config cannot be used.
        StateError: the checkpoint does not fit the config.
        StorageError: the checkpoint is damaged.
        BaseException: an error of the dataset, the model or a hook while it is built. The run is unchanged in all these
            cases.
    """
    joined = join()
    source = resolved(run_directory)
    with joined.in_step() as exchange:
        check_run(source)
        if joined.is_first:
            return _resumed(source, overrides, checkpoint_name, command, added_hooks, exchange)
        return _follow(source, overrides, added_hooks, exchange)


def _resumed(
    source: Path,
    overrides: Sequence[str],
    checkpoint_name: str | None,
    command: Sequence[str],
    added_hooks: Sequence[str],
    exchange: Exchange,
) -> Training | None:
    """Resume on rank 0, which writes the run directory; `exchange` is called at the same points as in `_follow`."""
    run = _opened(source, command)
    try:
        # the plan, and what has changed since
        stored = read_config(source)
        config = stored.overridden(overrides)
        plan = _plan_of(config, added_hooks)
        check_alike(plan, exchange)
        changed = _changes(_as_written(source, stored), config.root)

        # a run that has finished
        trace = read_trace(source)
        if (
            trace.get("status") == "finished"
            and not trace.get("exit_status")
            and not changed
            and checkpoint_name is None
        ):
            _leave_finished(plan, run, trace.get("reason"), has_page=plan.get("main_loop", {}).get("report", True))
            exchange("run to resume", None)
            return None

        # the checkpoint
        check_names(source / CHECKPOINTS)
        place = _checkpoint_to_load(source / CHECKPOINTS, checkpoint_name)
        _check_that_nothing_is_lost(source, trace, place)

        # the objects, with the states of the checkpoint
        record_code(plan, run)
        with run.log:
            warn_of(config.notes)
            log_code_directory(plan)
            _tell_of_ranks(int(trace.get("ranks") or 1))
            exchange("run to resume", (str(run.directory), place is None))
            training = connected(
                assemble_alike(plan, exchange, run.directory, run, is_new=place is None, classes=run.directory), run
            )
            if place is not None:
                place = _restored(training, place, changed)
            else:
                training.main_loop.rows.rewind_to_start()
                _LOG.info("%s has no checkpoint: starting from the beginning", from_here(source))
            schedule = plan_schedule(training, plan)
            _check_end(training, changed)
            exchange("checkpoint to load", str(place) if place is not None else None)
            exchange("all is ready", None)  # the other ranks have loaded the checkpoint
            log_plan(schedule)

            # the run directory, when all ranks are ready
            run.trace.begin_again(  # before the config: a run with a changed one must not count as finished
                trace,
                {"checkpoint": place.name if place else None, "changed": changed},
                seed=plan.get("seed", 0),
                device=device_of(training.model),
            )
            record_preparation(training.prepared, run.directory)
            _store(run, config.root, _as_written(source, stored), source, changed, training.dataset)
            return training
    except BaseException:
        run.release()
        raise


def _opened(source: Path, command: Sequence[str]) -> Run:
    """Lock a run, to write it again."""
    lock = RunLock(source)
    try:
        check_links(source)
        return Run(source, command=command, lock=lock)
    except BaseException:
        lock.release()
        raise


def _complete_sinks(plan: Plan, run: Run, reason: str | None) -> None:
    """Write what sinks do not have of a finished run."""
    recipes = [
        recipe for recipe in plan.hooks if isinstance(recipe.target, type) and issubclass(recipe.target, AbstractSink)
    ]
    supplied: dict[str, Any] = {"output_dir": run.directory, "model": None, "dataset": None}
    supplied[PREPARATION] = read_preparation(run.directory)
    with run.log:
        sinks = [recipe.build(supplied) for recipe in recipes]
        record = MetricsLog(run.directory)
        record.read_epochs()
        for sink in sinks:
            sink.complete(record, "finished", reason, sinks)


def _leave_finished(plan: Plan, run: Run, reason: str | None, *, has_page: bool) -> None:
    """Say that a run is finished, and how to train it longer; write its page if the process was killed before."""
    _LOG.info("nothing to do: the run is finished%s", f": {reason}" if reason else "")
    if is_of_earlier_version((run.checkpoints / "latest").resolve()):
        _LOG.info("an earlier version of emrun has made the run, which alone can train it longer")
    else:
        _LOG.info("to train longer, resume with %s", _way_on(reason))
        _complete_sinks(plan, run, reason)
    if has_page:
        complete(run.directory)
    run.release()


def _plan_of(config: Config, added_hooks: Sequence[str]) -> Plan:
    """Return the plan of a training."""
    plan = Plan.of(config, added=added_hooks)
    plan.check_trainable()
    return plan


def _follow(source: Path, overrides: Sequence[str], added_hooks: Sequence[str], exchange: Exchange) -> Training | None:
    """Resume on a rank other than 0, which writes nothing: load the checkpoint that rank 0 has loaded."""
    plan = _plan_of(read_config(source).overridden(overrides), added_hooks)
    check_alike(plan, exchange)
    resumed = exchange("run to resume", None)
    if resumed is None:  # nothing to do
        return None

    def load(training: Training) -> None:
        place = exchange("checkpoint to load", None)
        if place is not None:
            training.main_loop.restore(Path(place))

    directory, is_new = resumed
    return follow(plan, Path(directory), exchange, load, is_new=is_new, classes=source)


def _tell_of_ranks(before: int) -> None:
    """Log what changes if the run has been trained on another number of ranks."""
    size = ranks().size
    if size != before:
        _LOG.warning(
            "the run was trained on %s and is resumed on %s: the batches stay the same, and each is shared by %s; sums "
            "of gradients are rounded in another order, and random numbers of the model and of batches are drawn anew",
            counted(before, "rank"),
            counted(size, "rank"),
            counted(size, "rank"),
        )


def _way_on(reason: str | None) -> str:
    """Return what lets a run continue that ended for this reason; None if its epochs were run by hand."""
    if reason is None:
        return "its checkpoint: --checkpoint latest"
    if (end := later_end(reason)) is not None:
        return f"a later end, such as {end}"
    match = re.search(r"\((\w+)(?: \w+: [^()]*)?\)$", reason)  # emrun's hooks name themselves there
    name = match[1] if match is not None else "the hook that ended it"
    return f"other arguments of {name}" + (f", or without it: '~hooks.{name}'" if match is not None else "")


def later_end(reason: str) -> str | None:
    """Return the override that makes a run twice as long which StopAfter has ended for this reason; else None."""
    limit = re.search(r"(?:(\d+) \w+ done )?\(StopAfter (\w+): ([\d.]+)\)$", reason)  # more is done if it had passed
    return None if limit is None else f"hooks.StopAfter.{limit[2]}={2 * float(limit[1] or limit[3]):.15g}"


def changes_to(run_directory: Path, config: Config) -> list[str]:
    """Return the keys in which a config differs from the config of a run, each with both values.

    A value that the run has found for `auto` is not a difference.
    """
    check_run(run_directory)
    stored = with_statistics(read_config(run_directory)).root
    drawn = {key: stored.value[key].plain() for key in DRAWN if key in stored.value}
    changes = _changes(stored, with_statistics(config).with_defaults(drawn).root)
    return _shown({key: pair for key, pair in changes.items() if key not in FOUND or pair[1] != "auto"})


def _checkpoint_to_load(root: Path, name: str | None) -> Path | None:
    """Return the checkpoint to resume from, after verifying it; None if the run has no checkpoint."""
    if name is None:
        return newest(root)
    if not name:  # for an evaluation that is `best`, and a resume from it would replace all that is newer
        raise UsageError("the name of the checkpoint is empty; leave --checkpoint out to resume from the newest one")
    while True:
        path = expanded(name)
        place = path.resolve() if path != Path(path.name) and path.is_dir() else find(root, name)
        if place.parent != root.resolve():
            raise UsageError(f"{name} is not a checkpoint in {root}")
        try:
            verify(place)
            return place
        except StorageError as error:
            if place.is_dir():  # otherwise the run is being trained, and the name has moved to a newer checkpoint
                note_intact(error, root)
                raise


def _restored(training: Training, place: Path, changed: Mapping[str, Any]) -> Path:
    """Load a checkpoint; an error names the values that this resume changes."""
    if any(f"{key}.".startswith(_INIT_FROM) for key in changed):
        _LOG.warning("model.init_from is read when a run begins; a resume has the weights of its checkpoint")
    loop = training.main_loop
    try:
        check_classes(training.dataset, place.parent.parent)
        of_data = {key: pair for key, pair in changed.items() if f"{key}.".startswith(_OF_DATA)}
        place = loop.restore(place, _shown(of_data))
        _LOG.info("resuming from %s: %s", place, progress(loop.training_epochs_done, loop.iterations_done))
        return place
    except StateError as error:
        if changed:
            values = ", ".join(_shown(changed))
            error.add_note(f"this resume changes {values}; undo that, or train anew with `emrun train`")
        raise


def _check_end(training: Training, changed: Mapping[str, Any]) -> None:
    """Check that a resume does not set an end that has passed: it would only change the config."""
    loop = training.main_loop
    done = {
        "epochs": loop.training_epochs_done,
        "passes": loop.passes_done,
        "updates": loop.updates_done,
        "iterations": loop.iterations_done,
    }
    of_hooks = {key: new for key, (_, new) in changed.items() if key.startswith("hooks")}
    for hook in loop.hooks:
        for unit, limit in hook.limits.items():
            is_set = any(key.endswith(f".{unit}") or f"'{unit}'" in repr(new) for key, new in of_hooks.items())
            if is_set and done[unit] > limit:
                end = f"{type(hook).__name__}.{unit}={limit}"
                raise UsageError(
                    f"{end} has passed: the checkpoint has made {done[unit]} of these {unit}; the run is "
                    "unchanged; write a later end"
                )


def _check_that_nothing_is_lost(source: Path, trace: Mapping[str, Any], place: Path | None) -> None:
    """Check that a run has what a resume from a checkpoint needs, or without one, that it may start from the beginning.

    It may if it was killed before the first checkpoint was committed.

    The trace records the first checkpoint a moment after its commit. The line of the first epoch in the metrics is
    written just before its checkpoint, so there may be a line without a checkpoint.

    Raises:
        UsageError: the checkpoint has no optimizer state any more; or there is none, and the run has recorded a
            training epoch or has had a checkpoint: a new start would replace its files.
    """
    if place is not None:
        check_resumable(place)
        return
    recorded = list(Reader(source).epochs())
    is_at_its_first = len(recorded) <= 1 and trace.get("status") in ("running", "failed")
    had_none = trace.get("has_checkpoints") is not True
    if had_none and (is_at_its_first or is_unfinished(source / CHECKPOINTS)):
        return
    epochs = sum(line["epoch"] > 0 for line in recorded)
    iterations = trace.get("iterations_done") if trace.get("status") in ("finished", "interrupted") else None
    if epochs or iterations or not had_none:
        done = counted(epochs, "epoch") if epochs else counted(iterations or 0, "iteration")
        shown = from_here(source)
        raise UsageError(
            f"{shown} has no checkpoint left to resume from, and starting from the beginning would replace its "
            f"records ({done} done); nothing was changed. Put the checkpoints back into {shown / CHECKPOINTS}, or "
            f"start in a new directory with: emrun train {shown}"
        )


def _as_written(source: Path, stored: Config) -> Node:
    """Return the config of a run as emrun has written it: an edit since is a change of this resume."""
    written = plain_of(source / CONFIG, None)
    return node_of(written, Position(CONFIG)) if isinstance(written, dict) else stored.root


def _store(run: Run, merged: Node, was: Node, source: Path, changed: Mapping[str, Any], dataset: Any) -> None:
    """Save the changed config as the config of the run, the old config as `config-<n>.yaml`, and new classes."""
    record_classes(dataset, run.directory)
    if not changed:
        return
    text = (source / CONFIG).read_text(encoding="utf-8")
    numbers = (number for number in itertools.count(1) if not (run.directory / f"config-{number}.yaml").exists())
    write_atomically(run.directory / f"config-{next(numbers)}.yaml", dump(was, text))
    write_with_plain(run.directory / CONFIG, dump(merged, text), merged.plain())
    _LOG.info("changed: %s", ", ".join(_shown(changed)))


def _shown(changed: Mapping[str, Any]) -> list[str]:
    """Return changes for a message: `model.optimizer.lr: 0.1 -> 0.01`; a missing value and null are `not set`."""
    shown = {key: ["not set" if value is None else repr(value) for value in pair] for key, pair in changed.items()}
    return [f"{key}: {' -> '.join(pair)}" for key, pair in shown.items()]


def _changes(old: Node, new: Node) -> dict[str, list[Any]]:
    """Return key -> [old value, new value] for all keys in which two configs differ; null is like a missing value."""
    pairs = {key: [node and node.plain() for node in sides] for key, *sides in differences(old, new)}
    if (moved := order_of_hooks(old, new)) is not None:
        pairs["hooks"] = [moved["a"], moved["b"]]
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
