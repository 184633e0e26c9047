"""A training that is interrupted and resumed ends in the same bits as one that was never stopped.

Tests here fail without any of these, as was checked once by removing each by hand: restoring the random states;
restoring them after the replay of the stream instead of before it; the copy of the state that is used during
evaluations; the states of ComputeStats, StopAfter, SaveBest and WriteCSV; `trained` of TorchModel; the rewinding of
metrics.jsonl.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from emrun import AbstractHook, TrainingTerminated, create_training, resume_training
from emrun.encoding import encode
from emrun.errors import ArgumentError, StateError, StorageError, UsageError
from emrun.storage.checkpoints import commit
from emrun.storage.sealed import describe, json_digest
from emrun.training.create import train

SAMPLES = Path(__file__).parents[2] / "sample_configs"

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

    def forward(self, x, y):
        logits = self.layers(x)
        losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        return {"loss": losses, "scalar": losses.mean(), "accuracy": (logits.argmax(dim=1) == y).float()}
"""

HOOKS = [
    {"ComputeStats": {"variables": [{"loss": ["mean", "std", "median", "count"]}, "scalar", "accuracy"]}},
    {"StopOnNaN": {"after_batch": True}},
    {"LogVariables": {"variables": ["loss"]}},
    "ShowProgress",
    {"SaveBest": {"variable": "accuracy", "condition": "max"}},
    "SaveLatest",
    {"SaveEvery": {"n_epochs": "4 iterations", "keep": 2}},
    "WriteCSV",
    {"StopAfter": {"epochs": 2, "minutes": 60}},
]
KINDS = [  # global random numbers that are drawn in a reader thread cannot be exact
    *((kind, buffer) for kind in ("context", "plain", "own_random") for buffer in (0, 2)),
    ("global_random", 0),
    ("stateful", 0),
]


class Interrupt(AbstractHook):
    """Sends a signal at the n-th event, and lists the events."""

    def __init__(self, at=None):
        super().__init__()
        self.at = at
        self.events = []

    def happened(self, what):
        self.events.append(what)
        if len(self.events) == self.at:
            os.kill(os.getpid(), signal.SIGINT)

    def before_epoch(self, epoch_id):
        self.happened(f"before_epoch {epoch_id}")

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


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "resume_data.py").write_text(DATA)
    (tmp_path / "resume_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def config_of(kind="context", **main_loop):
    return {
        "seed": 3,
        "dataset": {"class": "resume_data.Data", "kind": kind},
        "model": {
            "module": {"class": "resume_model.Net"},
            "optimizer": {"class": "Adam", "lr": 0.05},
            "scheduler": {"class": "StepLR", "step_size": 1, "gamma": 0.5},
        },
        "main_loop": {"extra_streams": ["valid"], **main_loop},
        "hooks": HOOKS,
    }


def train_with(training, *hooks):
    """Train with additional hooks."""
    loop = training.main_loop
    loop.change_hooks([*loop.hooks, *hooks])
    train(training)


def interrupted(config, directory, at):
    """Train until the n-th event; return the events."""
    training = create_training(config, output_dir=directory)
    hook = Interrupt(at)
    train_with(training, hook)
    return hook.events


def resumed(directory):
    training = resume_training(directory)
    if training is not None:
        train(training)


def result(directory, has_best=True):
    """Return all that must be the same: weights, optimizer, metrics without times, CSV."""
    latest = directory / "checkpoints" / "latest"
    state = torch.load(latest / "state.pt", weights_only=True)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    hooks = [each for each in state["hooks"] if each["class"].rpartition(".")[2] != "StopAfter"]  # its time differs
    csv = directory / "training.csv"
    return {
        "weights": (latest / "model.safetensors").read_bytes(),
        "best": (directory / "checkpoints" / "best" / "model.safetensors").read_bytes() if has_best else None,
        "metrics": [{**line, "seconds": None} for line in lines],
        "csv": csv.read_text() if csv.exists() else None,
        "model": plain(state["model"]),
        "loop": state["loop"],
        "names": sorted(path.name for path in (directory / "checkpoints").iterdir() if path.is_symlink()),
        "hooks": plain([each for each in hooks if "Interrupt" not in each["class"]]),
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


def readers():
    return {thread for thread in threading.enumerate() if thread.name.startswith("emrun-read")}


SWEPT = {  # in every test run; the others in campaigns
    None: [("context", 0), ("plain", 2), ("own_random", 0), ("global_random", 0), ("stateful", 0)],
    3: [("context", 0), ("stateful", 0)],
}
SWEEPS = [
    pytest.param(*kind, size, marks=() if kind in SWEPT[size] else pytest.mark.campaign)
    for size in SWEPT
    for kind in KINDS
]


@pytest.mark.parametrize(("kind", "buffer", "fixed_epoch_size"), SWEEPS)
@pytest.mark.timeout(600)
def test_an_interrupt_at_any_event_changes_nothing(project, kind, buffer, fixed_epoch_size, recwarn):
    before = readers()
    config = config_of(kind, buffer=buffer, fixed_epoch_size=fixed_epoch_size)
    events = interrupted(config, project / "straight", None)
    expected = result(project / "straight")
    assert expected["loop"]["phase"] == "between"
    for at in range(1, len(events) + 1):
        directory = project / f"at-{at}"
        interrupted(config, directory, at)
        resumed(directory)
        found = result(directory)
        assert {key: found[key] == expected[key] for key in expected} == dict.fromkeys(expected, True), events[at - 1]
        assert readers() <= before
        shutil.rmtree(directory)


def test_a_training_interrupted_at_every_event_in_turn_ends_the_same(project):
    config = config_of()
    interrupted(config, project / "straight", None)
    directory = project / "often"
    interrupted(config, directory, 30)
    for _ in range(200):
        training = resume_training(directory)
        if training is None:
            break
        hook = Interrupt(8)  # an evaluation, which begins anew each time, has seven events after before_epoch
        train_with(training, hook)
    else:
        raise AssertionError("the training makes no progress")
    assert result(directory) == result(project / "straight")


def test_a_hook_that_is_not_interrupted_here_is_found():
    names = {next(iter(entry)) if isinstance(entry, dict) else entry for entry in HOOKS}
    files = {path.stem.replace("_", "") for path in (SAMPLES.parent / "hooks").glob("[!_]*.py")}
    assert {name.lower() for name in names} == files


@pytest.mark.parametrize("sample", sorted(p.relative_to(SAMPLES) for p in SAMPLES.rglob("*.yaml")), ids=str)
def test_every_sample_can_be_interrupted_in_an_epoch_and_in_an_evaluation(project, sample, monkeypatch):
    monkeypatch.chdir(shutil.copytree(SAMPLES / sample.parent, project / "sample"))
    monkeypatch.syspath_prepend(project / "sample")
    if Path("prepare.py").exists():
        subprocess.run([sys.executable, "prepare.py"], timeout=60, check=True)
    for module in (project / "sample").glob("*.py"):
        monkeypatch.setitem(sys.modules, module.stem, None)  # undone at the end, whatever is imported meanwhile
        del sys.modules[module.stem]
    overrides = ["hooks.StopAfter.epochs=2", "seed=1"]

    def run(directory, at):
        training = create_training(sample.name, output_dir=directory, overrides=overrides)
        hook = Interrupt(at)
        train_with(training, hook)
        return hook.events

    def same(directory):
        names = [path.name for path in (project / "straight" / "checkpoints").iterdir() if path.is_symlink()]
        pairs = [(project / "straight" / "checkpoints" / n, directory / "checkpoints" / n) for n in names]
        lines = [
            [json.loads(line)["streams"] for line in (d / "metrics.jsonl").read_text().splitlines()]
            for d in (project / "straight", directory)
        ]
        return lines[0] == lines[1] and all(
            (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes() for a, b in pairs
        )

    events = run(project / "straight", None)
    first = events.index("before_epoch 1")
    points = [first + 10, first + events[first:].index("after_stream train") + 3]
    for at in points:
        run(project / f"at-{at}", at)
        resumed(project / f"at-{at}")
        assert same(project / f"at-{at}"), events[at - 1]


def test_a_stream_that_cannot_be_repeated_logs_a_warning(project, caplog):
    (project / "wild_data.py").write_text(
        DATA + "\nimport random\n_rng = random.SystemRandom()\n\n\nclass Wild(Data):\n"
        "    def plain(self):\n        for _ in range(5):\n            yield self._batch([_rng.randrange(20)] * 4)\n"
    )
    config = {**config_of("plain"), "dataset": {"class": "wild_data.Wild", "kind": "plain"}}
    events = interrupted(config, project / "run", None)
    shutil.rmtree(project / "run")
    interrupted(config, project / "run", events.index("before_epoch 1") + 8)
    resumed(project / "run")
    assert "this resume is not exact: stream 'train'" in caplog.text


# what a resume may change


def stopped(project, config=None, epochs=1):
    directory = project / "run"
    training = create_training(
        config or config_of(), output_dir=directory, overrides=[f"hooks.StopAfter.epochs={epochs}"]
    )
    train(training)
    return directory


def test_a_finished_run_has_nothing_to_do(project, caplog):
    directory = stopped(project)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    caplog.set_level("INFO")
    assert resume_training(directory) is None
    assert "nothing to do" in caplog.text
    assert {path: path.read_bytes() for path in before} == before


def test_a_later_end_continues_and_ends_like_a_longer_training(project):
    directory = stopped(project)
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    train(create_training(config_of(), output_dir=project / "straight"))
    assert result(directory) == result(project / "straight")
    assert "epochs: 2" in (directory / "config.yaml").read_text()
    assert "epochs: 1" in (directory / "config-1.yaml").read_text()
    assert "hooks.8.StopAfter.epochs" in (directory / "trace.yaml").read_text()


def test_a_new_learning_rate_scales_the_current_one(project):
    directory = stopped(project)
    training = resume_training(directory, ["hooks.StopAfter.epochs=2", "model.optimizer.lr=0.5"])
    assert training.model.optimizer.param_groups[0]["lr"] == pytest.approx(0.25)  # halved once by the scheduler
    assert training.model.scheduler.scheduler.base_lrs == [0.5]


def test_other_arguments_that_changed_win_over_the_saved_ones(project):
    directory = stopped(project)
    training = resume_training(
        directory, ["hooks.StopAfter.epochs=2", "model.optimizer.weight_decay=0.1", "model.scheduler.gamma=0.9"]
    )
    assert training.model.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert training.model.scheduler.scheduler.gamma == 0.9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.optimizer={class: SGD, lr: 0.1}", "model.optimizer is SGD, but was Adam"),
        ("model.scheduler={class: ExponentialLR, gamma: 0.5}", "model.scheduler is ExponentialLR, but was StepLR"),
        ("~model.scheduler", "model.scheduler was added or removed"),
        ("model.module.width=9", "in the checkpoint, "),
        ("model.optimizer.momentun=1", "unknown argument"),
    ],
)
def test_what_cannot_be_changed_is_refused_and_loses_nothing(project, override, message):
    directory = stopped(project)
    before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file() and p.suffix not in (".log", ".json")}
    with pytest.raises(ValueError, match=message) as caught:
        resume_training(directory, ["hooks.StopAfter.epochs=2", override])
    assert caught.value.exit_status == 2
    assert {path: path.read_bytes() for path in before} == before
    assert not (directory / "config-1.yaml").exists()


def test_an_older_checkpoint_becomes_the_latest_and_the_metrics_go_back_to_it(project):
    directory = stopped(project, epochs=2)
    expected = result(directory)
    shutil.copytree(directory, project / "copy", symlinks=True)
    name = (directory / "checkpoints" / "best").readlink().name
    train(resume_training(directory, checkpoint_name="best"))
    assert result(directory) == expected
    assert name


def test_a_fork_leaves_the_run_alone_and_records_where_it_came_from(project):
    directory = stopped(project)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"], fork=project / "fork"))
    assert {path: path.read_bytes() for path in before} == before
    train(create_training(config_of(), output_dir=project / "straight"))
    assert result(project / "fork") == result(project / "straight")
    assert "forked_from" in (project / "fork" / "trace.yaml").read_text()


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(project):
    train(create_training(config_of(), output_dir=project / "straight"))
    training = create_training(config_of(), output_dir=project / "run")
    training.main_loop.run.release()  # as the kernel does when the process is killed
    resumed(project / "run")
    assert result(project / "run") == result(project / "straight")
    assert "status: killed" in (project / "run" / "trace.yaml").read_text()


# damage


@pytest.mark.parametrize("content", [b"", b"status: [", b"\xff\xfe", b"- 1\n", b"train_begin: 1\nresumes: 3\n"])
def test_a_run_with_a_damaged_trace_can_be_resumed(project, content):
    directory = stopped(project)
    (directory / "trace.yaml").write_bytes(content)
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    assert "status: finished" in (directory / "trace.yaml").read_text()


def test_metrics_that_end_in_half_a_line_are_read_up_to_there(project):
    directory = stopped(project)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "iter')
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    assert [json.loads(line)["epoch"] for line in (directory / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


# states


def test_a_state_that_cannot_be_saved_is_found_before_the_first_batch(project):
    class Bad(AbstractHook):
        def state_dict(self):
            return {"a": {"b": np.zeros(3)}}

    training = create_training(config_of(), output_dir=project / "run")
    with pytest.raises(ValueError, match=r"Bad.a.b is ndarray, which cannot be saved") as caught:
        train_with(training, Bad())
    assert caught.value.exit_status == 2
    assert training.main_loop.iterations_done == 0
    assert not (project / "run" / "metrics.jsonl").exists()


# what a review found


class End(AbstractHook):
    """Ends the training at an event."""

    def __init__(self, event, epoch):
        super().__init__()
        self.ends_at = epoch
        setattr(self, event, self.end)

    def end(self, stream_name):
        if stream_name == "train" and self.main_loop.iterations_done == 5 * self.ends_at:
            raise TrainingTerminated("enough")


def straight(project, config):
    train(create_training(config, output_dir=project / "straight"))
    return result(project / "straight")


def test_an_end_behind_the_last_batch_of_an_epoch_does_not_add_a_pass(project):
    """Leaving the phase `TRAIN` only after the event makes this fail."""
    expected = straight(project, config_of())
    train_with(create_training(config_of(), output_dir=project / "run"), End("after_stream", 1))
    train(resume_training(project / "run", checkpoint_name="latest"))
    assert result(project / "run") == expected


def test_a_signal_behind_the_last_batch_of_a_pass_does_not_add_a_pass(project):
    (project / "tail_data.py").write_text(
        DATA + "\nimport os\nimport signal\n\n\nclass Tail(Data):\n"
        "    def __init__(self, kind, at=0):\n        super().__init__(kind)\n        self.at, self.passes = at, 0\n\n"
        "    def plain(self):\n        self.passes += 1\n        yield from super().plain()\n"
        "        if self.passes == self.at:\n            os.kill(os.getpid(), signal.SIGINT)\n"
    )
    config = {**config_of("plain"), "dataset": {"class": "tail_data.Tail", "kind": "plain"}}
    expected = straight(project, config)
    train(create_training({**config, "dataset": {**config["dataset"], "at": 2}}, output_dir=project / "run"))
    text = (project / "run" / "config.yaml").read_text()
    assert "at: 2" in text
    training = resume_training(project / "run", ["dataset.at=0"])
    assert training.main_loop.iterations_done == 5
    train(training)
    assert result(project / "run") == expected


MEMORY = '''

class Memory(Data):
    """The same object for every pass; its random numbers continue from pass to pass."""

    def stateful(self):
        if not hasattr(self, "stream"):
            self.stream = Endless(self)
        return self.stream

    def plain(self):
        if not hasattr(self, "rng"):
            self.rng = np.random.default_rng(7)
        for _ in range(5):
            yield self._batch(self.rng.integers(0, 20, size=4))


class Endless(Stateful):
    def __iter__(self):
        self.index %= 5
        return super().__iter__()
'''


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_stream_with_a_state_continues_after_a_pass(project, epochs):
    (project / "memory_data.py").write_text(DATA + MEMORY)
    config = {**config_of("stateful"), "dataset": {"class": "memory_data.Memory", "kind": "stateful"}}
    train(create_training(config, output_dir=project / "straight", overrides=["hooks.StopAfter.epochs=3"]))
    directory = stopped(project, config, epochs)
    train(resume_training(directory, ["hooks.StopAfter.epochs=3"]))
    assert result(directory) == result(project / "straight")


def test_a_stream_with_a_hidden_state_logs_a_warning_after_a_pass(project, caplog):
    (project / "memory_data.py").write_text(DATA + MEMORY)
    config = {**config_of("plain"), "dataset": {"class": "memory_data.Memory", "kind": "plain"}}
    directory = stopped(project, config, epochs=2)
    train(resume_training(directory, ["hooks.StopAfter.epochs=3"]))
    assert "this resume is not exact: stream 'train'" in caplog.text


@pytest.mark.parametrize(("buffer", "told"), [(0, False), (2, True)])
def test_global_random_numbers_in_a_reader_thread_log_a_warning(project, caplog, buffer, told):
    (project / "global_data.py").write_text(
        DATA + "\n\nclass Global(Data):\n    def plain(self):\n        for _ in range(5):\n"
        "            yield self._batch(np.random.randint(0, 20, size=4))\n"
    )
    config = {**config_of("plain", buffer=buffer), "dataset": {"class": "global_data.Global", "kind": "plain"}}
    events = interrupted(config, project / "run", None)
    shutil.rmtree(project / "run")
    interrupted(config, project / "run", events.index("before_epoch 1") + 8)
    resumed(project / "run")
    assert ("this resume is not exact: stream 'train'" in caplog.text) == told


def test_a_fork_into_a_directory_that_is_not_empty_is_refused(project):
    directory = stopped(project)
    (project / "mine").mkdir()
    (project / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="exists and is not empty"):
        resume_training(directory, ["model.module.width=9"], fork=project / "mine")
    assert (project / "mine" / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ValueError, match="in the checkpoint, "):
        resume_training(directory, ["hooks.StopAfter.epochs=2", "model.module.width=9"], fork=project / "fork")
    assert not (project / "fork").exists()


def test_an_earlier_checkpoint_gives_a_name_back_to_where_it_was(project):
    config = config_of()
    config["hooks"] = [
        {"ComputeStats": {"variables": ["loss"]}}, {"SaveEvery": {"n_epochs": 1}}, "Scores",
        {"StopAfter": {"epochs": 4}},
    ]  # fmt: skip
    (project / "my_scores.py").write_text(
        "from emrun.hooks import SaveBest\n\n\nclass Scores(SaveBest):\n"
        "    def _read(self, epoch_data):\n"
        "        return [5.0, 6.0, 6.5, 4.0, 7.0][self.main_loop.training_epochs_done]\n"
    )
    config["hooks"][2] = "my_scores.Scores"
    train(create_training(config, output_dir=project / "run"))
    checkpoints = project / "run" / "checkpoints"
    assert checkpoints.joinpath("best").readlink() == checkpoints.joinpath("epoch-3").readlink()
    training = resume_training(project / "run", checkpoint_name="epoch-2")
    assert checkpoints.joinpath("best").readlink() == checkpoints.joinpath("epoch-0").readlink()
    assert sorted(path.name for path in checkpoints.iterdir() if path.is_symlink()) == [
        "best", "epoch-0", "epoch-1", "epoch-2", "latest",
    ]  # fmt: skip
    training.main_loop.run.release()


def test_what_is_written_to_a_csv_cannot_be_reordered(project):
    config = config_of()
    config["hooks"] = [
        *(hook for hook in HOOKS if hook != "WriteCSV"), {"WriteCSV": {"output_file": "a.csv"}},
        {"WriteCSV": {"output_file": "b.csv"}},
    ]  # fmt: skip
    directory = stopped(project, config)
    before = (directory / "b.csv").read_bytes()
    index = next(i for i, hook in enumerate(config["hooks"]) if "WriteCSV" in hook)
    with pytest.raises(ValueError, match=r"output_file is 'b.csv', but was 'a.csv'") as caught:
        resume_training(directory, [f"~hooks.{index}", "hooks.StopAfter.epochs=2"])
    assert caught.value.exit_status == 2
    assert (directory / "b.csv").read_bytes() == before


def test_another_statistic_starts_again_with_its_best(project, caplog):
    directory = stopped(project)
    train(resume_training(directory, ["hooks.StopAfter.epochs=2", "hooks.SaveBest={variable: loss, condition: min}"]))
    assert "now compares another statistic" in caplog.text
    best = json.loads((directory / "checkpoints" / "best" / "manifest.json").read_text())
    assert best["epoch"] == 2


def test_a_smaller_epoch_ends_at_once_when_it_is_full(project):
    config = config_of("context", fixed_epoch_size=4)
    events = interrupted(config, project / "run", None)
    shutil.rmtree(project / "run")
    first = events.index("before_epoch 1")
    third = [index for index, event in enumerate(events) if event == "after_batch train" and index > first][2]
    interrupted(config, project / "run", third + 1)
    training = resume_training(project / "run", ["main_loop.fixed_epoch_size=2"])
    assert training.main_loop.iterations_done == 3
    train(training)
    lines = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 3, 5]


def test_a_config_error_leaves_a_directory_that_was_there_as_it_was(project):
    (project / "mine").mkdir()
    (project / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="buffer"):
        create_training(config_of(buffer=-1), output_dir=project / "mine")
    assert sorted(path.name for path in (project / "mine").iterdir()) == [".lock", "notes.txt"]
    create_training(config_of(), output_dir=project / "mine").main_loop.run.release()


def test_a_new_peak_of_a_one_cycle_schedule_counts(project):
    config = config_of()
    config["model"]["scheduler"] = {"class": "OneCycleLR", "max_lr": 0.1, "total_steps": 40, "step_on": "update"}
    directory = stopped(project, config)
    training = resume_training(directory, ["hooks.StopAfter.epochs=2", "model.scheduler.max_lr=0.01"])
    train(training)
    lower = create_training(config, output_dir=project / "lower", overrides=["model.scheduler.max_lr=0.01"])
    train(lower)
    rates = [each.model.optimizer.param_groups[0]["lr"] for each in (training, lower)]
    assert rates[0] == pytest.approx(rates[1])


def test_a_learning_rate_that_is_a_tensor_is_resumed(project):
    (project / "rates.py").write_text(
        "import torch\n\n\ndef adam(parameters):\n    return torch.optim.AdamW(parameters, lr=torch.tensor(0.1))\n"
    )
    config = config_of()
    config["model"]["optimizer"] = {"class": "rates.adam"}
    expected = straight(project, config)
    directory = stopped(project, config)
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    assert result(directory) == expected


def test_parameters_that_change_their_group_are_refused(project):
    config = config_of()
    config["model"]["optimizer"] = {"class": "SGD", "lr": 0.1, "groups": [{"match": "weight", "lr": 0.2}]}
    directory = stopped(project, config)
    with pytest.raises(ValueError, match="other groups"):
        resume_training(directory, ["hooks.StopAfter.epochs=2", "model.optimizer.groups=[{match: bias, lr: 0.2}]"])


@pytest.mark.parametrize("value", [b"", 2**3000, np.datetime64("2026-01-01"), np.longdouble(1)], ids=str)
def test_what_torch_could_not_read_again_is_not_saved(value):
    with pytest.raises(StateError, match=r"key is .*, which cannot be saved"):
        encode(value, "key")


def test_a_new_rate_leaves_the_schedule_of_a_sequence_where_it_is(project):
    (project / "schedules.py").write_text(
        "from torch.optim import lr_scheduler as each\n\n\ndef sequence(optimizer):\n"
        "    parts = [each.ConstantLR(optimizer, 1.0), each.ExponentialLR(optimizer, 0.5)]\n"
        "    return each.SequentialLR(optimizer, parts, milestones=[2])\n"
    )
    config = config_of()
    config["model"]["scheduler"] = {"class": "schedules.sequence", "step_on": "update"}
    directory = stopped(project, config)
    training = resume_training(directory, ["hooks.StopAfter.epochs=2", "model.optimizer.lr=0.5"])
    before = training.model.optimizer.param_groups[0]["lr"]
    assert before == pytest.approx(0.5 * 0.5**3)  # of five updates, three were behind the milestone
    train(training)
    assert training.model.optimizer.param_groups[0]["lr"] == pytest.approx(before * 0.5**5)


def sequence(*schedulers, kind="SequentialLR", **arguments):
    return {"class": kind, "schedulers": list(schedulers), "step_on": "update", **arguments}


WARM_UP = {"class": "LinearLR", "start_factor": 0.25, "total_iters": 3}
SCHEDULES = {
    "sequential": sequence(WARM_UP, {"class": "CosineAnnealingLR", "T_max": 20}, milestones=[4]),
    "chained": sequence(WARM_UP, {"class": "MultiStepLR", "milestones": [4, 6], "gamma": 0.5}, kind="ChainedScheduler"),
    "nested": sequence(
        {"class": "ChainedScheduler", "schedulers": [WARM_UP, {"class": "ExponentialLR", "gamma": 0.9}]},
        {"class": "CosineAnnealingLR", "T_max": 20},
        milestones=[4],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("epochs", [1, 2], ids=["before the milestone", "behind it"])
def test_a_schedule_of_schedules_continues_and_ends_like_a_longer_training(project, name, epochs):
    config = config_of()
    config["model"]["scheduler"] = SCHEDULES[name]
    directory = stopped(project, config, epochs)
    train(resume_training(directory, ["hooks.StopAfter.epochs=3"]))
    train(create_training(config, output_dir=project / "straight", overrides=["hooks.StopAfter.epochs=3"]))
    assert result(directory) == result(project / "straight")


def test_an_argument_of_a_nested_scheduler_that_changed_wins_over_the_saved_one(project):
    config = config_of()
    config["model"]["scheduler"] = SCHEDULES["sequential"]
    directory = stopped(project, config)
    changed = ["hooks.StopAfter.epochs=2", "model.scheduler.schedulers.1.T_max=40", "model.optimizer.lr=0.5"]
    scheduler = resume_training(directory, changed).model.scheduler.scheduler
    warm_up, cosine = scheduler._schedulers
    assert (cosine.T_max, cosine.base_lrs, warm_up.base_lrs) == (40, [0.5], [0.5])
    assert (scheduler.last_epoch, warm_up.total_iters) == (5, 3)
    assert scheduler.get_last_lr() == cosine.get_last_lr() == [scheduler.optimizer.param_groups[0]["lr"]]


def test_other_parts_of_a_schedule_are_refused_at_a_resume(project):
    config = config_of()
    config["model"]["scheduler"] = SCHEDULES["sequential"]
    directory = stopped(project, config)
    parts = "[{class: LinearLR}, {class: ExponentialLR, gamma: 0.9}]"
    message = r"is SequentialLR\(LinearLR, ExponentialLR\), but was SequentialLR\(LinearLR, CosineAnnealingLR\)"
    with pytest.raises(StateError, match=message):
        resume_training(directory, ["hooks.StopAfter.epochs=2", f"model.scheduler.schedulers={parts}"])


ENDS = {  # schedule, of which one epoch of five updates is the whole -> what the warning says
    "cosine": (
        {"class": "CosineAnnealingLR", "T_max": 5},
        "CosineAnnealingLR has made 5 of its 5 steps (model.scheduler.T_max); the learning rate is 0, after the next "
        "step 0.00477458; the override model.scheduler.T_max=N",
    ),
    "polynomial": (
        {"class": "PolynomialLR", "total_iters": 4},
        "PolynomialLR has made 5 of its 4 steps (model.scheduler.total_iters); the learning rate is 0, after the next "
        "step 0; the override model.scheduler.total_iters=N",
    ),
    "linear": (
        {"class": "LinearLR", "start_factor": 1.0, "end_factor": 0.1, "total_iters": 5},
        "LinearLR has made 5 of its 5 steps (model.scheduler.total_iters); the learning rate is 0.005, after the next "
        "step 0.005;",
    ),
    "sequence": (
        sequence(WARM_UP, {"class": "CosineAnnealingLR", "T_max": 2}, milestones=[3]),
        "CosineAnnealingLR has made 2 of its 2 steps (model.scheduler.schedulers.1.T_max); the learning rate is 0, ",
    ),
    "chain": (
        sequence(WARM_UP, {"class": "CosineAnnealingLR", "T_max": 5}, kind="ChainedScheduler"),
        "CosineAnnealingLR has made 5 of its 5 steps (model.scheduler.schedulers.1.T_max); the learning rate is ",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_resume_that_outlives_its_schedule_warns_once_with_the_rates_and_is_exact(project, caplog, name):
    schedule, message = ENDS[name]
    config = config_of()
    config["model"]["scheduler"] = {**schedule, "step_on": "update"}
    directory = stopped(project, config)
    caplog.clear()
    train(resume_training(directory, ["hooks.StopAfter.epochs=3"]))
    (warning,) = [each.getMessage() for each in caplog.records if "schedule" in each.getMessage()]
    assert warning.startswith(f"the run continues after the end of its schedule: {message}")
    train(create_training(config, output_dir=project / "straight", overrides=["hooks.StopAfter.epochs=3"]))
    assert result(directory) == result(project / "straight")


def test_a_longer_schedule_that_begins_at_a_rate_of_0_is_warned_of(project, caplog):
    config = config_of()
    config["model"]["scheduler"] = ENDS["cosine"][0] | {"step_on": "update"}
    directory = stopped(project, config)
    train(resume_training(directory, ["hooks.StopAfter.epochs=2", "model.scheduler.T_max=10"]))
    assert "had made 5 of its 5 steps (model.scheduler.T_max); the learning rate is 0, after the next step 0" in (
        caplog.text
    )


NO_ENDS = [
    {"class": "CosineAnnealingLR", "T_max": 6},
    {"class": "CosineAnnealingWarmRestarts", "T_0": 2},
    {"class": "ExponentialLR", "gamma": 0.9},
    WARM_UP,
    {"class": "ConstantLR", "total_iters": 2},
    sequence(WARM_UP, {"class": "CosineAnnealingLR", "T_max": 3}, milestones=[3]),
    sequence({"class": "CosineAnnealingLR", "T_max": 2}, {"class": "ExponentialLR", "gamma": 0.9}, milestones=[3]),
    sequence(WARM_UP, {"class": "ExponentialLR", "gamma": 0.9}, kind="ChainedScheduler"),
]


@pytest.mark.parametrize("schedule", NO_ENDS, ids=lambda each: each["class"])
def test_a_schedule_that_is_not_over_or_has_no_end_is_not_warned_of(project, caplog, schedule):
    config = config_of()
    config["model"]["scheduler"] = {**schedule, "step_on": "update"}
    directory = stopped(project, config)
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    assert "end of its schedule" not in caplog.text


def test_a_resume_with_nothing_left_to_train_does_not_warn_of_its_schedule(project, caplog):
    config = config_of()
    config["model"]["scheduler"] = {**ENDS["cosine"][0], "step_on": "update"}
    directory = stopped(project, config)
    train(resume_training(directory, ["hooks.StopAfter.iterations=5"]))
    assert "end of its schedule" not in caplog.text


def test_a_one_cycle_schedule_that_is_over_is_an_error_before_any_update(project):
    config = config_of()
    config["model"]["scheduler"] = {"class": "OneCycleLR", "max_lr": 0.1, "total_steps": 5, "step_on": "update"}
    directory = stopped(project, config)
    before = (directory / "checkpoints" / "latest").resolve()
    training = resume_training(directory, ["hooks.StopAfter.epochs=2"])
    message = r"OneCycleLR has made 5 of its 5 steps \(model.scheduler.total_steps\), .* model.scheduler.total_steps=N"
    with pytest.raises(ArgumentError, match=message) as caught:
        train(training)
    assert caught.value.exit_status == 2
    assert training.main_loop.iterations_done == 5
    assert (directory / "checkpoints" / "latest").resolve() == before
    longer = resume_training(directory, ["model.scheduler.total_steps=20"])
    train(longer)
    assert longer.main_loop.iterations_done == 10


def test_the_code_of_a_run_comes_before_that_of_the_current_directory(project, monkeypatch):
    (project / "here").mkdir()
    (project / "there").mkdir()
    for place, width in (("here", 4), ("there", 8)):
        (project / place / "placed_net.py").write_text(
            f"from resume_model import Net\n\n\nclass Placed(Net):\n    width = {width}\n"
        )
    config = {**config_of(), "code_directory": str(project / "there")}
    config["model"] = {**config["model"], "module": {"class": "placed_net.Placed"}}
    monkeypatch.chdir(project / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    training = create_training(config, output_dir=project / "run")
    assert training.model.module.width == 8
    training.main_loop.run.release()


def copy_files(old, place):
    shutil.copytree(old, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))


def test_a_fork_chooses_again_when_the_run_deletes_the_checkpoint_meanwhile(project, monkeypatch, caplog):
    directory = stopped(project)
    copy, copied = shutil.copy2, []

    def after_the_next_commit(source, target):
        if not copied:
            copied.append(source)
            old = (directory / "checkpoints" / "latest").resolve()
            names = [link.name for link in old.parent.iterdir() if link.is_symlink()]
            commit(old.parent, lambda place: copy_files(old, place), epoch=1, iteration=int(old.name[3:]), names=names)
            assert not old.exists()
        return copy(source, target)

    monkeypatch.setattr("emrun.storage.checkpoints.shutil.copy2", after_the_next_commit)
    training = resume_training(directory, ["hooks.StopAfter.epochs=2"], fork=project / "fork")
    (name,) = {link.resolve().name for link in (project / "fork" / "checkpoints").iterdir() if link.is_symlink()}
    assert name == (directory / "checkpoints" / "latest").resolve().name
    assert training.output_dir == project / "fork"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_fork_that_cannot_be_built_leaves_nothing(project, monkeypatch):
    directory = stopped(project)
    monkeypatch.setattr(
        "emrun.storage.checkpoints.shutil.copy2", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(OSError, match="disk is full"):
        resume_training(directory, ["hooks.StopAfter.epochs=2"], fork=project / "fork")
    assert not (project / "fork").exists()


# what hooks set up before an epoch


class SetsUp(AbstractHook):
    """Sets something up in `before_epoch` that no state holds, and changes there what the states hold."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def before_epoch(self, epoch_id):
        self.count += 1
        model = self.main_loop.model
        for parameter in model.module.layers[0].parameters():
            parameter.requires_grad_(epoch_id >= 2)
        model.module.layers[1].eval()
        model.optimizer.param_groups[0]["lr"] *= 0.9
        for state in model.optimizer.state.values():
            state["exp_avg"].mul_(0.5)
        self.drawn = torch.rand(2) * random.random() + np.random.rand()
        self.first = self.main_loop.iterations_done
        with torch.no_grad():
            model.module.layers[3].bias.add_(self.drawn)

    def after_epoch(self, epoch_id):
        with torch.no_grad():
            self.main_loop.model.module.layers[3].bias.add_(self.drawn * (self.first + 1))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.fixture
def hooked(project):
    """Return a config whose hooks set something up before an epoch; of other settings of the main loop."""
    (project / "sets_up.py").write_text("from tests_of_resuming import SetsUp  # noqa: F401\n")

    def config(**main_loop):
        found = config_of(**main_loop)
        return {**found, "hooks": ["sets_up.SetsUp", *found["hooks"]]}

    sys.modules["tests_of_resuming"] = sys.modules[__name__]
    yield config
    del sys.modules["tests_of_resuming"]


@pytest.mark.parametrize(
    "main_loop", [{}, {"skip_zeroth_epoch": True, "extra_streams": []}], ids=["evaluated", "only trained"]
)
def test_what_a_hook_sets_up_before_an_epoch_is_in_force_wherever_the_epoch_is_resumed(project, hooked, main_loop):
    """It fails without any of these: `before_epoch`, its random states, its iterations, the second load, the modes."""
    config = hooked(**main_loop)
    config["hooks"] = [hook for hook in config["hooks"] if main_loop == {} or "SaveBest" not in hook]
    events = interrupted(config, project / "straight", None)
    expected = result(project / "straight", bool(not main_loop))
    for epoch in (1, 2):
        first = events.index(f"before_epoch {epoch}")
        last = events.index(f"after_epoch {epoch}")
        for at in (first, first + 1, first + 5, last - 9, last - 2, last - 1, last, last + 1):
            interrupted(config, project / "run", at + 1)
            resumed(project / "run")
            assert result(project / "run", bool(not main_loop)) == expected, events[at]
            shutil.rmtree(project / "run")


class Events(AbstractHook):
    """Lists its events, and calls a function in `before_epoch`."""

    def __init__(self, act=lambda hook: None):
        super().__init__()
        self.act = act
        self.events = []

    def before_training(self):
        self.events.append("before_training")

    def before_epoch(self, epoch_id):
        self.events.append(f"before_epoch {epoch_id}")
        self.act(self)

    def before_batch(self, stream_name):
        self.events.append(f"{stream_name} at {self.main_loop.iterations_done}")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.events.append("load_state_dict")


def stopped_in_an_epoch(project, iterations=7, **main_loop):
    config = {**config_of(**main_loop), "hooks": [{"StopAfter": {"iterations": iterations}}]}
    train_with(create_training(config, output_dir=project / "run"), Events())
    return project / "run"


def resumed_with(directory, hook):
    """Resume until the tenth iteration with an additional hook that also loads its state; return the training."""
    training = resume_training(directory, ["hooks.StopAfter.iterations=10"])
    loop = training.main_loop
    loop.change_hooks([*loop.hooks, hook])
    loop.restore(directory / "checkpoints" / "latest")
    return training


def test_the_order_of_a_resume_in_the_middle_of_an_epoch(project):
    hook = Events()
    train(resumed_with(stopped_in_an_epoch(project), hook))
    assert hook.events[:5] == [
        "load_state_dict", "before_training", "before_epoch 2", "load_state_dict", "train at 7",
    ]  # fmt: skip
    assert hook.events.count("before_epoch 2") == 1


@pytest.mark.parametrize("iterations", [0, 5])
def test_nothing_is_loaded_twice_between_epochs(project, iterations):
    hook = Events()
    config = {**config_of(), "hooks": [{"StopAfter": {"epochs": iterations // 5}}]}
    train_with(create_training(config, output_dir=project / "run"), Events())
    training = resume_training(project / "run", ["hooks.StopAfter.epochs=2"])
    training.main_loop.change_hooks([*training.main_loop.hooks, hook])
    training.main_loop.restore(project / "run" / "checkpoints" / "latest")
    train(training)
    epoch = iterations // 5 + 1
    assert hook.events[:4] == [
        "load_state_dict", "before_training", f"before_epoch {epoch}", f"train at {iterations}",
    ]  # fmt: skip


def terminate(hook):
    raise TrainingTerminated("enough")


def request(hook):
    hook.main_loop.request_checkpoint("begun")


@pytest.mark.parametrize("act", [terminate, request])
def test_terminations_and_requests_have_no_effect_while_an_epoch_begins_again(project, act):
    """In the `before_epoch` of the resume, a termination or a request for a checkpoint has no effect."""
    directory = stopped_in_an_epoch(project)
    hook = Events(lambda hook: act(hook) if len(hook.events) < 4 else None)
    training = resumed_with(directory, hook)
    train(training)
    assert training.main_loop.iterations_done == 10
    assert not (directory / "checkpoints" / "begun").exists()


def test_an_error_in_before_epoch_of_a_resume_leaves_the_checkpoints(project):
    directory = stopped_in_an_epoch(project)
    before = {path: path.read_bytes() for path in (directory / "checkpoints").rglob("*") if path.is_file()}

    def fail(hook):
        raise RuntimeError("no")

    training = resumed_with(directory, Events(fail))
    with pytest.raises(RuntimeError, match="no"):
        train(training)
    assert training.main_loop.iterations_done == 7
    assert {path: path.read_bytes() for path in before} == before
    resumed(directory)


def test_a_limit_that_is_reached_ends_a_resume_in_the_middle_of_an_epoch_at_once(project):
    directory = stopped_in_an_epoch(project)
    hook = Events()
    training = resume_training(directory, ["model.optimizer.lr=0.1"])
    training.main_loop.change_hooks([*training.main_loop.hooks, hook])
    train(training)
    assert hook.events == ["before_training"]
    assert training.main_loop.outcome.reason == "7 iterations done (StopAfter iterations: 7)"


def test_an_epoch_by_hand_is_resumed_in_its_middle(project, hooked):
    """Restoring neither random states nor what hooks set up makes this fail."""
    train(create_training(hooked(), output_dir=project / "straight"))
    events = interrupted(hooked(), project / "run", None)
    shutil.rmtree(project / "run")
    interrupted(hooked(), project / "run", events.index("before_epoch 2") + 6)
    loop = resume_training(project / "run").main_loop
    assert loop.iterations_done > 5
    with loop:
        loop.epoch(["train"], ["valid"])
    assert result(project / "run")["weights"] == result(project / "straight")["weights"]
    assert result(project / "run")["metrics"] == result(project / "straight")["metrics"]


def test_a_warning_of_loading_is_logged_once(project, caplog):
    events = interrupted(config_of(), project / "run", None)
    shutil.rmtree(project / "run")
    interrupted(config_of(), project / "run", events.index("before_epoch 2") + 6)
    train(resume_training(project / "run", ["hooks.SaveBest={variable: loss, condition: min}"]))
    assert caplog.text.count("now compares another statistic") == 1


def test_a_checkpoint_without_the_beginning_of_its_epoch_can_be_resumed(project):
    directory = stopped_in_an_epoch(project)
    latest = (directory / "checkpoints" / "latest").resolve()
    state = torch.load(latest / "state.pt", weights_only=True)
    assert state.pop("epoch_began")["iterations_done"] == 5
    torch.save(state, latest / "state.pt")
    manifest = json.loads((latest / "manifest.json").read_text())
    manifest.pop("sha256")
    manifest["files"]["state.pt"] = describe(latest / "state.pt")
    (latest / "manifest.json").write_text(json.dumps({**manifest, "sha256": json_digest(manifest)}))
    hook = Events()
    train(resumed_with(directory, hook))
    assert hook.events[2] == "before_epoch 2"


def test_a_finished_run_says_how_to_train_longer(project, caplog):
    directory = stopped(project)
    caplog.set_level("INFO")
    assert resume_training(directory) is None
    assert caplog.messages[-2:] == [
        "nothing to do: the run is finished: 1 epoch done (StopAfter epochs: 1)",
        "to train longer, resume with a later end, such as hooks.StopAfter.epochs=20",
    ]


def test_another_architecture_is_refused_with_the_values_that_the_resume_changes(project):
    directory = stopped(project)
    with pytest.raises(StateError, match=r"does not fit the module: .* in the checkpoint, .* in the module") as caught:
        resume_training(directory, ["model.module.width=7"])
    (note,) = caught.value.__notes__
    assert note.startswith("this resume changes model.module.width: ")
    assert note.endswith(" -> 7; undo that, or train anew with `emrun train`")


def test_a_damaged_checkpoint_is_refused_with_those_that_are_intact(project):
    directory = stopped(project, epochs=2)
    root = directory / "checkpoints"
    damaged = commit(root, lambda place: (place / "state.pt").write_bytes(b"x"), epoch=1, iteration=2, names=("mine",))
    (damaged / "state.pt").write_bytes(b"y")
    with pytest.raises(StorageError, match="is damaged") as caught:
        resume_training(directory, checkpoint_name="mine")
    intact = sorted(path.name for path in root.iterdir() if path.is_symlink() and path.name != "mine")
    assert caught.value.__notes__ == [f"intact checkpoints: {', '.join(intact)}"]


def test_each_damaged_checkpoint_has_a_line(project):
    directory = stopped(project)
    places = [path for path in (directory / "checkpoints").iterdir() if not path.is_symlink() and path.name[0] != "."]
    for place in places:
        (place / "state.pt").write_bytes(b"y")
    with pytest.raises(StorageError) as caught:
        resume_training(directory, ["hooks.StopAfter.epochs=2"])
    head, *lines = str(caught.value).split("\n")
    assert head.endswith("checkpoints is intact:")
    assert [line.partition(": ")[0] for line in lines] == [
        f"  checkpoint {place}" for place in sorted(places, reverse=True)
    ]


class Terminate(AbstractHook):
    def after_batch(self):
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_interrupt_is_named_once_in_the_log(project):
    training = create_training(config_of(), output_dir=project / "run")
    train_with(training, Terminate())
    assert (project / "run" / "train.log").read_text().rstrip().endswith(" interrupted by SIGTERM")
