"""Repeat a step that failed, or whose update was skipped, and find the examples of its batch that cause this."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from emrun.base.censor import hidden
from emrun.base.encoding import set_random_state
from emrun.base.errors import StateError
from emrun.base.fields import reading
from emrun.base.preparations import PREPARATION
from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.sources import is_nested, length as length_of, parts
from emrun.base.temporary import temporary_folder
from emrun.base.types import Batch
from emrun.base.wording import counted
from emrun.config.config import read_config
from emrun.config.import_finder import Imported
from emrun.config.plan import Plan
from emrun.config.recipe import Recipe
from emrun.diagnosis.values import not_finite, scalars
from emrun.hook import AbstractHook, UpdateSkipped
from emrun.loop.determinism import DeterministicKernels
from emrun.loop.main_loop import MainLoop
from emrun.model import AbstractModel
from emrun.storage.capsules import ANOTHER_CAPSULE, FAILURES, Capsule, find_capsule, kind_of, read_capsule
from emrun.storage.checkpoints.finding import newest
from emrun.storage.checkpoints.state_file import FILE
from emrun.storage.files import read_regular
from emrun.storage.preparation import read_preparation
from emrun.storage.run import CHECKPOINTS, CONFIG, check_config
from emrun.streams.stream import StreamWrapper
from emrun.training.members import load_model

_MOST = 16  # causes that are looked for; each costs a step for every halving of the batch
_LARGEST = 64_000_000  # bytes of a config


@dataclass(slots=True)
class Replay:
    """The result of repeating a step.

    Args:
        capsule: the step as it was saved.
        error: the error of the repeated step; None when the step succeeded.
        message: the class and the message of the error, without values from the environment.
        reproduced: whether the error is the original one.
        causes: groups of examples, usually of one example; each group alone fails in the same way.
        is_every: whether every example that was tried fails alone.
        is_cut: whether there may be more causes than these.
        known_as: example of the causes -> its numbers and strings, such as an id, by source.
        not_finite: source -> those examples of the causes in which it has values that are not finite.
        anomaly: the report of `torch.autograd.detect_anomaly`; None when that was not requested.
        notes: in what the repeated step may differ from the original one.
    """

    capsule: Capsule
    error: BaseException | None = None
    message: str = ""
    reproduced: bool = False
    causes: list[list[int]] = field(default_factory=list)
    is_every: bool = False
    is_cut: bool = False
    known_as: dict[int, dict[str, Any]] = field(default_factory=dict)
    not_finite: dict[str, list[int]] = field(default_factory=dict)
    anomaly: str | None = None
    notes: list[str] = field(default_factory=list)


def replay(directory: str | Path, device: str | None = None, anomaly: bool = False) -> Replay:
    """Repeat the step of a capsule and find the examples that make it fail; write nothing into the run directory.

    The model and the hook that failed are built from the config of the run. The dataset is built only if one of them
    takes it as an argument, or if the run keeps what it has learnt.

    Args:
        directory: a capsule, or a run directory, which means its newest capsule.
        device: another device for the model, such as `cpu`.
        anomaly: also look for the operation whose gradient is NaN.

    Raises:
        UsageError: there is no capsule.
        ConfigError: the config of the run cannot be used.
        StateError: the weights no longer fit the model of the config, or the hook has changed.
        StorageError: the capsule is damaged.
        BaseException: any error that the model, the dataset or the hook raises while it is built.
    """
    place, run_directory = map(Path.resolve, find_capsule(Path(directory)))  # user code may change the directory
    capsule = read_capsule(place, run_directory)
    check_config(run_directory)
    config = read_config(run_directory, [f"model.device={device}"] if device is not None else [])
    plan = Plan.of(config, Imported())
    result = Replay(capsule, notes=list(_differences(capsule, plan)))
    with preserved_randomness(), temporary_folder("replay") as output_dir:
        attempt = _Attempt(capsule, plan, output_dir, result.notes)
        result.error = attempt.run(capsule.batch)
        if result.error is not None:
            result.message = f"{kind_of(result.error)}: {hidden(str(result.error))}"
            result.reproduced = attempt.is_same(result.error, exactly=not attempt.is_part)
        if result.reproduced and not _is_out_of_memory(result.error):
            _find_causes(result, attempt)
        if anomaly:
            result.anomaly = attempt.look_for_anomaly()
    return result


class _Attempt:
    """Repeats the step of a capsule any number of times, each time from the same weights and random states."""

    def __init__(self, capsule: Capsule, plan: Plan, output_dir: Path, notes: list[str]) -> None:
        self._capsule = capsule
        self._plan = plan
        self._is_skip = capsule.facts["error"] == kind_of(UpdateSkipped())
        self._seed = int(plan.get("seed", 0))
        self._hook_recipe = recipe = self._recipe_of_hook()
        self._supplied: dict[str, Any] = {"output_dir": output_dir, "on_bad_example": plan.on_bad_example}
        self._supplied |= {"dataset": None, "load_model": partial(load_model, self._supplied, [])}
        kept = self._supplied[PREPARATION] = read_preparation(capsule.run_directory)
        builders = (plan.model, recipe)
        wanted = bool(kept.given) or any(builder is not None and builder.wants("dataset") for builder in builders)
        order = ("model", "dataset") if plan.dataset.wants("model") else ("dataset", "model")
        for what in order:  # as trained
            if what == "model" or wanted:
                seed_everything(self._seed, what)
                self._supplied[what] = getattr(plan, what).build(self._supplied)
        self._model: AbstractModel = self._supplied["model"]
        if kept and hasattr(self._model, "use_dataset"):
            self._model.use_dataset(self._supplied["dataset"])
        self._weights: Path | None = capsule.place
        if capsule.facts["weights"] == "lost":
            self._weights = newest(capsule.run_directory / CHECKPOINTS)
            name = self._weights.name if self._weights is not None else "a new model, as there is no checkpoint"
            notes.append(f"the weights could not be read from the device; instead they are those of {name}")
        if self._weights is not None:
            self._model.load_initial = None  # a new model begins with other weights
        has_windows = capsule.step.train and self._model.iterations_per_update > 1
        self.is_part = self._is_skip and has_windows
        """Whether an update was skipped of which the batch is only a part, so that its gradients are others."""
        if has_windows:
            notes.append("the batch makes an update alone; the gradients of the others of its update were not saved")
        self._random = dict(capsule.state["random"])
        if capsule.step.event != "before_batch":
            self._model.before_batch = None  # the batch was saved after this event
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if len(self._random["cuda"]) > devices:
            count = len(self._random["cuda"])
            notes.append(f"the capsule has random states of {count} GPUs, but this machine has only {devices}")
        self._random["cuda"] = self._random["cuda"][:devices]

    def _recipe_of_hook(self) -> Recipe | None:
        """Return the recipe of the hook that failed, if it was a hook: the capsule has only its index in the config."""
        index = self._capsule.step.hook
        if index is None or index >= len(self._plan.hooks):
            return None
        name = getattr(self._plan.hooks[index].target, "__qualname__", None)
        if name != self._capsule.step.hook_class:
            before = self._capsule.step.hook_class
            raise StateError(f"hooks[{index}] is {name}, not {before} as when the run failed; undo the change")
        return self._plan.hooks[index]

    def run(self, batch: Batch) -> BaseException | None:
        """Do the step on a batch; return its error, or None when it succeeds."""
        # a loop that is where the run was
        step = self._capsule.step
        hooks = self._hooks()
        policy = (self._plan.get("main_loop", {}) or {}).get("on_nan_loss", "error")
        loop = _ReplayLoop(self._model, None, hooks, seed=self._seed, on_unused_sources="ignore", on_nan_loss=policy)
        loop.start_from(step.epoch, step.iteration, evaluating=step.evaluating)
        if self._is_skip:
            count = length_of(next(iter(batch.values()), ()))
            full_count = length_of(next(iter(self._capsule.batch.values()), ()))
            loop.note_skipped(count / full_count if full_count > 0 else 1.0)

        # the weights and the states from before the step
        if self._weights is not None:
            with reading(f"{self._weights}: weights", ANOTHER_CAPSULE, self._model.load):
                self._model.load(self._weights)
        if self._capsule.state["model"] is not None:
            with reading(f"{self._capsule.place / FILE}: model", ANOTHER_CAPSULE, self._model.load_state_dict):
                self._model.load_state_dict(self._capsule.state["model"])
        if self._hook_recipe is not None and self._capsule.state["hook"]:
            what = f"{self._capsule.place / FILE}: hook {type(hooks[0]).__name__}"
            with reading(what, ANOTHER_CAPSULE, hooks[0].load_state_dict):
                hooks[0].load_state_dict(self._capsule.state["hook"])
        if not step.train and self._weights is not None:
            self._model.load(self._weights)  # again: those for evaluations, which may be others

        # the step
        def only_batch() -> Iterator[Batch]:
            set_random_state(self._random)
            yield dict(batch)
            if step.train:
                loop.batches.finish_update()  # of a window that the batch does not end
            raise _WentThroughError  # whatever follows is not part of the step

        stream = StreamWrapper(only_batch, name=step.stream, training=step.train, seed=self._seed)
        try:
            with loop:
                if step.train:
                    loop.epoch([stream], [])
                else:
                    loop.epoch([], [stream])
        except _WentThroughError:
            if not loop.skipped:
                return None
            matching = [error for error in loop.skipped if self.is_same(error, exactly=True)]
            return matching[0] if matching else loop.skipped[0]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's code may also have called sys.exit
            return error
        if loop.outcome is not None and loop.outcome.signal_number is not None:
            raise KeyboardInterrupt
        return None

    def _hooks(self) -> list[AbstractHook]:
        """Return the hook that failed, and the hook that makes kernels deterministic."""
        kernels = [DeterministicKernels()] if self._plan.get("deterministic", False) else []
        if self._hook_recipe is None:
            return [*kernels]
        seed_everything(self._seed, "hooks")
        hook = self._hook_recipe.build(self._supplied)
        if self._capsule.step.event != "before_batch":
            AbstractHook.mute(hook, "before_batch")  # the saved batch has its changes
        return [hook, *kernels]

    def is_same(self, error: BaseException, *, exactly: bool) -> bool:
        """Return whether class and message are those of the original error; without `exactly`, ignore numbers in it."""
        facts = self._capsule.facts
        if kind_of(error) != facts["error"]:
            return False
        if _is_out_of_memory(error) or (self._is_skip and not exactly):
            return True  # the message depends on how much memory is free, or on the gradients of all examples
        messages = (hidden(text) for text in (str(error), facts["message"]))
        return len({message if exactly else re.sub(r"\d+", "0", message) for message in messages}) == 1

    def look_for_anomaly(self) -> str:
        """Do the step with `torch.autograd.detect_anomaly`; return its report."""
        if not self._capsule.step.train:
            return "not looked for, because an evaluation has no gradients"
        with warnings.catch_warnings(record=True, action="always") as caught, torch.autograd.detect_anomaly():
            error = self.run(self._capsule.batch)
        texts = [str(warning.message) for warning in caught if "Error detected in" in str(warning.message)]
        texts = [text.partition("(Triggered internally")[0].rstrip() for text in texts]
        is_other = error is not None and not self.is_same(error, exactly=False)
        return "\n".join([*texts, *([str(error)] if is_other else [])]).strip() or "no gradient is NaN"


class _ReplayLoop(MainLoop):
    """A main loop that notes the updates that hooks skip."""

    skipped: Sequence[UpdateSkipped] = ()

    def note_skipped(self, share: float) -> None:
        """Note the updates that hooks skip from now on.

        Args:
            share: the share of the examples in the batch. Gradients are scaled by it: those of few examples are larger
                than their mean.
        """
        skipped: list[UpdateSkipped] = []
        notify = self.notify

        def noting(event: str, **arguments: Any) -> None:
            if event == "before_update" and share != 1:
                for group in arguments["optimizer"].param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.mul_(share)
            try:
                notify(event, **arguments)
            except UpdateSkipped as error:
                skipped.append(error)
                raise

        self._set(notify=noting, skipped=skipped)


class _WentThroughError(Exception):
    """Ends the loop when the step has succeeded."""


def _differences(capsule: Capsule, plan: Plan) -> Iterator[str]:
    """Yield the known differences from the original step."""
    facts = capsule.facts
    step = capsule.step
    stored = capsule.place / CONFIG
    now = read_regular(capsule.run_directory / CONFIG, _LARGEST)
    if stored.exists() and read_regular(stored, _LARGEST, depth=3) != now:
        yield f"config.yaml has changed since the run failed; the previous one is in {FAILURES}/{capsule.place.name}"
    is_known = not facts["weights"].startswith("unknown")
    if facts["weights"] == "after the update" or not is_known:
        saved = facts["checkpoint"]
        before = "there is no checkpoint before it"
        if saved is not None:
            count = step.iteration - saved["iteration"]
            before = f"{saved['name']} was saved {counted(count, 'iteration')} before the step"
        when = "are" if is_known else "may be"
        yield f"the weights {when} those after the step's update; {before}"
    for name, reason in facts["left_out"].items():
        yield f"not saved in the capsule: {name}: {reason}"
    if step.hook_class is not None:
        yield f"of all hooks, only {step.hook_class} is called"
    nothing = AbstractHook.before_batch
    if step.event != "before_batch" and any(
        getattr(recipe.target, "before_batch", nothing) is not nothing for recipe in plan.hooks
    ):
        yield "before_batch of the hooks is not called: the saved batch already has their changes"


def _find_causes(result: Replay, attempt: _Attempt) -> None:
    """Halve the batch repeatedly to find the smallest groups of examples that fail alone."""
    batch = result.capsule.batch

    def fails(examples: Sequence[int]) -> bool:
        error = attempt.run({name: _rows(values, examples) for name, values in batch.items()})
        return error is not None and attempt.is_same(error, exactly=False)

    try:
        length = length_of(next(iter(batch.values()), ()))
        result.causes = halve(list(range(length)), fails, _MOST)
    except (IndexError, TypeError):  # a source without rows
        result.notes.append("the batch cannot be divided into examples")
        return
    result.is_cut = len(result.causes) >= _MOST
    tried = len(result.causes) if result.is_cut else length
    result.is_every = length > 1 and result.causes == [[index] for index in range(tried)]
    examples = [index for group in result.causes for index in group]
    known = {name: ids for name, values in parts(batch) if (ids := scalars(values)) is not None}
    shown = [] if result.is_every else examples[:_MOST]
    result.known_as = {index: {name: ids[index] for name, ids in known.items()} for index in shown}
    gaps = {name: [index for index in not_finite(values) if index in examples] for name, values in parts(batch)}
    result.not_finite = {name: rows for name, rows in gaps.items() if rows}


def halve(examples: list[int], fails: Callable[[list[int]], bool], most: int) -> list[list[int]]:
    """Return the smallest groups of examples that fail, found by halving; a group of which no half fails is not split.

    Args:
        examples: a group that fails.
        fails: returns whether a smaller group fails.
        most: the maximum number of groups.
    """
    if len(examples) <= 1:
        return [examples]
    middle = len(examples) // 2
    failing = [half for half in (examples[:middle], examples[middle:]) if fails(half)]
    if not failing:
        return [examples]
    groups: list[list[int]] = []
    for half in failing:
        if len(groups) < most:
            groups += halve(half, fails, most - len(groups))
    return groups


def _rows(values: Any, examples: Sequence[int]) -> Any:
    if isinstance(values, Mapping):
        return {name: _rows(entry, examples) for name, entry in values.items()}
    if isinstance(values, list | tuple):
        return [values[index] for index in examples]
    if is_nested(values):
        return torch.nested.nested_tensor([values[index] for index in examples], layout=values.layout)
    return values[list(examples)]


def _is_out_of_memory(error: BaseException | None) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError)
