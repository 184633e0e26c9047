"""Functions that give the rate of each update, and how those of the phases of a schedule become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

_POINTS = 400  # of the curve in a plan; a multiple of 4

Factor = Callable[[int], float]
"""Updates done -> the share of each parameter group's own rate that the next update has."""


def in_phases(warmup: int, between: Factor, end: int | None = None, cooldown: int = 0, final: float = 0.0) -> Factor:
    """Return the rates of a schedule.

    Args:
        warmup: number of updates of the warm-up.
        between: the rates after it, as a function of the updates since then.
        end: number of updates before the cool-down, or of all without one; None if `between` has no end.
        cooldown: number of updates of the cool-down.
        final: the rate at the end of the cool-down.
    """
    last = 0.0 if end is None else between(end - warmup)

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        if end is None or done < end:
            return between(done - warmup)
        return last + (final - last) * min(done - end, cooldown) / cooldown if cooldown else last

    return factor


def base_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each parameter group of which a schedule gives shares."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def sampled(factor: Factor, total: int, bases: Sequence[float]) -> list[list[float]]:
    """Return the rates of some updates, evenly spread from the first to the last one, for each base rate."""
    count = min(total, _POINTS + 1)
    shares = [factor(round(index * (total - 1) / max(count - 1, 1))) for index in range(count)]
    return [[base * share for share in shares] for base in bases]


def by_group(bases: Sequence[float], shares: Sequence[float]) -> str:
    """Return the rates of parameter groups as text, those of different groups apart."""
    groups: dict[float, list[str]] = {}  # base rate -> the numbers of the groups that have it
    for number, base in enumerate(bases):
        groups.setdefault(base, []).append(str(number))
    texts = []
    for base, numbers in groups.items():
        rates = ", ".join(f"{base * share:.3g}" for share in shares)
        name = f"{'group' if len(numbers) == 1 else 'groups'} {', '.join(numbers)}: "
        texts.append(name + rates if len(groups) > 1 else rates)
    return "; ".join(texts)
