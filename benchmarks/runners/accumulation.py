"""Ways to compute the mean of many losses, which come as one tensor per batch."""

from __future__ import annotations

import torch

BATCH_SIZE = 32


def stream(count: int):
    """Yield `count` losses, in a new tensor for each batch, as from a model."""
    source = torch.arange(1024 * BATCH_SIZE, dtype=torch.float32).reshape(-1, BATCH_SIZE) / 1024 / BATCH_SIZE
    for index in range(count // BATCH_SIZE):
        yield source[index % 1024].clone()


def nothing(losses) -> float:
    """Only read the stream."""
    for _ in losses:
        pass
    return 0.5


def emrun(losses) -> float:
    from emrun.record.running_stats import RunningStats

    stats = RunningStats(["mean"])
    for each in losses:
        stats.add(each, len(each))
    return stats.result()["mean"]


def torchmetrics(losses) -> float:
    from torchmetrics import MeanMetric

    metric = MeanMetric()
    for each in losses:
        metric.update(each)
    return metric.compute().item()


def appended(losses) -> float:
    return torch.cat(list(losses)).mean().item()


def summed(losses) -> float:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for each in losses:
        total += each.sum()
        count += len(each)
    return (total / count).item()
