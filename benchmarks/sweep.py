"""Measure what a trial of `emrun sweep` costs beside its training, next to a shell loop and to Optuna.

    python benchmarks/sweep.py [--rounds 3] [--trials 10]

A trial trains the sample `majority.yaml` for two epochs; its training is what `metrics.jsonl` has as seconds. The start
of a sweep is paid once, so the cost of a trial is the difference between a sweep of many trials and one of two, per
trial. The ways alternate; medians are printed, with the budget.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

BUDGET = 0.5  # seconds beside the training
FEW = 2  # trials of the sweep whose time is taken off

ROOT = Path(__file__).parent.parent
EMRUN = str(Path(sys.executable).with_name("emrun"))
CONFIG = str(ROOT / "sample_configs" / "majority.yaml")
SHORT = ["hooks.StopAfter.epochs=2"]
OPTUNA = """
import json, subprocess, sys
from pathlib import Path
import optuna

emrun, config, short, rates = json.loads(sys.argv[1])
optuna.logging.set_verbosity(optuna.logging.WARNING)

def objective(trial):
    rate, place = trial.suggest_categorical("rate", rates), f"optuna/{trial.number}"
    command = [emrun, "train", "-q", config, *short, f"model.optimizer.lr={rate}", "--output-dir", place]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(Path(place, "metrics.jsonl").read_text().splitlines()[-1])["streams"]["valid"]["loss"]["mean"]

sampler = optuna.samplers.GridSampler({"rate": rates})
optuna.create_study(sampler=sampler).optimize(objective, n_trials=len(rates))
"""


def rates_of(count: int) -> list[float]:
    """Return as many learning rates."""
    return [round(0.1 + 0.01 * index, 2) for index in range(count)]


def sweep(count: int, place: Path) -> None:
    """Run a sweep."""
    values = f"model.optimizer.lr={rates_of(count)}"
    call([EMRUN, "sweep", "-q", CONFIG, *SHORT, "-p", values, "--output-dir", "sweep"], place)


def shell(count: int, place: Path) -> None:
    """Run `emrun train` in a loop of a shell."""
    command = f"{EMRUN} train -q {CONFIG} {SHORT[0]} model.optimizer.lr=$rate --output-dir shell/$rate"
    call(["bash", "-c", f"for rate in {' '.join(map(str, rates_of(count)))}; do {command} || exit 1; done"], place)


def optuna(count: int, place: Path) -> None:
    """Run Optuna's own loop, whose objective starts `emrun train`."""
    call([sys.executable, "-c", OPTUNA, json.dumps([EMRUN, CONFIG, SHORT, rates_of(count)])], place)


def call(command: list[str], place: Path) -> None:
    subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)


def cpu_seconds() -> float:
    """Return the CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(way, count: int) -> tuple[float, float, float]:
    """Return the seconds of a way with this number of trials, those of the training in them, and its CPU time."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        began, used = perf_counter(), cpu_seconds()
        way(count, place)
        taken, used = perf_counter() - began, cpu_seconds() - used
        files = list(place.glob("*/*/metrics.jsonl"))
        assert len(files) == count
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return taken, sum(line["seconds"] for line in lines), used


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=10)
    arguments = parser.parse_args()
    ways = {"emrun sweep": sweep, "a shell loop": shell, "Optuna with subprocesses": optuna}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    starts: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            few, many = (measured(way, count) for count in (FEW, FEW + arguments.trials))
            cost = (many[0] - few[0] - (many[1] - few[1])) / arguments.trials
            costs[name].append(cost)
            used[name].append((many[2] - few[2]) / arguments.trials)
            starts[name].append(few[0] - few[1] - FEW * cost)
    for name in ways:
        cost, start = statistics.median(costs[name]), statistics.median(starts[name])
        verdict = "" if name != "emrun sweep" else f", budget {BUDGET}, {'held' if cost <= BUDGET else 'NOT HELD'}"
        cpu = f"CPU time of a trial with its training {statistics.median(used[name]):.2f} s"
        print(f"{name}: {cost:.2f} s a trial beside its training{verdict}; once {start:.1f} s; {cpu}", flush=True)


if __name__ == "__main__":
    main()
