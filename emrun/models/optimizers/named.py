"""The optimizers of a `TorchModel`, with their schedules, as one."""

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
from emrun.base.types import Batch, State, Values
from emrun.base.wording import NO_OPTIMIZER, did_you_mean, few, listed
from emrun.models.optimizers.parameters import names_of, parameters_beside, parameters_of
from emrun.models.optimizers.scheduled import ScheduledOptimizer
from emrun.models.schedules.closed_form import ClosedForm
from emrun.models.schedules.stepping import Scheduler
from emrun.schedule_plan import SchedulePlan

_LOG = logging.getLogger(__name__)


class Optimizers:
    """Builds, shows, saves and loads the optimizers and their schedules.

    Args:
        model: a `TorchModel`, whose file needs this one.
        optimizer: the form of the optimizer, or name -> form; None for a model that is only evaluated, or trains in its
            own way.
        scheduler: the form of the schedule, which every optimizer gets, or name of an optimizer -> form.

    Raises:
        ArgumentError: an optimizer or a schedule cannot be built, a name is not that of an optimizer, or two optimizers
            train the same parameter.
    """

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        self._model = model
        self.members = optimizers_of(model.module, optimizer, scheduler)
        """The optimizers with their schedules, in the order of the config; an empty one if the config has none."""
        self.only = self.members[0] if not self.members[0].name else None
        """The only optimizer, without a name; None if there are several."""
        check_apart(model.module, self.members)
        self.has_modes = any(each.has_modes for each in self.members)
        """Whether an optimizer has other weights for evaluations than for training."""
        self.is_plan_due = False
        """Whether the plan of the learning rates will be known after the zeroth epoch."""
        self._untrained: set[str] = set()  # the names of parameters that no optimizer has, and that a warning has named

    def replace(self, optimizer: Optimizer | None) -> None:
        """Take another optimizer than the only one.

        Raises:
            ArgumentError: there are several, with names.
        """
        if self.only is None:
            names = listed([each.name for each in self.members])
            raise ArgumentError("optimizer", f"the model has several optimizers ({names}), and none to replace")
        self.only.replace(optimizer)
        self.has_modes = self.only.has_modes

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """Name -> optimizer; the only one is named `optimizer`."""
        return {each.name or "optimizer": each.optimizer for each in self.members if each.optimizer is not None}

    @property
    def schedulers(self) -> dict[str, Scheduler | ClosedForm]:
        """Name of the optimizer -> its schedule."""
        return {each.name or "optimizer": each.scheduler for each in self.members if each.scheduler is not None}

    def warn_of_untrained(self) -> None:
        """Warn once of each parameter that no optimizer has, also of those that replace others in the training."""
        if not self.optimizers:
            return
        named = dict(self._model.module.named_parameters())
        beside = set(map(id, parameters_beside(list(named.values()), *self.optimizers.values())))
        untrained = {name for name, each in named.items() if each.requires_grad and id(each) in beside}
        if names := [name for name in named if name in untrained - self._untrained]:
            self._untrained |= untrained
            _LOG.warning("no optimizer trains %s; if this is meant, set requires_grad to False", few(names))

    def prepare(self, batch: Batch, train: bool, stream: str) -> None:
        """Put the weights into the module with which a batch is run."""
        self.set_mode(train=train)

    def set_mode(self, *, train: bool) -> None:
        """Put the weights for training or for evaluations into the module, if an optimizer has both."""
        for each in self.members:
            each.set_mode(train=train)

    @contextmanager
    def mode_of_evaluations(self) -> Iterator[None]:
        """Have the weights for evaluations in the module, to save them."""
        trained = [each for each in self.members if each.is_training]
        self.set_mode(train=False)
        try:
            yield
        finally:
            for each in trained:
                each.set_mode(train=True)

    def named(self, optimizer: Optimizer | str | None) -> Optimizer:
        """Return an optimizer by its name, or as it is.

        Raises:
            ArgumentError: there is no such optimizer.
        """
        if optimizer is None:
            names = listed([each.name for each in self.members])
            raise ArgumentError(
                "optimizer", NO_OPTIMIZER if self.only is not None else f"name one of the optimizers: {names}"
            )
        if not isinstance(optimizer, str):
            return optimizer
        own = self.optimizers
        if optimizer not in own:
            there = did_you_mean(optimizer, own) or f"; there are {listed(list(own)) or 'none'}"
            raise ArgumentError("optimizer", f"there is no optimizer {optimizer!r}{there}")
        return own[optimizer]

    def rates(self, *, of_next: bool) -> list[float | Tensor] | dict[str, float | Tensor] | None:
        """Return the learning rates of the last update, or of the next one if there is none.

        Args:
            of_next: whether to return those of the next update in any case.

        Returns:
            The rates of the groups of the only optimizer, None if there is none; of several: name -> rate, with
            a number after the names of further groups (`generator`, `generator_1`).
        """
        loop = self._model._main_loop
        if (only := self.only) is not None:
            has_next = only.rates is None and only.optimizer is not None
            return only.next_rates(loop) if has_next else only.rates
        found: dict[str, float | Tensor] = {}
        for each in self.members:
            rates = each.next_rates(loop) if each.rates is None or of_next else each.rates
            found |= {f"{each.name}_{index}" if index else each.name: rate for index, rate in enumerate(rates)}
        return found

    def plan(self) -> SchedulePlan | None:
        """Return the learning rates of the run, as far as its length is known; see `AbstractModel.schedule_plan`.

        Raises:
            ArgumentError: the schedule does not fit the length of the run.
        """
        loop = self._model._main_loop
        if loop is None or not self.schedulers:
            return None
        found = [(each.name, *each.plan(loop)) for each in self.members if each.scheduler is not None]
        self.is_plan_due = any(is_due for _, _, is_due in found)
        first, *others = [replace(plan, optimizer=name) for name, plan, _ in found]
        return replace(first, others=others)

    def state_dict(self) -> State:
        """Return the states of optimizers and schedulers, and the last learning rates."""
        if self.only is not None:
            return self.only.state_dict()
        several = {each.name: each.state_dict() for each in self.members}
        return {"optimizer": None, "scheduler": None, "rates": None, "optimizers": several}

    def load_state_dict(self, state: Values) -> None:
        """Restore what `state_dict` returned; arguments that the config has changed, e.g. `lr`, replace the saved ones.

        Raises:
            StateError: the config has other optimizers or schedulers, or one of them refuses its state.
        """
        several = state.get("optimizers")
        names = [each.name for each in self.members if each.name]
        if sorted(several or ()) != sorted(names):
            now = listed(names) if names else "no names"
            then = listed(list(several)) if several else "no names"
            raise StateError(f"model.optimizer has {now}, but had {then}; a resume cannot change that")
        refusals: list[str] = []
        for each in self.members:
            try:
                each.load_state_dict(several[each.name] if several else state, self._model._main_loop)
            except StateError as error:
                if not each.name:
                    raise
                refusals.append(f"optimizer {each.name!r}: {error}")
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
    if not isinstance(optimizer, Mapping):
        if isinstance(scheduler, Mapping):
            raise ArgumentError("scheduler", "has names, but there is one optimizer without a name; write one schedule")
        return (ScheduledOptimizer(module, "", optimizer, scheduler),)
    for name in optimizer:
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError("optimizer", f"{name!r} is not a name of letters, digits and underscores")
    if not optimizer:
        raise ArgumentError("optimizer", "is empty; write {class: NAME, ...}, or {NAME: {class: NAME, match: REGEX}}")
    schedulers = dict(scheduler) if isinstance(scheduler, Mapping) else dict.fromkeys(optimizer, scheduler)
    for name in schedulers:
        if name not in optimizer:
            there = did_you_mean(str(name), optimizer) or f"; there are {listed(list(optimizer))}"
            raise ArgumentError(f"scheduler.{name}", f"there is no optimizer {name!r}{there}")
    has_names = isinstance(scheduler, Mapping)
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
        for each in parameters_of(member.optimizer):
            if id(each) in owners:
                message = f"selects parameter {names[id(each)]!r}, which optimizer {owners[id(each)]!r} trains"
                raise ArgumentError(f"optimizer.{member.name}.match", message)
            owners[id(each)] = member.name
