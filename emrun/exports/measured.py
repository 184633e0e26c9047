"""The model of a run on a stream: some batches with their outputs, and losses and metrics with their intervals."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from emrun.base.censor import hidden_in
from emrun.base.errors import StreamError
from emrun.base.sources import examples_of
from emrun.base.types import Json
from emrun.config.config import Config
from emrun.config.data_numbers import with_numbers
from emrun.config.override_keys import streams_of
from emrun.config.plan import Plan
from emrun.config.signatures import parameters_of
from emrun.dataset import stream_names
from emrun.exports.formats import Options
from emrun.hook import AbstractHook
from emrun.loop.main_loop import MainLoop
from emrun.record.running_stats import RunningStats
from emrun.runs.stored_run import StoredRun
from emrun.runs.summaries import chosen_by
from emrun.storage.checkpoints.manifest import Manifest
from emrun.storage.run import CHECKPOINTS
from emrun.training.build import Training, assemble
from emrun.training.evaluate import check_stream, find_checkpoint, load_checkpoint, name_of_checkpoint
from emrun.training.members import config_of
from emrun.training.predict import changes_batches
from emrun.training.user_code import log_code_directory, warn_of_changed_code

_LOG = logging.getLogger(__name__)
_KEPT = 4  # batches
_QUANTILE = 1.959964  # of the normal distribution, for 95 %


class Statistic(NamedTuple):
    """The mean of a loss or metric over the examples of a stream, with its 95 % interval if the values tell one.

    `is_share` says whether each value is 0 or 1, such as that of an accuracy. `examples` is 0 if it is not known.
    """

    stream: str
    name: str
    value: float
    examples: int
    interval: tuple[float, float] | None
    is_share: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """The model of a run, evaluated on a stream.

    `batches` are the first ones of the stream, with their outputs; `statistics` are empty if only these were read;
    `rows` has the numbers of examples of streams, as far as they are known. There is no checkpoint if the model is made
    of runs.
    """

    run: StoredRun
    plan: Plan
    training: Training
    stream: str
    batches: list[Json]
    statistics: Sequence[Statistic]
    rows: Mapping[str, int]
    checkpoint: tuple[Path, Manifest] | None

    def in_config(self, *path: str) -> Any:
        """Return a value of the config in plain types, with numbers of the data and references replaced.

        References to the environment stay, as an export is given to others.
        """
        node = self.plan.config.get(*path)
        return None if node is None else hidden_in(with_numbers(node.plain(), self.training.prepared.numbers))


def measure(options: Options) -> Measured:
    """Build the model of a run on the CPU, load a checkpoint and evaluate a stream.

    A stream that the training evaluates too is read as the training does, which is not a further look at its labels.

    Raises:
        UsageError: there is no such checkpoint or stream.
        ConfigError: the config cannot be used.
        StreamError: the stream has no rows.
        StorageError: the checkpoint is damaged or does not fit.
        BaseException: an error of the dataset, the model or a hook.
    """
    # the plan
    directory = options.directory
    run = StoredRun(directory)
    base = config_of(directory)
    stream = options.stream or _default_stream(run, base)
    overrides = [*options.overrides, "main_loop.fixed_batch_size=null"]
    plan = Plan.of(base.overlaid(stream, overrides))
    parameters = parameters_of(plan.model.target)
    fixed = {"device": "cpu", "compile": "null"}
    added = [f"model.{name}={value}" for name, value in fixed.items() if parameters and name in parameters.named]
    plan = Plan.of(base.overlaid(stream, [*overrides, *added]))
    find_checkpoint(plan, directory, options.checkpoint_name)
    log_code_directory(plan)
    plan = replace(plan, hooks=[recipe for recipe in plan.hooks if changes_batches(recipe)])

    # the model, with the weights that evaluations use
    training = assemble(plan, directory, run=None, is_evaluation=True, classes=directory)
    warn_of_changed_code(plan, directory)
    check_stream(training.dataset, stream)
    training.model.predict_only()
    loop = training.main_loop
    root = directory / CHECKPOINTS
    checkpoint = load_checkpoint(training, root, name_of_checkpoint(root, options.checkpoint_name))

    # the batches
    keeper = _Keeper()
    loop.change_hooks([*loop.hooks, keeper])
    is_measured = stream in run.last_epoch.get("streams", {}) and stream != loop.train_stream_name
    loop.run_evaluation(stream, in_order=True, batches=loop.stream_sizes.get(stream) if is_measured else _KEPT)
    if not keeper.batches:
        raise StreamError(f"stream {stream!r} has no rows; nothing is written", first_batch=True)
    rows = _rows_of(loop, stream_names(training.dataset))
    statistics = list(keeper.statistics(stream)) if is_measured else []
    return Measured(run, plan, training, stream, keeper.batches, statistics, rows, checkpoint)


def _default_stream(run: StoredRun, config: Config) -> str:
    """Return the stream of the best checkpoint, or else the first of the usual ones that the dataset has."""
    best = chosen_by(run.value("hooks.SaveBest"))[0].partition("/")[0]
    train = run.value("main_loop.train_stream_name")
    usual = [best, "valid", "test", train if isinstance(train, str) else "train"]
    known = streams_of(config)
    return next((name for name in usual if name in known), usual[0])


def _rows_of(loop: MainLoop, names: Iterable[str]) -> dict[str, int]:
    """Return the numbers of examples of those streams whose first batch can be read, as far as they tell it."""
    found = {}
    for name in names:
        with suppress(Exception):  # of data that are not there
            stream = loop.streams.get(name, train=False, batches=1, in_order=True)
            with stream:
                next(iter(stream), None)
            if stream.rows:
                found[name] = stream.rows
    return found


class _Keeper(AbstractHook):
    """Keeps the first batches of a stream with their outputs, and collects losses and metrics of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Json] = []
        self.rows = 0
        self._collected: dict[str, RunningStats] = {}
        self._is_weighted = False

    def after_batch(self, stream_name: str, batch_data: Mapping[str, Any]) -> None:
        """Keep a batch."""
        count = examples_of(batch_data)
        if len(self.batches) < _KEPT:
            self.batches.append(copy.deepcopy(dict(batch_data)))
        self.rows += count
        self._is_weighted |= "example_weight" in batch_data
        for name in ("loss", *self.main_loop.model.metric_names):
            if tuple(getattr(batch_data.get(name), "shape", ())) == (count,):
                collected = self._collected.setdefault(name, RunningStats(("mean", "std", "min", "max")))
                collected.add(batch_data[name], count, batch_data.get("example_weight"))

    def statistics(self, stream: str) -> Iterator[Statistic]:
        """Yield the means."""
        count = self.rows
        for name, collected in self._collected.items():
            result = collected.result()
            mean = result["mean"]
            std = result["std"]
            interval = None
            is_share = False
            if not self._is_weighted and count > 1 and math.isfinite(mean) and math.isfinite(std):
                is_share = result["min"] >= 0 and result["max"] <= 1 and abs(std**2 - mean * (1 - mean)) < 1e-9
                half = _QUANTILE * std / math.sqrt(count - 1)
                interval = interval_of_share(mean, count) if is_share else (mean - half, mean + half)
            yield Statistic(stream, name, mean, count, interval, is_share)


def interval_of_share(share: float, count: int) -> tuple[float, float]:
    """Return the bounds of the 95 % interval of a share of so many examples, by the formula of Wilson (1927)."""
    by = _QUANTILE**2 / count
    middle = (share + by / 2) / (1 + by)
    half = math.sqrt(share * (1 - share) * by + by**2 / 4) / (1 + by)
    return max(0.0, middle - half), min(1.0, middle + half)
