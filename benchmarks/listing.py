"""Measure how long `emrun ls` takes on 1,000 runs, as a whole process: all columns, conditions, and values of configs.

    python benchmarks/listing.py [--runs 1000] [--rounds 5]

The runs are generated: each has its own config, 20 epochs, 600 steps, two checkpoints, and ends as one of five kinds.
The median of the rounds is printed beside the budget, and beside `emrun --help`, which is the start alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter

from emrun.config.yaml_tree import parse
from emrun.storage.plain import write_with_plain

BUDGET = 1.0  # seconds
EPOCHS = 20
EMRUN = str(Path(sys.executable).with_name("emrun"))
COMMANDS = (
    ["--help"],
    ["ls"],
    ["ls", "-l", "--sort", "best"],
    ["ls", "--where", "model.module.channels=32"],
    ["ls", "--where", "model.optimizer.lr<0.01", "--where", "valid/loss<0.5"],
    ["ls", "-c", "hooks.StopAfter.epochs,min:valid/loss,dataset.batch_size"],
    ["ls", "--json"],
    ["prune", "--keep-best", "10", "--dry-run"],
)
CONFIG = """\
# Generated: the config of run {number}.
seed: {number}
name: generated
dataset:
  class: Digits
  batch_size: {batch_size}
  shift: 1                                              # train images are moved by up to one pixel
model:
  module:
    class: my_model.Net
    channels: {channels}
    layers:
      - {{class: torch.nn.Conv2d, in_channels: 1, out_channels: {channels}, kernel_size: 3, padding: 1}}
      - {{class: torch.nn.ReLU}}
      - {{class: torch.nn.Linear, in_features: 1024, out_features: 10}}
  inputs: [image]
  outputs: [logits]
  loss: {{class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}}
  metrics:
    accuracy: {{import: emrun.metrics.accuracy, inputs: [logits, label]}}
  optimizer: {{class: AdamW, lr: {rate}, weight_decay: {decay}}}
  scheduler: {{class: Cosine, warmup: 5%}}
main_loop:
  extra_streams: [valid]
  buffer: 4
hooks:
  - ComputeStats: {{variables: [loss, accuracy]}}
  - LogVariables
  - ShowProgress
  - SaveBest: {{variable: accuracy, condition: max}}
  - SaveLatest
  - StopAfter: {{epochs: 20}}
"""
TRACE = """\
train_begin: '{begin}'
train_end: {end}
epochs_done: 20
iterations_done: 600
exit_status: {exit_status}
status: {status}
reason: '20 epochs done (StopAfter epochs: 20)'
seed: {number}
emrun: 0.1.0
torch: 2.13.0+cpu
python: 3.11.7
command:
- emrun
- train
- config.yaml
host: generated
pid: {number}
git_commit: 0123456789abcdef0123456789abcdef01234567
has_checkpoints: true
"""


def make_run(root: Path, number: int) -> None:
    """Write the directory of a run."""
    draw = random.Random(number)
    place = root / f"generated_{number:04d}"
    place.mkdir()
    config = CONFIG.format(
        number=number,
        batch_size=draw.choice([16, 32, 64]),
        channels=draw.choice([16, 32, 64]),
        rate=f"{10 ** draw.uniform(-4, -1):.6f}",
        decay=f"{draw.random():.6f}",
    )
    write_with_plain(place / "config.yaml", config, parse(config, "").plain())
    status = ("finished", "finished", "interrupted", "failed", "running")[number % 5]  # nobody writes it: killed
    begin = datetime(2026, 11, 1, tzinfo=UTC) + timedelta(minutes=number)
    end = "" if status == "running" else f"'{(begin + timedelta(minutes=3)).isoformat()}'"
    trace = TRACE.format(
        begin=begin.isoformat(), end=end, status=status, number=number, exit_status=int(status == "failed")
    )
    write_with_plain(place / "trace.yaml", trace, parse(trace, "").plain())
    lines = []
    for epoch in range(EPOCHS + 1):
        streams = {
            stream: {name: {"mean": draw.random()} for name in ("loss", "accuracy")} for stream in ("train", "valid")
        }
        counters = {"epoch": epoch, "iteration": 30 * epoch, "seconds": draw.random()}
        lines.append(json.dumps({**counters, "streams": streams}))
    (place / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    steps = {"format": 1, "from": 1, "every": 1, "loss": [draw.random() for _ in range(30 * EPOCHS)]}
    (place / "steps.jsonl").write_text(json.dumps(steps) + "\n", encoding="utf-8")
    (place / "train.log").write_text("epoch\n" * 100, encoding="utf-8")
    for name, iteration in (("best", 300), ("latest", 600)):
        checkpoint = place / "checkpoints" / f"it-{iteration:08d}"
        checkpoint.mkdir(parents=True)
        for file in ("model.safetensors", "state.pt", "manifest.json"):
            (checkpoint / file).write_bytes(b"x" * 1000)
        (place / "checkpoints" / name).symlink_to(checkpoint.name)


def seconds(arguments: list[str], directory: Path) -> float:
    """Return the seconds that a command takes; it must succeed."""
    began = perf_counter()
    done = subprocess.run([EMRUN, *arguments], cwd=directory, check=False, capture_output=True)
    taken = perf_counter() - began
    assert done.returncode == 0, done.stderr.decode()
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "log"
        root.mkdir()
        for number in range(options.runs):
            make_run(root, number)
        for arguments in COMMANDS:
            found = statistics.median(seconds(arguments, root.parent) for _ in range(options.rounds))
            verdict = "held" if found <= BUDGET else "NOT HELD"
            print(f"emrun {' '.join(arguments)}: {found:.2f} s, budget {BUDGET:g}, {verdict}", flush=True)


if __name__ == "__main__":
    main()
