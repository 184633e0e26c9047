"""The sample with every hook: interrupted, killed and resumed, its run ends in the same files."""

import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from conftest import Warm
from ruamel.yaml import YAML
from training.resuming import SEND, copy_of_run, plain, train_with

from emrun import AbstractHook, create_training, resume_training
from emrun.config.names import short_names
from emrun.training.create import train

SAMPLE = Path(__file__).parents[2] / "sample_configs" / "digits_everything.yaml"

SENT = [  # an epoch has 45 iterations; rows are written every 20 updates, checkpoints every 50
    (signal.SIGINT, "train", 77),
    (signal.SIGTERM, "valid", 225),
    (signal.SIGKILL, "train", 338),
    (signal.SIGINT, "after_epoch", 405),
    (signal.SIGTERM, "train", 500),
]


@pytest.fixture(scope="module")
def warm(warm):
    """Let `emrun` run where the libraries of the hooks are imported already."""
    process = Warm("matplotlib.pyplot", "torch.utils.tensorboard", parent=warm)
    yield process
    process.end()


def hooks():
    """Return the names of the hooks in the sample."""
    entries = YAML(typ="safe").load(SAMPLE)["hooks"]
    return [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]


def curves(directory):
    """Return what TensorBoard reads: the points of each scalar, in their order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tables(directory):
    """Return the rows of the SQLite database without times."""
    columns = {"epochs": "epoch, iteration, updates", "epoch_values": "*", "step_values": "*"}
    with closing(sqlite3.connect(directory / "metrics.sqlite")) as database:
        return {name: database.execute(f"SELECT {which} FROM {name}").fetchall() for name, which in columns.items()}


def files(directory):
    """Return the files of a run without times: metrics, steps, CSV files, pictures, checkpoints by their names."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    texts = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in [directory / "steps.jsonl", *directory.rglob("*.csv"), *directory.rglob("*.png")]
    }
    links = sorted(path for path in (directory / "checkpoints").iterdir() if path.is_symlink())
    return {
        "metrics": [{**line, "seconds": None} for line in lines],
        "curves": curves(directory),
        "tables": tables(directory),
        **texts,
        "checkpoints": {path.name: checkpoint(path) for path in links},
        "directories": len({path.readlink() for path in links}),
    }


def checkpoint(place):
    manifest = json.loads((place / "manifest.json").read_text())
    state = torch.load(place / "state.pt", weights_only=True)
    state["hooks"] = {name: each for name, each in state["hooks"].items() if "CopyAtUpdate" not in name}
    for hook in state["hooks"].values():
        hook.pop("seconds", None)  # of StopAfter
    state["record"] = {"first": state["record"]["first"], "intervals": state["record"]["intervals"]}  # lines have times
    return {
        "epoch": manifest["epoch"],
        "iteration": manifest["iteration"],
        "weights": (place / "model.safetensors").read_bytes(),
        "names": sorted(state["names"]),
        "state": plain({name: value for name, value in state.items() if name != "names"}),  # they lead to directories
    }


def test_the_sample_has_every_built_in_hook():
    services = ("WriteMLflow", "WriteTrackio", "WriteWandb")  # tests/hooks has runs of theirs that are interrupted
    assert sorted({*hooks(), *services}) == sorted(short_names("hook", installed=False))


def config_in(directory, epochs, every):
    """Write the sample with fewer epochs, and with the hook that sends signals, to a file; return it."""
    sample = SAMPLE.read_text()
    assert "{epochs: 20," in sample
    assert "every: 10 epochs" in sample
    lines = [
        line if "PlotLines" in line else line.replace("every: 10 epochs", f"every: {every} epochs")
        for line in sample.replace("{epochs: 20,", f"{{epochs: {epochs},").splitlines()
    ]  # the figures of PlotLines take longest
    (directory / "send.py").write_text(SEND)
    config = directory / "config.yaml"
    config.write_text("\n".join([*lines, "  - send.Send\n"]))  # `hooks` is the last section
    return config


def assert_same(directory, epochs):
    """Compare the files of the runs `straight` and `often`, whose pictures are of the first and the last epoch."""
    expected, found = files(directory / "straight"), files(directory / "often")
    written = ["curves.csv", "predictions.csv", "steps.jsonl", "training.csv"]
    written += [f"confusion_matrix_epoch_{epoch}_valid.{kind}" for epoch in epochs for kind in ("csv", "png")]
    written += ["logits.csv", "sequences.csv", "masks/valid/masks.csv", *(f"masks/valid/{n}.png" for n in range(180))]
    for epoch in {0, 10}.intersection(epochs):
        written += [f"visual/epoch_{epoch}/valid/{n}_batch_1_plot-logits.png" for n in range(4)]
    for epoch in epochs:
        written += [f"examples/epoch_{epoch}/valid/examples.csv"]
        written += [f"examples/epoch_{epoch}/valid/{n + 1:02}_{n}.png" for n in range(16)]
    assert sorted(expected) == sorted(["checkpoints", "curves", "directories", "metrics", "tables", *written])
    iterations = [step for step, _ in expected["curves"]["steps/loss"]]
    assert iterations == list(range(20, iterations[-1] + 1, 20))
    assert len(expected["tables"]["epochs"]) == len(expected["metrics"])
    assert list(found["checkpoints"]) == list(expected["checkpoints"])
    for name, parts in expected["checkpoints"].items():
        same = {part: found["checkpoints"][name][part] == value for part, value in parts.items()}
        assert same == dict.fromkeys(parts, True), name
    assert {name: found[name] == expected[name] for name in expected} == dict.fromkeys(expected, True)


class CopyAtUpdate(AbstractHook):
    """Copies the run directory within an epoch, which is what a kill leaves."""

    reads = ()

    def after_update(self):
        if self.main_loop.updates_done == 77:
            copy_of_run(self.main_loop, "straight", "often")


@pytest.mark.campaign
def test_killed_and_resumed_its_files_are_those_of_the_uninterrupted_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_with(create_training(config_in(tmp_path, epochs=2, every=2), output_dir="straight"), CopyAtUpdate())
    train(resume_training("often"))
    assert_same(tmp_path, epochs=(0, 2))


@pytest.mark.campaign
def test_interrupted_killed_and_resumed_its_files_are_those_of_the_uninterrupted_run(tmp_path, emrun):
    config_in(tmp_path, epochs=20, every=10)
    assert emrun("train", "-q", "config.yaml", "--output-dir", "straight", cwd=tmp_path).returncode == 0
    (tmp_path / "signals.json").write_text(json.dumps(SENT))
    command = ["train", "-q", "config.yaml", "--output-dir", "often"]
    for number, *_ in SENT:
        done = emrun(*command, cwd=tmp_path)
        assert done.returncode == -number, done.stderr
        command = ["resume", "-q", "often"]
    done = emrun(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path, epochs=(0, 10))
