"""Proves on a config that an interrupted training equals an uninterrupted one, or names what differs first."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emrun.config.config import load_config
from emrun.errors import EmrunError, UsageError
from emrun.randomness import draw_seed
from emrun.temporary import TemporaryFolder

_LOG = logging.getLogger(__name__)

_LONGEST = 20  # iterations of an epoch that is verified as it is
_SHORT = 8  # iterations of an epoch instead of a longer one
_BEFORE_KILL = 2  # iterations between the last checkpoint and SIGKILL
_PARTS = {  # of the end, in the order in which a difference is looked for
    "weights": "parameter or buffer",
    "model": "state of the model,",
    "loop": "counter",
    "streams": "position of stream",
    "generators": "random state of",
    "hooks": "state of hook",
    "metrics": "metrics.jsonl,",
}
_NOT_PERSISTENT = "(persistent=False)"  # stands behind the name of such a buffer
_MAY_VARY = ("hooks", "metrics")  # may hold times; what differs between two straight runs is left out
_CHILD = "import sys; sys.path[:] = {path!r}; from emrun.diagnosis.probe import main; main(sys.argv[1])"
_SETTINGS = {"TQDM_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # nothing beside the config's modules

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """Where a training is interrupted: after a batch of the train stream, or of an evaluation.

    Args:
        name: what it is called.
        iteration: batches of the train stream run.
        stream: the stream of the batch.
        batch: its number in the evaluation, from 1; None for the train stream.
    """

    name: str
    iteration: int
    stream: str
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing in which two trainings differ.

    Args:
        what: the thing, where, and both values.
        cause: what is likely to be the reason, None when nothing points at one.
    """

    what: str
    cause: str | None = None


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


class VerificationFailed(EmrunError):
    """A training of the verification failed by itself."""

    def __init__(self, text: str, exit_status: int) -> None:
        self.exit_status = exit_status
        super().__init__(text)


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
        trainings = _Trainings(place, str(config), arguments)
        notes = []
        _LOG.info("training without interruption")
        straight = trainings.run("straight", longest=None if full_epochs else _LONGEST)
        if straight.is_long:
            arguments.append(f"main_loop.fixed_epoch_size={_SHORT}")
            notes.append(
                f"epochs are longer than {_LONGEST} iterations: verified with main_loop.fixed_epoch_size={_SHORT}, so "
                "that the end of a pass may not be reached (--full-epochs leaves them as they are)"
            )
            straight = trainings.run("straight-short")
        settings = loaded.get("main_loop")
        settings = settings if isinstance(settings, Mapping) else {}
        last = straight.epoch_ends[-1] if settings.get("on_interrupt") == "epoch" and not kill else straight.end - 1
        points = _chosen(straight, at, last) if at else list(_usual(straight))
        if not points:
            raise UsageError(f"the training ends after {straight.end} iterations, too early to be interrupted")
        _LOG.info("again without interruption")
        again = trainings.run("again", end=straight.end)
        causes = _Causes(straight, again, int(settings.get("buffer") or 0))
        vary = {part: _varying(straight.final[part], again.final[part]) for part in _MAY_VARY}
        found = _compare(straight, [again], vary)
        if found is not None:
            return Verification([Row(None, "", None, causes.explain(found, again))], straight.end, notes)
        notes += [
            f"not compared, as it differs without interruption: {_PARTS[part]} {name}"
            for part, names in vary.items()
            for name in sorted(names)
        ]
        rows = []
        for number, point in enumerate(points):
            _LOG.info("interrupted at %s (iteration %d)", point.name, point.iteration)
            rows.append(_verify_point(trainings, f"point-{number}", straight, point, kill, vary, causes))
        return Verification(rows, straight.end, notes)


def _verify_point(
    trainings: _Trainings,
    name: str,
    straight: _Recording,
    point: Point,
    kill: bool,
    vary: Mapping[str, set[str]],
    causes: _Causes,
) -> Row:
    number = signal.SIGKILL if kill else signal.SIGTERM
    first = trainings.run(name, end=straight.end, interrupt=(number, point))
    if not first.was_interrupted(kill):
        missed = Difference(f"the training never came to {point.name}: {first.told()}")
        return Row(point, number.name, None, missed)
    second = trainings.run(name, end=straight.end, resume=True)
    found = _compare(straight, [first, second], vary)
    difference = None if found is None else causes.explain(found, second)
    return Row(point, number.name, second.begin, difference)


def _usual(straight: _Recording) -> Iterator[Point]:
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


def _chosen(straight: _Recording, at: Sequence[int], last: int) -> list[Point]:
    stream = next((event["stream"] for event in straight.of("batch") if event["training"]), "")
    for iteration in at:
        if not 0 < iteration <= last:
            raise UsageError(
                f"--at {iteration} is beyond the end: the verification is {straight.end} iterations long, so that it "
                f"can interrupt at 1 to {last}"
            )
    return [Point("as told", iteration, stream) for iteration in dict.fromkeys(at)]


class _Recording:
    """What a training of the verification wrote down."""

    def __init__(self, events: list[Event], exit_code: int) -> None:
        self.events = events
        self._exit_code = exit_code

    def of(self, kind: str) -> list[Event]:
        """Return the events of a kind."""
        return [event for event in self.events if event["kind"] == kind]

    def one(self, kind: str) -> Event:
        """Return the event that happens once."""
        return next(iter(self.of(kind)), {})

    @property
    def is_long(self) -> bool:
        """Whether the training gave up because its epochs are long."""
        return bool(self.of("long"))

    @property
    def final(self) -> Event:
        """What the training came to: part -> name -> value."""
        return self.one("final")

    @property
    def begin(self) -> int | None:
        """The iteration that the training began behind."""
        begin: int | None = self.one("begin").get("iteration")
        return begin

    @property
    def epoch_ends(self) -> list[int]:
        """The last iterations of the training epochs that came to their end."""
        return [event["iteration"] for event in self.of("epoch") if event["epoch"] > 0] or [0]

    @property
    def end(self) -> int:
        """The last iteration."""
        return max((event["iteration"] for event in self.of("batch")), default=0)

    def was_interrupted(self, kill: bool) -> bool:
        """Tell whether the signal came."""
        return self._exit_code == -signal.SIGKILL if kill else self.one("outcome").get("status") == "interrupted"

    def told(self) -> str:
        """Return what is known of its end."""
        return f"it came to iteration {self.end}"


class _Trainings:
    """Runs trainings in processes of their own.

    Args:
        place: the directory for all that they write.
        config: the config.
        overrides: a list that may grow.
    """

    def __init__(self, place: Path, config: str, overrides: list[str]) -> None:
        self._place = place
        self._config = config
        self._overrides = overrides
        self._temporary = place / "temporary"  # torch leaves a directory in it
        self._temporary.mkdir()

    def run(
        self,
        name: str,
        *,
        end: int | None = None,
        longest: int | None = None,
        interrupt: tuple[int, Point] | None = None,
        resume: bool = False,
    ) -> _Recording:
        """Run a training, or go on with it.

        Raises:
            VerificationFailed: it failed.
        """
        record = self._place / f"{name}-{'resumed' if resume else 'begun'}.jsonl"
        number, point = interrupt or (None, None)
        wanted = point and {"signal": number, "iteration": point.iteration, "stream": point.stream}
        save_at = point.iteration - _BEFORE_KILL if point and number == signal.SIGKILL else None
        job = {
            "record": str(record),
            "directory": str(self._place / name),
            "resume": resume,
            "config": self._config,
            "overrides": self._overrides,
            "end": end,
            "longest": longest,
            "interrupt": point and wanted and {**wanted, "batch": point.batch},
            "save_at": save_at,
        }
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD.format(path=sys.path), json.dumps(job)],
            env={**os.environ, **_SETTINGS, "TMPDIR": str(self._temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["kind"] == "error":
                raise VerificationFailed(event["text"].replace(str(self._place / name), "RUN_DIR"), event["status"])
        was_killed = number == signal.SIGKILL and done.returncode == -signal.SIGKILL
        if not was_killed and (done.returncode or not {"final", "long"} & {event["kind"] for event in events}):
            last = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
            raise VerificationFailed(f"a training ended by itself, with status {done.returncode}{last}", 1)
        return _Recording(events, done.returncode)


@dataclass(frozen=True, slots=True)
class _Found:
    """A difference, before its cause is looked for."""

    what: str
    part: str
    detail: str = ""
    straight: Any = None


def _compare(straight: _Recording, others: Sequence[_Recording], vary: Mapping[str, set[str]]) -> _Found | None:
    """Return the first difference, in the order of time; what is run again is compared again."""
    expected = {_place_of(event): event for event in straight.of("batch")}
    missing = dict(expected)
    for other in others:
        for event in other.of("batch"):
            place = _place_of(event)
            if place not in expected:
                return _Found(f"{_told(event)}: the straight run has no such batch", "order", event["stream"])
            missing.pop(place, None)
            found = _compare_batches(expected[place], event)
            if found is not None:
                return found
    if missing:
        return _Found(f"{_told(next(iter(missing.values())))}: missing in the other run", "order")
    final = others[-1].final
    for part, title in _PARTS.items():
        one, other_part = straight.final[part], final.get(part, {})
        for name in [*one, *(each for each in other_part if each not in one)]:
            if one.get(name) != other_part.get(name) and name not in vary.get(part, ()):
                values = _both(one.get(name), other_part.get(name))
                return _Found(f"at the end: {title} {name}{values}", part, name)
    return None


def _compare_batches(one: Event, other: Event) -> _Found | None:
    where = _told(other)
    if one["batch"] != other["batch"]:
        return _Found(f"{where}: another batch", "batch", other["stream"])
    for key, when in (("random_before", "before"), ("random", "after")):
        if key == "random":
            if one["outputs"] != other["outputs"]:
                names = [name for name, value in one["outputs"].items() if other["outputs"].get(name) != value]
                name = "loss" if "loss" in names else (names or ["(other names)"])[0]
                values = _both(one["shown"].get(name), other["shown"].get(name))
                return _Found(f"{where}: output {name}{values}", "outputs", name)
            if one["rates"] != other["rates"]:
                values = _both(", ".join(one["rates"]), ", ".join(other["rates"]))
                return _Found(f"{where}: learning rate{values}", "rates")
        names = [name for name, value in one[key].items() if other[key].get(name) != value]
        if names:
            return _Found(f"{where}: random state of {names[0]} {when} the batch", "random", names[0])
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
    return "" if one == other or one.startswith("digest") else f" ({one} straight, {other} otherwise)"


def _varying(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


class _Causes:
    """Looks for what is likely to be the reason of a difference.

    Args:
        straight: a training without interruption.
        again: the same once more.
        buffer: how many batches are read ahead.
    """

    def __init__(self, straight: _Recording, again: _Recording, buffer: int) -> None:
        self._straight = straight
        self._again = again
        self._buffer = buffer
        self._private: dict[str, str] = straight.one("private").get("attributes", {})
        repeated = again.one("private").get("attributes", {})
        self._vary = _varying(self._private, repeated)

    def explain(self, found: _Found, other: _Recording) -> Difference:
        """Return the difference with its cause.

        Args:
            found: the difference.
            other: the training that differs.
        """
        cause = self._of_reading_ahead(found)
        if cause is None and other is self._again:
            cause = self._of_repetition(found)
        return Difference(found.what, cause or self._of_state(found, other))

    def _of_reading_ahead(self, found: _Found) -> str | None:
        draws = self._straight.one("private").get("draws", {})
        names = [found.detail] if found.part == "batch" and draws.get(found.detail) else list(draws)
        for name in names:
            if draws[name] and self._buffer and found.part in ("batch", "random", "outputs", "generators", "weights"):
                return (
                    f"stream {name!r} draws from the global random state of {' and '.join(draws[name])} in a "
                    f"read-ahead thread (main_loop.buffer: {self._buffer}); let it draw from ctx.rng instead"
                )
        return None

    def _of_repetition(self, found: _Found) -> str:
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

    def _of_state(self, found: _Found, other: _Recording) -> str | None:
        """Name what is kept in attributes that no checkpoint has."""
        now = other.one("private").get("attributes", {})
        different = sorted(name for name in _varying(self._private, now) if now and name not in self._vary)
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
            shown = [f"{name}{_both(self._private.get(name), now.get(name))}" for name in different[:3]]
            hint = hints[kind]
            if different[0].endswith(_NOT_PERSISTENT):
                hint = "a buffer with persistent=False changes in training; no checkpoint has it, make it persistent"
            return f"{hint}: {'; '.join(shown)}"
        if found.part == "batch":
            return f"stream {found.detail!r} depends on more than ctx and the random state that a pass begins with"
        forgetful: Iterable[str] = self._straight.one("private").get("forgetful", ())
        names = ", ".join(forgetful)
        return f"something keeps state that no checkpoint has; hooks without state_dict: {names}" if names else None
