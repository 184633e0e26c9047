"""What the directories of trials say: how each stands, its values of the objective, and the mean of repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from emrun.base.errors import StorageError
from emrun.base.types import Json
from emrun.base.wording import from_here
from emrun.epoch_data import numbers
from emrun.launch.parameters import Parameter
from emrun.launch.settings import Sweep
from emrun.launch.trials import Experiment, Trial
from emrun.runs.code_comparison import CodeNow
from emrun.runs.stored_run import StoredRun, statistic
from emrun.storage.run import METRICS, holds_run

DONE = ("finished", "pruned", "failed", "changed")
"""How a trial stands that a sweep does not train."""
_DISK_FULL = 74  # exit status: the trial itself has not failed
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)  # 97.5 % quantiles of Student's t distribution with 1, 2, ... degrees of freedom
_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Result:
    """How a trial stands.

    Args:
        status: `waiting` (it has no directory), `running`, `interrupted`, `killed`, `damaged` (it has lost metrics), or
            one of `DONE`. `changed`: it was resumed with another config, so it is not the trial any more.
        reason: why it ended, or what is damaged; None if it has not ended.
        values: (epoch, value of the objective) of each epoch that has it.
        value: the value of the objective that counts; None as long as the trial is not finished.
        threads: the number of threads of PyTorch that it was trained with, None if it is not known.
        changed: the modules whose code has changed since it was trained; None if that is not known.
    """

    status: str
    reason: str | None = None
    values: Sequence[tuple[int, float]] = ()
    value: float | None = None
    threads: int | None = None
    changed: Sequence[str] | None = None


def result_of(trial: Trial, settings: Sweep, code: CodeNow | None = None) -> Result:
    """Return how a trial stands, from its directory alone.

    Args:
        trial: the trial.
        settings: the section `sweep`.
        code: the code as it is now, to find out what has changed.
    """
    if not holds_run(trial.directory):
        return Result("waiting")
    run = StoredRun(trial.directory)
    status = run.status
    if status == "failed" and run.trace.get("exit_status") == _DISK_FULL:
        status = "interrupted"
    resumes: Any = run.trace.get("resumes") or ()
    if any(resume.get("changed") for resume in resumes):
        status = "changed"
    values = [] if settings.objective is None else objective_of(run, settings.objective)
    trained = [entry for entry in values if entry[0] > 0 or not run.epochs_done]
    damage = damage_of(run) if status == "finished" and settings.objective is not None else None
    if damage is not None:
        status = "damaged"
    value = value_of(trained, settings) if status == "finished" else None
    changed = None if code is None or status == "running" else code.changed(trial.directory)
    return Result(status, damage or run.reason, values, value, run.trace.get("threads"), changed)


def objective_of(run: StoredRun, address: str) -> list[tuple[int, float]]:
    """Return (epoch, value) for each epoch of a run that has a statistic."""
    try:
        values = [(epoch["epoch"], statistic(epoch, address)) for epoch in run.epochs()]
    except StorageError:
        return []
    return [(epoch, value) for epoch, value in values if value is not None]


def damage_of(run: StoredRun) -> str | None:
    """Return what is damaged of the metrics of a finished run, with the name of the file; None if they are whole."""
    try:
        recorded = {epoch["epoch"] for epoch in run.epochs()}
    except StorageError as error:
        return str(error)
    if recorded.issuperset(range(1, run.epochs_done + 1)):
        return None
    return f"{from_here(run.directory / METRICS)} does not have all of its {run.epochs_done} epochs"


def value_of(values: Sequence[tuple[int, float]], settings: Sweep) -> float | None:
    """Return the value of a trial: that of its best or last epoch; None if there is none.

    Args:
        values: (epoch, value) of the epochs that count: without the zeroth one, unless the trial has no other.
        settings: the section `sweep`.
    """
    trained = [value for _, value in values]
    if settings.epoch == "last":
        return trained[-1] if trained else None
    numbers = [value for value in trained if not math.isnan(value)]
    best = min if settings.condition == "min" else max
    return best(numbers) if numbers else (math.nan if trained else None)


def summary_of(values: Iterable[float | None]) -> Json:
    """Return a summary of the values of an experiment's runs; None stands for a run without a value.

    Returns:
        `count`: the number of values. `mean`: None without values. `deviation`: the standard deviation, with N - 1, and
        `interval`: half the width of the 95 % confidence interval of the mean, by Student's t distribution with N - 1
        degrees of freedom; both None for fewer than two values, or if one is not finite.
    """
    present = [value for value in values if value is not None]
    count = len(present)
    is_finite = all(map(math.isfinite, present))
    mean = None
    if present:
        mean = statistics.fmean(present) if is_finite else sum(present) / count
    deviation = statistics.stdev(present) if count > 1 and is_finite else None
    interval = None if deviation is None else t_quantile(count - 1) * deviation / math.sqrt(count)
    return {"count": count, "mean": mean, "deviation": deviation, "interval": interval}


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, to four digits."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = _Z  # Abramowitz and Stegun, 26.7.5
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


Ranked = tuple[Experiment, list[Result]]
"""An experiment with the results of its trials."""


def ranked(experiments: Sequence[Ranked], settings: Sweep) -> list[Ranked]:
    """Return experiments from the best to the worst; those without a value, or with NaN, come last.

    Of equal ones, that whose first run has the first name in the alphabet comes first, as in all lists of runs.
    """

    def place(entry: Ranked) -> tuple[bool, float, str]:
        name = entry[0].trials[0].directory.name
        mean = summary_of(result.value for result in entry[1])["mean"]
        if mean is None or math.isnan(mean):
            return True, 0.0, name
        return False, mean if settings.condition == "min" else -mean, name

    return sorted(experiments, key=place)


def as_dict(experiment: Experiment, results: Sequence[Result], parameters: Sequence[Parameter]) -> Json:
    """Return an experiment and its results as plain values, for JSON."""
    summary = summary_of(result.value for result in results)
    settings = {parameter.name: parameter.setting(experiment.values[parameter.name]) for parameter in parameters}
    values = {name: setting[name] if list(setting) == [name] else dict(setting) for name, setting in settings.items()}
    runs = [
        {
            "directory": str(from_here(trial.directory)),
            "status": result.status,
            "reason": result.reason,
            "seed": trial.seed,
            "fold": trial.fold,
            "value": numbers(result.value),
            "threads": result.threads,
            "changed_modules": None if result.changed is None else list(result.changed),
        }
        for trial, result in zip(experiment.trials, results, strict=True)
    ]
    return {"values": values, **{name: numbers(number) for name, number in summary.items()}, "runs": runs}
