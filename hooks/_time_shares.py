"""Where the time of an epoch went, from the profile of the loop, and what to change about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from emrun.base.types import Profile
from emrun.dataset import ASKS

WAITS = 0.2
EVALUATES = 0.5
CALLS = 0.1
SAVES = 0.1
"""The shares of the time from which a verdict names reading, evaluations, hooks and checkpoints."""


@dataclass
class Times:
    """Seconds of one or more epochs, and what they were spent on.

    Args:
        seconds: in total.
        reading: stream -> waiting for its batches.
        model: stream -> the model on its batches, without hooks.
        hooks: class of a hook -> in all its events.
        saving: waiting for checkpoints, without hooks.
        examples: stream -> number of examples.
        trained: the streams that the model was trained on.
    """

    seconds: float = 0.0
    reading: dict[str, float] = field(default_factory=dict)
    model: dict[str, float] = field(default_factory=dict)
    hooks: dict[str, float] = field(default_factory=dict)
    saving: float = 0.0
    examples: dict[str, float] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, profile: Profile, streams: Sequence[str], trained: Sequence[str], seconds: float) -> Times:
        """Return the times of an epoch.

        Args:
            profile: the profile, see `AbstractHook.after_epoch_profile`.
            streams: the streams of the epoch.
            trained: those that the model was trained on.
            seconds: how long the epoch took; if the parts took longer, their sum counts.
        """

        def total(key: str) -> float:
            return sum(profile.get(key, ()))

        model = {name: total(f"eval_batch_{name}") for name in streams}
        in_hooks = total("hooks_in_updates")
        for name in trained[:1]:
            model[name] = max(0.0, model[name] - in_hooks)
        times = cls(
            0.0,
            {name: total(f"read_batch_{name}") for name in streams},
            model,
            {key.removeprefix("hook_"): total(key) for key in profile if key.startswith("hook_")},
            max(0.0, total("save_checkpoints") - total("hooks_in_checkpoints")),
            {name: total(f"batch_length_{name}") for name in streams},
            set(trained),
        )
        times.seconds = max(seconds, sum(times._sums().values()))
        return times

    def add(self, other: Times) -> None:
        """Add the times of another epoch."""
        self.seconds += other.seconds
        self.saving += other.saving
        for name in ("reading", "model", "hooks", "examples"):
            seconds: dict[str, float] = getattr(self, name)
            for key, value in getattr(other, name).items():
                seconds[key] = seconds.get(key, 0.0) + value
        self.trained |= other.trained

    def _sums(self) -> dict[str, float]:
        sums = {name: sum(getattr(self, name).values()) for name in ("model", "reading", "hooks")}
        return {**sums, "checkpoints": self.saving}

    def shares(self) -> dict[str, float]:
        """Return the shares of the time: `model`, `reading`, `hooks`, `checkpoints` and `other`; their sum is 1."""
        whole = self.seconds or 1.0
        shares = {name: seconds / whole for name, seconds in self._sums().items()}
        return {**shares, "other": max(0.0, 1 - sum(shares.values()))}

    def rate(self, stream: str) -> float | None:
        """Return the examples a second of a stream while it was read and run; None if it had no batch."""
        seconds = self.reading.get(stream, 0.0) + self.model.get(stream, 0.0)
        return self.examples[stream] / seconds if self.examples.get(stream) and seconds else None

    def evaluating(self) -> float:
        """Return the share of the time for reading and running streams that are evaluated."""
        spent = 0.0
        for seconds in (self.reading, self.model):
            for name, value in seconds.items():
                if name not in self.trained:
                    spent += value
        return spent / (self.seconds or 1.0)


def verdict(times: Times, ahead: Mapping[str, int] | None, extra_streams: Sequence[str], cores: int) -> tuple[str, str]:
    """Return what most of the time was spent on: its name, and in words with what to change in the config, if anything.

    The first that applies: waiting for data, evaluations, hooks, checkpoints; else the model.

    Args:
        times: the times.
        ahead: the settings `buffer` and `workers` of the config; None if nothing can be read ahead.
        extra_streams: the streams that are evaluated after the train stream.
        cores: the number of processors that the process may use.
    """
    shares = times.shares()
    if shares["reading"] >= WAITS:
        advice = _for_reading(ahead, cores) if ahead is not None else f"{ASKS}; make the dataset faster"
        return "reading", f"waits for data {shares['reading']:.0%} of the time: {advice}"
    if times.trained and extra_streams and times.evaluating() >= EVALUATES:
        name = max(extra_streams, key=lambda stream: times.model.get(stream, 0.0))
        often = f"evaluate less often, main_loop.extra_streams: [{{{name}: 5 epochs}}], or less of it, {{batches: 20}}"
        return "evaluations", f"evaluates {times.evaluating():.0%} of the time: {often}"
    if shares["hooks"] >= CALLS:
        name = max(times.hooks, key=lambda hook: times.hooks[hook])
        share = times.hooks[name] / times.seconds
        often = "call it less often, or leave it out"
        return "hooks", f"hooks take {shares['hooks']:.0%} of the time, {name} {share:.0%}: {often}"
    if shares["checkpoints"] >= SAVES:
        return "checkpoints", (
            f"waits for checkpoints {shares['checkpoints']:.0%} of the time: save less often; a checkpoint "
            "that is begun waits for the one before"
        )
    if shares["other"] > shares["model"]:
        return "other", (
            f"{shares['other']:.0%} of the time is around the batches: use larger batches or longer epochs; "
            "checking batches and ending epochs takes more time than the model"
        )
    return "model", f"the model takes {shares['model']:.0%} of the time: nothing else is worth changing"


def _for_reading(ahead: Mapping[str, int], cores: int) -> str:
    measured = "`emrun bench CONFIG` measures what helps"
    workers = ahead["workers"]
    if workers and workers >= cores:
        return f"main_loop.workers is {workers} on {cores} processors, so make the dataset faster; {measured}"
    if workers:
        return f"main_loop.workers: {min(2 * workers, cores)} instead of {workers}; {measured}"
    if cores > 1:
        return f"main_loop.workers: {min(2, cores)}; {measured}"
    return f"make the dataset faster; {measured}" if ahead["buffer"] else f"main_loop.buffer: 4; {measured}"
