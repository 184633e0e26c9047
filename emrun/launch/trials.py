"""The trials of a sweep: the config of each, its identity and its directory.

A trial is a run. Its identity is a digest of its resolved config without its name, and the name of its directory ends
with it: a sweep that is started again, or on several machines, finds the same directories.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from emrun.base.arguments import resolved
from emrun.base.errors import ConfigError, Position, Problem, StorageError, UsageError
from emrun.base.randomness import derived_seed
from emrun.base.wording import from_here
from emrun.config.config import Config
from emrun.config.interpolation import unread_values
from emrun.config.overrides import in_name
from emrun.config.plan import Plan
from emrun.config.source_finder import Unimported
from emrun.config.yaml_text import dump
from emrun.launch.parameters import Parameter, Value
from emrun.launch.settings import Sweep
from emrun.runs.code_comparison import CodeNow
from emrun.runs.stored_run import MISSING, StoredRun
from emrun.storage.run import CONFIG, check_outside, create_run

_MOST_SHOWN = 180  # letters of the parameters in the name of a directory, which may have 255
NOT_OF_IDENTITY = ("sweep", "name", "code_directory")
"""The sections of a config that do not tell one trial from another."""
_FOLD = "vars.fold"
_PREFIX = "trial-"


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of a sweep.

    Args:
        overrides: what its config has instead of the sweep's.
        directory: its run directory, named for its identity.
        seed: its seed.
        fold: its fold; None without folds.
    """

    overrides: tuple[str, ...]
    directory: Path
    seed: int
    fold: int | None


@dataclass(frozen=True, slots=True)
class Experiment:
    """A combination of parameters, with its runs: one for each repeat and fold.

    Args:
        values: the name of each parameter -> its value.
        trials: the runs.
    """

    values: Mapping[str, Value]
    trials: tuple[Trial, ...]


class Trials:
    """Makes the experiments of a sweep.

    Args:
        config: the config.
        parameters: the parameters.
        settings: the section `sweep`.
        directory: the directory of the sweep.

    Raises:
        UsageError: the directory is that of a run, or lies in one.
    """

    def __init__(self, config: Config, parameters: Sequence[Parameter], settings: Sweep, directory: Path) -> None:
        check_outside(directory / "trial")
        without_sweep = config.without("sweep")
        self.config = config
        self._base = without_sweep.with_defaults({"seed": 0})
        self._has_seed = self._base is without_sweep
        self.parameters = parameters
        self.settings = settings
        self.directory = resolved(directory)
        seed = self._base["seed"]
        self.seed = seed if isinstance(seed, int) else 0  # another one is reported by `check`
        """The seed of the sweep: that of the config, or 0."""
        self.code = CodeNow()
        """The code of the user as it is now."""
        self._known: dict[Path, Experiment | None] = {}

    def called(self, trial: Trial) -> str:
        """Return what the log calls a trial."""
        return trial.directory.name

    def grid(self) -> Iterator[Experiment]:
        """Yield the experiments of all combinations; the values of the last parameter change first."""
        names = [parameter.name for parameter in self.parameters]
        for values in itertools.product(*(parameter.values for parameter in self.parameters)):
            yield self.experiment(dict(zip(names, values, strict=True)))

    def experiment(self, values: Mapping[str, Value]) -> Experiment:
        """Return the experiment of a combination.

        Raises:
            ConfigError: the config cannot be changed so; at the position of the parameter.
        """
        config, positions = self._with(values)
        folds: Sequence[int | None] = [None] if self.settings.folds is None else range(self.settings.folds)
        members = itertools.product(range(self.settings.repeats), folds)
        return Experiment(values, tuple(self._trial(config, tuple(positions), *member) for member in members))

    def _with(self, values: Mapping[str, Value]) -> tuple[Config, Mapping[str, Position]]:
        """Return the config of a combination, and its overrides -> the positions of the parameters."""
        overrides = [parameter.overrides(values[parameter.name]) for parameter in self.parameters]
        positions = {text: place for of_parameter in overrides for text, place in of_parameter.items()}
        with _at(positions):
            return self._base.overridden(list(positions)), positions

    def check(self) -> None:
        """Check the configs of trials without importing anything: the first, and each value of each parameter alone.

        Raises:
            ConfigError: a config cannot be used; at the position of the parameter.
        """
        ends = {
            parameter.name: parameter.values if parameter.span is None else [parameter.span.low, parameter.span.high]
            for parameter in self.parameters
        }
        first = {name: values[0] for name, values in ends.items()}
        tried = [first, *({**first, name: other} for name, values in ends.items() for other in values[1:])]
        problems: list[Problem] = []
        finder = Unimported()
        for index, values in enumerate(tried):
            try:
                config, positions = self._with(values)
                with _at(positions):
                    if self.settings.folds is not None:
                        _check_fold(config)
                        config = config.overridden([f"{_FOLD}=0"])
                    if index == 0:
                        Plan.with_evaluations(config, finder)
                    else:
                        Plan.of(config, finder)
            except ConfigError as error:
                problems += [problem for problem in error.problems if problem not in problems]
        if problems:
            raise ConfigError(problems)

    def config_of(self, trial: Trial) -> Config:
        """Return the config of a trial."""
        return self._base.overridden(trial.overrides)

    def known(self) -> Iterator[Experiment]:
        """Yield the experiments that have directories, as their configs tell: the directories are the only record."""
        seen: set[tuple[Trial, ...]] = set()
        for place in sorted(self.directory.glob(f"{_PREFIX}*")):
            if place not in self._known and (place / CONFIG).exists():
                self._known[place] = self._of_directory(place)
            experiment = self._known.get(place)
            if experiment is not None and experiment.trials not in seen:
                seen.add(experiment.trials)
                yield experiment

    def _of_directory(self, place: Path) -> Experiment | None:
        """Return the experiment to which a directory belongs; None if it is not a trial of this sweep."""
        keys = dict.fromkeys(key for parameter in self.parameters for key in parameter.keys)
        try:
            stored = StoredRun(place)
            stored_values = {key: stored.value(key) for key in keys}
            values = {parameter.name: parameter.value_in(stored_values) for parameter in self.parameters}
            if MISSING in stored_values.values() or None in values.values():
                return None
            experiment = self.experiment(values)
        except (ConfigError, StorageError):
            return None
        return experiment if any(trial.directory == place for trial in experiment.trials) else None

    def _trial(self, config: Config, overrides: tuple[str, ...], repeat: int, fold: int | None) -> Trial:
        seed = self.seed if repeat == 0 else derived_seed(self.seed, "repeat", repeat) % 2**31
        further = []
        if repeat > 0 or not self._has_seed:
            further.append(f"seed={seed}")
        if fold is not None:
            further.append(f"{_FOLD}={fold}")
        changed = *overrides, *further
        name = identity(config.overridden(further))
        shown = in_name(sorted(changed, key=lambda text: text.partition("=")[0].rpartition(".")[2]), _MOST_SHOWN)
        place = self.directory / f"{_PREFIX}{f'{shown}-' if shown else ''}{name}"
        if not place.exists():  # but perhaps as a trial of other parameters
            place = next(self.directory.glob(f"{_PREFIX}*{name}"), place)
        if place.is_symlink():
            raise UsageError(
                f"{from_here(place)} is a link, and the directory of a trial is its own; remove the link, or "
                "use another --output-dir"
            )
        return Trial(changed, place, seed, fold)


def identity(config: Config) -> str:
    """Return a digest of a resolved config, in which values of the environment are as the config names them.

    The sections `NOT_OF_IDENTITY` do not count, nor does the order of the keys of a mapping.
    """
    return digest_of(config.tree.shown())


def digest_of(tree: Mapping[str, Any]) -> str:
    """Return the digest of a config in plain types; see `identity`."""
    kept = {name: value for name, value in tree.items() if name not in NOT_OF_IDENTITY}
    return hashlib.sha256(json.dumps(_ordered(kept)).encode()).hexdigest()[:12]


def record_refusal(config: Config, directory: Path, reason: str) -> None:
    """Create the directory of a trial whose config is refused, as that of a run whose start has failed.

    Raises:
        UsageError: the directory holds a run.
        StorageError: the directory cannot be written.
    """
    run = create_run(
        dump(config.root, config.text),
        config.name,
        output_root=directory.parent,
        output_dir=directory,
        seed=config.get("seed", 0),
        command=sys.argv,
        plain=config.root.plain(),
    )
    run.end("failed", ConfigError.exit_status, reason)


def _ordered(value: Any) -> Any:
    """Return a plain tree with its mappings as sorted lists of pairs: keys may have types that JSON has not."""
    if isinstance(value, dict):
        return {"mapping": sorted([repr(key), json.dumps(_ordered(item))] for key, item in value.items())}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


def _check_fold(config: Config) -> None:
    """Check that the config uses the free value that tells the folds apart."""
    if any(path == ("vars", "fold") for path, _ in unread_values(config.overridden([f"{_FOLD}=0"]).root)):
        raise ConfigError(
            Problem(
                None,
                "sweep.folds",
                f"no value of the config is ${{{_FOLD}}}, which the folds set to 0, 1, ...",
                "config.sweep",
            )
        )


@contextmanager
def _at(positions: Mapping[str, Position]) -> Iterator[None]:
    """Move problems about overrides to the positions of the parameters that they come from."""
    places = {f"override {text!r}": place for text, place in positions.items()}
    try:
        yield
    except ConfigError as error:
        located = [
            (problem, places.get(problem.position.source) if problem.position else None) for problem in error.problems
        ]
        raise ConfigError(
            [replace(problem, position=place or problem.position) for problem, place in located]
        ) from error
