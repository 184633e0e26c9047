"""Measure how long `emrun report` takes, and how large its page is: 50 runs of 1,000 epochs and 100,000 steps each.

    python benchmarks/report.py [--runs 50] [--rounds 3]

The runs are generated, as `emrun train` would write them. One step of each run has a loss that is far above all others;
the page must have each of these peaks. The page of one run is measured too, which is what a run writes at its end.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

BUDGET, LARGEST = 3.0, 5_000_000  # seconds, bytes
BUDGET_OF_ONE = 0.3
EPOCHS, STEPS = 1_000, 100_000
CHUNK = 100  # steps of an epoch
EMRUN = str(Path(sys.executable).with_name("emrun"))
ALONE = """\
from pathlib import Path
from sys import argv
from time import perf_counter
from emrun.runs.report.page import write_at_end
begin = perf_counter()
write_at_end(Path(argv[1]))
print(perf_counter() - begin)
"""
CONFIG = """\
seed: {number}
name: generated
dataset: {{class: Digits, batch_size: {batch_size}}}
model:
  module: {{class: my_model.Net, channels: {channels}}}
  inputs: [image]
  outputs: [logits]
  loss: {{class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}}
  optimizer: {{class: AdamW, lr: {rate}}}
main_loop: {{extra_streams: [valid]}}
hooks:
  - ComputeStats: {{variables: [loss, accuracy]}}
  - SaveBest
  - StopAfter: {{epochs: 1000}}
"""
TRACE = """\
train_begin: '2026-11-20T10:00:00+00:00'
train_end: '2026-11-20T12:00:00+00:00'
epochs_done: 1000
iterations_done: 100000
exit_status: 0
status: finished
reason: 1000 epochs done
seed: {number}
threads: 2
emrun: 0.1.0
torch: 2.13.0
python: 3.11.7
command: [emrun, train, config.yaml]
host: generated
"""


def make_run(directory: Path, number: int) -> tuple[int, float]:
    """Write a run, and return the step that has the peak, and its loss."""
    rng = random.Random(number)
    directory.mkdir(parents=True)
    values = {
        "batch_size": rng.choice([16, 32, 64]),
        "channels": rng.choice([16, 32]),
        "rate": 10 ** rng.uniform(-4, -1),
    }
    (directory / "config.yaml").write_text(CONFIG.format(number=number, **values))
    (directory / "trace.yaml").write_text(TRACE.format(number=number))
    peak = rng.randrange(1, STEPS + 1), 100.0 + number
    with (directory / "metrics.jsonl").open("w") as metrics, (directory / "steps.jsonl").open("w") as steps:
        for epoch in range(1, EPOCHS + 1):
            first = (epoch - 1) * CHUNK + 1
            losses = [2 / (1 + 1e-4 * (first + index)) + rng.random() for index in range(CHUNK)]
            if first <= peak[0] < first + CHUNK:
                losses[peak[0] - first] = peak[1]
            rates = [values["rate"] * (1 - (first + index) / (STEPS + 1)) for index in range(CHUNK)]
            chunk = {"format": 1, "from": first, "every": 1, "loss": losses, "learning_rate": rates}
            steps.write(json.dumps(chunk) + "\n")
            mean = statistics.fmean(losses)
            streams = {
                "train": {"learning_rate": rates[-1], "loss": {"mean": mean}, "accuracy": {"mean": 1 - mean / 4}},
                "valid": {"loss": {"mean": mean + rng.random() / 10}, "accuracy": {"mean": 1 - mean / 3}},
            }
            line = {"epoch": epoch, "iteration": epoch * CHUNK, "seconds": 7.2, "streams": streams}
            metrics.write(json.dumps(line) + "\n")
    return peak


def seconds_of(command: list[str]) -> float:
    """Return how long a command takes."""
    begin = perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return perf_counter() - begin


def main() -> int:
    """Measure, and print the results beside their budgets; return 1 if one is not held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "runs")
        peaks = [make_run(root / f"run-{number:03d}", number) for number in range(options.runs)]
        page = Path(folder, "report.html")
        command = [EMRUN, "report", str(root), "-o", str(page)]
        several = statistics.median(seconds_of(command) for _ in range(options.rounds))
        size, text = page.stat().st_size, page.read_text()
        lost = [peak for peak in peaks if f"{peak[1]:.1f}" not in text]
        start = statistics.median(seconds_of([EMRUN, "--help"]) for _ in range(options.rounds))
        alone = [sys.executable, "-c", ALONE, str(root / "run-000")]
        one = statistics.median(
            float(subprocess.run(alone, check=True, capture_output=True, text=True).stdout)
            for _ in range(options.rounds)
        )
    rows = [
        (f"emrun report, {options.runs} runs", f"{several:.2f} s", f"{BUDGET:g} s", several <= BUDGET),
        ("its page", f"{size / 1e6:.2f} MB", f"{LARGEST / 1e6:g} MB", size <= LARGEST),
        ("peaks that are not in the page", str(len(lost)), "0", not lost),
        ("the page at the end of one run", f"{one:.3f} s", f"{BUDGET_OF_ONE:g} s", one <= BUDGET_OF_ONE),
    ]
    print(f"emrun --help: {start:.2f} s\n\n|  |  | budget |  |\n| --- | ---: | ---: | --- |")
    for name, value, budget, is_held in rows:
        print(f"| {name} | {value} | {budget} | {'held' if is_held else 'NOT HELD'} |")
    return 0 if all(row[-1] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
