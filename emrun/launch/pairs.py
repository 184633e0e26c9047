"""Two configs, trained on the same seeds in pairs: the trials, which config is better, and the examples that change."""

from __future__ import annotations

import csv
import errno
import io
import itertools
import json
import logging
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any, TypeGuard

from emrun.base.arguments import resolved
from emrun.base.errors import ConfigError, StorageError, UsageError
from emrun.base.types import Json
from emrun.base.wording import from_here, listed
from emrun.config.config import Config
from emrun.config.plan import Plan, with_statistics
from emrun.config.yaml_tree import Node
from emrun.dataset import AbstractDataset
from emrun.launch.results import Result, result_of
from emrun.launch.settings import Condition
from emrun.launch.trials import Experiment, Trial, Trials, digest_of, identity
from emrun.runs.config_comparison import differences
from emrun.runs.finding import find_runs
from emrun.runs.stored_run import StoredRun
from emrun.runs.summaries import chosen_by
from emrun.storage.code.files import Key, recorded_batches
from emrun.storage.files import read_regular
from emrun.storage.run import METRICS
from emrun.storage.trace import TRACE

_LOG = logging.getLogger(__name__)

ERROR = 0.05
"""The probability of a wrong verdict, at most, however many pairs are looked at."""
_SPREAD = 4.0  # variance of the differences that are expected, in units of their noise; see `half_width`
_LARGEST = 500_000_000  # bytes of a file of predictions
_OF_OTHERS = (TypeError, KeyError, AttributeError, csv.Error)
_LOSSES = ("loss", "error", "perplexity", "mae", "mse", "rmse")
_SCORES = ("accuracy", "f1", "auc", "auroc", "precision", "recall", "iou", "dice", "map", "r2", "bleu")


class Pair(Trials):
    """A trial of each of two configs, with the same seed; a grid of one experiment.

    Args:
        side: the trials of a config.
        trials: the two trials.
        instead: what to train in place of each if its data are out of date.
    """

    def __init__(self, side: Trials, trials: tuple[Trial, ...], instead: tuple[Trial, ...]) -> None:
        super().__init__(side.config, (), side.settings, side.directory)
        self.trials = trials
        self._instead = instead

    def called(self, trial: Trial) -> str:
        """Return what the log calls a trial, with its side."""
        side = "AB"[self.trials.index(trial)]
        return f"{side}, {super().called(trial)}"

    def grid(self) -> Iterator[Experiment]:
        """Yield the experiment; the two trials of a config that is compared with itself are one."""
        yield Experiment({}, tuple(dict.fromkeys(self.trials)))

    def with_same_data(self, before: Container[Path]) -> Pair | None:
        """Return the pair in which runs that may have other data than their partners are trained again; None for none.

        These are runs from before, unless the first batches of both are the same. Those of two runs of the comparison
        may differ, as random numbers can make the data.

        Args:
            before: the directories of the runs that were finished before the comparison began or continued.
        """
        first, second = self._batches()
        common = first.keys() & second.keys()
        older = [trial for trial in self.trials if trial.directory in before]
        were_compared = len(older) == 2 and all(trial.directory.parent == self.directory for trial in older)
        if not older or were_compared or (common and all(first[key] == second[key] for key in common)):
            return None
        _LOG.info("a pair is trained again, as the data may have changed since %s", from_here(older[0].directory))
        trials = tuple(new if old in older else old for old, new in zip(self.trials, self._instead, strict=True))
        return Pair(self, trials, trials)

    def check_evaluated(self, stream: str) -> None:
        """Check that the first batch of the first evaluation of a stream was the same in both runs.

        Raises:
            UsageError: it was another one.
        """
        first, second = self._batches()
        for key in first.keys() & second.keys():
            sources = sorted(name for name in first[key] | second[key] if first[key].get(name) != second[key].get(name))
            if key[:2] == (stream, 0) and sources:
                raise UsageError(
                    f"the data of the two differ: {listed(list(map(repr, sources)))} in the first batch of stream "
                    f"{stream!r}, which is evaluated; to compare them all the same, use --anyway"
                )

    def _batches(self) -> list[dict[Key, dict[str, str]]]:
        return [recorded_batches(trial.directory / "code") for trial in self.trials]


def _again(trial: Trial) -> Trial:
    """Return a trial with the directory of its second training, after the data have changed."""
    return replace(trial, directory=trial.directory.with_name(f"again-{trial.directory.name}"))


def pairs_of(sides: Sequence[Trials], finished: Mapping[str, Path]) -> list[Pair]:
    """Return the pairs of the trials of two configs; a finished run with the config of a trial takes its place.

    Args:
        sides: the trials of each config.
        finished: digest of a config -> the directory of a finished run.
    """
    trials_of_sides = [[_known(side, trial, finished) for trial in side.experiment({}).trials] for side in sides]
    pairs = []
    for same_seed in zip(*trials_of_sides, strict=True):
        trials, instead = zip(*same_seed, strict=True)
        pairs.append(Pair(sides[0], trials, instead))
    return pairs


def _known(side: Trials, trial: Trial, finished: Mapping[str, Path]) -> tuple[Trial, Trial]:
    """Return a trial, or the finished run that takes its place, and what is trained if its data are out of date."""
    second = _again(trial)
    if second.directory.exists():
        trial = second
    place = finished.get(identity(with_statistics(side.config_of(trial))))
    if place is not None and not trial.directory.exists():
        known = replace(trial, directory=place)
        result = result_of(known, side.settings, side.code)
        if result.value is not None and result.changed is not None and not result.changed:
            _LOG.info("the run %s has the config and the seed of a pair, and is not trained again", from_here(place))
            return known, trial
    return trial, _again(trial)


def whole(result: Result, trial: Trial) -> Result:
    """Return a result that can be compared.

    Raises:
        StorageError: the run is finished, but its record is damaged, or has no value.
    """
    has_none = result.status == "finished" and result.value is None
    if result.status == "damaged" or has_none:
        place = from_here(trial.directory)
        what = f"{place / METRICS} has no value of the metric" if has_none else result.reason
        message = f"{what}, although the run is finished; put the file back, or remove {place} to train it again"
        raise StorageError(errno.EIO, message)
    return result


def finished_runs(sources: Iterable[str], root: Path) -> dict[str, Path]:
    """Return digest of the config -> directory, of finished runs: those among `sources`, beside these, in `root`."""
    runs = [resolved(source) for source in sources if (Path(source) / TRACE).exists()]
    directories: dict[str, Path] = {}
    for place in dict.fromkeys([*runs, *(run.parent for run in runs), root]):
        with suppress(UsageError, StorageError):
            for run in find_runs(place):
                if run.status == "finished":
                    with suppress(ConfigError, StorageError):
                        directories.setdefault(digest_of(run.final), run.directory)
    return directories


def train_only(config: Config, stream: str) -> Sequence[str]:
    """Return the keys of the dataset that may differ: those that change nothing that is evaluated, as its class says.

    Args:
        config: the config.
        stream: the stream by which configs are compared.
    """
    target = Plan.of(config).dataset.target
    keys: Sequence[str] = getattr(target, "train_only", AbstractDataset.train_only)
    if stream == (config.get("main_loop") or {}).get("train_stream_name", "train"):
        return AbstractDataset.train_only
    return [key for key in keys if key != "train" or config["dataset"].get("split") is None]


def check_comparable(a: Node, b: Node, variable: str, may_differ: Sequence[str] = AbstractDataset.train_only) -> bool:
    """Check that metric, budget and the data that are evaluated are the same in two configs.

    Args:
        a: one config.
        b: the other one.
        variable: the variable by which they are compared.
        may_differ: the keys of the dataset that may differ, see `train_only`.

    Returns:
        Whether such keys differ, but for the batch size, so that `Pair.check_evaluated` must look at the batches.

    Raises:
        UsageError: they differ; the message has the keys.
    """
    metric = "model.loss" if variable == "loss" else f"model.metrics.{variable}"
    parts = {
        "data": ("dataset", "main_loop.extra_streams", "main_loop.train_stream_name"),
        "metrics": (metric,),
        "budget": ("hooks.StopAfter", "main_loop.fixed_epoch_size", "main_loop.overfit"),
    }
    keys = [key for key, _, _ in differences(a, b)]
    trained = _below(keys, [f"dataset.{name}" for name in may_differ])
    for what, wanted in parts.items():
        differing = [key for key in _below(keys, wanted) if key not in trained]
        if differing:
            raise UsageError(
                f"the {what} of the two differ ({listed(differing)}); to compare them all the same, use --anyway"
            )
    return bool(trained) and "dataset.batch_size" not in trained


def _below(keys: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the keys that are among some names, or below one of them."""
    return [key for key in keys if any(f"{key}.".startswith(f"{name}.") for name in names)]


def condition_of(config: Config, address: str) -> Condition | None:
    """Return whether smaller or larger values of a statistic are better; None if nothing tells.

    The hook `SaveBest` of the config tells it of the variable that the hook watches, and else the name of the variable.
    """
    watched, best = watched_by(config)
    stream, variable = address.split("/")[:2]
    return best if watched.split("/")[:2] == [stream, variable] else direction_of(variable)


def watched_by(config: Config) -> tuple[str, Condition]:
    """Return the statistic by which `SaveBest` of a config chooses, and whether smaller or larger values are better."""
    entries = config.get("hooks") or ()
    saves = (entry["SaveBest"] for entry in entries if isinstance(entry, dict) and "SaveBest" in entry)
    return chosen_by(next(saves, None))


def direction_of(variable: str) -> Condition | None:
    """Return whether smaller or larger values of a variable are better, as its name tells; None if it does not."""
    words = variable.lower().split("_")
    if any(word in words for word in _LOSSES):
        return "min"
    return "max" if any(word in words for word in _SCORES) else None


def judge(a: Sequence[float], b: Sequence[float], condition: Condition, by: float = 0.0) -> Json:
    """Return what the values of two configs on the same seeds tell, with an error of 5 % at most.

    Args:
        a: the values of A, in the order of the pairs.
        b: those of B.
        condition: whether smaller or larger values are better.
        by: a difference up to this one does not matter; 0 if every difference does.

    Returns:
        `verdict`: which is better, `a` or `b`; `none`: no difference larger than was asked for; or `undecided`.
        `means`: of `a` and `b`. `difference`: of the means, B minus A. `interval`: the confidence interval of B minus
        A, None as long as the pairs are too few. `noise`: the standard deviations of `a` and `b` over the seeds, None
        with fewer than two pairs.
    """
    differences_ = [right - left for left, right in zip(a, b, strict=True)]
    half = half_width(differences_, resolution((*a, *b))) if any(differences_) else 0.0
    low = fmean(differences_) - half
    high = fmean(differences_) + half
    word = "undecided"
    if -by <= low and high <= by:
        word = "none"
    elif low > 0 or high < 0:
        word = "b" if (low > 0) == (condition == "max") else "a"
    sides = {"a": a, "b": b}
    means = {name: fmean(values) for name, values in sides.items()}
    return {
        "verdict": word,
        "means": means,
        "difference": means["b"] - means["a"],
        "interval": (low, high) if math.isfinite(half) else None,
        "noise": {name: stdev(values) for name, values in sides.items()} if len(a) > 1 else None,
    }


def half_width(differences_: Sequence[float], step: float = 0.0) -> float:
    """Return half the width of the confidence sequence of the mean of normal differences; infinite for too few.

    The sequence is that of a sequential t-test whose e-process is valid at any time: with 95 %, the intervals after all
    numbers of differences contain the mean, so that one may look after each pair and stop. Source: H. Wang and
    A. Ramdas, Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance, 2023
    (arXiv:2310.03722): a Gaussian mixture over effects, with the right Haar prior over the noise. The e-value of a mean
    m after n differences, with t = sqrt(n) (mean - m) / deviation, k = n - 1 and r = 1 + 4 n, is r^(-1/2) times
    ((1 + t^2/k) / (1 + t^2/(k r)))^(n/2); the interval has the means whose e-value is below 20.

    Args:
        differences_: the differences.
        step: the distance of the values that a difference may have, which counts as noise.
    """
    n = len(differences_)
    r = 1 + n * _SPREAD
    most = (math.sqrt(r) / ERROR) ** (2 / n)
    if most >= r:  # also of a single difference
        return math.inf
    noise = variance(differences_) + step**2 / 6
    return math.sqrt(noise * (n - 1) * (most - 1) / (1 - most / r) / n)


def resolution(values: Sequence[float]) -> float:
    """Return the smallest distance between two values that differ, as those of an accuracy on few examples do."""
    return min((right - left for left, right in itertools.pairwise(sorted(set(values)))), default=0.0)


def has_value(value: float | None) -> TypeGuard[float]:
    """Return whether a run has a value that can be compared; it has none if it has failed or diverged."""
    return value is not None and math.isfinite(value)


def worst_for_missing(sides: Sequence[Sequence[float | None]], condition: Condition) -> list[list[float]]:
    """Return the values of both sides; one that is missing or not finite is worse than all others, by their range.

    Raises:
        UsageError: no run has a value.
    """
    finite = sorted(value for side in sides for value in side if has_value(value))
    if not finite:
        raise UsageError("no run is finished and has a finite value of the metric")
    beyond = (finite[-1] - finite[0]) or abs(finite[-1]) or 1.0
    worst = finite[-1] + beyond if condition == "min" else finite[0] - beyond
    return [[value if has_value(value) else worst for value in side] for side in sides]


def changed_examples(pairs: Sequence[Sequence[Path]], stream: str, variable: str) -> Json | None:
    """Return the examples of a stream that B gets right and A does not, and the other way round, in most pairs of runs.

    Args:
        pairs: the run directories of A and of B.
        stream: the stream.
        variable: what is 1 for an example that is right, and 0 for another one, such as the accuracy.

    Returns:
        `stream`, `pairs` (those with predictions of both), `fixed` and `broken`, the names of examples; None if there
        are no predictions.
    """
    right_examples = [[_right_in(place, stream, variable) for place in places] for places in pairs]
    complete = [(a, b) for a, b in right_examples if a and b]
    votes = defaultdict(list)
    for a, b in complete:
        for name in a:
            if name in b:
                votes[name].append((a[name], b[name]))
    shares = {name: tuple(map(fmean, zip(*outcomes, strict=True))) for name, outcomes in votes.items()}
    if not shares:
        return None
    fixed = [name for name, (a, b) in shares.items() if a < 0.5 < b]
    broken = [name for name, (a, b) in shares.items() if b < 0.5 < a]
    return {"stream": stream, "pairs": len(complete), "fixed": fixed, "broken": broken}


def _right_in(directory: Path, stream: str, variable: str) -> dict[str, float]:
    """Return example -> 0 or 1, by the file of `SavePredictions`; nothing without one, or if there are other values."""
    run = StoredRun(directory)
    with suppress(ConfigError, StorageError, ValueError, *_OF_OTHERS):  # no predictions, or others' files
        given = [hook["SavePredictions"] for hook in run.final.get("hooks") or () if "SavePredictions" in hook]
        files = [str(arguments["file"]) for arguments in given if arguments["stream"] == stream]
        for file in files:
            if not file.endswith((".csv", ".jsonl")):
                continue
            lines = io.StringIO(read_regular(directory / file, _LARGEST, len(Path(file).parts)).decode())
            rows: Iterable[Any] = csv.DictReader(lines) if file.endswith(".csv") else map(json.loads, lines)
            right = {str(row.get("id", row.get("position"))): float(row[variable]) for row in rows if variable in row}
            if right and set(right.values()) <= {0.0, 1.0}:
                return right
    return {}
