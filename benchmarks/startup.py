"""Measure how long emrun takes to start and to end, on one thread.

    python benchmarks/startup.py [--pairs 20]

`emrun --help` is compared with the help of a bare program of click that is installed as emrun is, and `emrun check
--static` with `emrun --help`. `emrun train` is compared with a script of PyTorch that trains the same model on the same
data: from the start of the process to the first update, whose time both print, and to the end of the process.

Each command alternates with the one it is compared with. The medians of the ratios or differences of the pairs are
printed beside the budgets. `peers.py` compares the time to the first update with that of other runners.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import CLOCK_MONOTONIC, clock_gettime

from runners.first_update import CONFIG

HELP_BUDGET = 2.0  # times the help of a bare program of click
CHECK_BUDGET = 0.5  # seconds more than --help
UPDATE_BUDGET = 1.15  # times the script of PyTorch

ROOT = Path(__file__).parent.parent
EMRUN = str(Path(sys.executable).with_name("emrun"))
HELP = [EMRUN, "--help"]
PROGRAM = """\
import click

@click.group()
@click.version_option("1.0")
def main():
    "Train."

@main.command()
@click.argument("config")
def train(config):
    "Train from a config."
"""
SCRIPT = f"""\
#!{sys.executable}
import sys
from bare_program import main
sys.exit(main())
"""
TELL = "print('first update at', time.clock_gettime(time.CLOCK_MONOTONIC), flush=True)"
DATA = """\
        generator = np.random.default_rng(0)
        yield {"image": generator.random((32, 784), dtype="float32"), "label": generator.integers(0, 10, 32)}
"""
OURS = f"""\
import time
import numpy as np
from emrun import AbstractHook

class Random:
    def train_stream(self):
{DATA}
class Exit(AbstractHook):
    def after_update(self):
        {TELL}
"""
PLAIN = f"""\
import time
import numpy as np
import torch

class Random:
    def train_stream(self):
{DATA}
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
for batch in Random().train_stream():
    logits = module(torch.from_numpy(batch["image"]))
    loss = criterion(logits, torch.from_numpy(batch["label"]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {TELL}
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": ""}
"""That of all commands: the compiled modules are kept, as they are where emrun is installed."""


def timed(command: list[str], directory: Path, status: int = 0) -> tuple[float, float]:
    """Return the seconds of a command to its first update, if there is one, and to its end, with the given status."""
    began = clock_gettime(CLOCK_MONOTONIC)
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True, env=ENVIRONMENT)
    ended = clock_gettime(CLOCK_MONOTONIC)
    assert done.returncode == status, done.stderr
    told = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("first update at ")]
    return (told or [ended])[0] - began, ended - began


def seconds(command: list[str], directory: Path, status: int = 0) -> float:
    """Return the seconds that a command takes; it must end with the given status."""
    return timed(command, directory, status)[1]


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
        (directory / "bare_program.py").write_text(PROGRAM)
        script = directory / "bare"
        script.write_text(SCRIPT)
        script.chmod(0o755)
        bare = [str(script), "--help"]
        show("emrun --help", pairs(HELP, bare, directory, count), "a bare program", HELP_BUDGET, ratio=True)
        show_updates(directory, count)
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


def show_updates(directory: Path, count: int) -> None:
    """Print the time to the first update and to the end of the process, beside those of a script of PyTorch."""
    (directory / "config.yaml").write_text(CONFIG)
    (directory / "first_update.py").write_text(OURS)
    (directory / "plain.py").write_text(PLAIN)
    ours = [EMRUN, "train", "-q", "config.yaml"]
    base = [sys.executable, "plain.py"]
    timed(ours, directory), timed(base, directory)
    rounds = [(timed(ours, directory), timed(base, directory)) for _ in range(count)]
    to_update, whole = ([(a[part], b[part]) for a, b in rounds] for part in (0, 1))
    show("emrun train, to the first update", to_update, "plain PyTorch", UPDATE_BUDGET, ratio=True)
    show("emrun train, to its end", whole, "plain PyTorch", UPDATE_BUDGET, ratio=True)


def overrides(path: Path) -> list[str]:
    """Return the overrides that the comments of a wrong config name."""
    marked = [line.removeprefix("# overrides: ") for line in comments(path) if line.startswith("# overrides: ")]
    return [word for line in marked for word in shlex.split(line)]


def comments(path: Path) -> list[str]:
    """Return the lines of a config; some configs are deliberately not UTF-8."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


if __name__ == "__main__":
    main()
