"""The optimizers of a model by their names, with their schedules; most models have one, without a name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from emrun.base.errors import ArgumentError, StateError
from emrun.base.types import State, Values
from emrun.base.wording import NO_OPTIMIZER, did_you_mean, few, listed
from emrun.hook import Loop
from emrun.models.optimizers.build import check_steps_alone
from emrun.models.optimizers.parameters import names_of, parameters_beside, parameters_of
from emrun.models.optimizers.scheduled import Rates, ScheduledOptimizer
from emrun.models.schedules.stepping import Schedule
from emrun.schedule_plan import SchedulePlan

_LOG = logging.getLogger(__name__)


class Optimizers:
    """Builds, shows, saves and loads the optimizers and their schedules.

    Args:
        module: the module to train.
        optimizer: the form of the optimizer, or name -> form; None for a model that is only evaluated, or trains in its
            own way.
        scheduler: the form of the schedule, which every optimizer gets, or name of an optimizer -> form.

    Raises:
        ArgumentError: an optimizer or a schedule cannot be built, a name is not that of an optimizer, or two optimizers
            train the same parameter.
    """

    def __init__(self, module: Module, optimizer: Any, scheduler: Any) -> None:
        self.members = optimizers_of(module, optimizer, scheduler)
        """The optimizers with their schedules, in the order of the config; an empty one if the config has none."""
        self.only = self.members[0] if not self.members[0].name else None
        """The only optimizer, without a name; None if there are several."""
        check_apart(module, self.members)
        self.has_modes = any(member.has_modes for member in self.members)
        """Whether an optimizer has other weights for evaluations than for training."""
        self.is_plan_due = False
        """Whether the plan of the learning rates will be known after the zeroth epoch."""
        self._names = [member.name for member in self.members]
        self._untrained: set[str] = set()  # the names of parameters that no optimizer has, and that a warning has named

    # which optimizers there are

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """Name -> optimizer; the only one is named `optimizer`."""
        return {member.shown_name: optimizer for optimizer, member in self.owners().items()}

    @property
    def schedulers(self) -> dict[str, Schedule]:
        """Name of the optimizer -> its schedule."""
        return {member.shown_name: member.scheduler for member in self.members if member.scheduler is not None}

    def owners(self) -> dict[Optimizer, ScheduledOptimizer]:
        """Return optimizer -> the member that it belongs to."""
        return {member.optimizer: member for member in self.members if member.optimizer is not None}

    def named(self, optimizer: Optimizer | str | None) -> Optimizer:
        """Return an optimizer by its name, or as it is.

        Raises:
            ArgumentError: there is no such optimizer.
        """
        if optimizer is None:
            raise ArgumentError(
                "optimizer", f"name one of the optimizers: {listed(self._names)}" if self.only is None else NO_OPTIMIZER
            )
        if not isinstance(optimizer, str):
            return optimizer
        optimizers = self.optimizers
        if optimizer not in optimizers:
            allowed = did_you_mean(optimizer, optimizers) or f"; there are {listed(list(optimizers))}"
            raise ArgumentError("optimizer", f"there is no optimizer {optimizer!r}{allowed}")
        return optimizers[optimizer]

    def replace(self, optimizer: Optimizer | None) -> None:
        """Take another optimizer than the only one.

        Raises:
            ArgumentError: there are several, with names.
        """
        if self.only is None:
            raise ArgumentError(
                "optimizer", f"the model has several optimizers ({listed(self._names)}), and none to replace"
            )
        self.only.replace(optimizer)
        self.has_modes = self.only.has_modes

    # checks and warnings

    def check_steps_alone(self) -> None:
        """Check that each optimizer makes its update without a function that calculates the loss.

        Raises:
            ArgumentError: one of them needs such a function, as LBFGS does.
        """
        for optimizer, member in self.owners().items():
            check_steps_alone(optimizer, member.key)

    def warn_of_untrained(self, module: Module) -> None:
        """Warn once of each parameter that no optimizer has, also of those that replace others in the training.

        Args:
            module: the module, which a hook may have replaced.
        """
        optimizers = self.owners()
        if not optimizers:
            return
        beside = set(map(id, parameters_beside(list(module.parameters()), *optimizers)))
        untrained = [name for name, each in module.named_parameters() if each.requires_grad and id(each) in beside]
        if names := [name for name in untrained if name not in self._untrained]:
            self._untrained.update(names)
            _LOG.warning("no optimizer trains %s; if this is meant, set requires_grad to False", few(names))

    # the weights for training, and those for evaluations

    def set_mode(self, *, train: bool) -> None:
        """Put the weights for training or for evaluations into the module, if an optimizer has both."""
        for member in self.members:
            member.set_mode(train=train)

    @contextmanager
    def mode_of_evaluations(self) -> Iterator[None]:
        """Have the weights for evaluations in the module, to save them."""
        trained = [member for member in self.members if member.is_training]
        self.set_mode(train=False)
        try:
            yield
        finally:
            for member in trained:
                member.set_mode(train=True)

    # the learning rates

    def rates(self, loop: Loop | None, *, of_next: bool) -> Rates | dict[str, float | Tensor] | None:
        """Return the learning rates of the last update, or of the next one if there is none.

        Args:
            loop: the loop, whose length a schedule may need.
            of_next: whether to return those of the next update of several optimizers in any case.

        Returns:
            The rates of the groups of the only optimizer, None if there is none; of several: name -> rate, with
            a number after the names of further groups (`generator`, `generator_1`).
        """
        if self.only is not None:
            return self.only.next_rates(loop) if self.only.rates is None else self.only.rates
        named: dict[str, float | Tensor] = {}
        for member in self.members:
            rates = member.next_rates(loop) if member.rates is None or of_next else member.rates
            for index, rate in enumerate(rates or ()):
                named[f"{member.name}_{index}" if index else member.name] = rate
        return named

    def plan(self, loop: Loop | None) -> SchedulePlan | None:
        """Return the learning rates of the run, as far as its length is known; see `AbstractModel.schedule_plan`.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        if loop is None or not self.schedulers:
            return None
        planned = [(member.name, *member.plan(loop)) for member in self.members if member.scheduler is not None]
        self.is_plan_due = any(is_due for _, _, is_due in planned)
        first, *others = [replace(plan, optimizer=name) for name, plan, _ in planned]
        return replace(first, others=others)

    # checkpoints

    def state_dict(self) -> State:
        """Return the states of optimizers and schedulers, and the last learning rates."""
        if self.only is not None:
            return self.only.state_dict()
        return {
            "optimizer": None,
            "scheduler": None,
            "rates": None,
            "optimizers": {member.name: member.state_dict() for member in self.members},
        }

    def load_state_dict(self, state: Values, loop: Loop | None) -> None:
        """Restore what `state_dict` returned; arguments that the config has changed, e.g. `lr`, replace the saved ones.

        Args:
            state: what `state_dict` returned.
            loop: the loop, whose length must fit the schedules.

        Raises:
            StateError: the config has other optimizers or schedulers, or one of them refuses its state.
        """
        states: Values = state.get("optimizers") or {"": state}  # the only optimizer has no name
        if sorted(states) != sorted(self._names):
            now = listed(self._names) or "no names"
            then = listed(list(states)) or "no names"
            raise StateError(f"model.optimizer has {now}, but had {then}; a resume cannot change that")
        refusals: list[str] = []
        for member in self.members:
            try:
                member.load_state_dict(states[member.name], loop)
            except StateError as error:
                if not member.name:
                    raise
                refusals.append(f"optimizer {member.name!r}: {error}")
        if refusals:
            raise StateError("\n".join(refusals))


def optimizers_of(module: Module, optimizer: Any, scheduler: Any) -> tuple[ScheduledOptimizer, ...]:
    """Return the optimizers of a model.

    Args:
        module: the module to train.
        optimizer: the form of the only optimizer, or name -> form.
        scheduler: the form of the schedule of every optimizer, or name of an optimizer -> form.

    Raises:
        ArgumentError: a name is not allowed, or an optimizer or a schedule cannot be built.
    """
    has_names = isinstance(scheduler, Mapping)
    # an optimizer without a name
    if not isinstance(optimizer, Mapping):
        if has_names:
            raise ArgumentError("scheduler", "has names, but there is one optimizer without a name; write one schedule")
        return (ScheduledOptimizer(module, "", optimizer, scheduler),)
    # their names
    for name in optimizer:
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError("optimizer", f"{name!r} is not a name of letters, digits and underscores")
    if not optimizer:
        raise ArgumentError("optimizer", "is empty; write {class: NAME, ...}, or {NAME: {class: NAME, match: REGEX}}")
    # their schedules
    schedulers = dict(scheduler) if has_names else dict.fromkeys(optimizer, scheduler)
    for name in schedulers:
        if name not in optimizer:
            allowed = did_you_mean(str(name), optimizer) or f"; there are {listed(list(optimizer))}"
            raise ArgumentError(f"scheduler.{name}", f"there is no optimizer {name!r}{allowed}")
    return tuple(
        ScheduledOptimizer(module, name, form, schedulers.get(name), f"scheduler.{name}" if has_names else "scheduler")
        for name, form in optimizer.items()
    )


def check_apart(module: Module, members: Sequence[ScheduledOptimizer]) -> None:
    """Check that no parameter is trained by two optimizers.

    Raises:
        ArgumentError: one is.
    """
    names = names_of(module)
    owners: dict[int, str] = {}
    for member in members:
        for parameter in parameters_of(member.optimizer):
            place = id(parameter)
            if place in owners:
                raise ArgumentError(
                    f"optimizer.{member.name}.match",
                    f"selects parameter {names[place]!r}, which optimizer {owners[place]!r} trains",
                )
            owners[place] = member.name
