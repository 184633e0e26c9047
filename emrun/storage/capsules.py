"""Failure capsules: directories that hold everything needed to repeat a step that failed or was skipped."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import emrun
from emrun.base import fields
from emrun.base.censor import hidden, hidden_in
from emrun.base.encoding import GENERATORS, decode, encode, encode_all
from emrun.base.errors import StorageError, UsageError, exit_status, reason_of
from emrun.base.types import Batch
from emrun.base.wording import from_here
from emrun.hook import AbstractHook, TrainingTerminated, UpdateSkipped
from emrun.model import AbstractModel
from emrun.storage.checkpoints.state_file import FILE, load_state, save_state
from emrun.storage.files import check_owner, copy_regular, make_directory, refuse_timeout, storing, written_aside
from emrun.storage.log import LOG
from emrun.storage.run import CONFIG, holds_run
from emrun.storage.sealed import damaged_file, read_seal, seal
from emrun.storage.step_randomness import StepRandomness

_LOG = logging.getLogger(__name__)

FAILURES = "failures"
FORMAT = 4
MOST = 5
"""How many capsules a run stores; older ones are deleted."""
_FACTS = "failure.json"
_ASIDE = ".tmp-"


@dataclass(frozen=True, slots=True)
class Step:
    """The place in a run where a batch was processed.

    Args:
        stream: the name of the stream.
        train: whether the model was to learn from the batch.
        evaluating: whether the command only evaluates, as `emrun eval` does.
        epoch: the number of training epochs finished before the batch.
        iteration: the number of training batches run before the batch.
        pass_number: the number of the pass over the stream.
        batch: the index of the batch in the pass.
        event: the event in which the failure happened, None for the model's `run`.
        hook: the index of the hook that failed, None if no hook failed.
        hook_class: the name of the hook's class.
    """

    stream: str
    train: bool
    evaluating: bool
    epoch: int
    iteration: int
    pass_number: int
    batch: int
    event: str | None
    hook: int | None
    hook_class: str | None


@dataclass(frozen=True, slots=True)
class Capsule:
    """The content of a capsule.

    Args:
        place: the directory of the capsule.
        run_directory: the directory of the run or evaluation that failed.
        step: where the failure happened.
        facts: the content of `failure.json`.
        batch: source -> values, with tensors on the CPU, as the code that failed received them: a hook whose
            `before_batch` failed, or the model after all hooks' `before_batch`.
        state: the content of `state.pt`: `random`, `model`, `hook`.
    """

    place: Path
    run_directory: Path
    step: Step
    facts: dict[str, Any]
    batch: dict[str, Any]
    state: dict[str, Any]


_STEP = {
    "stream": fields.TEXT,
    **dict.fromkeys(("train", "evaluating"), fields.FLAG),
    **dict.fromkeys(("epoch", "iteration", "pass_number", "batch"), fields.whole()),
    **dict.fromkeys(("event", "hook_class"), fields.optional(fields.TEXT)),
    "hook": fields.optional(fields.whole()),
}
_WEIGHTS = ("before the step", "after the update", "lost", "unknown")
FACTS = {
    "format": fields.whole(1),
    "error": fields.TEXT,
    "message": fields.TEXT,
    "traceback": fields.TEXT,
    "versions": fields.mapping_of(fields.TEXT),
    "step": fields.record(_STEP),
    "random_before_step": fields.sequence_of(fields.choice(*GENERATORS)),
    "device": fields.optional(fields.TEXT),
    "checkpoint": fields.optional(fields.record({"name": fields.TEXT, "iteration": fields.whole()})),
    "left_out": fields.mapping_of(fields.TEXT),
    "weights": fields.Kind(
        f"one of {', '.join(_WEIGHTS)}", lambda value: type(value) is str and value.startswith(_WEIGHTS)
    ),
    "files": fields.FILES,
}
"""Field of `failure.json` -> the kind of its value."""

ANOTHER_CAPSULE = "restore the capsule from a copy, or choose another capsule of the run"


def keep_failure(
    run_directory: Path,
    error: BaseException,
    step: Step,
    batch: Batch,
    model: AbstractModel,
    *,
    randomness: StepRandomness,
    hook: AbstractHook | None,
    checkpoint: tuple[str, int] | None,
) -> Path | None:
    """Write a capsule of the step that failed, or whose update a hook has skipped.

    A resumed run that skips the same update again, for the same reason, has its capsule already. No capsule is written
    for failures that are not caused by a step: a termination, an interrupt, a mistake in the config, a file that cannot
    be written. An error while the capsule is written is logged, not raised.

    Args:
        run_directory: the directory that holds `failures`.
        error: the error of the step; an `UpdateSkipped` has the hook's state before the event.
        step: where the error happened.
        batch: the batch in its present state.
        model: the model; the step may have changed its weights already.
        randomness: knows the random states before the step.
        hook: the hook that failed or skipped the update, None if it was no hook.
        checkpoint: the name and the iteration of the newest checkpoint.

    Returns:
        The capsule's directory, None if there is none.
    """
    if isinstance(error, TrainingTerminated | KeyboardInterrupt) or exit_status(error) not in (1, 3):
        return None
    is_skip = isinstance(error, UpdateSkipped)
    what = "batch of the skipped update" if is_skip else "batch that failed"
    try:
        random, exact = randomness.before_step()
        facts = {
            **_facts(error),
            "step": asdict(step),
            "random_before_step": exact,
            "device": str(getattr(model, "device", "")) or None,
            "checkpoint": None if checkpoint is None else {"name": checkpoint[0], "iteration": checkpoint[1]},
        }
        place = _same(run_directory / FAILURES, facts) if is_skip else None
        if place is None:
            state = error.keep if isinstance(error, UpdateSkipped) else None
            place = _write(run_directory, facts, batch, model, hook, state, random)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # the error to report is that of the run
        _LOG.warning("cannot save the %s: %s: %s", what, type(failure).__name__, reason_of(failure))
        return None
    shown = from_here(place)
    advice = f"; repeat the step with: emrun replay {shown}" if is_skip else ""
    _LOG.info("saved the %s in %s%s", what, shown, advice)
    return place


def _same(root: Path, facts: Mapping[str, Any]) -> Path | None:
    """Return the capsule of the same step with the same error, if there is one."""
    numbers = _numbers(root) if root.is_dir() else []
    for number in numbers:
        with suppress(OSError, ValueError, RecursionError):
            stored, intact = read_seal(root / str(number) / _FACTS)
            if intact and all(stored.get(name) == facts[name] for name in ("step", "error", "message")):
                return root / str(number)
    return None


def _facts(error: BaseException) -> dict[str, Any]:
    """Return the fields of `failure.json` that describe an error, without values of the environment."""
    message = hidden(str(error))
    trace = hidden("".join(traceback.format_exception(error)))
    versions = {"emrun": emrun.__version__, "python": platform.python_version()}
    versions.update({name: metadata.version(name) for name in ("torch", "numpy")})
    return {"format": FORMAT, "error": kind_of(error), "message": message, "traceback": trace, "versions": versions}


def _write(
    run_directory: Path,
    facts: dict[str, Any],
    batch: Batch,
    model: AbstractModel,
    hook: AbstractHook | None,
    hook_state: Mapping[str, Any] | None,
    random: dict[str, Any],
) -> Path:
    root = run_directory / FAILURES
    with storing(root, "write"):
        # what a process that was killed has left
        check_owner(root / _FACTS)
        make_directory(root, exist_ok=True)
        for leftover in root.glob(f"{_ASIDE}*"):
            shutil.rmtree(leftover)

        # the capsule, under a temporary name until it is complete
        place = root / str(max(_numbers(root), default=0) + 1)
        with written_aside(place, root / f"{_ASIDE}{os.getpid()}") as aside:
            aside.mkdir()
            encoded, left_out = encode_all(batch)
            state: dict[str, Any] = {"batch": encoded, "random": random, "model": None, "hook": None}
            facts["weights"] = _save_weights(model, facts["step"], state, aside)
            if hook is not None:
                try:
                    state["hook"] = encode(hook.state_dict() if hook_state is None else dict(hook_state), "hook")
                except Exception as error:
                    left_out["the hook's state"] = str(error)
            facts["left_out"] = hidden_in(left_out)
            save_state(state, aside)
            if (run_directory / CONFIG).exists():
                copy_regular(run_directory / CONFIG, aside / CONFIG)
            check_owner(place)
            seal(aside, _FACTS, facts)

        # the oldest ones go
        for number in sorted(_numbers(root))[:-MOST]:
            old = root / f"{_ASIDE}{number}"
            (root / str(number)).rename(old)
            shutil.rmtree(old)
    return place


def _save_weights(model: AbstractModel, step: dict[str, Any], state: dict[str, Any], aside: Path) -> str:
    """Write the weights and the rest of the model's state; return whether they are from before or after the update."""
    try:
        model.save(aside)
        state["model"] = encode(model.state_dict(), "state of the model")
    except OSError:
        raise
    except Exception as error:  # a device that failed returns no data
        _LOG.warning("cannot save the weights: %s", reason_of(error))
        for path in aside.iterdir():
            path.unlink()
        return "lost"
    if not step["train"] or step["event"] == "before_batch":
        return "before the step"
    has_updated = model.has_updated
    if has_updated is None:
        return f"unknown: {type(model).__name__} does not report whether the step made an update"
    return "after the update" if has_updated else "before the step"


def _numbers(root: Path) -> list[int]:
    return [int(path.name) for path in root.iterdir() if path.name.isdecimal() and path.is_dir()]


def find_capsule(directory: Path) -> tuple[Path, Path]:
    """Return the directory of a capsule and the directory of its run.

    Args:
        directory: the directory of a capsule, or of a run, whose newest capsule is used.

    Raises:
        UsageError: the directory is neither of these, or the run has no capsule.
    """
    if (directory / _FACTS).exists():
        place = directory.resolve()
        if place.parent.name != FAILURES or not holds_run(place.parent.parent):
            raise UsageError(
                f"{directory} is not in the {FAILURES} directory of a run; emrun repeats a step with the run's config"
            )
        return directory, place.parent.parent
    if not holds_run(directory):
        raise UsageError(f"{directory} is neither a run directory nor a capsule in the {FAILURES} directory of a run")
    root = directory / FAILURES
    numbers = _numbers(root) if root.is_dir() else []
    if not numbers:
        raise UsageError(
            f"{directory} has no recorded failure: no step of the model or a hook has failed; if a stream failed, or a "
            f"hook outside of a batch, the traceback is in {directory / LOG}; StopOnNaN records a step with "
            "after_batch: true"
        )
    return root / str(max(numbers)), directory


def read_capsule(place: Path, run_directory: Path) -> Capsule:
    """Read a capsule and compare every file with its checksum; nothing in the files is imported or called.

    Raises:
        StorageError: the capsule is damaged, or has the format of another version of emrun.
        StateError: a field has an invalid value although its checksum is correct.
    """
    shown = from_here(place)
    try:
        facts, intact = read_seal(place / _FACTS)
        if not intact:
            raise ValueError("its checksum does not match")
    except (OSError, ValueError, RecursionError) as error:
        refuse_timeout(error, place)
        reason = reason_of(error)
        raise StorageError(f"capsule {shown}: {_FACTS} cannot be read ({reason}); the capsule is damaged") from error
    with fields.reading(f"{shown / _FACTS}", ANOTHER_CAPSULE):
        version = facts.get("format")
        if type(version) is int and version != FORMAT:
            newer = f"is newer than this emrun supports ({FORMAT}); update emrun"
            why = newer if version > FORMAT else "is of an earlier version of emrun, which alone can replay it"
            raise StorageError(f"capsule {shown}: format {version} {why}")
        fields.record(FACTS).check(facts)
        if FILE not in facts["files"]:
            raise fields.FieldError("files", f"is {fields.shown(list(facts['files']))}", f"a mapping that has {FILE}")
    damage = damaged_file(place, facts["files"])
    if damage is not None:
        raise StorageError(f"capsule {shown}: {damage[0]} is missing or was changed; the capsule is damaged")
    state = load_state(place)
    with fields.reading(f"{shown / FILE}", ANOTHER_CAPSULE):
        state = decode(state)
        batch = state.pop("batch")
        step = Step(**{name: facts["step"][name] for name in _STEP})
    return Capsule(place, run_directory, step, facts, batch, state)


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class, with its module unless the class is built into Python."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
