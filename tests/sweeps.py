"""A project whose runs take no time, for sweeps: a model without PyTorch, and a hook that kills."""

import json

from ruamel.yaml import YAML

CODE = '''
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from emrun import AbstractHook, AbstractModel


class Data:
    """Five random numbers per pass; the fold is added to them."""

    def __init__(self, fold=0, delay=0.0):
        self.fold = fold
        self.delay = delay

    def train_stream(self, ctx):
        for _ in range(5):
            time.sleep(self.delay)
            yield {"x": [self.fold + float(ctx.rng.random())]}

    def valid_stream(self):
        yield {"x": [0.5]}


class Model(AbstractModel):
    """Goes towards 0.3; worse for a larger width."""

    input_names = ("x",)
    output_names = ("loss",)

    def __init__(self, lr=0.1, width=1, fails=False):
        self.w, self.lr, self.width, self.fails = 1.0, lr, width, fails
        self.loss = None  # until the first batch; an epoch that is resumed at the end of its stream may have none

    def run(self, batch, train, stream):
        if train and self.fails:
            raise RuntimeError("this width does not work")
        if train:
            self.w -= self.lr * batch["x"][0] * (self.w - 0.3)
        self.loss = (self.w - 0.3) ** 2 + 0.01 * self.width
        return {"loss": self.loss}

    def step_values(self):
        return {} if self.loss is None else {"loss": self.loss}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = state["w"]

    def save(self, directory):
        (directory / "weights").write_text(repr(self.w))

    def load(self, directory):
        self.w = float((directory / "weights").read_text())


class Do(AbstractHook):
    """Does once what a file says: kills the `parent`, the `trial` or `both`, sends it `SIGINT`, or `hangs`."""

    def after_batch(self, batch_data):
        if self.main_loop.training and self.main_loop.iterations_done == 7:
            with suppress(FileNotFoundError):
                claimed = Path(f"do-{os.getpid()}")
                Path("do").rename(claimed)
                self.do(claimed.read_text())

    def do(self, what):
        parent, handler = os.getppid(), signal.getsignal(signal.SIGTERM)
        if what == "hangs":
            signal.alarm(60)  # in case that nothing kills it
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: os.kill(parent, signal.SIGINT))  # a second signal, after the first
        if what in ("SIGINT", "hangs"):
            os.kill(parent, signal.SIGINT)
        if what in ("parent", "both"):
            os.kill(parent, signal.SIGKILL)
        if what in ("trial", "both"):
            os.kill(os.getpid(), signal.SIGKILL)
        while what == "hangs" or signal.getsignal(signal.SIGTERM) is handler:  # until the signal of the sweep arrives
            time.sleep(0.001)
'''
CONFIG = """
seed: 3
name: tiny
vars: {fold: 0}
dataset: {class: my_code.Data, fold: "${vars.fold}"}
model: {class: my_code.Model, lr: 0.1}
main_loop: {extra_streams: [valid], record_steps: 1, report: false}
hooks:
  - ComputeStats: {variables: [loss]}
  - my_code.Do
  - StopAfter: {epochs: 3}
sweep:
  parameters:
    model.lr: [0.1, 0.3]
  objective: valid/loss/mean
"""


def write_project(directory):
    """Write the project and its `config.yaml` to a directory; return the directory."""
    (directory / "my_code.py").write_text(CODE)
    (directory / "config.yaml").write_text(CONFIG)
    return directory


def trials(project):
    return sorted((project / "log" / "tiny_sweep").glob("trial-*"))


def trace(run):
    return YAML(typ="safe").load((run / "trace.yaml").read_text())


def statuses(project):
    return [trace(run)["status"] for run in trials(project)]


def content(run):
    """Return what must be equal of two runs of a config: the metrics without times, the steps, the last weights."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    latest = run / "checkpoints" / "latest"
    weights = next(path for path in (latest / "weights", latest / "model.safetensors") if path.exists())
    metrics = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
    return metrics, (run / "steps.jsonl").read_bytes(), weights.read_bytes()
