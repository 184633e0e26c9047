"""Verify for a config that an interrupted run equals an uninterrupted one, or find the first difference."""

from __future__ import annotations

import itertools
import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 - the first optimizer imports it, which takes a second

from emrun.base.errors import UsageError
from emrun.base.randomness import draw_seed
from emrun.base.temporary import temporary_folder
from emrun.base.types import Json
from emrun.base.wording import duration
from emrun.config.config import Config, load_config
from emrun.config.import_finder import Imported
from emrun.config.names import same_class
from emrun.config.overrides import hook_entry
from emrun.config.plan import Plan, hook_entries, with_statistics
from emrun.diagnosis.differences import PARTS, Causes, Difference, find_difference, find_rounded, varying
from emrun.diagnosis.probe import main
from emrun.diagnosis.recorded_trainings import Job, Point, Recording
from emrun.launch.jobs import Jobs, is_fork_safe

_LOG = logging.getLogger(__name__)

_LONGEST = 20  # iterations; longer epochs are shortened
_SHORT = 8  # iterations of a shortened epoch, which has at least two updates
_MOST_POINTS = 5  # at which runs are interrupted by default
_ROUNDED: dict[Any, float] = {
    "bf16": 5e-2,
    "fp16": 5e-2,
    "tf32": 5e-2,
}  # precision -> what rounding may change metrics and steps by
_MAY_VARY = ("hooks", "metrics")  # may contain times; values that differ between two uninterrupted runs are left out


def verify(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    kill: bool = False,
    at: Sequence[int] = (),
    full_epochs: bool = False,
    ranks: int = 1,
    resumed_on: Sequence[int] = (),
    tell: Callable[[int, int], object] = lambda done, most: None,
) -> Json:
    """Train twice without interruption, then once more for each point with an interruption, and compare all batches.

    Each run is a few iterations long, has its own process and writes into a temporary directory. The processes are
    forks of this one, which has imported the classes of the config, where that is safe. The second run is a new Python,
    in which for example sets of strings have another order. All hooks of the config run, except StopAfter.

    Args:
        config: a file, or a directory with a `config.yaml`.
        overrides: `key.path=value`, or `~key.path` to delete a key.
        kill: interrupt by SIGKILL, two iterations after a checkpoint, instead of by SIGTERM.
        at: iterations after which to interrupt; by default in the middle of an epoch, at its end, in an evaluation,
            with `fixed_epoch_size` at the end of a pass, and with `accumulate` in the middle of an update.
        full_epochs: do not shorten epochs of more than 20 iterations.
        ranks: the number of processes that train together in each run.
        resumed_on: the numbers of processes that resume each interrupted run; by default the same number.
        tell: called before each run with the number of runs so far, and the most that there will be.

    Returns:
        `exact`: whether nothing differs. `iterations`: the length of each run. `rows`: a row for each point, or a
        single one without a point if two uninterrupted runs differ: `interrupted_at` and `iteration`, the point; `by`,
        the signal; `resumed_at`, the iteration of the checkpoint; `resumed_on`, the number of processes that resumed
        the run, None if it was not resumed; `rounding`, the largest difference of rounding, as a share, None if the
        number of processes stayed the same; `difference` and `likely_cause`, None if the resume is exact, or rounded
        only. `notes`: what the verification does not cover.

    Raises:
        ConfigError: the config cannot be used.
        UsageError: an iteration is beyond the end of the run, or the run is too short to be interrupted.
        VerificationFailed: a run failed for another reason than a difference.
    """
    loaded = load_config(config, overrides)
    arguments = list(overrides)
    if loaded.get("seed") is None:
        arguments.append(f"seed={draw_seed()}")
    with temporary_folder("verify") as place:
        # a run without interruption
        job = partial(Job, str(place), str(config), arguments, ranks=ranks)
        notes = []
        numbers = sorted(dict.fromkeys(resumed_on or [ranks]), key=lambda number: number == ranks)  # the same at last
        uninterrupted = 2 if full_epochs else 3
        most = uninterrupted + (1 + len(numbers)) * (len(dict.fromkeys(at)) or _MOST_POINTS)
        runs = _Runs(tell, forks_for(loaded) if ranks == 1 else None, most)
        _LOG.info("making up to %d short runs, each in a process of its own", most)
        _LOG.info("running without interruption")
        started = time.monotonic()
        straight = runs.make(job("straight", longest=None if full_epochs else _LONGEST))
        if straight.of("long"):  # the run gave up because its epochs are too long
            key = "overfit" if (loaded.get("main_loop") or {}).get("overfit") else "fixed_epoch_size"
            long = straight.one("long")
            short = max(_SHORT, 2 * long["window"])
            arguments += [f"main_loop.{key}={short}", *_same_horizon(loaded, long["updates"])]
            job = partial(job, is_shortened=True)
            notes.append(
                f"epochs have more than {_LONGEST} iterations: verified with main_loop.{key}={short}, so "
                "that the run may not reach the end of a pass; use --full-epochs to verify whole epochs"
            )
            started = time.monotonic()
            straight = runs.make(job("straight-short"))

        # where it is interrupted
        settings = loaded.get("main_loop") or {}
        last = straight.epoch_ends[-1] if settings.get("on_interrupt") == "epoch" and not kill else straight.end - 1
        points = _chosen(straight, at, last) if at else list(_usual(straight))
        if not points:
            raise UsageError(f"the run ends after {straight.end} iterations, which is too early to interrupt it")
        count = 1 + (1 + len(numbers)) * len(points)
        runs.most = runs.done + count
        _LOG.info("%d more runs will take about %s", count, duration(count * (time.monotonic() - started)))

        # the same run again
        _LOG.info("running again without interruption")
        end = straight.end
        if straight.epoch_ends[-1] == end:  # a hook may have ended the run there
            end += 1
        repetition = runs.make(job("again", end=end), forks=False)
        causes = Causes(straight, repetition, straight.one("begin").get("buffer", 0))
        vary = {part: varying(straight.final[part], repetition.final[part]) for part in _MAY_VARY}
        difference = find_difference(straight, [repetition], vary)
        if difference is not None:
            return _result(straight, [_row(None, "", causes.explain(difference, repetition))], notes)
        notes += [
            f"not compared: {PARTS[part]} {name}, which differs between two uninterrupted runs"
            for part, names in vary.items()
            for name in sorted(names)
        ]

        # interrupted and resumed
        rows = []
        ending_signal = signal.SIGKILL if kill else signal.SIGTERM
        rounded = _ROUNDED.get((loaded.get("model") or {}).get("precision"), 1e-2)
        for number, point in enumerate(points):
            _LOG.info("running with an interruption at %s (iteration %d)", point.name, point.iteration)
            name = f"point-{number}"
            first = runs.make(job(name, end=end, point=point, by=ending_signal))
            if not first.was_interrupted(kill):
                rows.append(
                    _row(
                        point,
                        ending_signal.name,
                        Difference(f"the run ended at iteration {first.end} and did not reach {point.name}", "order"),
                    )
                )
                continue
            for size, second in runs.resumed(job(name, end=end, resume=True), numbers):
                difference, share = _compared(first, second, causes, vary, None if size == ranks else rounded)
                rows.append(
                    _row(point, ending_signal.name, difference, second.one("begin").get("iteration"), size, share)
                )
        return _result(straight, rows, notes)


def _row(
    point: Point | None,
    by: str,
    difference: Difference | None,
    resumed_at: int | None = None,
    resumed_on: int | None = None,
    rounding: float | None = None,
) -> Json:
    return {
        "interrupted_at": None if point is None else point.name,
        "iteration": None if point is None else point.iteration,
        "by": by,
        "resumed_at": resumed_at,
        "resumed_on": resumed_on,
        "rounding": rounding,
        "difference": None if difference is None else difference.what,
        "likely_cause": None if difference is None else difference.cause,
    }


def _result(straight: Recording, rows: list[Json], notes: list[str]) -> Json:
    is_exact = all(row["difference"] is None for row in rows)
    return {"exact": is_exact, "iterations": straight.end, "rows": rows, "notes": notes}


@dataclass(slots=True)
class _Runs:
    """Makes the runs, and counts them."""

    tell: Callable[[int, int], object]
    forks: Jobs | None
    most: int
    done: int = 0

    def make(self, job: Job, *, forks: bool = True) -> Recording:
        """Make a run, as a fork of this process if possible, and return its recording."""
        self.tell(self.done, self.most)
        self.done += 1
        return job.run(self.forks if forks and job.ranks == 1 else None)

    def resumed(self, job: Job, numbers: Sequence[int]) -> Iterator[tuple[int, Recording]]:
        """Yield each number of ranks with the recording of a run that is resumed on it; on others, a copy of the run.

        Args:
            job: the job that resumes the run on the number of ranks that it has.
            numbers: the numbers of ranks, that of the job at last.
        """
        for number in numbers:
            moved_job = job
            if number != job.ranks:
                moved_job = replace(job, name=f"{job.name}-on-{number}", ranks=number, is_moved=True)
                shutil.copytree(job.directory, moved_job.directory, symlinks=True)
            yield number, self.make(moved_job)


def _compared(
    first: Recording, second: Recording, causes: Causes, vary: Mapping[str, list[str]], most: float | None
) -> tuple[Difference | None, float | None]:
    """Compare an interrupted and resumed run with the uninterrupted one: exactly, or see `find_rounded`."""
    if most is not None:
        return find_rounded(causes.straight, second, vary, most)
    difference = find_difference(causes.straight, [first, second], vary)
    return None if difference is None else causes.explain(difference, second), None


def forks_for(config: Config) -> Jobs | None:
    """Return what makes jobs as forks of this process, which imports all that they need; None if no fork is safe."""
    Plan.of(with_statistics(config).with_defaults({"seed": 0}), Imported())
    return Jobs(main, (), None, may_fork=lambda: True) if is_fork_safe() else None


def _same_horizon(config: Config, updates: int | None) -> list[str]:
    """Return overrides with which the run has its horizon, on which schedules depend, although its epochs are shorter.

    Args:
        config: the config.
        updates: the horizon; None if it is not known.
    """
    further = []
    for index, (name, arguments) in enumerate(map(hook_entry, hook_entries(config.tree))):
        if updates is not None and arguments is not None and isinstance(arguments.value, dict):
            limits = [limit for limit in ("epochs", "passes") if limit in arguments.value]
            if same_class(name, "StopAfter") and limits:
                key = f"hooks.{index}.{name}"
                further += [f"{key}.updates={updates}", *(f"~{key}.{limit}" for limit in limits)]
    return further


def _usual(straight: Recording) -> Iterator[Point]:
    """Yield the points at which runs are interrupted by default."""
    ends = straight.epoch_ends
    window = straight.one("begin").get("window", 1)
    batches = [event for event in straight.of("batch") if event["training"]]
    stream = batches[0]["stream"] if batches else ""
    passes = [one["iteration"] for one, next_one in itertools.pairwise(batches) if one["pass"] != next_one["pass"]]
    for first, last in ((*ends, straight.end)[:2], (0, ends[0])):
        iterations = [iteration for iteration in range(first + 1, last) if iteration not in passes]
        between_updates = [iteration for iteration in iterations if (iteration - first) % window == 0] or iterations
        if between_updates:
            yield Point("the middle of an epoch", between_updates[(len(between_updates) - 1) // 2], stream)
        if mid_updates := [iteration for iteration in iterations if (iteration - first) % window]:
            yield Point("the middle of an update", mid_updates[len(mid_updates) // 2], stream)
        if between_updates:
            break
    pass_ends = [iteration for iteration in passes if iteration not in ends]
    if pass_ends:
        yield Point("the end of a pass", pass_ends[0], stream)
    if ends[0]:
        yield Point("the last batch of an epoch", ends[0], stream)
    for end in ends[:2]:
        evaluated = [event for event in straight.of("batch") if not event["training"] and event["iteration"] == end]
        if evaluated:
            middle = evaluated[(len(evaluated) - 1) // 2]
            yield Point(f"an evaluation ({middle['stream']})", end, middle["stream"], middle["number"])
            break


def _chosen(straight: Recording, at: Sequence[int], last: int) -> list[Point]:
    stream = next((event["stream"] for event in straight.of("batch") if event["training"]), "")
    for iteration in at:
        if not 0 < iteration <= last:
            raise UsageError(f"--at must be from 1 to {last}, not {iteration}; the run has {straight.end} iterations")
    return [Point("the given iteration", iteration, stream) for iteration in dict.fromkeys(at)]
