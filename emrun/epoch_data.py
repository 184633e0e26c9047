"""The data of epochs and batches: addresses of statistics, what hooks declare to read and write, whether it fits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import EpochData
from emrun.base.wording import did_you_mean, listed, meant_of, short
from emrun.model import AbstractModel

_MOST = 40  # statistics in a message; of more, such as those of each class, it has only the variables

MOST_CLASSES = 4
"""How many classes a table, the log and a page have each by itself."""

RUNNING = ("mean", "sum", "min", "max", "std", "var", "count", "nancount", "nanfraction")
"""The aggregations that are computed from a few running totals."""

_ADDRESS = re.compile(r"[^/]+(/[^/]+)+")

LEARNING_RATE = "learning_rate"
"""The name of the learning rate in the data of an epoch and in the step record."""


class ByStream(dict[str, dict[str, Any]]):
    """The data of an epoch by stream; a stream that is not there is an error with the streams that are."""

    before: Mapping[str, dict[str, Any]] = {}
    """What else a hook gets by the name of a stream: the data of the last training epoch, in an evaluation at the end.
    They are not part of the data, so nothing that is added to them is recorded."""

    def __missing__(self, stream: str) -> dict[str, Any]:
        if stream in self.before:
            return self.before[stream]
        raise KeyError(f"there is no stream {stream!r} in the data of the epoch{meant_of(stream, self)}")


def named_rates(rates: Iterable[Any]) -> dict[str, Any]:
    """Return learning rates by name: `learning_rate`, `learning_rate_1`, ... in order; of a mapping, by its names."""
    if isinstance(rates, Mapping):
        return {f"{LEARNING_RATE}_{name}": rate for name, rate in rates.items()}
    return {f"{LEARNING_RATE}_{index}" if index else LEARNING_RATE: rate for index, rate in enumerate(rates)}


def learning_rates(model: AbstractModel) -> dict[str, float]:
    """Return the learning rates of a model's last update by name, as `named_rates`; empty if the model has none."""
    rates = model.step_values().get(LEARNING_RATE)
    return {name: float(rate) for name, rate in named_rates(() if rates is None else rates).items()}


def is_rate(name: str) -> bool:
    """Return whether a name is that of a learning rate; see `named_rates`."""
    return name == LEARNING_RATE or name.startswith(f"{LEARNING_RATE}_")


def read_by(hook: Any) -> tuple[str, ...] | None:
    """Return the variables of a batch that a hook declares to read; None if it declares nothing.

    Raises:
        HookError: `reads` of the hook is not a list of names.
    """
    by_arguments = _named(hook, "variable")
    reads = declared(hook, "reads")
    return by_arguments or None if reads is None else tuple(dict.fromkeys((*by_arguments, *reads)))


def check_monitors(hooks: Sequence[Any], streams: Sequence[str] | None) -> None:
    """Check that an earlier hook writes what hooks read from the epoch data, for a stream that is run.

    Args:
        hooks: the hooks in their order, and the model, which writes before the hooks and may also monitor statistics.
        streams: the names of the streams that are run, the train stream first; None if any stream may be run. Then only
            variables that are monitored without a stream are checked.

    Raises:
        HookError: the check failed; the message says which hook to move, or what to add.
    """
    writes = [declared(hook, "writes") or () for hook in hooks]
    everything = sorted({name for names in writes for name in names})
    for index, hook in enumerate(hooks):
        for address, is_variable in _monitored(hook, everything).items():
            stream, _, statistic = ("", "", address) if is_variable else address.partition("/")
            if streams is None and not is_variable:
                continue
            whole = address, address.removesuffix("/mean")
            if not is_variable and streams is not None and stream not in streams:
                why = (
                    f"but stream {stream!r} is not run{did_you_mean(stream, streams or ())} (the main loop runs "
                    f"{listed(streams or ())}); add it to main_loop.extra_streams"
                )
                code = "config.unknown-stream"
                fix = ""
                if len(streams) == 1:  # others may have keys
                    fix = f"override main_loop.extra_streams=[{stream}]"
                if streams and any(_is_of_variable(name, stream) for name in everything):
                    why = f"but a statistic is written STREAM/VARIABLE/AGGREGATION: {streams[-1]}/{address}"
                    code = "config.unknown-statistic"
                    fix = f"set {streams[-1]}/{address}"
                raise HookError(f"{type(hook).__name__} monitors {address}, {why}", index, (*whole, stream), code, fix)
            if is_rate(statistic.partition("/")[0]) and (is_variable or stream == (streams or ("",))[0]):
                continue  # the loop writes it
            is_meant = _is_of_variable if is_variable else _is_statistic
            writers = [i for i, names in enumerate(writes) if any(is_meant(name, statistic) for name in names)]
            others = [] if is_variable else [_only_in(hooks[i], statistic, stream) for i in writers]
            if others and all(others):
                raise HookError(
                    f"{type(hook).__name__} monitors {address}, but {statistic!r} is only written for "
                    f"{listed(sorted({name for names in others for name in names}))} (see `streams` of what writes it)",
                    index,
                    whole,
                    "config.unknown-statistic",
                )
            if any(isinstance(hooks[i], AbstractModel) for i in writers):
                continue  # `stream_values` of the model come before what hooks write
            if not writers:
                variables = sorted({name.partition("/")[0] for name in everything})
                there = variables if is_variable else everything
                near = [*there, *(f"{name}/mean" for name in there if "/" not in name and not is_variable)]
                meant = did_you_mean(statistic, near)
                written = listed(there if len(there) <= _MOST else variables)
                raise HookError(
                    f"{type(hook).__name__} monitors {address}, but no hook writes {statistic!r}{meant} "
                    f"(hooks write {written}); add it to ComputeStats{'' if meant else _example(statistic)}, "
                    f"or declare `writes = [{statistic!r}]` in the hook of yours that writes it",
                    index,
                    (*whole, statistic.partition("/")[0]),
                    "config.unknown-statistic",
                )
            if writers[0] > index:
                writer = type(hooks[writers[0]]).__name__
                raise HookError(
                    f"{type(hook).__name__} monitors {address}, which {writer} writes later; move this hook after "
                    f"{writer}",
                    index,
                    code="config.hook-order",
                    fix="move",
                )


def _example(statistic: str) -> str:
    """Return how the variables of ComputeStats are written with a statistic, for a message."""
    variable, _, aggregation = statistic.partition("/")
    entry = variable if aggregation in ("", "mean") else f"{{{variable}: {aggregation}}}"
    others = [] if variable == "loss" else ["loss"]
    return f" (variables: [{listed([*others, entry])}])"


def read_of_others(hook: Any, hooks: Sequence[Any], stream: str) -> str | None:
    """Return a statistic that a hook reads from the epoch data of a stream other than the given one; None if none.

    Args:
        hook: the hook.
        hooks: all hooks, and the model.
        stream: the name of the stream.
    """
    monitored = _monitored(hook, [name for each in hooks for name in declared(each, "writes") or ()]).items()
    return next((each for each, is_variable in monitored if not is_variable and named(each)[0] != stream), None)


def _monitored(hook: Any, written: Sequence[str]) -> dict[str, bool]:
    """Return what a hook reads from the epoch data -> whether it is the name of a variable, without a stream.

    `written` holds what all hooks write, because the name of a variable may contain a slash.
    """
    addresses = (*_named(hook, "address"), *(declared(hook, "monitors") or ()))
    found = {name: "/" not in name or any(_is_of_variable(each, name) for each in written) for name in addresses}
    return {**found, **dict.fromkeys(_named(hook, "epoch variable"), True)}


def _is_of_variable(name: str, variable: str) -> bool:
    """Return whether a written name, `variable` or `variable/aggregation`, belongs to a variable."""
    return name.startswith(f"{variable}/") or (name == variable and "/" not in variable)


def _only_in(hook: Any, statistic: str, stream: str) -> Sequence[str]:
    """Return the streams for which a hook, or the model, writes a statistic, if that is not one of them; else ()."""
    for variable, streams in getattr(hook, "only_in", {}).items():
        if _is_statistic(variable, statistic) and stream not in streams:
            return tuple(streams)
    return ()


def _is_statistic(name: str, statistic: str) -> bool:
    """Return whether a written name is a statistic, or its variable, whose aggregations are then not known."""
    return name == statistic.partition("/")[0] or name.removesuffix("/mean") == statistic.removesuffix("/mean")


def declared(hook: Any, attribute: str) -> tuple[str, ...] | None:
    """Return the names that a hook declares in an attribute; None if the attribute is missing or None.

    Raises:
        HookError: the attribute is not a list of names.
    """
    names = getattr(hook, attribute, None)
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise HookError(f"{type(hook).__name__}.{attribute} must be a list of names such as ['loss'], not {names!r}")
    return tuple(names)


def _named(hook: Any, what: str) -> tuple[str, ...]:
    """Return the names of a kind in the arguments of a hook; nothing for a hook made without its constructor."""
    return tuple(name for kind, name in getattr(hook, "_named_by_arguments", ()) if kind == what)


def statistics(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each statistic of a stream's variables.

    A mean or a plain value has the name of its variable. Any other aggregation is named `variable/aggregation`.
    """
    for name, value in variables.items():
        if isinstance(value, Mapping):
            yield from ((name if key == "mean" else f"{name}/{key}", entry) for key, entry in value.items())
        else:
            yield name, value


class Lowest(str):
    """The lowest statistics of many classes, as text."""

    __slots__ = ()


def brief_statistics(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) as `statistics` does, but of a statistic of many classes the mean and the three lowest."""
    for name, value in variables.items():
        parts = value if isinstance(value, Mapping) else {}
        numbers = [(each, key) for key, each in parts.items() if key != "mean" and isinstance(each, int | float)]
        if len(numbers) <= MOST_CLASSES or any(key in (*RUNNING, "median") for _, key in numbers):
            yield from statistics({name: value})
            continue
        yield from ((name, each) for key, each in parts.items() if key == "mean")
        lowest = sorted(each for each in numbers if not math.isnan(each[0]))[:3]
        yield f"lowest {name}", Lowest(", ".join(f"{key} {short(each)}" for each, key in lowest))


def check_address(argument: str, value: object) -> None:
    """Raise `ArgumentError` unless a value is an address `stream/variable` or `stream/variable/aggregation`."""
    if not isinstance(value, str) or not _ADDRESS.fullmatch(value):
        raise ArgumentError(argument, f"{value!r} is not an address such as valid/loss or valid/loss/mean")


@cache
def named(address: str) -> tuple[str, str]:
    """Return the stream of an address, and the name that `statistics` gives to the statistic at the address.

    `valid/loss` and `valid/loss/mean` are the same. The name of a variable may contain slashes.
    """
    stream, _, name = address.partition("/")
    return stream, name.removesuffix("/mean")


def number_at(epoch_data: EpochData, address: str, owner: str) -> float | None:
    """Return the number at an address; None if the stream was not evaluated.

    Args:
        epoch_data: the data of an epoch.
        address: the address.
        owner: what reads the number, for messages.

    Raises:
        HookError: the statistic is missing, or not a number.
    """
    stream, name = named(address)
    if stream not in epoch_data:
        return None
    there = dict(statistics(epoch_data[stream]))
    if name not in there:
        has = listed(list(map(str, there)))
        raise HookError(f"{owner} monitors {address}, but there is no {name!r}: {stream} has {has}")
    value = there[name]
    if (found := number(value)) is not None:
        return as_float(found)
    shape = getattr(value, "shape", None)
    shown = repr(value)[:40] if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
    raise HookError(f"{owner} monitors {address}, which is not a number: {shown}")


def number(value: Any) -> float | None:
    """Return a value that is one number as an `int` or a `float`; None if it is not one number.

    All that reads numbers of hooks asks this. One number is what `float` takes, except text, or an array or a tensor
    with one element; a time has a unit, and is none.

    Raises:
        ValueError: it is a number that no `float` can have, such as a complex one.
    """
    if getattr(getattr(value, "dtype", None), "kind", None) in ("m", "M"):
        return None
    if callable(item := getattr(value, "item", None)):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # there is not one element
            return None
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str) or not (hasattr(value, "__float__") or isinstance(value, complex)):
        return None
    with suppress(TypeError, ValueError, OverflowError):
        found = float(value)
        if not math.isinf(found) or found == value:
            return found
    raise ValueError("is a number that no float can have")


def check_numbers(epoch_data: EpochData, writer: str) -> None:
    """Check that the record can have the numbers in the data of an epoch, each under its own name.

    Raises:
        HookError: it cannot have one, which `writer` has added.
    """
    for stream, variables in epoch_data.items():
        names = set[str]()
        for name, value in statistics(variables):
            if name in names or not isinstance(name, str):
                message = f"{writer} wrote {stream}/{name}, but {name!r} is not a text, or the name of two numbers"
                raise HookError(f"{message}; write another name")
            names.add(name)
            try:
                number(value)
            except ValueError as error:
                raise HookError(f"{writer} wrote {stream}/{name}, which {error}; write another number") from error


def as_float(value: float) -> float:
    """Return a number as a float; a whole number that is too large for it is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def numbers(value: Any) -> Any:
    """Return numbers in types that JSON has: NaN and infinity as strings; values that are not numbers are left out."""
    if isinstance(value, Mapping):
        entries = {str(key): numbers(entry) for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not None}
    found = number(value)
    is_special = isinstance(found, float) and not math.isfinite(found)
    return json.dumps(found) if is_special else found
