"""The methods and pruners of Optuna, on a study in memory that is made again from the directories of the trials."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from emrun.base.errors import ArgumentError
from emrun.base.randomness import derived_seed
from emrun.base.wording import did_you_mean, meant_of, normalised
from emrun.launch.parameters import Parameter, Value
from emrun.launch.results import Result, summary_of
from emrun.launch.settings import Sweep
from emrun.launch.trials import Experiment

_LOG = logging.getLogger(__name__)


class Search:
    """Proposes combinations of parameters, and says which trials to prune.

    Args:
        parameters: the parameters.
        settings: the section `sweep`.
        seed: the seed of the sweep. A proposal depends on it, on the number of earlier proposals and on the results.

    Raises:
        ArgumentError: Optuna has no such method or pruner, or it has other arguments.
    """

    def __init__(self, parameters: Sequence[Parameter], settings: Sweep, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._settings = settings
        self._seed = seed
        self._distributions = {parameter.name: _distribution(parameter) for parameter in parameters}
        self._parameters = parameters
        name = settings.pruner
        arguments = settings.pruner_arguments
        self._study = optuna.create_study(
            sampler=self._sampler(0),
            pruner=_built("pruner", optuna.pruners, "Pruner", name, arguments) if name else optuna.pruners.NopPruner(),
            direction="minimize" if settings.condition == "min" else "maximize",
        )
        self._live: dict[str, optuna.Trial] = {}
        self.is_exhausted = False
        """Whether all combinations were tried, so that there is none to propose."""

    @property
    def count(self) -> int:
        """The number of combinations that were proposed or added."""
        return len(self._study.get_trials(deepcopy=False))

    def propose(self) -> tuple[Mapping[str, Value], optuna.Trial]:
        """Return values for all parameters, and what `begin` gets if they are tried."""
        self._study.sampler = self._sampler(self.count)
        trial = self._study.ask(self._distributions)
        return {
            parameter.name: parameter.nearest(trial.params[parameter.name]) for parameter in self._parameters
        }, trial

    def begin(self, experiment: Experiment, trial: optuna.Trial | None = None) -> None:
        """Note that an experiment runs; without a proposal, it is added."""
        if trial is None:
            self._study.enqueue_trial(dict(experiment.values))
            trial = self._study.ask(self._distributions)
        self._live[_name(experiment)] = trial

    def should_prune(self, experiment: Experiment, values: Sequence[tuple[int, float]]) -> bool:
        """Report the values of the epochs of an experiment; return whether it is worse than others."""
        return any(trial.should_prune() for trial in self._reports(experiment, values))

    def end(self, experiment: Experiment, results: Sequence[Result]) -> None:
        """Note the results of an experiment that has ended, whether it ran here or not."""
        if _name(experiment) not in self._live:
            self.begin(experiment)
        if len(results) == 1:
            list(self._reports(experiment, results[0].values))
        self.repeat(self._live.pop(_name(experiment)), results)

    def repeat(self, trial: optuna.Trial, results: Sequence[Result]) -> None:
        """Note the results of a proposal; also of one that was tried before."""
        summary = summary_of(result.value for result in results)
        is_whole = summary["count"] == len(results) and not math.isnan(summary["mean"])
        state = TrialState.COMPLETE if is_whole else TrialState.FAIL
        if any(result.status == "pruned" for result in results):
            state = TrialState.PRUNED
        try:
            self._study.tell(trial, summary["mean"] if state == TrialState.COMPLETE else None, state)
        except RuntimeError as error:  # after the trial is noted, a sampler that has tried all ends the study
            if "Study.stop" not in str(error):
                raise
            if not self.is_exhausted:
                _LOG.info("method %s has tried all combinations: the sweep ends", self._settings.method)
            self.is_exhausted = True

    def _reports(self, experiment: Experiment, values: Sequence[tuple[int, float]]) -> Iterator[optuna.Trial]:
        """Report the values of epochs that are not known yet; yield the trial after each."""
        trial = self._live[_name(experiment)]
        known = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for epoch, value in values:
            if epoch > 0 and epoch not in known:
                trial.report(value, epoch)
                yield trial

    def _sampler(self, number: int) -> Any:
        seed = derived_seed(self._seed, "sampler", number) % 2**32
        name = "random" if self._settings.is_grid else self._settings.method
        return _built("method", optuna.samplers, "Sampler", name, {"seed": seed, **self._settings.method_arguments})


def _name(experiment: Experiment) -> str:
    return experiment.trials[0].directory.name


def _distribution(parameter: Parameter) -> BaseDistribution:
    span = parameter.span
    if span is None:
        return CategoricalDistribution(tuple(range(len(parameter.choices))))
    if span.is_whole:
        return IntDistribution(int(span.low), int(span.high), log=span.log, step=int(span.step or 1))
    return FloatDistribution(span.low, span.high, log=span.log, step=span.step)


def _built(argument: str, module: Any, ending: str, name: str, arguments: Mapping[str, Any]) -> Any:
    """Return a sampler or a pruner by its name without the ending."""
    classes = {
        normalised(class_name.removesuffix(ending)): class_name
        for class_name in module.__all__
        if class_name.endswith(ending)
    }
    known = sorted(classes.keys() - {"", "base", "nop", "grid", "partialfixed"})
    word = normalised(name).removesuffix(ending.lower())
    if word not in known:
        raise ArgumentError(argument, f"Optuna has no {name!r}{meant_of(name, known)}")
    target = getattr(module, classes[word])
    accepted = list(inspect.signature(target).parameters)
    given = {key: value for key, value in arguments.items() if key != "seed" or key in accepted}
    for key in given:
        if key not in accepted:
            raise ArgumentError(argument, f"{name} has no argument {key!r}{did_you_mean(key, accepted)}")
    try:
        return target(**given)
    except (TypeError, ValueError) as error:
        raise ArgumentError(argument, f"{name}: {error}") from error
