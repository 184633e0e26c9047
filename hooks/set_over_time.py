"""SetOverTime: sets a number of the module, an optimizer or a loss along a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Annotated, Any

from emrun import AbstractHook
from emrun.base.arguments import check_number
from emrun.base.errors import ArgumentError, HookError, StateError
from emrun.base.types import Batch, Factory, Form
from emrun.hook import Loop
from emrun.hooks._numbers import Number, find_numbers
from emrun.hooks._parts.parameters import module_of

_LOG = logging.getLogger(__name__)

ScheduleForm = Annotated[Factory, Form(package="emrun.models.schedules.built_in", supplied=1)]


class SetOverTime(AbstractHook):
    """Sets a number of the module, an optimizer or a loss along a schedule.

        hooks:
          - SetOverTime: {target: optimizer.weight_decay, value: 0.01, end: 0.1, schedule: {class: Cosine}}

    The schedules are those of learning rates, `Constant`, `Linear`, `Cosine` and so on, with the same arguments. They
    give a share s for each update, and the number is `s * value + (1 - s) * end`: `Linear` and `Cosine` go from `value`
    to `end` over the run; with `warmup`, the number comes from `end`. The number of an update is set before its first
    batch. It depends only on the number of updates done and the length of the run, so a resume is exact, and a run that
    is made longer follows the rules of schedules (`on_extend`).

    A target is a path of names: `module.encoder.dropout.p`, `optimizer.weight_decay`, `optimizer.betas.0`,
    `loss.label_smoothing`; with several losses or optimizers `loss.NAME.scale`, `optimizer.NAME.momentum`. A name `*`
    stands for all that lead to a number: `module.layers.*.p`. In all parameter groups of an optimizer, the number is
    set; groups that have 0 while others do not, such as those of `no_decay`, keep it.

    Numbers of the module and of losses have their own value again in evaluations, so that these are the same in `emrun
    eval`, which does not train. A number that evaluations need as it was in training should be a buffer of the module
    with one element: it is set in place, and checkpoints have it. With `model.compile`, use a buffer too: torch
    compiles again for a changed number of the module, and stops compiling after 8 times.

    Args:
        target: the path of the number.
        schedule: one of emrun's schedules, and its arguments.
        value: the number at the share 1; by default the one that is there when the run begins.
        end: the number at the share 0.

    Raises:
        ArgumentError: there is no such number, another hook sets it, or an argument has a value that is not allowed.
        HookError: the model is not a `TorchModel`, or the schedule does not fit the length of the run.
    """

    reads = ()
    changes_batches = False
    every_rank = True

    def __init__(
        self,
        target: str,
        schedule: ScheduleForm,
        value: float | None = None,
        end: float = 0.0,
        model: Any = None,
    ) -> None:
        super().__init__(model=model)
        for name, number in (("value", 0.0 if value is None else value), ("end", end)):
            check_number(name, number)
        if not isinstance(target, str):
            raise ArgumentError("target", f"{target!r} is not a path such as optimizer.weight_decay")
        self._target = target
        self._value, self._end = value, float(end)
        self._schedule = _built(schedule)
        self._found: list[float] | None = None  # the numbers of the config
        self._numbers: list[tuple[Number, float, float, float]] = []  # its values at the shares 1 and 0, in the config
        self._factor: Callable[[int], float] | None = None
        self._done: int | None = None  # the number of updates that the numbers are set for
        self._share: float | None = None
        self._is_logged = False
        if model is not None:
            self._find(model)  # a wrong target is reported at its line

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check that the target is there, that no other hook sets it, and that the schedule fits the run."""
        super().register_mainloop(main_loop)
        self._find(main_loop.model)
        own = {each.place for each in self._places(main_loop.model)}
        for other in main_loop.hooks[: self._index]:
            if isinstance(other, SetOverTime) and own & {each.place for each in other._places(main_loop.model)}:
                raise self._problem(f"another SetOverTime sets {self._target} too; remove one", self._target)
        horizon, schedule = main_loop.horizon, self._schedule
        knows_passes = horizon.updates_per_pass is not None or all(each.unit != "passes" for each in schedule.lengths())
        if horizon.updates is not None and knows_passes:
            with self._errors():
                schedule.factor(horizon)

    def before_training(self) -> None:
        """Plan the values of the run."""
        loop = self.main_loop
        self._factor = self._done = self._share = None
        if not loop.evaluating and not self._schedule.is_awaited(loop.horizon):
            self._plan()

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Set the numbers for an update, or for an evaluation."""
        loop = self.main_loop
        if not loop.training:
            if self._done is not None:
                self._put_back()
        elif self._done != loop.updates_done:
            self._set(loop.updates_done)

    def after_training(self, success: bool) -> None:
        """Give the numbers the values of the config again."""
        if self._done is not None:
            self._put_back()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, and the numbers of the config."""
        self._schedule.updates_done = self.main_loop.updates_done
        return {"schedule": self._schedule.state_dict(), "found": self._found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            StateError: the schedule is another one, or the run is longer in a way that changes values already used.
        """
        self._factor = self._done = self._share = None
        places, found = self._places(self.main_loop.model), state["found"]
        is_saved = all(each.is_of_training for each in places) and self._target.startswith("module.")
        if (self._found is None or is_saved) and found is not None and len(found) == len(places):
            self._found = list(found)  # what the checkpoint has loaded is the number of now
        key = f"{self._key}.schedule"
        try:
            self._schedule.load_state_dict(state["schedule"])
        except StateError as error:
            raise StateError(str(error).replace("model.scheduler", key)) from error
        if self.main_loop.evaluating:
            return
        with self._errors():
            refusal = self._schedule.refusal(self.main_loop.horizon)
        if refusal is not None:
            what = f"{key}, of {self._target}; rates are shares of its value"
            raise StateError(f"{what}: {refusal.replace('model.scheduler.', f'{key}.')}")

    @property
    def _key(self) -> str:
        """The key of the hook in the config, for messages and overrides."""
        alike = [index for index, each in enumerate(self.main_loop.hooks) if isinstance(each, SetOverTime)]
        return "hooks.SetOverTime" if len(alike) == 1 else f"hooks.{self._index}"

    @property
    def _index(self) -> int:
        return next(index for index, each in enumerate(self.main_loop.hooks) if each is self)

    def _problem(self, message: str, about: str) -> HookError:
        return HookError(message, self._index, [about])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Report errors of the schedule at its place in the config."""
        try:
            yield
        except ArgumentError as error:
            argument = error.argument.replace("scheduler", "schedule", 1)
            about = argument.partition("[")[0].rpartition(".")[2]
            raise self._problem(f"SetOverTime.{argument}: {error.message}", about) from error

    def _places(self, model: Any) -> list[Number]:
        """Return the numbers; none as long as a lazy module has no optimizer."""
        module_of("SetOverTime", model)
        if getattr(model, "is_lazy", False) and self._target.startswith("optimizer."):
            return []
        return find_numbers("target", self._target, model)

    def _find(self, model: Any) -> None:
        """Find the numbers of the config, if they are there already.

        Raises:
            ArgumentError: see the class.
        """
        places = self._places(model)
        if not places:
            return
        self._found = self._found or [each.read() for each in places]
        if self._value is None and self._end == 0 and not any(self._found):
            raise ArgumentError("target", f"{self._target} is 0, and so is end; give value or end")

    def _plan(self) -> None:
        loop = self.main_loop
        self._schedule.updates_done = loop.updates_done
        with self._errors():
            factor = self._schedule.plan(loop.horizon)
        self._factor = self._schedule.by_time(factor, loop.horizon)
        self._find(loop.model)
        places, found = self._places(loop.model), self._found or []
        keeps_zeros = self._target.startswith("optimizer.") and any(found)
        self._numbers = [
            (place, number if self._value is None else float(self._value), self._end, number)
            for place, number in zip(places, found, strict=True)
            if number or not keeps_zeros
        ]
        total, done = loop.horizon.updates, loop.updates_done
        if total is not None and done < total and not self._is_logged and loop.horizon.share is None:
            self._is_logged = True
            _, value, end, _ = self._numbers[0]
            points = (done, (done + total - 1) // 2, total - 1)
            values = ", ".join(f"{_between(factor(point), value, end):.3g}" for point in points)
            _LOG.info("SetOverTime: %s in the next update, halfway, and in update %d: %s", self._target, total, values)

    def _set(self, done: int) -> None:
        if self._factor is None:
            self._plan()
        assert self._factor is not None
        share = self._factor(done)
        if share != self._share:
            for number, value, end, _ in self._numbers:
                number.write(_between(share, value, end))
        self._done, self._share = done, share

    def _put_back(self) -> None:
        """Give numbers that evaluations may read the values of the config."""
        self._done = self._share = None
        for number, _, _, found in self._numbers:
            if not number.is_of_training:
                number.write(found)


def _between(share: float, value: float, end: float) -> float:
    return share * value + (1 - share) * end


def _built(form: Callable[..., Any]) -> Any:
    """Return the schedule, of a stand-in for an optimizer with the rate 1.

    Raises:
        ArgumentError: it is not a schedule of emrun.
    """
    schedule: Any = None
    try:
        schedule = form(SimpleNamespace(param_groups=[{"lr": 1.0}]))
    except (TypeError, AttributeError) as error:
        reason: BaseException | None = error
    else:
        reason = None
    if not all(callable(getattr(schedule, name, None)) for name in ("plan", "factor", "refusal")):
        raise ArgumentError("schedule", f"{form!r} is not a schedule of emrun, such as Linear or Cosine") from reason
    schedule.sets_rates = False
    return schedule
