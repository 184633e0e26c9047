"""Measure how long a shell waits for completions: the process that answers when the Tab key is pressed.

    python benchmarks/completion.py [--rounds 20]

The places are those of a project with a config, and of a directory with 1,000 runs. The median of the rounds is printed
beside the budget, and beside `emrun --help`, which is the start alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

BUDGET = 0.2  # seconds
RUNS = 1000
EMRUN = str(Path(sys.executable).with_name("emrun"))
PROJECT = Path(__file__).parent.parent / "sample_configs" / "my_project"
LINES = (
    "tr",
    "train c",
    "train config.yaml mod",
    "train config.yaml model.module.h",
    "train config.yaml model.optimizer.l",
    "train config.yaml main_loop.ex",
    "train config.yaml hooks.S",
    "train config.yaml hooks.StopAfter.ep",
    "resume log/run-0",
    "eval log/run-0001 v",
    "init mine --from d",
)


def seconds(line: str | None, directory: Path) -> float:
    """Return the seconds until the last word of a line is completed; without a line, those of `emrun --help`."""
    command, words = [EMRUN, "--help"], {}
    if line is not None:
        command, count = [EMRUN], str(len(line.split()))
        words = {"COMP_WORDS": f"emrun {line}", "COMP_CWORD": count, "_EMRUN_COMPLETE": "bash_complete"}
    began = perf_counter()
    done = subprocess.run(command, cwd=directory, env={**os.environ, **words}, check=True, capture_output=True)
    taken = perf_counter() - began
    assert done.stdout, line
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as place:
        directory = shutil.copytree(PROJECT, Path(place) / "project")
        for number in range(RUNS):
            run = directory / "log" / f"run-{number:04}"
            run.mkdir(parents=True)
            (run / "trace.yaml").write_text("status: finished\nseed: 1\n")
            shutil.copy(directory / "config.yaml", run)
        figures: dict[str | None, list[float]] = {line: [] for line in (None, *LINES)}
        for line in figures:
            seconds(line, directory)  # load the files into the cache
        for _ in range(rounds):
            for line, taken in figures.items():
                taken.append(seconds(line, directory))
    for line, taken in figures.items():
        found = statistics.median(taken)
        verdict = "" if line is None else f", budget {BUDGET}, {'held' if found <= BUDGET else 'NOT HELD'}"
        print(f"{'emrun --help' if line is None else line:40} {found:.3f} s{verdict}", flush=True)


if __name__ == "__main__":
    main()
