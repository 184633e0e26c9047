"""Types that contracts, configs and hooks share."""

from __future__ import annotations

import inspect
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_type_hints

from emrun.base.errors import ArgumentError
from emrun.base.sources import NEW, changed
from emrun.base.wording import listed

Batch = Mapping[str, Any]
"""Source name -> values; all sources have the same length."""

Values = Mapping[str, Any]
"""Name -> value: the outputs of a batch, or what was saved."""

Named = dict[str, Any]
"""Name -> anything."""

State = dict[str, Any]
"""What a `state_dict` returns, in plain types and tensors."""

EpochData = dict[str, dict[str, Any]]
"""Stream -> variable -> a number, or a mapping aggregation -> number."""

Counts = Mapping[str, int]
"""Name -> a number of things."""

Json = dict[str, Any]
"""Name -> a value that JSON has, as `--json` prints it and the files of a run have it."""

Strings = Sequence[str]
"""A list of strings, such as names."""

Profile = dict[str, "array[float]"]
"""What was timed -> seconds, one entry each time it happened."""

Policy = Literal["error", "warn", "ignore"]
"""What to do about a problem."""

InterruptPolicy = Literal["batch", "epoch"]
"""Where the first SIGINT ends the training: after the current batch or the current epoch."""

InsteadOf = Iterable[str] | Callable[[Iterable[str]], Iterable[str]]
"""Names that checkpoints lose when a checkpoint is saved, or a function that returns them, called with all names."""

Prefetch = Callable[[Batch], Callable[[], None] | None]
"""Prepares a batch in the read-ahead thread; returns a function for the loop to call before the batch, or None."""

Reader = Literal["loop", "thread", "worker"]
"""Who makes the batches of a stream: the thread of the loop, a thread that reads ahead, or a worker process."""

StartMethod = Literal["fork", "forkserver", "spawn"]
"""How worker processes are started."""


@dataclass(frozen=True, slots=True)
class Names:
    """Says what the strings in an argument of a hook name; see `VariableName`, `EpochVariable`, `Address`.

    Args:
        what: `variable`, `epoch variable` or `address`.
    """

    what: Literal["variable", "epoch variable", "address"]


VariableName = Annotated[str, Names("variable")]
"""A variable of a batch, a source or an output, that a hook reads; it is checked with the first batch of each stream.

`VariableName`, `EpochVariable` and `Address` annotate parameters of a hook's constructor, also inside lists, mappings
and unions, as in `variables: Sequence[VariableName] | None`. The strings that are passed there are what the hook reads.
"""

EpochVariable = Annotated[str, Names("epoch variable")]
"""A variable of the data of an epoch that a hook reads, in any stream; an earlier hook must write it."""

Address = Annotated[str, Names("address")]
"""A statistic that a hook reads, `stream/variable` or `stream/variable/aggregation`; an earlier hook must write it."""


def evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """Return the type of an annotation, or None if it cannot be evaluated.

    Args:
        annotation: a type, or a string with a type.
        names: the global names of the function with the annotation.
    """
    owner = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(owner, names, include_extras=True)["it"]
    except Exception:  # annotations are user code, and may need names that only type checkers import
        return None


@dataclass(frozen=True, slots=True)
class Interval:
    """How often or when something happens: `5 epochs`, `200 updates`, `500 iterations`, `30 minutes`.

    A bare number means epochs. A hook of your own gets an interval by two lines, the first in its constructor:

        self.every = Interval.parse("every", every, ("epochs", "updates", "iterations"))
        if self.every.due(self.main_loop):
    """

    count: float
    unit: str

    @classmethod
    def parse(cls, argument: str, value: object, units: tuple[str, ...] = ("epochs",)) -> Interval:
        """Read an interval.

        Args:
            argument: the name of the argument, for the message.
            value: a string such as `5 epochs`, or a number of epochs.
            units: the units that are allowed.

        Raises:
            ArgumentError: the value is not a positive number of one of these units.
        """
        match = None if isinstance(value, bool) else re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)?\s*", str(value))
        word = (match.group(2) or "epochs") if match else ""
        unit = next((allowed for allowed in units if word in (allowed, _singular(allowed))), None)
        count = float(match.group(1)) if match else 0.0
        if unit is not None and unit != "minutes" and not count.is_integer():
            raise ArgumentError(argument, f"{value!r} is not an interval; write a whole number of {unit}")
        if unit is not None and count <= 0:
            raise ArgumentError(
                argument, f"{value!r} is not an interval; write for example '5 {unit}', a number above 0"
            )
        if unit is None:
            more = f"; the units here are {listed(units)}" if len(units) > 1 else ""
            raise ArgumentError(argument, f"{value!r} is not an interval; write for example '5 {units[0]}'{more}")
        return cls(count, unit)

    def due(self, main_loop: Any) -> bool:
        """Return whether the training has just completed a multiple of the interval; the start is one too.

        An interval of epochs is due in `after_epoch`, and after each evaluation by `emrun eval`. One of updates or
        iterations is due in `before_batch` and `after_batch`, in batches that the model is trained on; the update of a
        window of `accumulate` that the end of an epoch has cut short is not seen by them.

        Args:
            main_loop: the main loop of the hook.

        Raises:
            ValueError: the interval has another unit.
        """
        if self.unit == "epochs":
            is_multiple = main_loop.training_epochs_done % self.count == 0
            return main_loop.stream_name is None and (main_loop.evaluating or is_multiple)
        if self.unit not in ("updates", "iterations"):
            raise ValueError(f"an interval of {self.unit} is not counted: {self}")
        done = getattr(main_loop, f"{self.unit}_done")
        is_open = self.unit == "updates" and main_loop.model.is_accumulating
        return main_loop.training and main_loop.stream_name is not None and done % self.count == 0 and not is_open

    def __str__(self) -> str:
        """Return the interval as it is written in a config."""
        return f"{self.count:g} {_singular(self.unit) if self.count == 1 else self.unit}"


BALANCED = "balanced"
"""The `weight` of a loss that makes up for classes of different sizes, with the counts that the run keeps."""

TICKS = 1_000_000
"""The number of updates of a run that time ends, for schedules; see `Horizon`."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """How many updates a run will make, as far as this is known.

    Args:
        updates: the smallest limit that hooks declare (`AbstractHook.limits`), in updates; None if it is not known.
        updates_per_pass: number of updates in a pass of the train stream; None if it is not known.
        missing: why `updates` will not be known before the first update, and what to do; empty if it will.
        is_awaited: whether the zeroth epoch will tell `updates_per_pass`.
        share: returns the share of the run that is over after a number of updates, from 0 to 1, if time ends the run;
            then `updates` is `TICKS`, of which a schedule takes this share for the updates done. None if updates end
            the run.
    """

    updates: int | None
    updates_per_pass: int | None = None
    missing: str = ""
    is_awaited: bool = False
    share: Callable[[int], float] | None = None


def _singular(unit: str) -> str:
    return unit.removesuffix("es") if unit == "passes" else unit.removesuffix("s")


@dataclass(frozen=True, slots=True)
class Units:
    """Says that an argument is an interval, and in which units; see `Period`.

    Args:
        allowed: the units.
    """

    allowed: tuple[str, ...]


Period = Annotated[int | str, Units(("epochs", "updates", "iterations", "minutes"))]
"""The interval at which a hook does something, `5 epochs` or `500 updates`; it is checked without importing the hook.

`Annotated[int | str, Units(("epochs", "updates"))]` is an interval in other units.
"""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Says that a number has a minimum: `Annotated[int, AtLeast(1)]` is checked without importing the class.

    Args:
        minimum: the smallest number that is allowed.
    """

    minimum: int


@dataclass(frozen=True, slots=True)
class Form:
    """Describes how a parameter annotated `Annotated[Factory, Form(...)]` is written in a config.

    Args:
        keys: the keys of the form that belong to its owner; they are stored in `Factory.options`. With `shared`, a key
            that is also a parameter of the target belongs to the target.
        package: the package in which a name without a dot is looked up, e.g. `torch.optim`.
        built_in: a module of emrun in which the name is looked up before that; not by the forms below this one.
        supplied: how many positional arguments its owner supplies.
        shared: the name of an argument, such as `optimizer`, that its owner supplies to the target and to the forms
            among the target's arguments that have a parameter of this name. See `Factory.share`.
    """

    keys: tuple[str, ...] = ()
    package: str = ""
    built_in: str = ""
    supplied: int = 0
    shared: str = ""

    def own_keys(self, parameters: Collection[str]) -> tuple[str, ...]:
        """Return the keys that belong to the owner of the form, of a target with these parameters."""
        return tuple(key for key in self.keys if not (self.shared and key in parameters))

    def is_by_name(self, parameters: Collection[str]) -> bool:
        """Return whether a target with these parameters, in their order, gets the shared argument by name."""
        return self.shared in parameters and next(iter(parameters)) != self.shared


class Factory:
    """A `class` or `import` form of a config that its owner calls itself, with arguments that only the owner knows.

    A constructor whose parameter is annotated `Factory` gets the form as a `Factory`. In Python,
    `Factory(torch.optim.SGD, lr=0.1)` is the same as `{class: SGD, lr: 0.1}` in a config.

    Args:
        target: the object to call.
        args: positional arguments that follow those of the caller.
        options: the keys of the form that belong to its owner, such as `inputs` of a loss.
        is_import: the form names an object that is not called: calling the factory returns `target` itself.
        kwargs: keyword arguments.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        /,
        *args: Any,
        options: Mapping[str, Any] | None = None,
        is_import: bool = False,
        **kwargs: Any,
    ) -> None:
        self.target = target
        self.options = dict(options or {})
        self._args = args
        self._is_import = is_import
        self.kwargs = kwargs

    def __call__(self, *supplied: Any) -> Any:
        """Call the target with the supplied arguments first; for an `import` form, return the target itself."""
        if self._is_import:
            return self.target
        return self.target(*supplied, *self._args, **self.kwargs)

    def share(self, name: str, value: Any) -> Any:
        """Call the factories among the target's arguments, then the target, all with the same additional argument.

        Args:
            name: the name of the argument. A target that has a parameter of this name, but not as its first parameter,
                gets the argument by name; other targets get it as first positional argument.
            value: the argument.
        """
        if self._is_import:
            return self.target
        args, kwargs = changed(
            (self._args, self.kwargs),
            lambda argument: argument.share(name, value) if isinstance(argument, Factory) else argument,
        )
        if Form(shared=name).is_by_name(parameters_of(self.target)):
            return self.target(*args, **kwargs, **{name: value})
        return self.target(value, *args, **kwargs)

    def __repr__(self) -> str:
        return f"Factory({getattr(self.target, '__qualname__', self.target)})"


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable by name; nothing for a callable in C that has no signature."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}


def takes_path(name: str, function: Callable[..., Any]) -> bool:
    """Return whether a stream function is that of new data: its stream is `new`, and it needs an argument `path`."""
    path = parameters_of(function).get("path") if name == NEW else None
    return path is not None and path.default is path.empty
