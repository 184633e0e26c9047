"""The step record of whole runs: what is in it, and what a resume does with the file that it finds."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from campaign import thinned
from training.resuming import DATA, MODEL, config_of, resumed, train_with

from emrun import AbstractHook, create_training, read_steps, resume_training
from emrun.base.errors import StorageError
from emrun.record.steps import read_chunk


class Losses(AbstractHook):
    """Keeps the loss that is minimised, as a hook of a user sees it, in the batch and from the model."""

    def __init__(self):
        super().__init__()
        self.seen, self.values = [], []

    def after_batch(self, batch_data):
        if self.main_loop.training:
            self.seen.append(batch_data["loss"].clone())
            self.values.append(self.main_loop.model.step_values()["loss"].clone())


def config(epochs=3, **main_loop):
    found = config_of(**main_loop)
    hooks = [{"ComputeStats": {"variables": ["loss"]}}, "SaveLatest", "WriteCSV", {"StopAfter": {"epochs": epochs}}]
    curves = {"WriteCSV": {"output_file": "curves.csv", "every": "6 updates"}}
    return {**found, "hooks": [*hooks, curves]}


def trained(directory, *hooks, **main_loop):
    train_with(create_training(config(**main_loop), output_dir=directory), *hooks)


NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self, dtype, scalar):
        super().__init__()
        self.scalar = scalar
        self.layer = torch.nn.Linear(3, 2, dtype=getattr(torch, dtype))

    def forward(self, x, y):
        losses = torch.nn.functional.cross_entropy(self.layer(x), y, reduction="none")
        return {"loss": losses.mean() if self.scalar else losses}
"""


DTYPES = [("float32", False), ("float64", True), ("bfloat16", True)]


@pytest.mark.parametrize(("dtype", "scalar"), thinned(DTYPES, [("bfloat16", True)]))
def test_the_losses_are_those_that_a_hook_sees_bit_for_bit(project, dtype, scalar):
    (project / f"net_of_{dtype}.py").write_text(NET)
    found = config()
    found["model"]["module"] = {"class": f"net_of_{dtype}.Net", "dtype": dtype, "scalar": scalar}
    hook = Losses()
    train_with(create_training(found, output_dir=project / "run"), hook)
    steps = read_steps(project / "run")
    values = torch.stack(hook.values)
    assert values.dtype == getattr(torch, dtype)
    assert torch.equal(torch.tensor(steps["loss"]).to(values.dtype), values)
    assert steps["loss"].tolist() == values.double().tolist()
    assert steps["loss"].tolist() == [loss.mean().item() for loss in hook.seen]
    assert steps["iteration"].tolist() == list(range(1, 16))
    np.testing.assert_array_equal(steps["learning_rate"], np.repeat([0.05, 0.025, 0.0125], 5))


class StopAt(AbstractHook):
    """Interrupts the run after an iteration."""

    def __init__(self, iteration):
        super().__init__()
        self.iteration = iteration

    def after_batch(self):
        if self.main_loop.training and self.main_loop.iterations_done == self.iteration:
            os.kill(os.getpid(), signal.SIGINT)


def files(directory):
    return [(directory / name).read_bytes() for name in ("steps.jsonl", "training.csv", "curves.csv")]


def spans(directory):
    chunks = map(read_chunk, (directory / "steps.jsonl").read_bytes().splitlines())
    return [(chunk.first, len(chunk)) for chunk in chunks]


def test_a_run_of_more_steps_than_a_line_has_is_resumed_to_the_same_bytes(project, monkeypatch):
    monkeypatch.setattr("emrun.loop.step_log.CHUNK_LENGTH", 20)
    sizes = {"epochs": 2, "fixed_epoch_size": 14, "extra_streams": [], "skip_zeroth_epoch": True}
    trained(project / "straight", **sizes)
    trained(project / "run", StopAt(20), **sizes)
    assert spans(project / "run") == [(1, 14), (15, 6)]
    train_with(resume_training(project / "run"), StopAt(23))
    assert spans(project / "run") == [(1, 14), (15, 6), (21, 3)]
    resumed(project / "run")
    assert spans(project / "run") == [(1, 14), (15, 6), (21, 8)]
    assert files(project / "run") == files(project / "straight")


# --- the file that a resume finds -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with a run that was interrupted after seven steps, and the same run without interruption."""
    directory = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for name, text in (("resume_data", DATA), ("resume_model", MODEL)):
            (directory / f"{name}.py").write_text(text)
        patch.syspath_prepend(directory)
        trained(directory / "straight", epochs=2)
        trained(directory / "run", StopAt(7), epochs=2)
    return directory


@pytest.fixture
def runs(place, tmp_path, monkeypatch):
    """Return a copy of this directory."""
    copy = shutil.copytree(place, tmp_path / "runs", symlinks=True)
    monkeypatch.syspath_prepend(copy)
    return copy


def damaged(path, kind):
    """Replace the step record by something else; return what must stay."""
    own = path.read_bytes()
    path.unlink()
    if kind == "directory":
        path.mkdir()
        (path / "kept").write_text("kept")
        return lambda: (path / "kept").read_text() == "kept"
    if kind == "link":
        target = path.with_name("elsewhere.jsonl")
        target.write_bytes(own)
        path.symlink_to(target)
        return lambda: path.is_symlink() and target.read_bytes() == own
    content = {
        "newer": own + b'{"format": 2, "blocks": "..."}\n',
        "foreign": b"my notes\nof steps\n",
        "zeros": b"x" + bytes(5000),
        "long line": b'{"format": 1, "loss": [' + b"0.5, " * 20_000_000,
    }[kind]
    path.write_bytes(content)
    return lambda: path.read_bytes() == content


KINDS = ["newer", "foreign", "zeros", "directory", "link", "long line"]
REPORT = "the file is left as it is, and the steps of this run are not recorded"


def lines_of(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{**line, "seconds": None} for line in lines]


@pytest.mark.parametrize("kind", thinned(KINDS, ["zeros", "link"]))
def test_a_file_that_this_emrun_did_not_write_is_reported_and_left_as_it_is(runs, caplog, kind):
    stays = damaged(runs / "run/steps.jsonl", kind)
    resumed(runs / "run")
    assert caplog.text.count(REPORT) == 1
    assert stays()
    assert lines_of(runs / "run") == lines_of(runs / "straight")
    assert (runs / "run/training.csv").read_bytes() == (runs / "straight/training.csv").read_bytes()
    refused = {"directory": "it is not a regular file", "link": "steps.jsonl is a link, which is not followed"}
    if kind not in refused:
        read_steps(runs / "run")
    else:
        with pytest.raises(StorageError, match=rf"cannot read .*steps\.jsonl: {refused[kind]}"):
            read_steps(runs / "run")


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["newer", "directory"])
def test_the_commands_report_it_too(runs, emrun_here, kind):
    stays = damaged(runs / "run/steps.jsonl", kind)
    shutil.copy(runs / "run/config.yaml", runs / "config.yaml")
    first = emrun_here("resume", "run", "hooks.StopAfter.epochs=2", cwd=runs)
    shutil.copy(runs / "run/config.yaml", runs / "config.yaml")
    second = emrun_here("train", "config.yaml", "--output-dir", "run", "--auto-resume", cwd=runs)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stderr.count(REPORT) == 1
    assert stays()


@pytest.mark.parametrize("left", thinned([0, 1, 99, -1], [99]), ids=["empty", "a byte", "99 bytes", "without its end"])
def test_a_file_that_was_cut_is_reported_and_continued(runs, caplog, left):
    file = runs / "run/steps.jsonl"
    first = file.read_bytes().splitlines(keepends=True)[0]
    file.write_bytes(first[:left])
    resumed(runs / "run")
    assert "steps.jsonl was changed since the checkpoint was saved" in caplog.text
    assert read_steps(runs / "run")["iteration"].tolist() == list(range(6, 11))


def test_the_values_that_are_only_in_the_checkpoint_come_back(runs):
    file = runs / "run/steps.jsonl"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])  # as after a kill: 6 and 7 are missing
    resumed(runs / "run")
    assert files(runs / "run") == files(runs / "straight")


@pytest.mark.campaign
def test_a_resume_may_record_fewer_steps_or_none(runs):
    directory = runs / "run"
    train_with(resume_training(directory, ["main_loop.record_steps=0"]), StopAt(9))
    train_with(resume_training(directory, ["main_loop.record_steps=3", "hooks.StopAfter.epochs=3"]))
    assert read_steps(directory)["iteration"].tolist() == [*range(1, 8), 12, 15]
