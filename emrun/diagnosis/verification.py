"""Proves on a config that an interrupted training equals an uninterrupted one, or names what differs first."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from emrun.config.config import load_config
from emrun.diagnosis.differences import PARTS, Causes, Difference, find_difference, varying
from emrun.diagnosis.recorded_trainings import Job, Point, Recording
from emrun.errors import UsageError
from emrun.randomness import draw_seed
from emrun.temporary import TemporaryFolder

_LOG = logging.getLogger(__name__)

_LONGEST = 20  # iterations of an epoch that is verified as it is
_SHORT = 8  # iterations of an epoch instead of a longer one
_MAY_VARY = ("hooks", "metrics")  # may hold times; what differs between two straight runs is left out


@dataclass(frozen=True, slots=True)
class Row:
    """What was found at a point.

    Args:
        point: where; None for the uninterrupted training, repeated.
        how: the name of the signal.
        resumed_at: the iteration of the checkpoint that the training went on from.
        difference: None when it is exact.
    """

    point: Point | None
    how: str
    resumed_at: int | None
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found.

    Args:
        rows: one for each point; only the uninterrupted training when that differs from itself.
        iterations: how long each training was.
        notes: what the verification does not cover.
    """

    rows: list[Row]
    iterations: int
    notes: list[str]

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs."""
        return all(row.difference is None for row in self.rows)


def verify(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    kill: bool = False,
    at: Sequence[int] = (),
    full_epochs: bool = False,
) -> Verification:
    """Train straight, twice, and then once for each point with an interruption there, and compare batch by batch.

    Every training is a few iterations long, runs in a process of its own and writes into a temporary directory. The
    config's hooks run too, but for StopAfter.

    Args:
        config: a file, or a directory that holds `config.yaml`.
        overrides: `key.path=value`, `~key.path` to delete.
        kill: interrupt by SIGKILL, two iterations after a checkpoint, instead of SIGTERM.
        at: iterations at which to interrupt, instead of the middle of an epoch, its end, an evaluation, and, with
            `fixed_epoch_size`, the end of a pass.
        full_epochs: leave epochs of more than 20 iterations as long as they are.

    Raises:
        UsageError: an iteration is beyond the end.
        VerificationFailed: a training failed by itself.
    """
    loaded = load_config(config, overrides)
    arguments = [*overrides, *([f"seed={draw_seed()}"] if loaded.get("seed") is None else [])]
    with TemporaryFolder("verify") as place:
        job = partial(Job, str(place), str(config), arguments)
        notes = []
        _LOG.info("training without interruption")
        straight = job("straight", longest=None if full_epochs else _LONGEST).run()
        if straight.of("long"):  # it gave up, as its epochs are long
            arguments.append(f"main_loop.fixed_epoch_size={_SHORT}")
            notes.append(
                f"epochs are longer than {_LONGEST} iterations: verified with main_loop.fixed_epoch_size={_SHORT}, so "
                "that the end of a pass may not be reached (--full-epochs leaves them as they are)"
            )
            straight = job("straight-short").run()
        settings = loaded.get("main_loop") or {}
        last = straight.epoch_ends[-1] if settings.get("on_interrupt") == "epoch" and not kill else straight.end - 1
        points = _chosen(straight, at, last) if at else list(_usual(straight))
        if not points:
            raise UsageError(f"the training ends after {straight.end} iterations, too early to be interrupted")
        _LOG.info("again without interruption")
        again = job("again", end=straight.end).run()
        causes = Causes(straight, again, int(settings.get("buffer") or 0))
        vary = {part: varying(straight.final[part], again.final[part]) for part in _MAY_VARY}
        found = find_difference(straight, [again], vary)
        if found is not None:
            return Verification([Row(None, "", None, causes.explain(found, again))], straight.end, notes)
        notes += [
            f"not compared, as it differs without interruption: {PARTS[part]} {name}"
            for part, names in vary.items()
            for name in sorted(names)
        ]
        rows = []
        by = signal.SIGKILL if kill else signal.SIGTERM
        for number, point in enumerate(points):
            _LOG.info("interrupted at %s (iteration %d)", point.name, point.iteration)
            name = f"point-{number}"
            first = job(name, end=straight.end, point=point, by=by).run()
            if first.was_interrupted(kill):
                second = job(name, end=straight.end, resume=True).run()
                found = find_difference(straight, [first, second], vary)
                difference = causes.explain(found, second) if found else None
                rows.append(Row(point, by.name, second.one("begin").get("iteration"), difference))
            else:
                missed = f"the training never came to {point.name}: it came to iteration {first.end}"
                rows.append(Row(point, by.name, None, Difference(missed, "order")))
        return Verification(rows, straight.end, notes)


def _usual(straight: Recording) -> Iterator[Point]:
    """Yield the points that are tried when none are given."""
    ends = straight.epoch_ends
    batches = [event for event in straight.of("batch") if event["training"]]
    stream = batches[0]["stream"] if batches else ""
    pairs = itertools.pairwise(batches)
    passes = [one["iteration"] for one, next_one in pairs if one["pass"] != next_one["pass"]]
    for first, last in ((*ends, straight.end)[:2], (0, ends[0])):
        inside = [iteration for iteration in range(first + 1, last) if iteration not in passes]
        if inside:
            yield Point("the middle of an epoch", inside[(len(inside) - 1) // 2], stream)
            break
    within = [iteration for iteration in passes if iteration not in ends]
    if within:
        yield Point("the end of a pass", within[0], stream)
    if ends[0]:
        yield Point("the last batch of an epoch", ends[0], stream)
    for end in ends[:2]:
        evaluated = [each for each in straight.of("batch") if not each["training"] and each["iteration"] == end]
        if evaluated:
            middle = evaluated[(len(evaluated) - 1) // 2]
            yield Point(f"an evaluation ({middle['stream']})", end, middle["stream"], middle["number"])
            break


def _chosen(straight: Recording, at: Sequence[int], last: int) -> list[Point]:
    stream = next((event["stream"] for event in straight.of("batch") if event["training"]), "")
    for iteration in at:
        if not 0 < iteration <= last:
            raise UsageError(
                f"--at {iteration} is beyond the end: the verification is {straight.end} iterations long, so that it "
                f"can interrupt at 1 to {last}"
            )
    return [Point("as told", iteration, stream) for iteration in dict.fromkeys(at)]
