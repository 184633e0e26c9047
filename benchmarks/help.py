"""How long `emrun --help` takes over importing click, as whole processes, alternating.

python benchmarks/help.py [--pairs 20]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

BUDGET = 2.0  # times the import of click


def seconds(command: list[str]) -> float:
    """Return how long a command takes."""
    began = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    emrun = [str(Path(sys.executable).with_name("emrun")), "--help"]
    click = [sys.executable, "-c", "import click"]
    seconds(emrun), seconds(click)  # files into the cache
    figures = [(seconds(emrun), seconds(click)) for _ in range(pairs)]
    ours, base = (statistics.median(column) for column in zip(*figures, strict=True))
    ratio = statistics.median(a / b for a, b in figures)
    verdict = "held" if ratio <= BUDGET else "NOT HELD"
    print(f"emrun --help {ours:.3f} s, import click {base:.3f} s, ratio {ratio:.2f}, budget {BUDGET}, {verdict}")


if __name__ == "__main__":
    main()
