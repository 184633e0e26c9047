"""The schedules of learning rates that emrun has itself; `closed_form` explains what they share."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer

from emrun.base.arguments import check_count, check_number
from emrun.base.errors import ArgumentError
from emrun.base.types import Horizon
from emrun.models.schedules.closed_form import ClosedForm
from emrun.models.schedules.curves import Factor
from emrun.models.schedules.lengths import Length


class Constant(ClosedForm):
    """Keeps the learning rate; with `warmup` and `cooldown`, this is warmup-stable-decay.

        model:
          scheduler: {class: Constant, warmup: 5%, cooldown: 20%}

    With lengths in updates or passes, the rates before the cool-down do not depend on how long the run is.
    """

    depends_on_end = False

    def between(self, horizon: Horizon, warmup: int, length: int) -> Factor:
        """Return 1."""
        return lambda done: 1.0


class Linear(ClosedForm):
    """Decays the learning rate in a straight line to `final`.

        model:
          scheduler: {class: Linear, warmup: 5%}

    After t of T updates, the rate is 1 - (1 - final) t / T of what it was.
    """

    def __init__(self, optimizer: Optimizer, final: float = 0.0, **kwargs: Any) -> None:
        super().__init__(optimizer, final=final, **kwargs)

    def between(self, horizon: Horizon, warmup: int, length: int) -> Factor:
        """Return 1 - (1 - final) t / T."""
        slope = self.final - 1
        return lambda done: 1 + slope * done / length


class Cosine(ClosedForm):
    """Decays the learning rate along half a cosine wave to `final`.

        model:
          scheduler: {class: Cosine, warmup: 5%, final: 0.1}

    Args:
        cycles: number of decays of equal length; each begins again with the full rate.
    """

    def __init__(self, optimizer: Optimizer, final: float = 0.0, cycles: int = 1, **kwargs: Any) -> None:
        check_count("cycles", cycles, minimum=1)
        super().__init__(optimizer, final=final, **kwargs)
        self._configured["cycles"] = self._cycles = cycles

    def between(self, horizon: Horizon, warmup: int, length: int) -> Factor:
        """Return final + (1 - final) (1 + cos(pi t / T)) / 2, where t and T are of the current cycle."""
        final = self.final
        height = 1 - final
        cycles = self._cycles
        cos = math.cos
        pi = math.pi
        if cycles > length:
            raise ArgumentError("scheduler.cycles", f"{cycles} is more than the {length} updates of the decay")

        def factor(done: int) -> float:
            if done >= length:
                return final
            return final + height * (1 + cos(pi * (cycles * done % length) / length)) / 2

        return factor


class Polynomial(ClosedForm):
    """Decays the learning rate to `final` by a power of the share of the run that is left.

        model:
          scheduler: {class: Polynomial, power: 2.0, warmup: 5%}

    Args:
        power: the exponent; 1 is a straight line.
    """

    def __init__(self, optimizer: Optimizer, final: float = 0.0, power: float = 1.0, **kwargs: Any) -> None:
        check_number("power", power, "a positive number", above=0)
        super().__init__(optimizer, final=final, **kwargs)
        self._configured["power"] = self._power = power

    def between(self, horizon: Horizon, warmup: int, length: int) -> Factor:
        """Return final + (1 - final) (1 - t / T) ** power."""
        final = self.final
        height = 1 - final
        power = self._power
        return lambda done: final + height * (1 - done / length) ** power


class Exponential(ClosedForm):
    """Changes the learning rate to `final` by the same factor in each update.

        model:
          scheduler: {class: Exponential, final: 0.01, warmup: 5%}

    A `final` above 1 increases the rate, as a range test of learning rates does.

    Args:
        final: where the rate ends, as a share of the rate; greater than 0, which no factor reaches.
    """

    largest_final = sys.float_info.max

    def __init__(self, optimizer: Optimizer, final: float = 0.01, **kwargs: Any) -> None:
        super().__init__(optimizer, final=final, **kwargs)
        if not self.final:
            raise ArgumentError("final", "an exponential decay does not reach 0; write for example 0.01")
        if self.final > 1 and self.warmup is not None:
            raise ArgumentError(
                "warmup", "a rate that increases to a final above 1 needs no warm-up; remove one of them"
            )

    def between(self, horizon: Horizon, warmup: int, length: int) -> Factor:
        """Return final ** (t / T)."""
        final = self.final
        return lambda done: final ** (done / length)


class InverseSqrt(ClosedForm):
    """Decays the learning rate with the square root of the number of updates, without an end.

        model:
          scheduler: {class: InverseSqrt, warmup: 500 updates, cooldown: 10%}

    After W updates of warm-up, update W + t has 1 / sqrt(1 + t / timescale) of the rate. With lengths in updates or
    passes, the rates before the cool-down do not depend on how long the run is.

    Args:
        timescale: how slowly the rate decays, written as `warmup`, which is the default.
    """

    depends_on_end = False

    def __init__(self, optimizer: Optimizer, timescale: float | str | None = None, **kwargs: Any) -> None:
        self.further_lengths = () if timescale is None else (Length.parse("timescale", timescale),)
        super().__init__(optimizer, **kwargs)
        if timescale is None and self.warmup is None:
            raise ArgumentError("timescale", "give a timescale or a warmup, such as '500 updates'")
        self._configured["timescale"] = timescale

    def between(self, horizon: Horizon, warmup: int, length: int) -> Factor:
        """Return 1 / sqrt(1 + t / timescale)."""
        timescale = (*self.further_lengths, self.warmup)[0]
        assert timescale is not None  # one of them is given
        scale = timescale.updates(horizon)
        sqrt = math.sqrt
        if scale == 0:
            raise ArgumentError(
                f"scheduler.{timescale.argument}", f"{timescale} is less than an update, as a timescale"
            )
        return lambda done: 1 / sqrt(1 + done / scale)


class Steps(ClosedForm):
    """Multiplies the learning rate by a factor at each milestone.

        model:
          scheduler: {class: Steps, milestones: [50%, 75%], gamma: 0.1}

    With lengths in updates or passes, the rates before the cool-down do not depend on how long the run is.

    Args:
        milestones: when the rate is multiplied, counted from the beginning of the run: shares of the run such as
            `50%`, `500 updates` or `2 passes`.
        gamma: the factor.
    """

    depends_on_end = False

    def __init__(
        self, optimizer: Optimizer, milestones: Sequence[float | str], gamma: float = 0.1, **kwargs: Any
    ) -> None:
        if not isinstance(milestones, list | tuple) or not milestones:
            raise ArgumentError("milestones", f"{milestones!r} is not a list such as ['50%', '75%']")
        check_number("gamma", gamma, "a number of at least 0", least=0)
        self.further_lengths = tuple(
            Length.parse(f"milestones[{index}]", value) for index, value in enumerate(milestones)
        )
        super().__init__(optimizer, **kwargs)
        self._configured.update(milestones=list(milestones), gamma=gamma)
        self._gamma = float(gamma)

    def between(self, horizon: Horizon, warmup: int, length: int) -> Factor:
        """Return gamma ** n after n milestones."""
        places = [milestone.updates(horizon) - warmup for milestone in self.further_lengths]
        end = math.inf if horizon.updates is None else length
        for index, (before, place) in enumerate(pairwise([0, *places])):
            if not before < place < end:
                allowed = f"more than {warmup + before}" if place <= before else f"fewer than {warmup + end}"
                raise ArgumentError(
                    f"scheduler.milestones[{index}]",
                    f"{self.further_lengths[index]} is after {warmup + place} updates; it must be after {allowed}",
                )
        gamma = self._gamma
        if len(places) * math.log(max(gamma, 1)) > 700:
            raise ArgumentError("scheduler.gamma", f"{gamma:g} makes the rate infinite")
        return lambda done: gamma ** bisect_right(places, done)
