"""What a config and its data agree on, tried out: batches of every stream, a step, evaluations, saving and loading."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from emrun.config.config import Config
from emrun.config.import_finder import Imported
from emrun.config.interpolation import unread_vars
from emrun.config.plan import Plan
from emrun.dataset import SourceInfo, open_stream, stream_names
from emrun.diagnosis.model_facts import memory, parameters
from emrun.diagnosis.private_state import DIGEST, NOT_PERSISTENT, unsaved_state, varying
from emrun.encoding import encode
from emrun.epoch_data import read_by
from emrun.errors import ArgumentError, ConfigError, Problem, StateError, reason_of
from emrun.events import listener, may_change_batches, may_read_anything
from emrun.hook import TrainingTerminated
from emrun.loop.main_loop import MainLoop
from emrun.loop.outcome import warn_of_no_end
from emrun.model import AbstractModel
from emrun.randomness import preserved_randomness, seed_everything
from emrun.storage.run import Run
from emrun.storage.state_file import load_state, save_state
from emrun.stream_context import StreamContext
from emrun.temporary import TemporaryFolder
from emrun.training.build import DeterministicKernels, Training, assemble
from emrun.types import Batch
from emrun.wording import meant_of

_BATCHES = 2
_MOST_BATCHES = 100  # are looked at to find two that the loop would run
_WAYS = (
    "keep it in a buffer (register_buffer), in get_extra_state() and set_extra_state() of the module, or in "
    "state_dict() and load_state_dict() of the model"
)
_TIMED = 3  # the second batch is run so often; the fastest counts


def try_out(config: Config) -> dict[str, Any]:
    """Build what a config describes and try it out, without changing anything: no file, no random state is left.

    The first two batches of every stream are looked at. A copy of the model makes a step with each of the train
    stream's, evaluates every stream, and is saved and loaded again. Hooks are built and registered, no more; those that
    may change batches get the events up to `before_batch`, and `after_training`.

    Args:
        config: the config.

    Returns:
        A tree of plain values. `streams`: stream -> {batches, runs, sources: source -> {dtype, shape, range, used_by}};
        `outputs`: output -> {dtype, shape, range}; `parameters`: [{module, class, shapes, count, bytes, trained}];
        `memory`: what -> bytes; `seconds_per_epoch`: stream -> seconds, for streams of known length;
        `notes`: what may be a mistake.

    Raises:
        ConfigError: the config cannot be used.
        StreamError: a stream breaks its contract.
        StateError: the model does not come back from a checkpoint as it was.
        BaseException: what the dataset, the model or a hook raises.
    """
    prepared = Plan.with_evaluations(config.with_defaults({"seed": 0}), Imported())
    with _unchanged_process(), TemporaryFolder("check") as place, _notes() as notes:
        notes.extend((*config.notes, *unread_vars(config.root)))
        training = assemble(prepared, place, Run(place))
        warn_of_no_end(training.hooks)
        notes.extend(_streams_of_no_dataset(prepared, training.dataset))
        switches = [hook for hook in training.hooks if isinstance(hook, DeterministicKernels)]
        for switch in switches:
            switch.before_training()
        try:
            copy = _build_model(prepared, training)
            found = _Trial(training, copy, notes).run()
            _check_round_trip(training, copy, found, place)
            notes.extend(found.lost_state())
        except ArgumentError as error:
            node = prepared.model.node.get(error.argument)
            position = node.position if node else prepared.model.node.key_position
            raise ConfigError(Problem(position, f"model.{error.argument}", error.message)) from error
        finally:
            for switch in switches:
                switch.after_training(success=True)
        return found.report()


def _build_model(prepared: Plan, training: Training) -> AbstractModel:
    """Build the model once more, in a loop of its own, so that no hook hears of its updates."""
    seed_everything(prepared.get("seed", 0), "model")
    supplied = {"dataset": training.dataset, "output_dir": str(training.output_dir)}
    model: AbstractModel = prepared.model.build(supplied)
    loop = MainLoop(model, training.dataset, train_stream_name=training.main_loop.train_stream_name)
    loop.checks = training.main_loop.checks
    loop.saves = True
    may_fail = any(map(may_change_batches, (*training.hooks, model)))  # as in a training
    for each in (training.model, model):
        training.main_loop.materialise(each, may_fail=may_fail)
    loop.notify("before_training")
    loop.notify("before_epoch", epoch_id=1)
    return model


def _streams_of_no_dataset(prepared: Plan, dataset: Any) -> list[str]:
    """Return what is to be said about streams under `eval` that a dataset does not have."""
    there = stream_names(dataset)
    named = prepared.get("eval", {})
    return [
        f"eval.{name}: the dataset has no stream {name!r}{meant_of(name, there)}"
        for name in named
        if name not in there and not hasattr(dataset, f"{name}_stream")
    ]


class _Trial:
    """Runs a model on the first batches of every stream and takes note of what it sees."""

    def __init__(self, training: Training, model: AbstractModel, notes: list[str]) -> None:
        self._loop = training.main_loop
        self._dataset = training.dataset
        self._hooks = training.hooks
        self._model = model
        self._changers = [each for each in (*training.hooks, model) if may_change_batches(each)]
        self._notes = notes
        self._lengths = _lengths(training.dataset)
        self._seconds: dict[str, float] = {}  # of one batch, reading included
        self._streams: dict[str, Any] = {}
        self._outputs: dict[str, SourceInfo] = {}
        self._batches_seen: list[tuple[str, Batch]] = []
        self._unsaved: dict[str, str] = {}  # before the first update
        self._again = training.model

    @property
    def first_batches(self) -> dict[str, Batch]:
        """The first batch of each stream that the loop runs, as hooks change it."""
        return dict(reversed(self._batches_seen))

    def run(self) -> _Trial:
        """Try all streams: those of the loop, then the others, of which only the sources are looked at."""
        own = self._loop.dataset_streams
        hooks = [each for each in self._changers if each is not self._model]
        for hook in hooks:
            _call(hook, "before_training")
            _call(hook, "before_epoch", epoch_id=1)
        for name in [*own, *(each for each in stream_names(self._dataset) if each not in own)]:
            try:
                self._try_stream(name, is_run=name in own)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the user's code may also have called sys.exit
                if name not in own:
                    self._notes.append(
                        f"stream {name!r}, which main_loop does not run: {type(error).__name__}: {reason_of(error)}"
                    )
                    continue
                error.add_note(f"while trying the first batches of stream {name!r}")
                raise
        for hook in hooks:
            _call(hook, "after_training", success=True)
        return self

    def _try_stream(self, name: str, *, is_run: bool) -> None:
        sources: dict[str, SourceInfo] = {}
        usable = 0
        batches = _timed(self._batches(name))
        changed_by = ", ".join(type(each).__name__ for each in self._changers)
        check = self._loop.checks.begin(name, changed_by) if is_run else len
        for batch, seconds in itertools.islice(batches, _MOST_BATCHES):
            if not self._is_usable(check(batch), is_run=is_run):
                continue
            changed = self._change(name, batch) if is_run else batch
            if not changed:
                continue
            for source, values in {**batch, **changed}.items():
                sources.setdefault(source, SourceInfo()).add(values)
            if is_run:
                self._batches_seen.append((name, changed))
                self._seconds[name] = seconds + self._run_model(name, changed, usable)
            usable += 1
            if usable == _BATCHES:
                break
        else:
            if is_run and not usable and next(batches, None) is None:
                self._loop.checks.report_empty_stream(name, self._loop.on_empty_stream)
        batches.close()
        self._notes += [f"stream {name!r}: source {each!r} has values that are not finite" for each in _gaps(sources)]
        self._streams[name] = {
            "batches": self._lengths.get(name),
            "looked_at": usable,
            "runs": self._how_often(name),
            "sources": {source: {**_seen(info), "used_by": self._users(source)} for source, info in sources.items()},
        }

    def _change(self, name: str, batch: Batch) -> Batch:
        """Return what hooks make of a batch before the model gets it, nothing when that is to be skipped."""
        if not self._changers:
            return batch
        changed = dict(batch)
        self._loop.training = name == self._loop.train_stream_name
        try:
            for each in self._changers:
                _call(each, "before_batch", stream_name=name, batch=changed)
        finally:
            self._loop.training = False
        return changed if self._loop.checks.check_changed(changed) else {}

    def _is_usable(self, length: int, *, is_run: bool) -> bool:
        """Tell whether the loop would run the model on a batch of this length."""
        fixed = self._loop.fixed_batch_size
        return not is_run or (length > 0 and fixed in (None, length))

    def _batches(self, name: str) -> Iterator[Batch]:
        training = name == self._loop.train_stream_name
        context = StreamContext(name, seed=self._loop.seed, epoch=int(training))
        batches = iter(open_stream(self._dataset, name, context))
        try:
            yield from batches
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    def _run_model(self, name: str, batch: Batch, index: int) -> float:
        """Run the model on a batch as the loop would; return the seconds that it took."""
        train = name == self._loop.train_stream_name
        if train and index == 0:
            with preserved_randomness():
                self._model.run(batch, False, name)  # as in the zeroth epoch
            self._unsaved = unsaved_state(self._model)
        seconds = float("inf")
        for _ in range(_TIMED if index else 1):
            began = perf_counter()
            outputs = self._model.run(batch, train, name)
            _synchronise()
            seconds = min(seconds, perf_counter() - began)
        self._loop.check_outputs(outputs)
        for output, values in outputs.items():
            self._outputs.setdefault(output, SourceInfo()).add(values)
        return seconds

    def lost_state(self) -> Iterator[str]:
        """Yield what has changed in training and is in no checkpoint, nor made anew from any batch, as caches are.

        The model of the training, into which the copy's checkpoint was loaded, is run on the batches that the copy has
        seen, and so is the copy once more: what is made from batches is equal then.
        """
        if not self._changed():
            return
        loop = MainLoop(self._again, self._dataset, train_stream_name=self._loop.train_stream_name)
        loop.notify("before_training")
        loop.notify("before_epoch", epoch_id=1)
        for name, batch in self._batches_seen:
            for model in (self._again, self._model):
                with preserved_randomness():
                    seed_everything(0, "training", name)
                    model.run(batch, name == self._loop.train_stream_name, name)
        for what in self.suspects():
            way = "register it without persistent=False" if what.endswith(NOT_PERSISTENT) else _WAYS
            yield f"{what} changes in training, but is in no checkpoint: a resume would not be exact; {way}"

    def _changed(self) -> set[str]:
        """Return what has changed since the first update, and may be in no checkpoint."""
        return varying(self._unsaved, unsaved_state(self._model))

    def suspects(self) -> list[str]:
        """Return what has changed in training and is another in the model that has the copy's checkpoint."""
        one, other = unsaved_state(self._again), unsaved_state(self._model)
        names = sorted(self._changed() & varying(one, other))
        # of the model itself, numbers and texts: weights differ as soon as something else does
        return [each for each in names if not (each.startswith("model") and one.get(each, DIGEST).startswith(DIGEST))]

    def _users(self, source: str) -> list[str]:
        in_model = (*self._model.input_names, *self._model.optional_input_names)
        readers = [type(hook).__name__ for hook in self._hooks if source in (read_by(hook) or ())]
        users = [*(["model"] if source in in_model else []), *dict.fromkeys(readers)]
        able = [type(each).__name__ for each in (*self._hooks, self._model) if may_read_anything(each)]
        return users or [f"{name} (possibly)" for name in dict.fromkeys(able)]

    def _how_often(self, name: str) -> str:
        if name == self._loop.train_stream_name:
            return "trained on"
        if name in self._loop.extra_streams:
            return "evaluated"
        return "not run by main_loop"

    def report(self) -> dict[str, Any]:
        """Return what was seen."""
        lengths: dict[str, float] = dict(self._lengths)
        if self._loop.fixed_epoch_size is not None:
            lengths[self._loop.train_stream_name] = self._loop.fixed_epoch_size
        for name, interval in self._loop.intervals.items():
            if name in lengths:
                lengths[name] /= interval or 1
        self._notes += [f"output {name!r} has values that are not finite" for name in _gaps(self._outputs)]
        return {
            "streams": self._streams,
            "outputs": {name: _seen(info) for name, info in self._outputs.items()},
            "parameters": list(parameters(self._model)),
            "memory": memory(self._model),
            "seconds_per_epoch": {
                name: seconds * lengths[name] for name, seconds in self._seconds.items() if lengths.get(name)
            },
            "notes": self._notes,
        }


def _call(listening: Any, event: str, **arguments: Any) -> None:
    """Call an event of a hook or a model as the loop would; one that ends the training has no effect."""
    call = listener(listening, event)
    try:
        if call is not None:
            call(**arguments)
    except TrainingTerminated:
        pass
    except BaseException as error:
        error.add_note(f"in {event} of {type(listening).__name__}")
        raise


def _check_round_trip(training: Training, copy: AbstractModel, trial: _Trial, place: Path) -> None:
    """Save the copy, load it into the model of the training, and compare what both make of the same batches.

    Raises:
        StateError: it is not the same.
    """
    directory = place / "checkpoint"
    directory.mkdir()
    copy.save(directory)
    saved = encode(copy.state_dict(), "state of the model")
    save_state({"model": saved}, directory)
    model = training.model
    model.load(directory)
    model.load_state_dict(load_state(directory)["model"])
    came_back = encode(model.state_dict(), "state of the model", copied=True)
    for stream, batch in trial.first_batches.items():
        before, after = (_evaluated(each, batch, stream) for each in (copy, model))
        for name, value in before.items():
            if not _equal(value, after.get(name)):
                suspects = trial.suspects()
                cause = f". In no checkpoint, but changed by training: {'; '.join(suspects)}" if suspects else ""
                raise StateError(
                    f"the model does not come back from a checkpoint as it was: output {name!r} of stream {stream!r} "
                    "is another one; what its save(), load() and state_dict() leave out must be a parameter or a "
                    f"buffer, or part of get_extra_state(){cause}"
                )
    if not _equal(saved, came_back):
        raise StateError("the model's state_dict() is another one after load_state_dict() of the same")


def _evaluated(model: AbstractModel, batch: Batch, stream: str) -> Mapping[str, Any]:
    with preserved_randomness():
        seed_everything(0, "evaluation", stream)
        return model.run(batch, False, stream)


def _equal(one: Any, other: Any) -> bool:
    """Tell whether two values are the same, numbers of tensors up to what kernels may differ by."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.allclose(one, other, equal_nan=True) if one.is_floating_point() else torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, np.ndarray | np.generic) and isinstance(other, np.ndarray | np.generic):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return np.allclose(one, other, equal_nan=True) if one.dtype.kind in "fc" else np.array_equal(one, other)
    return bool(one == other) or repr(one) == repr(other)  # NaN is not equal to itself


def _seen(info: SourceInfo) -> dict[str, Any]:
    dtype, shape, span = info.row()
    if info.is_scalar:
        shape = "scalar"
    elif shape != "ragged":
        shape = "(B,)" if shape == "()" else f"(B, {shape[1:].replace(',)', ')')}"
    return {"dtype": dtype.replace("torch.", ""), "shape": shape, "range": span}


def _timed(batches: Iterator[Batch]) -> Generator[tuple[Batch, float], None, None]:
    """Yield each batch with the seconds it took to make."""
    began = perf_counter()
    for batch in batches:
        yield batch, perf_counter() - began
        began = perf_counter()


def _gaps(seen: Mapping[str, SourceInfo]) -> list[str]:
    return [name for name, info in seen.items() if info.has_gaps]


def _lengths(dataset: Any) -> dict[str, int]:
    """Return the number of batches of each stream whose dataset tells it."""
    told = dict(getattr(dataset, "num_batches", None) or {})
    return {str(name): int(count) for name, count in told.items() if count is not None and math.isfinite(count)}


def _synchronise() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """Put back what building a training changes in the process: random states and variables of the environment."""
    before = set(os.environ)
    try:
        with preserved_randomness():
            yield
    finally:
        for name in os.environ.keys() - before:
            del os.environ[name]


@contextmanager
def _notes() -> Iterator[list[str]]:
    """Collect the warnings of emrun's log."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Collect(logging.WARNING)
    log = logging.getLogger("emrun")
    propagates, log.propagate = log.propagate, False  # they are in the report
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
