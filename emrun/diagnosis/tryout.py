"""Try out a config with its data: batches of every stream, a step, evaluations, saving and loading."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from emrun.base.encoding import encode_all
from emrun.base.errors import ArgumentError, ConfigError, reason_of
from emrun.base.preparations import PREPARATION
from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.sources import length, parts
from emrun.base.temporary import temporary_folder
from emrun.base.types import Batch, Json
from emrun.base.wording import meant_of
from emrun.config.config import Config
from emrun.config.import_finder import Imported
from emrun.config.interpolation import unread_vars
from emrun.config.plan import Plan
from emrun.dataset import SourceInfo, open_stream, stream_lengths, stream_names
from emrun.diagnosis.built_once import with_modules_built_once
from emrun.diagnosis.model_facts import (
    FloatTargets,
    StepMemory,
    memory,
    memory_per_rank,
    parameter_groups,
    parameters,
    timed_run,
)
from emrun.diagnosis.rehearsal import rehearse
from emrun.diagnosis.round_trip import RoundTrip
from emrun.diagnosis.values import sorted_sources
from emrun.epoch_data import read_by
from emrun.events import listener, may_change_batches, may_read_anything
from emrun.hook import AbstractHook, TrainingTerminated
from emrun.loop.determinism import DeterministicKernels
from emrun.loop.main_loop import MainLoop
from emrun.loop.outcome import warn_of_no_end
from emrun.model import AbstractModel
from emrun.storage.run import CHECKPOINTS, METRICS, ROWS, STEPS, Run
from emrun.stream_context import StreamContext
from emrun.streams.stream_pass import closable
from emrun.training.build import Training, assemble, plan_schedule
from emrun.training.members import load_model

_BATCHES = 2
_MOST_BATCHES = 100  # batches that are read to find two that the loop would run
_TIMED = 3  # runs of the second batch; the fastest counts


def try_out(config: Config, ranks: int = 1) -> Json:
    """Build the objects of a config and try them out; leave no file and no changed random state behind.

    The first two batches of every stream are read. A copy of the model makes a step with each of these batches of
    the train stream, evaluates every stream of the main loop, and is saved and loaded again. Hooks that may change
    batches get the events up to `before_batch`, and `after_training`. Then a training is rehearsed with all hooks, see
    `rehearse`.

    Args:
        config: the config.
        ranks: the number of ranks whose memory is forecast too, if there are several.

    Returns:
        A tree of plain values. `streams`: stream -> {batches, runs, sources: source -> {dtype, shape, range, used_by}};
        `reading`: `buffer` and `workers`, as they are used;
        `outputs`: output -> {dtype, shape, range}; `statistics`: stream -> what the model computed of the first batches
        as of a whole stream; `parameters`: [{module, class, shapes, count, bytes, trained}];
        `parameter_groups`: [{optimizer, class, group, lr, weight_decay, parameters, count}]; `precision`: that of the
        model, or None; `schedule`: the plan of the learning rates, see `SchedulePlan`, or None; `memory`: what uses it
        -> bytes; `seconds_per_epoch`: stream -> seconds, for streams of known length; `forecast`: what a run takes
        (`training`, `tensors of a step`, `checkpoint`, `kept checkpoints`, `record`, and `rank: ...`, see
        `memory_per_rank`) -> {`seconds` or `bytes`, `how`}, see `StepMemory`; `initial_weights`: what `init_from`
        loads, see `AbstractModel.load_initial`, or None; `notes`: warnings about possible mistakes.

    Raises:
        ConfigError: the config cannot be used.
        StreamError: a stream breaks its contract.
        StateError: a checkpoint does not restore the model exactly.
        BaseException: any error that the dataset, the model or a hook raises.
    """
    plan = Plan.with_evaluations(config.with_defaults({"seed": 0}), Imported())
    plan.check_trainable()
    with apart() as notes, temporary_folder("check") as place, temporary_folder("modules") as modules:
        # the objects of the config; each further model begins with the same module
        plan = replace(plan, model=with_modules_built_once(plan.model, modules))
        notes.extend((*config.notes, *unread_vars(config.root)))
        training = assemble(plan, place, Run(place))
        warn_of_no_end(training.hooks)
        schedule = plan_schedule(training, plan)
        notes.extend(
            f"eval.{name}: the dataset has no stream {name!r}{meant_of(name, stream_names(training.dataset))}"
            for name in plan.get("eval", {})
            if not hasattr(training.dataset, f"{name}_stream")
        )

        # a copy of the model makes steps, and is saved and loaded
        switch = DeterministicKernels() if plan.get("deterministic", False) else AbstractHook()
        switch.before_training()
        copy: AbstractModel | None = None
        try:
            copy, initial = _build_model(plan, training)
            round_trip = RoundTrip(copy, training.model)
            tryout = Tryout(training, copy, round_trip, notes, compiles=bool(plan.get("model", {}).get("compile")))
            tryout.run()
            round_trip.check(place / "checkpoint")
            notes.extend(round_trip.lost_state(partial(begin, known=training.main_loop)))
        except ArgumentError as error:
            raise ConfigError(plan.model.problem(error)) from error
        finally:
            if copy is not None:
                call_event(copy, "after_training", success=True)
            switch.after_training(success=True)

        # what is known now
        shown = None if schedule is None else schedule.as_dict()
        report = tryout.report()
        dataset = training.dataset
        lengths = tryout.lengths
        done = tryout.done
        kept = tryout.most_kept()
        if ranks > 1:
            copy.finish_update()  # of a long window: the optimizer gets its state
            report["forecast"] |= memory_per_rank(copy, ranks, tryout.forward)

        # a short training with all hooks
        del training, copy, round_trip, tryout  # the memory of two models
        rehearse(plan, place, dataset, lengths, ranks=ranks)
        notes[:] = dict.fromkeys(notes)
        report["forecast"] |= _on_disk(place, done, kept)
        return {**report, "schedule": shown, "initial_weights": initial}


def _on_disk(place: Path, done: Mapping[str, float], kept: int | None) -> Json:
    """Return the bytes of a checkpoint and, as far as they are known, of all that are kept, and of the record.

    Args:
        place: the directory of the rehearsal.
        done: the `epochs` and `iterations` of the run, if they are known.
        kept: how many checkpoints the run keeps at most, if this is known.
    """
    size = sum(file.stat().st_size for file in (place / CHECKPOINTS / "latest").resolve().iterdir())
    on_disk: Json = {"checkpoint": {"bytes": size, "how": "measured"}}
    if kept is not None:
        on_disk["kept checkpoints"] = {"bytes": kept * size, "how": f"at most {kept} of this size"}
    if done.get("iterations"):  # a run of the zeroth epoch alone has no steps
        lines = (place / METRICS).read_bytes().splitlines()
        per_step = (place / STEPS).stat().st_size / json.loads(lines[-1])["iteration"]
        per_epoch = len(lines[-1]) + (place / ROWS).stat().st_size / len(lines)
        size = round((done["epochs"] + 1) * per_epoch + done["iterations"] * per_step)  # also epoch 0
        on_disk["record"] = {"bytes": size, "how": "estimated from the rows of the short epoch"}
    return on_disk


def build_apart(config: Config) -> Training:
    """Return what a config builds, apart from any run: its directory is temporary and gone.

    Raises:
        ConfigError: the config cannot be used.
        BaseException: any error that the dataset, the model or a hook raises.
    """
    with apart(), temporary_folder("check") as place:
        return assemble(Plan.of(config.with_defaults({"seed": 0}), Imported()), place, Run(place))


def _build_model(plan: Plan, training: Training) -> tuple[AbstractModel, Mapping[str, Any] | None]:
    """Build the model once more, in a separate main loop, so that no hook gets its events.

    Returns:
        The model, and what it has loaded to begin with; None for nothing.
    """
    seed_everything(plan.get("seed", 0), "model")
    supplied: dict[str, Any] = {"dataset": training.dataset, "output_dir": str(training.output_dir)}
    supplied[PREPARATION] = training.prepared
    supplied["load_model"] = partial(load_model, supplied, [])
    model: AbstractModel = plan.model.build(supplied)
    initial = model.load_initial() if model.load_initial is not None else None
    begin(model, training.main_loop)
    return model, initial


def begin(model: AbstractModel, known: MainLoop, hook: AbstractHook | None = None) -> MainLoop:
    """Begin to train a model in a second main loop, with the arguments of the first and at most one hook."""
    hook = hook or AbstractHook()
    hook.limits = known.limits  # it stands for the hooks, for the schedule
    loop = _SecondLoop(
        model,
        known.dataset,
        [hook],
        train_stream_name=known.train_stream_name,
        fixed_epoch_size=known.fixed_epoch_size,
        overfit=known.streams.overfit,
        fixed_batch_size=known.parts.checks.fixed_batch_size,
        run=known.run,
    )
    loop.check_as(known)
    loop.parts.length.never_end()  # also where the training has no iteration
    loop.notify("before_training")
    loop.notify("before_epoch", epoch_id=1)
    return loop


class _SecondLoop(MainLoop):
    """A main loop of which the hooks of another one check the outputs."""

    def check_as(self, known: MainLoop) -> None:
        """Check outputs as another loop does."""
        self._set(check_outputs=known.check_outputs)


class Tryout:
    """Runs a model on the first batches of every stream and collects the contract."""

    def __init__(
        self,
        training: Training,
        model: AbstractModel,
        round_trip: RoundTrip,
        notes: list[str],
        *,
        compiles: bool = True,
    ) -> None:
        self._loop = training.main_loop
        self._dataset = training.dataset
        self._hooks = training.hooks
        self._model = model
        self._changers = [receiver for receiver in (*training.hooks, model) if may_change_batches(receiver)]
        self._round_trip = round_trip
        self._notes = notes
        self._lengths = stream_lengths(training.dataset)
        self.lengths: dict[str, int] = {}
        """Stream -> how many batches were read until two of them were usable."""
        self._seconds: dict[str, float] = {}  # for a batch, including reading
        self._streams: Json = {}
        self._outputs: dict[str, SourceInfo] = {}
        self._step_memory = None if compiles else StepMemory()
        self.done: dict[str, float] = {}
        """The `epochs`, `iterations` and `updates` to the end of the run, if they are known; after `report`."""
        self._rows = 0

    @property
    def forward(self) -> tuple[int, int]:
        """The most bytes of tensors that the forward pass of a step made, and the number of its rows."""
        return (self._step_memory.forward if self._step_memory is not None else 0), self._rows

    def run(self) -> None:
        """Try all streams: first those of the main loop; of the others, only the batches are read."""
        in_loop = self._loop.streams.sources
        with self.hooks_called():
            for name in [*in_loop, *(stream for stream in stream_names(self._dataset) if stream not in in_loop)]:
                try:
                    self._try_stream(name, is_run=name in in_loop)
                    self._look_at_sample(name)
                except BaseException as error:  # the user's code may also have called sys.exit
                    if name in in_loop or isinstance(error, KeyboardInterrupt):
                        error.add_note(f"while trying the first batches of stream {name!r}")
                        raise
                    self._notes.append(
                        f"stream {name!r}, which main_loop does not run, failed: {type(error).__name__}: "
                        f"{reason_of(error)}"
                    )

    @contextmanager
    def hooks_called(self) -> Iterator[None]:
        """Call the hooks that may change batches at the beginning and, unless something fails, at the end."""
        hooks = [receiver for receiver in self._changers if receiver is not self._model]
        for hook in hooks:
            call_event(hook, "before_training")
            call_event(hook, "before_epoch", epoch_id=1)
        yield
        for hook in hooks:
            call_event(hook, "after_training", success=True)

    def _try_stream(self, name: str, *, is_run: bool) -> None:
        is_trained = name == self._loop.train_stream_name
        sources: dict[str, SourceInfo] = {}
        looked_at = 0
        for batch, changed, seconds in self.usable(name, is_run=is_run):
            for source, values in parts({**batch, **changed}):
                sources.setdefault(source, SourceInfo()).add(values)
            if is_run:
                self._round_trip.batches.append((name, changed))
                self._seconds[name] = seconds + self._run_model(name, changed, looked_at)
                if is_trained and not looked_at:
                    self._notes += [
                        f"stream {name!r}: if a step fails, its batch is saved without source {source!r}: {reason}"
                        for source, reason in encode_all(changed)[1].items()
                    ]
            looked_at += 1
        self._notes += [
            f"stream {name!r}: source {source!r} has values that are not finite" for source in _gaps(sources)
        ]
        self._streams[name] = {
            "batches": self._lengths.get(name),
            "looked_at": looked_at,
            "runs": "trained on" if is_trained else "evaluated" if is_run else "not used in training",
            "sources": {source: {**_seen(info), "used_by": self._users(source)} for source, info in sources.items()},
        }

    def usable(self, name: str, *, is_run: bool = True) -> Iterator[tuple[Batch, Batch, float]]:
        """Yield the first two batches of a stream that the loop would run: as read, as hooks change them, and seconds.

        Raises:
            StreamError: the stream breaks its contract, or the loop runs it and it is empty.
        """
        usable = self.lengths[name] = 0
        changed_by = ", ".join(type(receiver).__name__ for receiver in self._changers)
        check = self._loop.parts.checks.begin(name, changed_by)
        with closing(self._batches(name)) as batches:
            for batch, seconds in itertools.islice(batches, _MOST_BATCHES):
                self.lengths[name] += 1
                if is_run and check(batch) == 0:
                    continue
                changed = self._change(name, batch) if is_run else batch
                if not changed:
                    continue
                yield batch, changed, seconds
                usable += 1
                if usable == _BATCHES:
                    return
            if is_run and not usable and next(batches, None) is None:
                self._loop.parts.checks.report_empty_stream(name)

    def _look_at_sample(self, name: str) -> None:
        """Add a note if only the first batches of a stream are evaluated, and these are sorted."""
        extra = self._loop.streams.extra.get(name)
        if extra is None or extra.batches is None:
            return
        with closing(self._batches(name)) as batches:
            sources = sorted_sources(batch for batch, _ in itertools.islice(batches, extra.batches))
        self._notes += [
            f"stream {name!r}: source {source!r} is sorted in the first {extra.batches} batches, which alone are "
            "evaluated; they may not represent the stream: shuffle it, or evaluate all of it"
            for source in sources
        ]

    def _change(self, name: str, batch: Batch) -> Batch:
        """Return the batch as hooks change it in `before_batch`; empty when the loop would skip it."""
        if not self._changers:
            return batch
        changed = dict(batch)
        with self._loop.progress.streams_of(train=name == self._loop.train_stream_name):
            for receiver in self._changers:
                call_event(receiver, "before_batch", stream_name=name, batch=changed)
        return changed if self._loop.parts.checks.check_changed(changed) else {}

    def _batches(self, name: str) -> Generator[tuple[Batch, float], None, None]:
        """Yield the batches of a stream, each with the seconds that reading it took."""
        trains = name == self._loop.train_stream_name
        context = StreamContext(name, seed=self._loop.seed, epoch=int(trains), read_by=self._loop.streams.reading.by)
        began = perf_counter()
        with closing(closable(open_stream(self._dataset, name, context))) as batches:
            for batch in batches:
                yield batch, perf_counter() - began
                began = perf_counter()

    def _run_model(self, name: str, batch: Batch, index: int) -> float:
        """Run the model on a batch as the loop would; return the seconds of the fastest run."""
        train = name == self._loop.train_stream_name
        if train and index == 0:
            targets = FloatTargets()
            watching = targets if self._step_memory is not None else nullcontext()
            with preserved_randomness(), self._steps_seen(), watching:
                self._model.run(batch, False, name)  # as in the zeroth epoch
            self._notes += targets.notes
            self._round_trip.begin()
            self._rows = length(batch)
        seconds = math.inf
        for _ in range(_TIMED if index else 1):
            with self._step_memory if train and not index and self._step_memory is not None else nullcontext():
                outputs, elapsed = timed_run(self._model, batch, train, name)
            seconds = min(seconds, elapsed)
        self._loop.check_outputs(outputs)
        if hasattr(self._model, "other_classes"):
            self._notes += self._model.other_classes(outputs, self._dataset)
        for output, values in outputs.items():
            self._outputs.setdefault(output, SourceInfo()).add(values)
        return seconds

    @contextmanager
    def _steps_seen(self) -> Iterator[None]:
        """Note the outputs of the steps of a `Graph`."""
        graph: Any = getattr(self._model, "module", None)
        with ExitStack() as watched:
            for _, name, take in getattr(graph, "graph_steps", ()):
                watched.callback(graph.get_submodule(name).register_forward_hook(self._noting(name, take)).remove)
            yield

    def _noting(self, step: str, take: int | None) -> Callable[..., None]:
        info = self._outputs[f"step {step}"] = SourceInfo()
        return lambda module, inputs, found: info.add(found if take is None else found[take])

    def _users(self, part: str) -> list[str]:
        source = part.partition(".")[0]  # of a mapping
        in_model = (*self._model.input_names, *self._model.optional_input_names)
        readers = [type(hook).__name__ for hook in self._hooks if {source, part} & {*(read_by(hook) or ())}]
        users = list(dict.fromkeys(readers))
        if {source, part} & {*in_model}:
            users.insert(0, "model")
        able = [type(receiver).__name__ for receiver in (*self._hooks, self._model) if may_read_anything(receiver)]
        return users or [f"{name} (possibly)" for name in dict.fromkeys(able)]

    def report(self) -> Json:
        """Return the contract; see `try_out`."""
        sizes = self._loop.streams.sizes
        extra = self._loop.streams.extra
        lengths = {name: min(length, sizes.get(name, length)) for name, length in self._lengths.items()}
        if self._loop.fixed_epoch_size is not None:  # may be more than a pass
            lengths[self._loop.train_stream_name] = self._loop.fixed_epoch_size
        seconds = {}
        for name, batch_seconds in self._seconds.items():
            every = extra[name].every if name in extra else None
            if lengths.get(name):
                seconds[name] = batch_seconds * lengths[name] / (every or 1)
        self._notes += [f"output {name!r} has values that are not finite" for name in _gaps(self._outputs)]
        return {
            "streams": self._streams,
            "reading": dict(self._loop.reading_ahead),
            "outputs": {name: _seen(info) for name, info in self._outputs.items()},
            "statistics": {name: dict(values) for name in self._streams if (values := self._model.stream_values(name))},
            "parameters": list(parameters(self._model)),
            "parameter_groups": list(parameter_groups(self._model)),
            "precision": getattr(self._model, "precision", None),
            "memory": memory(self._model),
            "seconds_per_epoch": seconds,
            "forecast": self._forecast(seconds, lengths.get(self._loop.train_stream_name)),
            "notes": self._notes,
        }

    def _forecast(self, seconds: Mapping[str, float], length: int | None) -> Json:
        """Return what a run will take: what -> {`seconds` or `bytes`, `how` it is known}."""
        forecast: Json = {}
        if length:
            window = self._model.iterations_per_update
            iterations = {"epochs": length, "passes": length, "iterations": 1, "updates": window}
            limits = [
                (unit, limit) for hook in self._hooks for unit, limit in hook.limits.items() if unit in iterations
            ]
            epochs = min((limit * iterations[unit] / length for unit, limit in limits), default=None)
            if epochs is not None:
                self.done = {"epochs": epochs, "iterations": epochs * length, "updates": epochs * length / window}
            if epochs is not None and {*seconds} >= {*self._loop.streams.extra}:
                forecast["training"] = {"seconds": epochs * sum(seconds.values()), "how": "estimated"}
        if self._step_memory is not None:
            forecast["tensors of a step"] = {"bytes": self._step_memory.peak, "how": "measured"}
        return forecast

    def most_kept(self) -> int | None:
        """Return how many checkpoints the hooks keep at most; None if this is not known; call it after `report`."""
        counts = [hook.most_kept(self.done) for hook in self._hooks if hasattr(hook, "most_kept")]
        return None if None in counts else math.floor(sum(counts))


def call_event(listening: Any, event: str, **arguments: Any) -> None:
    """Call an event of a hook or a model as the loop would; ignore `TrainingTerminated`."""
    call = listener(listening, event)
    try:
        with suppress(TrainingTerminated):
            if call is not None:
                call(**arguments)
    except BaseException as error:
        error.add_note(f"in {event} of {type(listening).__name__}")
        raise


def _seen(info: SourceInfo) -> Json:
    dtype, shape, span = info.row()
    if info.is_scalar:
        shape = "scalar"
    elif shape != "ragged":
        shape = "(B,)" if shape == "()" else f"(B, {shape[1:].replace(',)', ')')}"
    return {"dtype": dtype.replace("torch.", ""), "shape": shape, "range": span}


def _gaps(infos: Mapping[str, SourceInfo]) -> list[str]:
    return [name for name, info in infos.items() if info.has_gaps]


@contextmanager
def apart() -> Iterator[list[str]]:
    """Collect the warnings of emrun's log, and restore random states and environment variables at the end."""
    warnings: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    before = set(os.environ)
    handler = Collect(logging.WARNING)
    log = logging.getLogger("emrun")
    propagates = log.propagate
    log.addHandler(handler)
    log.propagate = False  # the report shows the warnings
    try:
        with preserved_randomness():
            yield warnings
    finally:
        log.propagate = propagates
        log.removeHandler(handler)
        for name in os.environ.keys() - before:
            del os.environ[name]
