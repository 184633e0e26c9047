"""Measure how fast streams are read, without read-ahead, by a thread or by workers, and how long training waits."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from emrun.base.arguments import check_choice
from emrun.base.cores import THREADS, cores, reading_threads
from emrun.base.encoding import random_state
from emrun.base.errors import ConfigError, StreamError, UsageError, reason_of
from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.types import Batch, StartMethod
from emrun.config.config import Config, load_config
from emrun.config.plan import named_streams
from emrun.config.sections import check_sections
from emrun.dataset import asks_model, stream_function, stream_names, takes_context
from emrun.diagnosis.model_facts import timed_run
from emrun.events import may_change_batches
from emrun.loop.main_loop import MainLoop
from emrun.model import AbstractModel
from emrun.stream_context import StreamContext
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamPosition, StreamWrapper
from emrun.streams.worker_process import set_environment
from emrun.training.create import create_dataset, create_hooks, create_model

_LOG = logging.getLogger(__name__)
_GAIN = 0.02  # share of the time; a simpler setting is chosen if it waits at most this much longer
_UNTIMED_STEPS = 3
_TIMED_STEPS = 20


@dataclass(frozen=True, slots=True)
class Setting(Reading):
    """How a stream is read ahead, with the keys of `main_loop`, and other changes that are tried.

    Args:
        threads: the value of EMRUN_THREADS; None to leave this variable as it is.
        dtype: the value of `dataset.dtype`; None to leave this key as it is.
    """

    threads: int | None = None
    dtype: str | None = None

    def __str__(self) -> str:
        main_loop = ("buffer", self.buffer), ("workers", self.workers)
        named: list[tuple[str, Any]] = [*main_loop, (THREADS, self.threads), ("dataset.dtype", self.dtype)]
        return ", ".join(f"{name}: {count}" for name, count in named if count) or "no read-ahead"


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a stream is read.

    Args:
        setting: how the stream is read ahead.
        first: seconds until the first batch of a pass, including the start of workers; None for an empty stream.
        seconds_per_batch: seconds for each later batch; None when a pass has too few batches to measure it.
    """

    setting: Setting
    first: float | None
    seconds_per_batch: float | None


@dataclass(slots=True)
class StreamBench:
    """The measurements of a stream.

    Args:
        name: the name of the stream.
        trains: whether it is the train stream.
        shares_rows: whether its rows come from `ctx.batches`, so that several workers can share them.
        length: number of batches of a pass; None when there was no time to read a whole pass.
        readings: a measurement for each setting, the simplest setting first.
        draws: the global random generators of this process that the stream draws from.
    """

    name: str
    trains: bool
    shares_rows: bool = False
    length: int | None = None
    readings: list[Speed] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)

    def waiting(self, reading: Speed, step: float) -> float:
        """Return the share of its time for which training waits for batches, if reading does not slow down training.

        If the length of a pass is known, the first batch of a pass counts, and with it the start of workers.

        Args:
            reading: one of `readings`; the stream must have batches.
            step: seconds that the model takes for a batch.
        """
        wait = max(0.0, (reading.seconds_per_batch or 0.0) - (step if reading.setting.ahead else 0.0))
        if self.length is None:
            return wait / (wait + step)
        waited = (reading.first or 0.0) + (self.length - 1) * wait
        return waited / (waited + self.length * step)

    def chosen(self, step: float) -> Speed:
        """Return the reading with the recommended setting: the simplest that waits hardly longer than the best one."""
        usual = [
            reading for reading in self.readings if reading.setting.threads is None and reading.setting.dtype is None
        ]
        least = min(self.waiting(reading, step) for reading in usual)
        return next(reading for reading in usual if self.waiting(reading, step) <= least + _GAIN)

    def change(self, present: Setting, step: float) -> tuple[Speed | None, Speed | None]:
        """Return the reading as the config is, if possible, and one with which training waits least, if that helps."""
        now = next((reading for reading in self.readings if _is_same(reading.setting, present)), None)
        best = min(self.readings, key=lambda reading: self.waiting(reading, step))
        helps = now is None or self.waiting(best, step) < self.waiting(now, step) - _GAIN
        return now, best if helps else None


@dataclass(frozen=True, slots=True)
class Bench:
    """The measurements of a config.

    Args:
        streams: the streams, the train stream first.
        step: seconds that the model takes for a batch of the train stream; None when this time is not known.
        no_step: why the time is not known.
        present: how the config reads the streams.
    """

    streams: list[StreamBench]
    step: float | None
    no_step: str | None = None
    present: Setting = field(default_factory=Setting)


def bench(
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    seconds: float = 3.0,
    step: float | None = None,
    all_streams: bool = False,
) -> Bench:
    """Measure how fast the streams of a config are read, without writing a file or changing a random state.

    Args:
        config: a file, a directory with a `config.yaml`, or a mapping.
        overrides: as on the command line.
        seconds: seconds for which each stream is read with each setting; the last batch may take longer.
        step: seconds that the model takes for a batch; None to build the model and measure.
        all_streams: read every stream of the dataset, not only those that the main loop runs.

    Raises:
        ConfigError: the config cannot be used.
        UsageError: the dataset does not have a stream that the main loop runs.
        BaseException: any error that the dataset or a stream raises.
    """
    loaded = load_config(config, overrides)
    tree = loaded.tree
    wrong = [problem for problem in check_sections(tree) if problem.key == "main_loop"]
    if wrong:  # no mapping; others do not matter
        raise ConfigError(wrong)
    with preserved_randomness():
        # the streams
        dataset = create_dataset(loaded)
        names = [name for name, _ in named_streams(tree)] + (stream_names(dataset) if all_streams else [])
        seed = loaded.get("seed")
        method = tree.get("main_loop", "start_method")
        start_method = None if method is None else method.value
        if start_method is not None:
            check_choice("main_loop.start_method", start_method, StartMethod)
        try:  # report a wrong name before anything is measured
            functions = {name: stream_function(dataset, name) for name in names}
        except AttributeError as error:
            raise UsageError(str(error)) from error

        # how fast each is read, with each setting
        main_loop = loaded.get("main_loop") or {}
        numbers = {key: main_loop[key] for key in ("buffer", "workers") if isinstance(main_loop.get(key), int)}
        usual = Setting(**numbers, start_method=start_method)
        present = replace(usual, buffer=usual.of(dataset).buffer)
        most = 0 if asks_model(dataset) else cores()
        reader = _Reader(seconds, seed if isinstance(seed, int) else 0, start_method, most)
        as_bytes = loaded.overridden(["dataset.dtype=uint8"])
        changes = _changes(loaded, as_bytes, dataset, names[0], present) if most else []
        trained = names[0]
        streams = []
        for name, function in functions.items():
            others = [(present, function), *changes] if name == trained else []
            streams.append(reader.read(function, StreamBench(name, name == trained), others))

        # how long the model takes
        no_step = None
        if reader.first_batch is None:
            step = None
            no_step = f"stream {trained!r} has no batches"
        elif step is None and tree.get("model") is None:
            no_step = "the config has no model; use --step-ms"
        elif step is None:
            try:
                unscheduled = loaded
                if tree.get("model", "scheduler") is not None:  # which may need the length of the run
                    unscheduled = loaded.overridden(["~model.scheduler"])
                model = create_model(unscheduled, dataset=dataset)
                batch = _changed(loaded, model, dataset, reader.first_batch, trained)
                step = _seconds_of_a_step(model, batch, trained, seconds)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the model may be for another machine, or unfinished
                no_step = (
                    f"the model cannot be trained here ({type(error).__name__}: {reason_of(error)}); use --step-ms"
                )
        return Bench(streams, step, no_step, present)


def _changes(
    config: Config, as_bytes: Config, dataset: Any, stream: str, present: Setting
) -> list[tuple[Setting, Callable[..., Any]]]:
    """Return what else than read-ahead may help: more threads, images as bytes; each with its stream function."""
    changes = []
    if not present.workers and reading_threads() < cores():
        changes.append((replace(present, threads=cores()), stream_function(dataset, stream)))
    is_other = config.get("dataset") != as_bytes.get("dataset")
    if is_other and "dtype" in inspect.signature(type(dataset)).parameters:
        with contextlib.suppress(Exception):  # its dtype is another thing
            changes.append((replace(present, dtype="uint8"), stream_function(create_dataset(as_bytes), stream)))
    return changes


def _is_same(one: Setting, two: Setting) -> bool:
    return (one.ahead, one.workers, one.threads, one.dtype) == (two.ahead, two.workers, two.threads, two.dtype)


def settings(most: int, start_method: StartMethod | None = None) -> list[Setting]:
    """Return the settings to measure, the simplest first: workers are doubled up to the number of cores."""
    if not most:
        return [Setting()]
    counts = {1, 2, most} | {2**power for power in range(most.bit_length()) if 2**power <= most}
    workers = [Setting(workers=count, start_method=start_method) for count in sorted(counts)]
    return [Setting(), Setting(buffer=4), *workers]


@dataclass(slots=True)
class _Reader:
    """Reads streams and measures the time.

    Args:
        seconds: seconds for which each stream is read with each setting.
        seed: the seed of the run.
        start_method: start method of worker processes; None for Python's default.
        most: the most workers; 0 if nothing can be read ahead.
    """

    seconds: float
    seed: int
    start_method: StartMethod | None
    most: int
    first_batch: Batch | None = None
    """The first batch of the train stream."""
    passes: int = 0
    """Number of passes that have been read of the current stream."""

    def read(
        self,
        function: Callable[..., Any],
        measured: StreamBench,
        others: Sequence[tuple[Setting, Callable[..., Any]]] = (),
    ) -> StreamBench:
        """Read a stream with every setting that can help, after a first reading that loads files and imports."""
        contexts: list[StreamContext] = []

        def watched(ctx: StreamContext) -> Any:
            contexts.append(ctx)
            return function(ctx)

        self.passes = 0
        _LOG.info("stream %r: warming up", measured.name)
        seed_everything(self.seed, "bench", measured.name)
        before = random_state()
        failure = None
        try:
            self._measure(watched if takes_context(function) else function, measured, Setting())
        except StreamError as error:  # it may be read in workers alone
            failure = error
        after = random_state()
        if failure is None:
            measured.draws.extend(name for name, state in before.items() if state != after[name])
        measured.shares_rows = any(context.skips for context in contexts)
        tried = [(setting, function) for setting in settings(self.most, self.start_method)]
        tried += [other for other in others if not any(_is_same(other[0], setting) for setting, _ in tried)]
        for setting, read in tried:
            if setting.workers < 2 or measured.shares_rows or (setting, read) in others:
                _LOG.info("stream %r: %s", measured.name, setting)
                try:
                    with _with_threads(setting.threads):
                        measured.readings.append(self._measure(read, measured, setting))
                except Exception as error:
                    if setting.dtype is None and not isinstance(error, StreamError):
                        raise
                    _LOG.warning("stream %r cannot be read with %s: %s", measured.name, setting, error)
        if failure is not None and not measured.readings:
            raise failure
        return measured

    def _measure(self, function: Callable[..., Any], stream: StreamBench, setting: Setting) -> Speed:
        """Read passes until the time is over; each has a new number, so that settings do not read the same data."""
        seed_everything(self.seed, "bench", stream.name)
        wrapper = StreamWrapper(function, name=stream.name, seed=self.seed, training=stream.trains, reading=setting)
        if stream.trains:
            wrapper.seek(StreamPosition(self.passes + 1, 0))
        firsts: list[float] = []
        measured_batches = 0
        measured_seconds = 0.0
        ends_at = math.inf
        untimed = max(1, setting.workers)  # batches that are not timed: one per worker, while workers start
        with contextlib.closing(wrapper), wrapper:
            while perf_counter() < ends_at:
                began = perf_counter()
                times: list[float] = []
                for batch in wrapper:
                    times.append(perf_counter())
                    if stream.trains and self.first_batch is None:
                        self.first_batch = batch
                    ends_at = min(ends_at, times[0] + self.seconds)
                    if times[-1] >= ends_at and (measured_batches or len(times) > untimed):  # after one timed batch
                        break
                self.passes += 1
                if not times:
                    stream.length = 0
                    return Speed(setting, None, None)
                firsts.append(times[0] - began)
                if len(times) > untimed:
                    measured_batches += len(times) - untimed
                    measured_seconds += times[-1] - times[untimed - 1]
                if wrapper.epoch_ended:
                    stream.length = len(times)
        return Speed(
            setting, statistics.median(firsts), measured_seconds / measured_batches if measured_batches else None
        )


@contextlib.contextmanager
def _with_threads(count: int | None) -> Iterator[None]:
    before = os.environ.get(THREADS)
    set_environment(THREADS, before if count is None else str(count))
    try:
        yield
    finally:
        set_environment(THREADS, before)


def _changed(config: Config, model: AbstractModel, dataset: Any, batch: Batch, stream: str) -> Batch:
    """Return a batch as the hooks of the config change it in training, before the model gets it."""
    hooks = create_hooks(config, model=model, dataset=dataset) if config.get("hooks") else ()
    changers = [hook for hook in hooks if may_change_batches(hook)]
    if not changers:
        return batch
    loop = MainLoop(model, dataset, changers, train_stream_name=stream)
    loop.notify("before_training")
    loop.notify("before_epoch", epoch_id=1)
    changed = dict(batch)
    with loop.progress.streams_of(train=True):
        loop.notify("before_batch", stream_name=stream, batch=changed)
    return changed


def _seconds_of_a_step(model: Any, batch: Batch, stream: str, seconds: float) -> float:
    """Return the median time of a training step on a batch, after a few steps that are not timed."""
    step_seconds = []
    ends_at = perf_counter() + seconds
    for index in range(_UNTIMED_STEPS + _TIMED_STEPS):
        step_seconds.append(timed_run(model, batch, True, stream)[1])
        if index >= _UNTIMED_STEPS and perf_counter() > ends_at:
            break
    return statistics.median(step_seconds[_UNTIMED_STEPS:])
