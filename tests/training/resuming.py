"""What the tests of resumed runs share: streams of all kinds, a config, runs that are interrupted."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import torch

from emrun import AbstractHook, create_training, resume_training
from emrun.training.create import train

DATA = '''
import numpy as np


class Data:
    """Streams of all kinds, with five batches per pass."""

    def __init__(self, kind, buffer_draws=True):
        self.x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
        self.train_stream = getattr(self, kind)

    def _batch(self, rows, noise=0.0):
        x = self.x[rows] + np.float32(noise)
        return {"x": x, "y": (x.sum(axis=1) > 0).astype(np.int64)}

    def context(self, ctx):
        for rows in ctx.batches(20, 4, shuffle=True):
            yield self._batch(rows, ctx.rng.normal())

    def plain(self):
        for first in range(0, 20, 4):
            yield self._batch(np.arange(first, first + 4))

    def own_random(self, ctx):
        for _ in range(5):
            yield self._batch(ctx.rng.integers(0, 20, size=4))

    def global_random(self):
        order = np.random.permutation(20)
        for first in range(0, 20, 4):
            yield self._batch(order[first : first + 4])

    def stateful(self):
        return Stateful(self)

    def valid_stream(self):
        np.random.rand()
        for first in range(0, 12, 4):
            yield self._batch(np.arange(first, first + 4))


class Stateful:
    """An iterable with a state of its own, and random numbers that nothing else could restore."""

    def __init__(self, data):
        self.data, self.index, self.rng = data, 0, np.random.default_rng(int(np.random.randint(1000)))

    def __iter__(self):
        while self.index < 5:
            rows = self.rng.integers(0, 20, size=4)
            self.index += 1
            yield self.data._batch(rows)

    def state_dict(self):
        return {"index": self.index, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.index = state["index"]
        self.rng.bit_generator.state = state["rng"]
'''

MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 2)
        )
        self.gain = 1.0

    def forward(self, x, y):
        logits = self.layers(x) * self.gain
        losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        return {"loss": losses, "scalar": losses.mean(), "accuracy": (logits.argmax(dim=1) == y).float()}
"""

SEND = '''
import json
import os
from pathlib import Path

from emrun import AbstractHook


class Send(AbstractHook):
    """Sends this process the first signal in signals.json, [number, event, iteration], when its turn has come."""

    def __init__(self):
        super().__init__()
        file = Path("signals.json")
        self.file, self.signals = file, json.loads(file.read_text()) if file.exists() else []

    def after_batch(self, stream_name):
        self.happened(stream_name)

    def after_epoch(self):
        self.happened("after_epoch")

    def happened(self, event):
        if self.signals and self.signals[0][1:] == [event, self.main_loop.iterations_done]:
            number, *_ = self.signals.pop(0)
            self.file.write_text(json.dumps(self.signals))
            os.kill(os.getpid(), number)
'''

HOOKS = [
    {"ComputeStats": {"variables": [{"loss": ["mean", "std", "median", "count"]}, "scalar", "accuracy"]}},
    {"StopOnNaN": {"after_batch": True}},
    {"LogVariables": {"variables": ["loss"]}},
    "ShowProgress",
    {"SaveBest": {"variable": "accuracy", "condition": "max"}},
    "SaveLatest",
    {"SaveEvery": {"every": "4 iterations", "keep": 2}},
    "WriteCSV",
    {"EarlyStopping": {"patience": 3}},
    {"OnPlateau": {"long_term": 2, "short_term": 1}},
    {"StopOnPlateau": {"long_term": 50, "short_term": 10}},
    {"StopAfter": {"epochs": 2, "minutes": 60}},
]

FEW_HOOKS = [
    {"ComputeStats": {"variables": ["loss", "accuracy"]}},
    {"SaveBest": {"variable": "accuracy", "condition": "max"}},
    {"StopAfter": {"epochs": 2, "minutes": 60}},
]
"""For tests of something else than hooks: a run with them takes two thirds of the time of one with `HOOKS`."""

AROUND_UPDATES = {
    "AverageWeights": {"half_life": "3 updates"},
    "ClipGradients": {"norm": 0.1},
    "Diagnose": {"every": "2 updates"},
    "Freeze": {"match": r"layers\.0", "until": "3 updates"},
    "LogNorms": {},
    "AverageWeights of kind swa": {"kind": "swa"},
    "SetOverTime": {"target": "module.gain", "end": 0.1, "schedule": {"class": "Linear"}},
}
"""Name, or name and what is special -> the arguments of a hook that acts on gradients or weights."""


class Interrupt(AbstractHook):
    """Sends a signal at the n-th event, or at the first of a name, and lists the events."""

    def __init__(self, at=None):
        super().__init__()
        self.at = at
        self.sent = False
        self.events = []

    def happened(self, what):
        self.events.append(what)
        if self.at in (len(self.events), what) and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGINT)

    def before_epoch(self, epoch_id):
        self.happened(f"before_epoch {epoch_id}")

    def before_stream(self, stream_name):
        self.happened(f"before_stream {stream_name}")

    def before_batch(self, stream_name):
        self.happened(f"before_batch {stream_name}")

    def after_update(self):
        self.happened("after_update")

    def after_batch(self, stream_name):
        self.happened(f"after_batch {stream_name}")

    def after_stream(self, stream_name):
        self.happened(f"after_stream {stream_name}")

    def after_epoch(self, epoch_id):
        self.happened(f"after_epoch {epoch_id}")

    def after_epoch_profile(self, epoch_id):
        self.happened(f"after_epoch_profile {epoch_id}")


def config_of(kind="context", hooks=HOOKS, **main_loop):
    """Return a config of runs without a page, which is a part of the cost of a short run and not compared."""
    return {
        "seed": 3,
        "dataset": {"class": "resume_data.Data", "kind": kind},
        "model": {
            "module": {"class": "resume_model.Net"},
            "optimizer": {"class": "Adam", "lr": 0.05},
            "scheduler": {"class": "StepLR", "step_size": 1, "gamma": 0.5},
        },
        "main_loop": {"extra_streams": ["valid"], "report": False, **main_loop},
        "hooks": hooks,
    }


def train_with(training, *hooks):
    """Train with additional hooks."""
    loop = training.main_loop
    loop.change_hooks([*loop.hooks, *hooks])
    train(training)


_KEPT = {}


def once(make, directory, *what):
    """Call `make`, which trains in a directory, or leave there what it has left for an equal call in this process.

    Args:
        make: what it returns is returned for each of these calls.
        directory: of the run, in that of the project.
        what: all that the run depends on, but for the modules of the project.
    """
    project = directory.parent
    modules = {path.name: path.read_text() for path in project.glob("*.py")}
    key = json.dumps([what, modules, str(Path.cwd()).replace(str(project), "project")])
    if key in _KEPT:
        found, before, files = _KEPT[key]
        names = [(str(before).encode(), str(directory).encode())]
        names += [(str(before.parent).encode(), str(project).encode())]
        for path, content in files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                target.symlink_to(content)
                continue
            for one, other in names:  # no checkpoint has them, whose manifest knows the bytes
                content = content.replace(one, other)
            target.write_bytes(content)
        return found
    found = make()
    files = {}
    for path in directory.rglob("*"):
        if path.is_symlink() or path.is_file():
            files[path.relative_to(directory)] = path.readlink() if path.is_symlink() else path.read_bytes()
    _KEPT[key] = found, directory, files
    return found


def interrupted(config, directory, at):
    """Train until the n-th event; return the events."""

    def run():
        training = create_training(config, output_dir=directory)
        hook = Interrupt(at)
        train_with(training, hook)
        return hook.events

    return once(run, directory, config, at)


def resumed(directory):
    training = resume_training(directory)
    if training is not None:
        train(training)


def stopped(project, config=None, epochs=1):
    """Return the directory of a run that has made some epochs."""
    return ended(project, config or config_of(), f"hooks.StopAfter.epochs={epochs}")


def ended(project, config, *overrides):
    """Return the directory of a run, whose overrides end it early."""
    return trained(config, project / "run", *overrides)


def straight(project, config, *overrides):
    """Return the result of a run that nothing ends early."""
    return result(trained(config, project / "straight", *overrides))


def trained(config, directory, *overrides):
    """Return the directory, in that of the project, of a run that has ended."""

    def run():
        train(create_training(config, output_dir=directory, overrides=overrides))

    once(run, directory, config, overrides)
    return directory


def copy_of_run(loop, directory, target):
    """Copy the run directory of a running loop, when none of its threads writes there."""
    loop.wait_for_checkpoints()
    for thread in threading.enumerate():
        if thread.name == "emrun-code":
            thread.join()
    shutil.copytree(directory, target, symlinks=True)


def result(directory, has_best=True):
    """Return all that must be the same: weights, optimizer, metrics without times, CSV, step record."""
    latest = directory / "checkpoints" / "latest"
    state = torch.load(latest / "state.pt", weights_only=True)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    skipped = ("StopAfter", "Interrupt")  # the time of the former differs
    hooks = {key: each for key, each in state["hooks"].items() if not any(name in key for name in skipped)}
    csv = directory / "training.csv"
    return {
        "weights": (latest / "model.safetensors").read_bytes(),
        "trained": trained.read_bytes() if (trained := latest / "training.safetensors").exists() else None,
        "best": (directory / "checkpoints" / "best" / "model.safetensors").read_bytes() if has_best else None,
        "metrics": [{**line, "seconds": None} for line in lines],
        "csv": csv.read_text() if csv.exists() else None,
        "steps": (directory / "steps.jsonl").read_bytes(),
        "steps not written yet": state["steps"]["pending"],
        "model": plain(state["model"]),
        "loop": state["loop"],
        "names": sorted(path.name for path in (directory / "checkpoints").iterdir() if path.is_symlink()),
        "hooks": plain(hooks),
        "random": plain(state["random"]),
        "streams": plain({name: {**stream, "began": None} for name, stream in state["streams"].items()}),
    }


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value
