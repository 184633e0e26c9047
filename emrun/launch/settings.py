"""The section `sweep` of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from emrun.base.arguments import check_choice, check_count
from emrun.base.errors import ArgumentError
from emrun.epoch_data import check_address

Condition = Literal["min", "max"]
"""Whether smaller or larger values are better."""

Epoch = Literal["best", "last"]
"""Which epoch of a trial counts."""

OnError = Literal["continue", "stop"]
"""What to do when a trial fails."""


class Sweep:
    """What a sweep tries, and how its trials are run; these are the arguments of the section `sweep`.

        sweep:
          parameters:
            model.optimizer.lr: [1.0e-4, 3.0e-4]
          repeats: 3
          objective: valid/loss/mean

    Args:
        parameters: key of the config -> values: a list, or a range `{low, high, log, step}`. A word that is not a key
            names a list of mappings, each of which sets several keys.
        method: `grid` for all combinations, or a sampler of Optuna (extra `sweep`): `random`, `tpe` or another one,
            also with its arguments: `{tpe: {n_startup_trials: 5}}`.
        trials: the number of combinations, for a sampler of Optuna.
        repeats: the number of seeds with which each combination is trained. The first is the seed of the config.
        folds: the number of values 0, 1, ... of `vars.fold` with which each combination is trained.
        objective: the statistic by which trials are compared, such as `valid/loss/mean`.
        condition: `min` if smaller values are better, `max` if larger values are better. Without it, `SaveBest` of the
            config tells it if the hook watches the variable of the objective, or else a name such as `accuracy`; if
            nothing tells, `min`.
        epoch: whether the value of a trial is that of its `best` epoch or of its `last` one.
        pruner: a pruner of Optuna (extra `sweep`), which ends trials that are worse than others: `median`, or with
            arguments `{median: {n_warmup_steps: 3}}`.
        jobs: the number of trials that run at the same time; by default one, or as many as there are `devices`.
        devices: the GPUs, each as CUDA_VISIBLE_DEVICES names it; each trial sees one.
        on_error: when a trial fails, `continue` with the others, or `stop`.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any] | None = None,
        method: str | Mapping[str, Any] = "grid",
        trials: int | None = None,
        repeats: int = 1,
        folds: int | None = None,
        objective: str | None = None,
        condition: Condition = "min",
        epoch: Epoch = "best",
        pruner: str | Mapping[str, Any] | None = None,
        jobs: int | None = None,
        devices: Sequence[int | str] | None = None,
        on_error: OnError = "continue",
    ) -> None:
        if not isinstance(parameters, Mapping | None):
            raise ArgumentError("parameters", f"{parameters!r} is not a mapping from keys to values")
        check_count("repeats", repeats, minimum=1)
        for name, value, minimum in (("trials", trials, 1), ("folds", folds, 2), ("jobs", jobs, 1)):
            if value is not None:
                check_count(name, value, minimum=minimum)
        check_choice("condition", condition, Condition)
        check_choice("epoch", epoch, Epoch)
        check_choice("on_error", on_error, OnError)
        is_list = isinstance(devices, list | tuple) and all(type(device) in (int, str) for device in devices)
        if devices is not None and not (devices and is_list):
            raise ArgumentError("devices", f"{devices!r} is not a list of devices such as [0, 1]")
        if objective is not None:
            way, colon, address = str(objective).partition(":")
            if colon and way in ("min", "max"):
                raise ArgumentError("objective", f"write `objective: {address.strip()}` and `condition: {way}`")
            check_address("objective", objective)
        self.method, self.method_arguments = named("method", method)
        self.trials = trials
        self.repeats = repeats
        self.folds = folds
        self.objective = objective
        self.condition = condition
        self.epoch = epoch
        self.pruner, self.pruner_arguments = ("", {}) if pruner is None else named("pruner", pruner)
        self.devices = None if devices is None else [str(device) for device in devices]
        self.jobs = jobs or len(self.devices or [""])
        self.on_error = on_error
        self._check_method()

    @property
    def is_grid(self) -> bool:
        """Whether all combinations are tried."""
        return self.method == "grid"

    def _check_method(self) -> None:
        """Check what depends on the method."""
        if self.is_grid and self.method_arguments:
            raise ArgumentError("method", "grid has no arguments")
        if self.is_grid and self.trials is not None:
            raise ArgumentError("trials", "a grid tries all combinations; remove trials, or set method: random or tpe")
        if not self.is_grid and self.trials is None:
            raise ArgumentError("method", f"{self.method} needs the number of combinations: set trials")
        needs = f"pruner: {self.pruner}" if self.pruner else ""
        needs = f"method: {self.method}" if self.method not in ("grid", "random") else needs
        if needs and self.objective is None:
            raise ArgumentError("objective", f"{needs} needs an objective such as valid/loss/mean")
        if self.pruner and self.runs_per_experiment > 1:
            raise ArgumentError("pruner", "compares single runs; remove it, or repeats and folds")

    @property
    def runs_per_experiment(self) -> int:
        """How many runs a combination of parameters has."""
        return self.repeats * (self.folds or 1)


def named(argument: str, value: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a method or a pruner, `NAME` or `{NAME: {argument: value}}`.

    Raises:
        ArgumentError: it has another form.
    """
    if isinstance(value, str):
        return value.lower(), {}
    name, arguments = next(iter(value.items())) if isinstance(value, Mapping) and len(value) == 1 else ("", None)
    if not isinstance(name, str) or not isinstance(arguments, Mapping | None) or not name:
        raise ArgumentError(argument, f"{value!r} is neither a name nor {{NAME: {{argument: value}}}}")
    return name.lower(), dict(arguments or {})
