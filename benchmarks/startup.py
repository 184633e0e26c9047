"""Measure how long emrun takes to start: `emrun --help` and `emrun check --static`, as whole processes.

    python benchmarks/startup.py [--pairs 20]

Each command alternates with one to compare it with. The medians of the ratios or differences of the pairs are printed
beside the budgets. `peers.py` measures the time to the first update.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

HELP_BUDGET = 2.0  # times the time of importing click
CHECK_BUDGET = 0.5  # seconds more than --help

ROOT = Path(__file__).parent.parent
EMRUN = str(Path(sys.executable).with_name("emrun"))
HELP = [EMRUN, "--help"]
CLICK = [sys.executable, "-c", "import click"]


def seconds(command: list[str], directory: Path, status: int = 0) -> float:
    """Return the seconds that a command takes; it must end with the given status."""
    began = perf_counter()
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True)
    taken = perf_counter() - began
    assert done.returncode == status, done.stderr.decode()
    return taken


def pairs(ours: list[str], base: list[str], directory: Path, count: int, status: int = 0) -> list[tuple[float, float]]:
    """Return the seconds of two commands that run alternately."""
    seconds(ours, directory, status), seconds(base, directory)  # load the files into the cache
    return [(seconds(ours, directory, status), seconds(base, directory)) for _ in range(count)]


def show(what: str, figures: list[tuple[float, float]], base: str, budget: float, *, ratio: bool) -> None:
    """Print the median of the ratios or of the differences, beside the budget."""
    a, b = (statistics.median(column) for column in zip(*figures, strict=True))
    found = statistics.median(x / y if ratio else x - y for x, y in figures)
    unit = "times" if ratio else "s more"
    verdict = "held" if found <= budget else "NOT HELD"
    print(f"{what} {a:.3f} s, {base} {b:.3f} s: {found:.2f} {unit}, budget {budget}, {verdict}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    count = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        show("emrun --help", pairs(HELP, CLICK, directory, count), "import click", HELP_BUDGET, ratio=True)
        check = [EMRUN, "check", "--static"]
        sample = [*check, str(ROOT / "sample_configs" / "digits_convnet.yaml")]
        show("check --static", pairs(sample, HELP, directory, count), "--help", CHECK_BUDGET, ratio=False)
        wrong = ROOT / "tests" / "wrong_configs"
        slowest: tuple[float, list[tuple[float, float]], str] = (0.0, [], "")
        for path in sorted(wrong.glob("*.yaml")):
            if {"# phase: one", "# phase: reading"} & set(comments(path)):
                figures = pairs([*check, path.name, *overrides(path)], HELP, wrong, max(3, count // 5), status=2)
                slowest = max(slowest, (statistics.median(x - y for x, y in figures), figures, path.stem))
        if slowest[1]:
            show(f"the slowest wrong config ({slowest[2]})", slowest[1], "--help", CHECK_BUDGET, ratio=False)


def overrides(path: Path) -> list[str]:
    """Return the overrides that the comments of a wrong config name."""
    marked = [line.removeprefix("# overrides: ") for line in comments(path) if line.startswith("# overrides: ")]
    return [word for line in marked for word in shlex.split(line)]


def comments(path: Path) -> list[str]:
    """Return the lines of a config; some configs are deliberately not UTF-8."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


if __name__ == "__main__":
    main()
