"""The first difference between recorded trainings, and what it is put down to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from emrun.diagnosis.recorded_trainings import Event, Recording

PARTS = {  # of the end, in the order in which a difference is looked for
    "weights": "parameter or buffer",
    "model": "state of the model,",
    "loop": "counter",
    "streams": "position of stream",
    "generators": "random state of",
    "hooks": "state of hook",
    "metrics": "metrics.jsonl,",
}

NOT_PERSISTENT = "(persistent=False)"
"""Stands behind the name of such a buffer."""

DIGEST = "digest"
"""How the text of a value begins that is too long to be shown."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing in which two trainings differ.

    Args:
        what: the thing, where, and both values.
        part: of which kind it is: `batch`, `outputs`, `rates`, `random`, `order`, or a part of the end.
        detail: its name there, or the stream.
        cause: what is likely to be the reason, None when nothing points at one.
    """

    what: str
    part: str
    detail: str = ""
    cause: str | None = None


def find_difference(
    straight: Recording, others: Sequence[Recording], vary: Mapping[str, list[str]]
) -> Difference | None:
    """Return the first difference, in the order of time; what is run again is compared again."""
    expected = {_place_of(event): event for event in straight.of("batch")}
    missing = dict(expected)
    for other in others:
        for event in other.of("batch"):
            place = _place_of(event)
            if place not in expected:
                return Difference(f"{_told(event)}: the straight run has no such batch", "order", event["stream"])
            missing.pop(place, None)
            found = _compare_batches(expected[place], event)
            if found is not None:
                return found
    if missing:
        return Difference(f"{_told(next(iter(missing.values())))}: missing in the other run", "order")
    final = others[-1].final
    for part, title in PARTS.items():
        one, other_part = straight.final[part], final.get(part, {})
        for name in varying(one, other_part):
            if name not in vary.get(part, ()):
                values = _both(one.get(name), other_part.get(name))
                return Difference(f"at the end: {title} {name}{values}", part, name)
    return None


def _compare_batches(one: Event, other: Event) -> Difference | None:
    where = _told(other)
    if one["batch"] != other["batch"]:
        return Difference(f"{where}: another batch", "batch", other["stream"])
    for name in varying(one["random_before"], other["random_before"]):
        return Difference(f"{where}: random state of {name} before the batch", "random", name)
    if one["outputs"] != other["outputs"]:
        names = [name for name in varying(one["outputs"], other["outputs"]) if name in one["outputs"]]
        name = "loss" if "loss" in names else (names or ["(other names)"])[0]
        values = _both(one["shown"].get(name), other["shown"].get(name))
        return Difference(f"{where}: output {name}{values}", "outputs", name)
    if one["rates"] != other["rates"]:
        return Difference(f"{where}: learning rate{_both(', '.join(one['rates']), ', '.join(other['rates']))}", "rates")
    for name in varying(one["random"], other["random"]):
        return Difference(f"{where}: random state of {name} after the batch", "random", name)
    return None


def _place_of(event: Event) -> tuple[Any, ...]:
    return event["training"], event["iteration"], event["stream"], event["number"]


def _told(event: Event) -> str:
    if event["training"]:
        return f"iteration {event['iteration']}"
    return f"evaluation of {event['stream']} at iteration {event['iteration']}, batch {event['number']}"


def _both(one: str | None, other: str | None) -> str:
    if one is None or other is None:
        return f" ({'missing' if one is None else 'there'} in the straight run only)" if one != other else ""
    return "" if one == other or one.startswith(DIGEST) else f" ({one} straight, {other} otherwise)"


def varying(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of what differs, or is in one of two only, in their order."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


@dataclass(frozen=True, slots=True)
class Causes:
    """Looks for what is likely to be the reason of a difference.

    Args:
        straight: a training without interruption.
        again: the same once more.
        buffer: how many batches are read ahead.
    """

    straight: Recording
    again: Recording
    buffer: int

    def explain(self, found: Difference, other: Recording) -> Difference:
        """Return the difference with its cause.

        Args:
            found: the difference.
            other: the training that differs.
        """
        cause = self._of_reading_ahead(found)
        if cause is None and other is self.again:
            cause = self._of_repetition(found)
        return replace(found, cause=cause or self._of_state(found, other))

    def _of_reading_ahead(self, found: Difference) -> str | None:
        draws = self.straight.one("private").get("draws", {})
        names = [found.detail] if found.part == "batch" and draws.get(found.detail) else list(draws)
        for name in names:
            if draws[name] and self.buffer and found.part in ("batch", "random", "outputs", "generators", "weights"):
                return (
                    f"stream {name!r} draws from the global random state of {' and '.join(draws[name])} in a "
                    f"read-ahead thread (main_loop.buffer: {self.buffer}); let it draw from ctx.rng instead"
                )
        return None

    def _of_repetition(self, found: Difference) -> str:
        if found.part == "batch":
            return (
                f"stream {found.detail!r} is another one each time it is read: its randomness does not come from the "
                "config's seed, but from the time, say; let it draw from ctx.rng"
            )
        if found.part == "random":
            return "how much is drawn from it depends on more than the seed, such as the time or a thread"
        return (
            "without any interruption the training does not repeat itself: kernels that are not deterministic "
            "(`deterministic: true` in the config), or something that depends on the time"
        )

    def _of_state(self, found: Difference, other: Recording) -> str | None:
        """Name what is kept in attributes that no checkpoint has."""
        recordings = (self.straight, self.again, other)
        kept, repeated, now = (each.one("private").get("attributes", {}) for each in recordings)
        different = sorted({*varying(kept, now)} - {*varying(kept, repeated)}) if now else []
        order = {"batch": "dataset", "rates": "hook"}.get(found.part, "module")
        different.sort(key=lambda name: not name.startswith(order))
        keep = "register_buffer, or get_extra_state() and set_extra_state() of the module, keep it"
        hints = {
            "module": f"the model keeps state outside parameters and buffers; {keep}",
            "loss": "a loss keeps state, of which no checkpoint has anything; make it part of the module",
            "model": "the model keeps state that its state_dict() leaves out",
            "hook": "a hook keeps state that its state_dict() leaves out",
            "dataset": "the dataset keeps state that does not come from ctx; derive it from ctx.epoch and ctx.rng",
        }
        if different:
            kind = different[0].split()[0]
            shown = [f"{name}{_both(kept.get(name), now.get(name))}" for name in different[:3]]
            hint = hints[kind]
            if different[0].endswith(NOT_PERSISTENT):
                hint = "a buffer with persistent=False changes in training; no checkpoint has it, make it persistent"
            return f"{hint}: {'; '.join(shown)}"
        if found.part == "batch":
            return f"stream {found.detail!r} depends on more than ctx and the random state that a pass begins with"
        names = ", ".join(self.straight.one("private").get("forgetful", ()))
        return f"something keeps state that no checkpoint has; hooks without state_dict: {names}" if names else None
