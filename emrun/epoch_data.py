"""The data of an epoch and of its batches: what hooks say that they read and write, and where that is found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from emrun.errors import HookError
from emrun.wording import did_you_mean, listed


def read_by(hook: Any) -> tuple[str, ...] | None:
    """Return the variables of a batch that a hook says it reads, None when it says nothing.

    Raises:
        HookError: its `reads` is not a list of names.
    """
    by_arguments = _named(hook, "variable")
    reads = declared(hook, "reads")
    return by_arguments or None if reads is None else tuple(dict.fromkeys((*by_arguments, *reads)))


def check_monitors(hooks: Sequence[Any], streams: Sequence[str] | None) -> None:
    """Check that what hooks read of the epoch's data is written by a hook before them, in a stream that is run.

    Args:
        hooks: the hooks in their order, and the model, which may monitor too.
        streams: the names of the streams that are run; None when any may be: then only variables that are monitored
            without a stream are looked at.

    Raises:
        HookError: it is not; the message says which hook to move, or what to add.
    """
    writes = [declared(hook, "writes") or () for hook in hooks]
    everything = sorted({name for names in writes for name in names})
    for index, hook in enumerate(hooks):
        for address, is_variable in _monitored(hook, everything).items():
            stream, _, statistic = ("", "", address) if is_variable else address.partition("/")
            if streams is None and not is_variable:
                continue
            if not is_variable and stream not in (streams or ()):
                raise HookError(
                    f"{type(hook).__name__} monitors {address}, but stream {stream!r} is not run"
                    f"{did_you_mean(stream, streams or ())} (main_loop runs {listed(streams or ())}: "
                    "main_loop.extra_streams)",
                    index,
                )
            is_meant = _is_of_variable if is_variable else _is_statistic
            writers = [i for i, names in enumerate(writes) if any(is_meant(name, statistic) for name in names)]
            if not writers:
                there = sorted({name.partition("/")[0] for name in everything}) if is_variable else everything
                raise HookError(
                    f"{type(hook).__name__} monitors {address}, but no hook writes {statistic!r}"
                    f"{did_you_mean(statistic, there)} (written are {listed(there)}); add it to ComputeStats. A hook "
                    f"of yours that writes it declares `writes = [{statistic!r}]`",
                    index,
                )
            if writers[0] > index:
                writer = type(hooks[writers[0]]).__name__
                raise HookError(f"{type(hook).__name__} monitors {address}: move it behind {writer}", index)


def _monitored(hook: Any, written: Sequence[str]) -> dict[str, bool]:
    """Return what a hook reads of the epoch's data -> whether it is a variable in whatever stream.

    Args:
        hook: the hook, or the model.
        written: what is written: a variable may have a slash in its name.
    """
    addresses = (*_named(hook, "address"), *(declared(hook, "monitors") or ()))
    found = {name: "/" not in name or any(_is_of_variable(each, name) for each in written) for name in addresses}
    return {**found, **dict.fromkeys(_named(hook, "epoch variable"), True)}


def _is_of_variable(name: str, variable: str) -> bool:
    """Tell whether what is written, `variable` or `variable/aggregation`, is of a variable."""
    return name.startswith(f"{variable}/") or (name == variable and "/" not in variable)


def _is_statistic(name: str, statistic: str) -> bool:
    """Tell whether what is written is a statistic, or the variable of one, whose aggregations are not known."""
    return name in (statistic, statistic.partition("/")[0])


def declared(hook: Any, attribute: str) -> tuple[str, ...] | None:
    """Return the names that a hook has in an attribute, None when it has none.

    Raises:
        HookError: it is not a list of names.
    """
    names = getattr(hook, attribute, None)
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise HookError(f"{type(hook).__name__}.{attribute} is {names!r}, not a list of names, e.g. ['loss']")
    return tuple(names)


def _named(hook: Any, what: str) -> tuple[str, ...]:
    """Return what the arguments of a hook name; nothing of a hook that was made without its constructor."""
    return tuple(name for kind, name in getattr(hook, "_named_by_arguments", ()) if kind == what)


def statistics(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the statistics of a stream's variables, each with its name.

    A mean goes by the name of its variable, as a plain value does, another aggregation by `variable/aggregation`.
    """
    for name, value in variables.items():
        if isinstance(value, Mapping):
            yield from ((name if key == "mean" else f"{name}/{key}", entry) for key, entry in value.items())
        else:
            yield name, value
