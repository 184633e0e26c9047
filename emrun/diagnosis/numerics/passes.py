"""Evaluated twice, a stream gives the same batches, outputs and statistics; saved and loaded, a model the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.base.types import Batch
from emrun.base.wording import few
from emrun.diagnosis.numerics.rows import DIFFERS, LEFT_OUT, RANDOM, SAME, Row
from emrun.diagnosis.round_trip import RoundTrip, copied, equal, statistics_of

AGAIN, LOADED = "a second pass of evaluated streams", "saved and loaded"
Read = Callable[[str], Iterable[tuple[Batch, Batch, float]]]
"""Returns the first batches of a stream: see `Tryout.usable`."""
_Differs = tuple[str, str, Any, Any]  # the word for it, its name, and two values


def second_pass(model: Any, read: Read, train_stream: str, evaluated: Mapping[str, str]) -> Row:
    """Evaluate the first batches of streams twice with the same random states, and once with others.

    Of the train stream, which may differ in each pass, only sources count that the model has changed in place. A change
    of a source that each pass makes anew is reported, but does not count as a difference.

    Args:
        model: the model.
        read: returns the first batches of a stream.
        train_stream: the train stream.
        evaluated: name in the evaluation -> name of the stream.
    """
    drawn: Row | None = None
    made_anew: set[str] = set()
    for stream, source in {train_stream: train_stream, **evaluated}.items():
        # twice with the same random states, and once with others
        first, changed = _pass(model, read(source), stream, seed=0)
        repeated, _ = _pass(model, read(source), stream, seed=0)
        others, _ = _pass(model, read(source), stream, seed=1)
        for what, name, one, other in _differences(first, repeated):
            why = " has state of its own, which its reset() leaves" if what == "metric" else " is another each time"
            if name in changed:
                why = " in a second pass: the model changes it in place, and the dataset has no other copy"
            if name in changed or stream != train_stream:
                return _row(AGAIN, DIFFERS, what, name, stream, one, other, why)
        drawing = _differences(first, others) if stream != train_stream else []
        for what, name, one, other in drawing:
            if parts := _dropping(model):
                return _row(AGAIN, DIFFERS, what, name, stream, one, other, f": in evaluation mode, {parts[0]} drops")
            drawn = drawn or _row(AGAIN, RANDOM, what, name, stream, one, other, " depends on global random numbers")
        made_anew |= changed
    if made_anew and drawn is None:
        return Row(
            AGAIN,
            SAME,
            f"the model changes {few(sorted(made_anew))} in place, which is made anew for each batch: a second pass "
            "cannot show it, but the loss, metrics and hooks get the changed values",
        )
    if not evaluated:
        return Row(AGAIN, LEFT_OUT, "main_loop.extra_streams names no stream")
    return drawn or Row(AGAIN, SAME)


def saved_and_loaded(model: Any, batches: Mapping[str, Batch], directory: Path, train: Callable[[], object]) -> Row:
    """Save a model, train it, load it again and compare its outputs.

    Args:
        model: the model.
        batches: stream -> a batch to evaluate.
        directory: the checkpoint directory to create.
        train: trains the model.
    """
    difference = RoundTrip(model, model, list(batches.items())[::-1]).difference(directory, train)
    if difference is None:
        return Row(LOADED, SAME)
    what, name, stream, one, other = difference
    if not stream:
        return Row(LOADED, DIFFERS, "state_dict() after load_state_dict() of the same state", name)
    why = ": a checkpoint does not have all state that training changes"
    return _row(LOADED, DIFFERS, what, name, stream, one, other, why)


def _pass(
    model: Any, batches: Iterable[tuple[Batch, Batch, float]], stream: str, seed: int
) -> tuple[list[Any], set[str]]:
    """Return the batches, the outputs and the statistics of a pass, and the sources that were changed in place."""
    read: list[dict[str, Any]] = []
    outputs: list[dict[str, Any]] = []
    changed: set[str] = set()
    with preserved_randomness():
        seed_everything(seed, "numerics", stream)
        for _, batch, _ in batches:
            read.append(copied(batch))
            outputs.append(copied(model.run(batch, False, stream)))
            changed |= {name for name, value in read[-1].items() if not equal(value, batch.get(name))}
        statistics = dict(statistics_of(model, stream))
    return [("source", read), ("output", outputs), ("metric", [statistics])], changed


def _differences(one: Sequence[Any], other: Sequence[Any]) -> list[_Differs]:
    differing = []
    for (what, first), (_, second) in zip(one, other, strict=True):
        for values, others in zip(first, second, strict=False):
            for name, value in values.items():
                if not equal(value, others.get(name)):
                    differing.append((what, name, value, others.get(name)))
    return differing


def _row(row: str, result: str, what: str, name: str, stream: str, one: Any, other: Any, why: str) -> Row:
    deviation = _apart(one, other)
    return Row(
        row,
        result,
        f"{what} {name!r} of stream {stream!r}{'' if deviation is None else f' by {deviation:.2g}'}{why}",
        name,
        deviation,
    )


def _apart(one: Any, other: Any) -> float | None:
    """Return how much two arrays of numbers differ, relative to their norms; None for other values."""
    try:
        values = [np.asarray(torch.as_tensor(value).double().cpu()) for value in (one, other)]
        norm = max(float(np.linalg.norm(value)) for value in values)
        return float(np.linalg.norm(values[0] - values[1])) / norm
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError):
        return None


def _dropping(model: Any) -> list[str]:
    """Return the parts of the module that drop values although the module is in evaluation mode."""
    module = getattr(model, "module", None)
    named: Iterator[tuple[str, Any]] = module.named_modules() if isinstance(module, torch.nn.Module) else iter(())
    kinds = torch.nn.modules.dropout._DropoutNd
    return [f"{name} ({type(part).__name__})" for name, part in named if isinstance(part, kinds) and part.training]
