"""Measure how well reading a stream overlaps with training, with a thread and with worker processes.

    python benchmarks/streams.py [--rounds 5] [--batches 200]

A step of the model and the creation of a batch take about the same time. The ideal time of both is that of the slower
one alone. Two processes that do the same work side by side and exchange nothing show how much of the ideal this machine
can reach. A producer that releases the interpreter lock (decompression) and one that holds it (plain Python) are read
without read-ahead, by a thread and by workers. The settings alternate; medians are printed. The hand-over of a batch is
measured with a producer that does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import statistics
import sys
import zlib
from time import perf_counter

import numpy as np
import torch

from emrun.streams.reading import Reading
from emrun.streams.stream import StreamWrapper

BUDGETS = {"releases the lock": 0.95, "holds the lock": 0.85}
HAND_OVER_BUDGET = 3.0  # microseconds
WIDTH = 512
BATCH = {"x": np.zeros(8, np.float32)}


class Step:
    """A training step of about two milliseconds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
        self.module = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.x = torch.randn(64, WIDTH)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.module(self.x).square().mean().backward()
        self.optimizer.step()


def releasing(times: int):
    """Decompress data; other threads can run meanwhile."""
    return [zlib.decompress(PACKED) for _ in range(times)]


def holding(times: int) -> int:
    """Compute in plain Python; other threads cannot run meanwhile."""
    found = 0
    for number in range(times):
        found += number * number % 7
    return found


PACKED = zlib.compress(np.random.default_rng(0).integers(0, 99, 40_000, dtype=np.uint8).tobytes(), 6)


def seconds(function, count: int) -> float:
    """Return the seconds of one call."""
    began = perf_counter()
    for _ in range(count):
        function()
    return (perf_counter() - began) / count


def fitted(function, target: float) -> int:
    """Return how many times a producer has to repeat its work to take as long as a step."""
    times = 1
    while seconds(functools.partial(function, times), 20) < target / 2:
        times *= 2
    return max(1, round(times * target / seconds(functools.partial(function, times), 50)))


def stream_of(function, times: int, batches: int):
    """Return a stream function that repeats the work of a producer for each batch."""

    def stream(ctx):
        for _ in ctx.batches(batches, 1):
            function(times)
            yield BATCH

    return stream


@contextlib.contextmanager
def switching(interval: float | None):
    """Set the switch interval of threads; None leaves Python's default of 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval or before)
    yield
    sys.setswitchinterval(before)


def epoch(stream, step, batches: int, interval: float | None, **options) -> float:
    """Return the seconds of a batch, without the first one, which includes the start of workers."""
    wrapper = StreamWrapper(stream, name="train", training=False, reading=Reading(**options))
    with switching(interval), wrapper:
        it = iter(wrapper)
        next(it)
        began = perf_counter()
        for _ in it:
            step()
        taken = perf_counter() - began
    wrapper.close()
    return taken / (batches - 1)


def apart(function, times: int, step, batches: int) -> float:
    """Return the seconds of a batch when reading and training are two processes that exchange nothing: the limit."""
    ready, taken = multiprocessing.Barrier(2), multiprocessing.Value("d")

    def read():
        ready.wait()
        taken.value = seconds(functools.partial(function, times), batches)

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    ready.wait()
    own = seconds(step, batches)
    process.join()
    return max(own, taken.value)


VARIANTS = {
    "two processes, nothing exchanged": None,
    "no read-ahead": (None, {}),
    "thread, buffer 4": (None, {"buffer": 4}),
    "thread, buffer 4, switching every 0.5 ms": (5e-4, {"buffer": 4}),
    "thread, buffer 16": (None, {"buffer": 16}),
    "1 worker": (None, {"workers": 1}),
    "1 worker, buffer 8": (None, {"workers": 1, "buffer": 8}),
    "2 workers": (None, {"workers": 2}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    step = Step()
    seconds(step, 50)
    for name, function in (("releases the lock", releasing), ("holds the lock", holding)):
        times = fitted(function, seconds(step, 200))
        found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(arguments.rounds):
            for variant, how in VARIANTS.items():
                alone = max(seconds(step, 100), seconds(functools.partial(function, times), 100))
                if how is None:
                    taken = apart(function, times, step, arguments.batches)
                else:
                    stream = stream_of(function, times, arguments.batches)
                    taken = epoch(stream, step, arguments.batches, how[0], **how[1])
                found[variant].append(alone / taken)
        print(f"\na producer that {name} (budget {BUDGETS[name]:.0%} of the ideal)")
        for variant, shares in found.items():
            print(f"  {variant:40} {statistics.median(shares):4.0%}   [{min(shares):.0%} .. {max(shares):.0%}]")
    print()
    for buffer in (0, 4, 32):
        costs = []
        for _ in range(5):
            reading = Reading(buffer)
            wrapper = StreamWrapper(
                lambda: ({"x": [0]} for _ in range(40_000)), "train", training=False, reading=reading
            )
            with wrapper:
                began = perf_counter()
                for _ in wrapper:
                    pass
                costs.append((perf_counter() - began) / 40_000 * 1e6)
        budget = f"   budget {HAND_OVER_BUDGET} us" if buffer == 32 else ""
        print(f"hand-over of a batch, buffer {buffer:2} {statistics.median(costs):6.2f} us{budget}")


if __name__ == "__main__":
    main()
