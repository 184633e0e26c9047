"""What the tests of hooks share: the YAML of docstrings, small runs, and a model with scripted outputs."""

import inspect
import json
import random
import signal

import pytest
from ruamel.yaml import YAML
from training.resuming import SEND

from emrun import AbstractHook, AbstractModel, create_training
from emrun.storage.run import create_run

TEN = [  # an epoch has 45 updates; checkpoints are saved every 20
    (signal.SIGTERM, "train", 5),
    (signal.SIGKILL, "train", 23),
    (signal.SIGINT, "train", 31),
    (signal.SIGKILL, "valid", 45),
    (signal.SIGTERM, "valid", 45),
    (signal.SIGKILL, "after_epoch", 45),
    (signal.SIGINT, "after_epoch", 45),
    (signal.SIGKILL, "train", 77),
    (signal.SIGTERM, "train", 90),
    (signal.SIGKILL, "valid", 135),
]
"""Ten moments at which a run is interrupted or killed."""
OFTEN = """
seed: 3
dataset: {{class: Digits, flat: true}}
model:
  module: {{class: torch.nn.Linear, in_features: 64, out_features: 10}}
  inputs: [image]
  outputs: [logits]
  loss: {{class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}}
  optimizer: {{class: SGD, lr: 0.5}}
main_loop: {{extra_streams: [valid], report: false}}
hooks:
  - ComputeStats: {{variables: [{{loss: [mean, std]}}]}}
  - SaveEvery: {{every: 20 updates, keep: 1}}
{trackers}
  - send.Send
  - StopAfter: {{epochs: {epochs}}}
"""


@pytest.fixture
def in_docstring():
    """Return the entries of the YAML in a hook's docstring."""

    def read(hook):
        text = next(part for part in inspect.getdoc(hook).split("\n\n") if part.startswith("    "))
        return YAML(typ="safe").load(text)["hooks"]

    return read


@pytest.fixture
def digits_config():
    """Return a config that trains a linear model on Digits with these hooks; an epoch has 15 batches, or fewer."""

    def config(hooks, batch_size=100, **main_loop):
        model = {
            "module": {"class": "torch.nn.Linear", "in_features": 64, "out_features": 10},
            "inputs": ["image"],
            "outputs": ["logits"],
            "loss": {"class": "torch.nn.CrossEntropyLoss", "reduction": "none", "inputs": ["logits", "label"]},
            "metrics": {"accuracy": {"import": "emrun.metrics.accuracy", "inputs": ["logits", "label"]}},
            "optimizer": {"class": "SGD", "lr": 0.5},
        }
        dataset = {"class": "Digits", "flat": True, "batch_size": batch_size}
        loop = {"extra_streams": ["valid"], "report": False, **main_loop}  # no page, which takes a fifth of the time
        return {"seed": 0, "dataset": dataset, "model": model, "main_loop": loop, "hooks": hooks}

    return config


@pytest.fixture
def train_digits(tmp_path, digits_config):
    """Train on Digits with these hooks, for an epoch or until they end it; return the training."""

    def train(hooks, batch_size=100, **main_loop):
        names = [name for entry in hooks for name in (entry if isinstance(entry, dict) else [entry])]
        ends = [] if "StopAfter" in names else [{"StopAfter": {"epochs": 1}}]
        config = digits_config([*hooks, *ends], batch_size, **main_loop)
        training = create_training(config, output_root=tmp_path / "log")
        assert training.main_loop.run_training().status == "finished"
        return training

    return train


class Scripted(AbstractModel):
    """Returns what a function makes of a batch; saving fails the given number of times."""

    input_names = ("x",)
    output_names = ("loss",)

    def __init__(self, function=lambda batch: {"loss": 0.0}, failures=0):
        self.function = function
        self.failures = failures

    def run(self, batch, train, stream):
        return self.function(batch)

    def save(self, directory):
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        (directory / "weights").write_text("none")

    def load(self, directory):
        pass


class Numbers:
    """Three batches of training, one of validation."""

    def train_stream(self):
        return iter([{"x": [1.0, 2.0]}, {"x": [3.0, 4.0]}, {"x": [5.0]}])

    def valid_stream(self):
        return iter([{"x": [10.0, 20.0]}])


class Write(AbstractHook):
    """Writes a statistic of each epoch: `values[epoch_id]`."""

    def __init__(self, values, stream="valid", variable="score", aggregation="mean"):
        super().__init__()
        self.values = values
        self.place = (stream, variable, aggregation)
        self.writes = (f"{variable}/{aggregation}" if aggregation else variable,)

    def after_epoch(self, epoch_id, epoch_data):
        stream, variable, aggregation = self.place
        if stream in epoch_data:
            value = self.values[epoch_id]
            epoch_data[stream][variable] = {aggregation: value} if aggregation else value


@pytest.fixture
def scripted():
    """Return a model that returns what a function makes of a batch."""
    return Scripted


@pytest.fixture
def numbers():
    """Return a dataset of a few numbers."""
    return Numbers()


@pytest.fixture
def write():
    """Return a hook that writes `values[epoch_id]` as a statistic."""
    return Write


@pytest.fixture
def run(tmp_path):
    """Return a run, which ends with the test."""
    run = create_run("", "run", output_root=tmp_path, output_dir=None, seed=0)
    yield run
    run.release()


@pytest.fixture(params=["two", pytest.param("ten", marks=[pytest.mark.campaign, pytest.mark.timeout(300)])])
def signals(request):
    """Return what interrupts and kills a run: at two moments, in `make campaign` at ten; of slow services at one."""
    return {"one": TEN[1:2], "two": TEN[1:5:3], "ten": TEN}[request.param]


@pytest.fixture
def epochs(signals):
    """Return in how many epochs the signals come."""
    return epochs_with(signals)


def epochs_with(signals):
    return min(3, 1 + signals[-1][2] // 45)


@pytest.fixture
def due(epochs):
    """Return the iterations after which a tracker gets a row, every 10 updates and after each epoch."""
    end = 45 * epochs
    return sorted({0, *range(10, end + 1, 10), *range(45, end + 1, 45)})


ALARM = """
import signal
import time
from pathlib import Path

from emrun import AbstractHook


class Alarm(AbstractHook):
    def before_training(self):
        self.began = time.perf_counter()
        if (file := Path("alarm.txt")).exists():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, float(file.read_text()))
            file.unlink()

    def after_training(self):
        Path("took.txt").write_text(str(time.perf_counter() - self.began))
"""
"""A hook that ends the process like a kill, after the seconds in alarm.txt, and says how long the training took."""


@pytest.fixture
def killed_at_random(often_project, emrun):
    """Run a config in `straight`, and again until 20 runs were killed at a random moment, each of which is resumed."""

    def run(trackers):
        place = often_project(trackers, {"alarm.py": ALARM})
        config = (place / "config.yaml").read_text()
        (place / "config.yaml").write_text(config.replace("  - send.Send", "  - alarm.Alarm"))
        command = ("train", "-q", "config.yaml", "--output-dir")
        assert emrun(*command, "straight", cwd=place).returncode == 0
        seconds, draw, killed, names = float((place / "took.txt").read_text()), random.Random(6), 0, []
        while killed < 20:
            assert len(names) < 100
            names.append(str(len(names)))
            (place / "alarm.txt").write_text(str(draw.uniform(0, seconds)))
            done = emrun(*command, names[-1], cwd=place)
            assert done.returncode in (0, -signal.SIGALRM), done.stderr
            killed += done.returncode != 0
            if done.returncode == 0:
                seconds = float((place / "took.txt").read_text())  # the machine may be faster now
            done = emrun("resume", "-q", names[-1], cwd=place)
            assert done.returncode == 0, done.stderr
        return place, names

    return run


@pytest.fixture
def often_project(tmp_path):
    """Write a config with these trackers, and the hook that sends signals; return the directory."""

    def write(trackers, files=None, epochs=3):
        config = OFTEN.format(trackers=trackers, epochs=epochs)
        for name, text in {"send.py": SEND, "config.yaml": config, **(files or {})}.items():
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


@pytest.fixture
def run_often(often_project, emrun):
    """Run a config without an interrupt, in `straight`, and with these signals, in `often`.

    With `calm`, which is `emrun` or `emrun_here`, where no signal comes.
    """

    def run(trackers, signals, files=None, calm=emrun):
        place = often_project(trackers, files, epochs_with(signals))
        done = calm("train", "-q", "config.yaml", "--output-dir", "straight", cwd=place)
        said = [line for line in done.stderr.splitlines() if " INFO mlflow.store.db." not in line]  # of a new database
        assert (done.returncode, said) == (0, [])
        (place / "signals.json").write_text(json.dumps(signals))
        command = ["train", "-q", "config.yaml", "--output-dir", "often"]
        for number, *_ in signals:
            done = emrun(*command, cwd=place)
            assert done.returncode == -number, done.stderr
            command = ["resume", "-q", "often"]
        assert calm(*command, cwd=place).returncode == 0
        return place

    return run
