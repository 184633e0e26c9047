"""Which streams are evaluated after the train stream, how often, and how many of their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from emrun.base.errors import ArgumentError
from emrun.base.types import Interval
from emrun.base.wording import did_you_mean

_KEYS = ("every", "batches")


class ExtraStream(NamedTuple):
    """When a stream is evaluated, and how much of it.

    Args:
        every: the number of epochs between evaluations; None for every epoch.
        batches: how many batches are evaluated at most; None for all.
    """

    every: int | None = None
    batches: int | None = None


def read_extra_streams(
    entries: Sequence[str | Mapping[str, Any]], train_stream_name: str, evaluated_train: str
) -> dict[str, ExtraStream]:
    """Return stream -> how it is evaluated; the train stream is called `evaluated_train`.

    Raises:
        ArgumentError: the value is not a list of streams, or has a stream twice.
    """
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ArgumentError("extra_streams", f"{entries!r} is not a list of streams")
    found: dict[str, ExtraStream] = {}
    for entry in entries:
        pairs = list(entry.items()) if isinstance(entry, Mapping) else [(entry, None)]
        if len(pairs) != 1 or not isinstance(pairs[0][0], str):
            raise ArgumentError(
                "extra_streams",
                f"{entry!r} is not a stream; write a name, `name: 5 epochs`, or "
                "`name: {every: 5 epochs, batches: 20}`",
            )
        stream, value = pairs[0]
        name = evaluated_train if stream == train_stream_name else stream
        if name in found:
            why = f" ({train_stream_name!r} is evaluated as {name!r})" if name == evaluated_train else ""
            raise ArgumentError("extra_streams", f"stream {stream!r} is listed twice{why}; remove one entry")
        found[name] = _read(stream, value if isinstance(value, Mapping) else {"every": value})
    return found


def _read(stream: str, values: Mapping[str, Any]) -> ExtraStream:
    for key in values:
        if key not in _KEYS:
            raise ArgumentError(
                "extra_streams",
                f"{stream}: unknown key {key!r}{did_you_mean(str(key), _KEYS)} (it may have {', '.join(_KEYS)})",
            )
    every = values.get("every")
    batches = values.get("batches")
    if batches is not None and (isinstance(batches, bool) or not isinstance(batches, int) or batches < 1):
        raise ArgumentError("extra_streams", f"{stream}: batches is {batches!r}, not a whole number of at least 1")
    return ExtraStream(None if every is None else _epochs(stream, every), batches)


def _epochs(stream: str, every: Any) -> int:
    try:
        return int(Interval.parse("extra_streams", every).count)
    except ArgumentError as error:
        unit = next((unit for unit in ("updates", "iterations") if unit[:-1] in str(every)), None)
        if "batch" in str(every):
            count = str(every).split()[0]
            raise ArgumentError(
                "extra_streams",
                f"{every!r} is not a number of epochs; for a part, write {{{stream}: {{batches: {count}}}}}",
            ) from error
        if unit is None:
            raise
        raise ArgumentError(
            "extra_streams",
            f"{stream}: {every!r} is not a number of epochs; extra streams are evaluated after an epoch. For an epoch "
            f"of that many {unit}, set main_loop.fixed_epoch_size: {every}",
        ) from error
