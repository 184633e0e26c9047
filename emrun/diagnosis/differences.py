"""Find the first difference between recorded runs, and its likely cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from emrun.diagnosis.recorded_trainings import Event, Recording

PARTS = {  # of the final state, in the order in which they are compared
    "weights": "parameter or buffer",
    "model": "model state",
    "loop": "counter",
    "streams": "position of stream",
    "generators": "random state of",
    "hooks": "state of hook",
    "metrics": "metrics.jsonl,",
    "steps": "steps.jsonl,",
}

NOT_PERSISTENT = "(persistent=False)"
"""Follows the name of a buffer that is not saved in checkpoints."""

DIGEST = "digest"
"""The first word of the string that stands for a value too long to be shown."""

_OF_RANKS = (
    "each rank draws random numbers of its own, such as dropout and those of `ctx.rng` in a batch; "
    "`ctx.rng_for(index)` draws the same on any number of ranks"
)
_OF_REPETITION = {
    "batch": (
        "stream {stream!r} yields other batches each time it is read: its randomness does not come from the config's "
        "seed, but for example from the time; use ctx.rng instead"
    ),
    "random": "the number of random draws depends on more than the seed, for example on the time or on a thread",
}
_DEPENDS = (
    "two uninterrupted runs differ: a kernel is not deterministic (set `deterministic: true` in the config), or "
    "something depends on the time"
)
_Name = TypeVar("_Name")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two runs.

    Args:
        what: where the runs differ, in what, and both values.
        part: the kind of the value: `batch`, `outputs`, `rates`, `random`, `order`, or a key of `PARTS`.
        detail: the name of the value within its part, or the stream.
        cause: the likely cause; None when none was found.
    """

    what: str
    part: str
    detail: str = ""
    cause: str | None = None


def find_difference(
    straight: Recording, others: Sequence[Recording], vary: Mapping[str, list[str]]
) -> Difference | None:
    """Return the first difference in time; batches that a resumed run repeats are compared again."""
    for rank, events in enumerate(straight.batches):
        difference = _find_in_batches(events, [event for other in others for event in other.batches[rank]])
        if difference is not None:
            return replace(difference, what=f"rank {rank}, {difference.what}") if rank else difference
    for part, name, *values in _at_the_end(straight, others[-1], PARTS, vary):
        return Difference(f"at the end: {PARTS[part]} {name}{_both(*values)}", part, name)
    return None


def find_rounded(
    straight: Recording, resumed: Recording, vary: Mapping[str, list[str]], most: float
) -> tuple[Difference | None, float]:
    """Return the first difference that is not of rounding in a run that was resumed on another number of ranks.

    Weights and states of optimizers must have been those of the checkpoint, exactly, when the run was resumed. In the
    end the counters must be equal, and the metrics and steps up to rounding.

    Args:
        straight: the recording of an uninterrupted run.
        resumed: that of the resumed one.
        vary: part -> names that are left out.
        most: the largest difference of two numbers, as a share of the larger one.

    Returns:
        The difference, and the largest one that is of rounding.
    """
    events = (event for of_rank in (resumed.events, *resumed.of_others) for event in of_rank)
    if wrong := [name for event in events if event["kind"] == "restored" for name in event["wrong"]]:
        return Difference(f"when it was resumed: {wrong[0]} is not that of the checkpoint", "weights", wrong[0]), 0.0
    largest = 0.0
    for part, name, *values in _at_the_end(straight, resumed, ("loop", "metrics", "steps"), vary):
        off = _share_of(*values)
        if not off <= (0 if part == "loop" else most):
            return Difference(f"at the end: {PARTS[part]} {name}{_both(*values)}", part, name, _OF_RANKS), largest
        largest = max(largest, off)
    return None, largest


def _at_the_end(
    straight: Recording, other: Recording, parts: Iterable[str], vary: Mapping[str, list[str]]
) -> Iterator[tuple[Any, ...]]:
    """Yield part, name and both values of what differs in the final states."""
    for part in parts:
        one = straight.final[part]
        two = other.final.get(part, {})
        names = [name for name in varying(one, two) if name not in vary.get(part, ())]
        yield from ((part, name, one.get(name), two.get(name)) for name in names)


def _share_of(one: str | None, other: str | None) -> float:
    """Return the relative difference of two unequal numbers; infinity if one is not a number."""
    try:
        numbers = [float(one or ""), float(other or "")]
    except ValueError:
        return math.inf
    return abs(numbers[0] - numbers[1]) / max(map(abs, numbers))


def _find_in_batches(straight: Sequence[Event], others: Sequence[Event]) -> Difference | None:
    """Return the first difference between the batches of a rank."""
    expected = {_place_of(event): event for event in straight}
    missing = dict(expected)
    for event in others:
        place = _place_of(event)
        if place not in expected:
            return Difference(f"{_where(event)}: the uninterrupted run has no such batch", "order", event["stream"])
        missing.pop(place, None)
        difference = _compare_batches(expected[place], event)
        if difference is not None:
            return difference
    first = next(iter(missing.values()), None)
    return None if first is None else Difference(f"{_where(first)}: missing in the other run", "order")


def _compare_batches(one: Event, other: Event) -> Difference | None:
    expected = _values_of(one)
    actual = _values_of(other)
    differing = varying(expected, actual)
    if not differing:
        return None
    first = differing[0]
    part, detail, what = first
    texts = [side.get(first, ("", None))[1] for side in (expected, actual)]
    return Difference(f"{_where(other)}: {what}{_both(*texts)}", part, detail)


def _attributes(recording: Recording) -> dict[str, str]:
    attributes: dict[str, str] = recording.one("private").get("attributes", {})
    return attributes


def _of_random(states: Mapping[str, str], when: str) -> dict[tuple[str, str, str], tuple[Any, str | None]]:
    return {
        ("random", name, f"random state of {name} {when} the batch"): (state, None) for name, state in states.items()
    }


def _values_of(event: Event) -> dict[tuple[str, str, str], tuple[Any, str | None]]:
    """Return part, name and description of each value of a batch -> the value and its text, in the order of time."""
    outputs = sorted(event["outputs"].items(), key=lambda pair: pair[0] != "loss")
    return {
        ("batch", event["stream"], "the batch differs"): (event["batch"], None),
        **_of_random(event["random_before"], "before"),
        **{("outputs", name, f"output {name}"): (value, event["shown"][name]) for name, value in outputs},
        ("rates", "", "learning rate"): (event["rates"], ", ".join(event["rates"])),
        **_of_random(event["random"], "after"),
    }


def _place_of(event: Event) -> tuple[Any, ...]:
    return event["training"], event["iteration"], event["stream"], event["number"]


def _where(event: Event) -> str:
    if event["training"]:
        return f"iteration {event['iteration']}"
    return f"evaluation of {event['stream']} at iteration {event['iteration']}, batch {event['number']}"


def _both(one: str | None, other: str | None) -> str:
    if one is None or other is None:
        return f" (only in the {'other' if one is None else 'uninterrupted'} run)" if one != other else ""
    return "" if one == other or one.startswith(DIGEST) else f" ({one} uninterrupted, {other} in the other run)"


def varying(one: Mapping[_Name, Any], other: Mapping[_Name, Any]) -> list[_Name]:
    """Return the names whose values differ, and those that only one mapping has, in their order."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


@dataclass(frozen=True, slots=True)
class Causes:
    """Finds the likely cause of a difference.

    Args:
        straight: the recording of an uninterrupted run.
        again: the recording of the same run, repeated.
        buffer: how many batches are read ahead, by `main_loop.buffer` or as the dataset says.
    """

    straight: Recording
    again: Recording
    buffer: int

    def explain(self, difference: Difference, other: Recording) -> Difference:
        """Return the difference with its likely cause.

        Args:
            difference: the difference.
            other: the recording of the run that differs.
        """
        cause = self._of_reading_ahead(difference)
        if cause is None and other is self.again:
            cause = _OF_REPETITION.get(difference.part, _DEPENDS).format(stream=difference.detail)
        return replace(difference, cause=cause or self._of_state(difference, other))

    def _of_reading_ahead(self, difference: Difference) -> str | None:
        draws = self.straight.one("private").get("draws", {})
        names = [difference.detail] if difference.part == "batch" and draws.get(difference.detail) else list(draws)
        for name in names:
            if (
                draws[name]
                and self.buffer
                and difference.part in ("batch", "random", "outputs", "generators", "weights")
            ):
                return (
                    f"stream {name!r} draws from the global random state of {' and '.join(draws[name])} in a "
                    f"read-ahead thread (main_loop.buffer: {self.buffer}); use ctx.rng instead"
                )
        return None

    def _of_state(self, difference: Difference, other: Recording) -> str | None:
        """Name the attributes that are saved in no checkpoint and differ."""
        kept = _attributes(self.straight)
        repeated = _attributes(self.again)
        now = _attributes(other)
        names = {*varying(kept, now)} - {*varying(kept, repeated)} if now else ()
        first = {"batch": "dataset", "rates": "hook"}.get(difference.part, "module")
        different = sorted(names, key=lambda name: (not name.startswith(first), name))
        hints = {
            "module": (
                "the module has state outside its parameters and buffers; save it with register_buffer(), or with "
                "get_extra_state() and set_extra_state() of the module"
            ),
            "loss": "a loss has state, and checkpoints do not save losses; make the loss part of the module",
            "model": "the model has state that its state_dict() does not return",
            "hook": "a hook has state that its state_dict() does not return",
            "parameters": (
                "your code replaces parameters in the training: the optimizer trains the new ones only after a resume; "
                "change them in place, with copy_()"
            ),
            "dataset": "the dataset has state that does not come from ctx; derive it from ctx.epoch and ctx.rng",
        }
        if different:
            kind = different[0].split()[0].partition(".")[0]  # of several losses, each is `loss.name`
            shown = [f"{name}{_both(kept.get(name), now.get(name))}" for name in different[:3]]
            lost = "a buffer with persistent=False changes in training and is not saved; make it persistent"
            return f"{lost if different[0].endswith(NOT_PERSISTENT) else hints[kind]}: {'; '.join(shown)}"
        if difference.part == "batch":
            return f"stream {difference.detail!r} depends on more than ctx and the random states at the start of a pass"
        hooks = ", ".join(self.straight.one("private").get("forgetful", ()))
        return f"some state is saved in no checkpoint; hooks without state_dict: {hooks}" if hooks else None
