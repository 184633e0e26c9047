"""The measurements in the process of a runner, which imports nothing else, so that the peak memory is the runner's."""

from __future__ import annotations

import gc
import importlib
import math
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from runners import RAW

STEPS, WARM = 300, 20
LONG = 3000
EPOCHS = 4
NULL_STEPS = 20_000
LOSSES = 10**6

Row = dict[str, Any]


def alternate(raw: Callable[[], float], theirs: Callable[[], float], rounds: int) -> Row:
    """Return the medians of both times, of their ratio and of their difference."""
    pairs = []
    for index in range(rounds + 1):
        if index % 2:
            base, found = raw(), theirs()
        else:
            found, base = theirs(), raw()
        if index:  # the first one warms up
            pairs.append((found, base, found / base, found - base))
    found, base, ratio, more = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"found": found, "raw": base, "ratio": ratio, "more": more}


def child(table: str, name: str, rounds: int) -> Row:
    """Measure a runner for a table."""
    if table == "metrics":
        return child_metrics(name, rounds)
    import torch

    if table == "typical":
        sys.stdout = sys.stderr = Terminal(sys.stderr.fileno(), "w", closefd=False)
    torch.set_num_threads(1)
    raw, runner = (importlib.import_module(f"runners.{each}") for each in (RAW, name))
    measures = (bare, begun, begun_long, typical, null, several, several_large)
    measure: Callable[[Any, dict[Any, Any]], float] = {each.__name__: each for each in measures}[table]
    if table.startswith("several"):
        meet(name)
    works: dict[Any, Any] = {}

    def measured(which: Any) -> float:
        gc.collect()  # free the batches of the previous training, which a reference cycle may hold
        return measure(which, works)

    row = alternate(lambda: measured(raw), lambda: measured(runner), rounds)
    return {**row, "note": runner.NOTES.get(table, ""), "rss": peak_rss()}


def bare(runner: Any, works: dict[Any, Any]) -> float:
    """Return the microseconds of a step."""
    from runners.work import Work

    work = Work(WARM + STEPS, warm=WARM)
    runner.bare(work)
    check(work, works)
    return work.step_seconds * 1e6


def begun(runner: Any, works: dict[Any, Any], steps: int = STEPS) -> float:
    """Return the microseconds of one of the first steps of a run."""
    from runners.work import Work

    work = Work(steps)
    with tempfile.TemporaryDirectory() as place:
        runner.begun(work, Path(place))
    check(work, works)
    return work.step_seconds * 1e6


def begun_long(runner: Any, works: dict[Any, Any]) -> float:
    """Return the microseconds of one of more first steps of a run."""
    return begun(runner, works, LONG)


def meet(name: str) -> None:
    """Connect the two processes, as the runner does it itself."""
    if name == "emrun":
        from emrun.ranks.group import join

        join()
    else:
        import torch.distributed

        torch.distributed.init_process_group("gloo")


def several(runner: Any, works: dict[Any, Any], **module: Any) -> float:
    """Return the microseconds of a step of two processes."""
    import torch.distributed

    from runners.work import Mlp, Work

    rank = torch.distributed.get_rank()
    work = Work(WARM + STEPS, warm=WARM, rank=rank, module=partial(Mlp, **module))
    work.clocked()
    torch.distributed.barrier()
    runner.several(work)
    check(work, works)
    return work.step_seconds * 1e6


def several_large(runner: Any, works: dict[Any, Any]) -> float:
    """Return the microseconds of a step of two processes with a larger model."""
    return several(runner, works, width=1024, layers=3)


def typical(runner: Any, works: dict[Any, Any]) -> float:
    """Return the microseconds of a step, including its share of the end of the epoch."""
    from runners.work import Work

    work = Work(STEPS, epochs=EPOCHS)
    with tempfile.TemporaryDirectory() as place:
        runner.typical(work, Path(place))
        taken = perf_counter() - work.began
        assert any(Path(place).rglob("*")), "nothing was written"
    check(work, works)
    assert work.losses and all(0 < loss < 10 for loss in work.losses), f"losses {work.losses}"
    last = works.setdefault("loss", work.losses[-1])
    assert math.isclose(work.losses[-1], last, rel_tol=1e-2), f"a mean loss of {work.losses[-1]}, not {last}"
    return taken / STEPS / EPOCHS * 1e6


def null(runner: Any, works: dict[Any, Any]) -> float:
    """Return the microseconds of a batch."""
    from runners.work import Work

    work = Work(NULL_STEPS, warm=NULL_STEPS // 20)
    runner.null(work)
    assert work.taken == NULL_STEPS
    return work.step_seconds * 1e6


def check(work: Any, works: dict[Any, Any]) -> None:
    """Assert that the runner has read all batches and that its weights equal those of the other runners.

    Kernels that add in another order cause differences of 1e-4; a step more or less causes one of 1e-3.
    """
    import torch

    assert work.taken == work.steps * work.epochs, f"{work.taken} batches"
    weights = work.weights()
    assert all(each.isfinite().all() for each in weights)
    for mine, theirs in zip(weights, works.setdefault("weights", weights), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-4)


def child_metrics(name: str, rounds: int) -> Row:
    """Measure a way to accumulate losses."""
    import torch

    from runners import accumulation

    torch.set_num_threads(1)
    way = getattr(accumulation, name)

    def seconds(function: Callable[..., float]) -> float:
        began = perf_counter()
        mean = function(accumulation.stream(LOSSES))
        taken = perf_counter() - began
        assert math.isclose(mean, 0.5, rel_tol=1e-2), f"a mean of {mean}"
        return taken

    way(accumulation.stream(LOSSES // 100)), seconds(accumulation.nothing)
    before = peak_rss()
    seconds(way)
    growth = peak_rss() - before
    row = alternate(lambda: seconds(accumulation.nothing), lambda: seconds(way), rounds)
    return {**row, "growth": growth}


class Terminal:
    """A file that claims to be a terminal, so that progress bars are drawn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._file = open(*args, **kwargs)  # noqa: SIM115, PTH123

    def isatty(self) -> bool:
        """Return True."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def peak_rss() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
