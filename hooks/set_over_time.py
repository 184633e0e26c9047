"""SetOverTime: sets a number of an optimizer or of the module along a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Annotated, Any

import torch

from emrun import AbstractHook
from emrun.base.arguments import check_number
from emrun.base.errors import ArgumentError, HookError, StateError
from emrun.base.types import Batch, Factory, Form
from emrun.base.wording import did_you_mean, listed
from emrun.hook import Loop
from emrun.hooks._shared.parameters import module_of

_LOG = logging.getLogger(__name__)
_RATES = ("lr", "initial_lr")

ScheduleForm = Annotated[Factory, Form(package="emrun.models.schedules.built_in", supplied=1)]


class SetOverTime(AbstractHook):
    """Sets a number of an optimizer or of the module along a schedule.

        hooks:
          - SetOverTime: {target: optimizer.weight_decay, value: 0.01, end: 0.1, schedule: {class: Cosine}}

    The schedules are those of learning rates, `Constant`, `Linear`, `Cosine` and so on, with the same arguments. They
    give a share s for each update, and the number is `s * value + (1 - s) * end`: `Linear` and `Cosine` go from `value`
    to `end` over the run; with `warmup`, the number comes from `end`. The number of an update is set before its first
    batch. It depends only on the number of updates done and the length of the run, so a resume is exact, and a run that
    is made longer follows the rules of schedules (`on_extend`).

    A target is a key of an optimizer, `optimizer.weight_decay`, with several optimizers `optimizer.NAME.momentum`; or
    an attribute of the module, `module.encoder.dropout.p`. The number is set in all parameter groups of the optimizer;
    groups that have 0 while others do not, such as those of `no_decay`, keep it.

    An evaluation has the number of the last update, but `emrun eval` that of the config. A number that matters in
    evaluations should be a buffer of the module with one element: it is set in place, and checkpoints have it. With
    `model.compile`, use a buffer too: torch compiles again for a changed number of the module, and stops compiling
    after 8 times.

    Args:
        target: the key or the attribute.
        schedule: one of emrun's schedules, and its arguments.
        value: the number at the share 1; by default the one that is there when the run begins.
        end: the number at the share 0.

    Raises:
        ArgumentError: there is no such number, or an argument has a value that is not allowed.
        HookError: another hook sets the number, the model is not a `TorchModel`, or the schedule does not fit the
            length of the run.
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
            raise ArgumentError("target", f"{target!r} is not a text such as optimizer.weight_decay")
        self._target = target
        self._value = value
        self._end = float(end)
        self._schedule = _built(schedule)
        self._numbers: list[_Number] = []
        self._initial: list[float] = []  # what the numbers were when the run began
        self._factor: Callable[[int], float] | None = None
        self._done: int | None = None  # the number of updates that the numbers are set for
        self._is_logged = False
        if model is not None:
            self._find(model)  # a wrong target is reported at its line

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check that the target is there, that no other hook sets it, and that the schedule fits the run."""
        super().register_mainloop(main_loop)
        self._find(main_loop.model)
        for other in main_loop.hooks[: self._index]:
            if isinstance(other, SetOverTime) and other._target == self._target:
                raise self._problem(f"another SetOverTime sets {self._target} too; remove one", self._target)
        horizon = main_loop.horizon
        schedule = self._schedule
        knows_passes = horizon.updates_per_pass is not None or all(
            length.unit != "passes" for length in schedule.lengths()
        )
        if horizon.updates is not None and knows_passes:
            with self._errors():
                schedule.factor(horizon)

    def before_training(self) -> None:
        """Plan the values of the run; after a resume, set the numbers of the last update."""
        loop = self.main_loop
        self._factor = self._done = None
        if not loop.evaluating and not self._schedule.is_awaited(loop.horizon):
            self._plan()
            if loop.updates_done:
                self._set(loop.updates_done - 1)

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Set the numbers for an update."""
        loop = self.main_loop
        if loop.training and self._done != loop.updates_done:
            self._set(loop.updates_done)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, and the numbers with which the run began."""
        self._schedule.updates_done = self.main_loop.updates_done
        return {"schedule": self._schedule.state_dict(), "found": self._initial}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            StateError: the schedule is another one, or the run is longer in a way that changes values already used.
        """
        self._factor = self._done = None
        if any(number.is_buffer for number in self._numbers):
            self._initial = list(state["found"])  # the checkpoint has the number of now, the config has none
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
            raise StateError(
                f"{key}, of {self._target}; rates are shares of its value: "
                f"{refusal.replace('model.scheduler.', f'{key}.')}"
            )

    @property
    def _key(self) -> str:
        """The key of the hook in the config, for messages and overrides."""
        hooks = [index for index, hook in enumerate(self.main_loop.hooks) if isinstance(hook, SetOverTime)]
        return "hooks.SetOverTime" if len(hooks) == 1 else f"hooks.{self._index}"

    @property
    def _index(self) -> int:
        return next(index for index, hook in enumerate(self.main_loop.hooks) if hook is self)

    def _problem(self, message: str, about: str) -> HookError:
        return HookError(message, self._index, [about])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Report errors of the schedule at its place in the config."""
        try:
            yield
        except ArgumentError as error:
            argument = error.argument.replace("scheduler", "schedule", 1)
            raise self._problem(
                f"SetOverTime.{argument}: {error.message}", argument.partition("[")[0].rpartition(".")[2]
            ) from error

    def _find(self, model: Any) -> None:
        """Find the numbers of the config.

        Raises:
            ArgumentError: see the class.
        """
        module = module_of("SetOverTime", model)
        root, _, path = self._target.partition(".")
        if root not in ("optimizer", "module") or not path:
            raise _wrong(self._target, "write optimizer.weight_decay, or an attribute such as module.dropout.p")
        is_first = not self._numbers
        if root == "module":
            self._numbers = [_number_of_module(self._target, module)]
        else:
            self._numbers = _numbers_of_optimizer(self._target, model.optimizers)
        if is_first:
            self._initial = [number.read() for number in self._numbers]
        if self._value is None and self._end == 0 and not any(self._initial):
            raise _wrong(self._target, "is 0, and so is end; give value or end")

    def _plan(self) -> None:
        loop = self.main_loop
        self._find(loop.model)  # an optimizer that has loaded a state has new groups
        self._schedule.updates_done = loop.updates_done
        with self._errors():
            factor = self._schedule.plan(loop.horizon)
        self._factor = self._schedule.by_time(factor, loop.horizon)
        total = loop.horizon.updates
        done = loop.updates_done
        if total is not None and done < total and not self._is_logged and loop.horizon.share is None:
            self._is_logged = True
            initial = next((number for number in self._initial if number), 0.0)
            points = (done, (done + total - 1) // 2, total - 1)
            values = ", ".join(f"{self._number(factor(point), initial):.3g}" for point in points)
            _LOG.info("SetOverTime: %s in the next update, halfway, and in update %d: %s", self._target, total, values)

    def _set(self, done: int) -> None:
        if self._factor is None:
            self._plan()
        assert self._factor is not None
        share = self._factor(done)
        for number, initial in zip(self._numbers, self._initial, strict=True):
            if initial or not any(self._initial):
                number.write(self._number(share, initial))
        self._done = done

    def _number(self, share: float, initial: float) -> float:
        """Return the number of a share, where the run began with `found`."""
        value = initial if self._value is None else float(self._value)
        return share * value + (1 - share) * self._end


@dataclass(frozen=True)
class _Number:
    """A number in a mapping of an optimizer, or an attribute of a part of the module."""

    owner: Any
    key: str
    is_buffer: bool = False

    def read(self) -> float:
        return float(self.owner[self.key] if isinstance(self.owner, dict) else getattr(self.owner, self.key))

    def write(self, number: float) -> None:
        if self.is_buffer:
            getattr(self.owner, self.key).fill_(number)
        elif isinstance(self.owner, dict):
            self.owner[self.key] = number
        else:
            setattr(self.owner, self.key, number)


def _wrong(target: str, message: str) -> ArgumentError:
    return ArgumentError("target", f"{target!r}: {message}")


def _numbers_of_optimizer(target: str, optimizers: dict[str, Any]) -> list[_Number]:
    """Return the numbers at a key in the parameter groups of an optimizer.

    Raises:
        ArgumentError: there is no such optimizer, or its groups do not have the number.
    """
    path, _, key = target.rpartition(".")
    name = path.partition(".")[2] or path  # the only optimizer is called `optimizer`
    if name not in optimizers:
        raise _wrong(target, f"the model has no optimizer {name!r}; it has {listed(list(optimizers)) or 'none'}")
    if key in _RATES:
        raise _wrong(target, "model.scheduler sets the learning rate, e.g. scheduler: {class: Cosine, warmup: 5%}")
    groups = optimizers[name].param_groups
    keys = [entry for entry, value in groups[0].items() if type(value) in (int, float) and entry not in _RATES]
    if key not in keys:
        raise _wrong(target, f"the optimizer has no number {key!r}{did_you_mean(key, keys)}; it has {listed(keys)}")
    return [_Number(group, key) for group in groups]


def _number_of_module(target: str, module: torch.nn.Module) -> _Number:
    """Return the number that is an attribute of a part of a module.

    Raises:
        ArgumentError: there is no such attribute, or it is not a number that may be set.
    """
    *path, key = target.split(".")[1:]
    try:
        owner = reduce(getattr, path, module)
        value = getattr(owner, key)
    except AttributeError as error:
        raise _wrong(target, f"{error}{did_you_mean(error.name or '', dir(error.obj))}") from error
    is_buffer = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() == 1
    if isinstance(value, torch.nn.Parameter) or not (is_buffer or type(value) in (int, float)):
        raise _wrong(target, f"is a {type(value).__name__}; only a number, or a buffer with one, can be set")
    return _Number(owner, key, is_buffer)


def _built(form: Callable[..., Any]) -> Any:
    """Return the schedule, of a stand-in for an optimizer with the rate 1.

    Raises:
        ArgumentError: it is not a schedule of emrun.
    """
    schedule: Any = None
    with suppress(TypeError, AttributeError):
        schedule = form(SimpleNamespace(param_groups=[{"lr": 1.0}]))
    if not hasattr(schedule, "sets_rates"):
        raise ArgumentError("schedule", f"{form!r} is not a schedule of emrun, such as Linear or Cosine")
    schedule.sets_rates = False
    return schedule
