"""Verify for a config that a finished run that is made longer equals one that had this length from its beginning."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from emrun.base.errors import StateError, UsageError
from emrun.base.randomness import draw_seed
from emrun.base.temporary import TemporaryFolder
from emrun.base.wording import duration
from emrun.config.config import load_config
from emrun.config.names import same_class
from emrun.diagnosis.differences import Causes, Difference, find_difference
from emrun.diagnosis.recorded_trainings import Job, Recording, VerificationFailed
from emrun.loop.horizon import UNITS
from emrun.schedule_plan import BEFORE_COOLDOWN
from emrun.storage.run import CHECKPOINTS

_LOG = logging.getLogger(__name__)

_WAYS = "write a factor such as 2x, or a new end such as '40 epochs' or '4000 updates'"


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run becomes.

    Args:
        count: the factor, or the number of units.
        unit: `epochs`, `passes`, `updates` or `iterations`; None for a factor.
    """

    count: Fraction
    unit: str | None

    @classmethod
    def parse(cls, text: str) -> Length:
        """Read a length such as `2x`, `1.5x` or `40 epochs`.

        Raises:
            UsageError: the text is not a length.
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(x|epochs?|pass(?:es)?|updates?|iterations?)\s*", text)
        if match is None:
            what = "has no unit" if re.fullmatch(r"[\d.]+", text.strip()) else "is not a length"
            raise UsageError(f"--extend: {text!r} {what}; {_WAYS}")
        count, word = Fraction(match[1]), match[2]
        if word == "x":
            if count <= 1:
                raise UsageError(f"--extend: {text!r} does not make the run longer; {_WAYS}")
            return cls(count, None)
        if count.denominator != 1:
            raise UsageError(f"--extend: {text!r} is not a whole number; {_WAYS}")
        return cls(count, next(unit for unit in UNITS if unit.startswith(word.removesuffix("es").removesuffix("s"))))

    def limits(self, now: Mapping[str, int]) -> dict[str, int]:
        """Return the limits of a longer run.

        Args:
            now: unit -> limit.

        Raises:
            UsageError: a limit would not be a whole number, or the run would not be longer.
        """
        if self.unit is None:
            longer = {unit: limit * self.count for unit, limit in now.items()}
            for unit, limit in longer.items():
                if limit.denominator != 1:
                    message = f"--extend: {float(self.count):g} times {now[unit]} {unit} is {float(limit):g}, not a"
                    raise UsageError(f"{message} whole number; write for example '{int(limit) + 1} {unit}'")
            return {unit: int(limit) for unit, limit in longer.items()}
        if self.count <= now.get(self.unit, 0):
            message = f"--extend: {self.count} {self.unit} are not more than the {now[self.unit]} of StopAfter"
            raise UsageError(message)
        return {self.unit: int(self.count)}


@dataclass(frozen=True, slots=True)
class Extension:
    """The result of a verification.

    Args:
        checkpoint: the name of the checkpoint from which the run was extended.
        resumed_at: its iteration; None if the resume was refused.
        ended: number of iterations of the run of the config.
        end: number of iterations of the longer run; None if the resume was refused.
        difference: the first difference between the extended run and the straight one; None if there is none.
        is_repeatable: whether two straight runs are the same; only known if there is a difference.
        refusal: why the run cannot be made longer; None if it can.
    """

    checkpoint: str
    resumed_at: int | None
    ended: int
    end: int | None
    difference: Difference | None
    is_repeatable: bool = True
    refusal: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the extended run is the straight one."""
        return self.refusal is None and self.difference is None


def verify_extension(config: Path, overrides: Sequence[str], length: str) -> Extension:
    """Train the run of a config to its end, make it longer, and compare it with a run that is as long at once.

    Each run has its own process and writes into a temporary directory. The run is extended from the checkpoint
    `before-cooldown` if there is one, otherwise from its end.

    Args:
        config: a file, or a directory with a `config.yaml`.
        overrides: `key.path=value`, or `~key.path` to delete a key.
        length: the new length: a factor such as `2x`, or a number with a unit, such as `40 epochs`.

    Raises:
        UsageError: the length is not allowed, or nothing in the config limits the run.
        VerificationFailed: a run failed.
    """
    loaded = load_config(config, overrides)
    changes = _changes(loaded.get("hooks") or [], Length.parse(length))
    arguments = [*overrides, *([f"seed={draw_seed()}"] if loaded.get("seed") is None else [])]
    with TemporaryFolder("verify") as place:
        job = partial(Job, str(place), str(config), is_whole=True)
        _LOG.info("training to the end of the config")
        started = time.monotonic()
        first = job(arguments, "extended").run()
        seconds = time.monotonic() - started
        has_cooldown = (Path(place) / "extended" / CHECKPOINTS / BEFORE_COOLDOWN).exists()
        checkpoint = BEFORE_COOLDOWN if has_cooldown else "latest"
        _LOG.info("resuming from %s with %s; the training took %s", checkpoint, " ".join(changes), duration(seconds))
        try:
            extended = job([], "extended", resume=True, changes=changes, checkpoint=checkpoint).run()
        except VerificationFailed as error:
            if error.error != StateError.__name__:
                raise
            return Extension(checkpoint, None, first.end, None, None, refusal=str(error))
        _LOG.info("training to the new end without an extension")
        straight = job([*arguments, *changes], "straight").run()
        if straight.end <= first.end:
            message = f"the longer run ends after {straight.end} iterations too; something else than StopAfter ends it"
            raise UsageError(f"--extend: {message}")
        resumed_at = extended.one("begin")["iteration"]
        result = partial(Extension, checkpoint, resumed_at, first.end, straight.end)
        events = [event for event in first.events if event["kind"] != "batch" or event["iteration"] <= resumed_at]
        parts = [Recording(events, 0), extended]
        vary = {"hooks": _of_stop_after(straight)}
        found = find_difference(straight, parts, vary)
        if found is None:
            return result(None)
        _LOG.info("they differ: training to the new end once more")
        again = job([*arguments, *changes], "again").run()
        causes = Causes(straight, again, int((loaded.get("main_loop") or {}).get("buffer") or 0))
        repeated = find_difference(straight, [again], vary)
        if repeated is not None:
            return result(causes.explain(repeated, again), is_repeatable=False)
        return result(causes.explain(found, extended))


def _of_stop_after(recording: Recording) -> list[str]:
    """Return the names of the states of StopAfter, which has a time in it."""
    return [name for name in recording.final["hooks"] if name.startswith("StopAfter")]


def _changes(hooks: Sequence[Any], length: Length) -> list[str]:
    """Return the overrides that give the run another length.

    Raises:
        UsageError: no StopAfter limits the run, or the length does not fit its limits.
    """
    found: list[str] = []
    for index, entry in enumerate(hooks):
        name, arguments = next(iter(entry.items())) if isinstance(entry, dict) and entry else (entry, None)
        if not same_class(name, "StopAfter") or not isinstance(arguments, dict):
            continue
        now = {unit: arguments[unit] for unit in UNITS if isinstance(arguments.get(unit), int)}
        if now:
            longer, key = length.limits(now), f"hooks.{index}.{name}"
            found += [f"{key}.{unit}={limit}" for unit, limit in longer.items()]
            found += [f"~{key}.{unit}" for unit in now if unit not in longer]
    if not found:
        message = f"no StopAfter of the config has a limit of {', '.join(UNITS)}, so that its run has no end to extend"
        raise UsageError(f"--extend: {message}")
    return found
