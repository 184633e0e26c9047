"""`emrun verify-run` as an installed command, on a run that is moved, and whose parts are changed."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

EMRUN = Path(sys.executable).with_name("emrun")
NET = """
import numpy as np
import torch

SCALE = 1.0


class Data:
    def __init__(self, path="data.npy"):
        self.x = np.load(path)

    def train_stream(self, ctx):
        for rows in ctx.batches(32, 4, shuffle=True):
            yield {"x": self.x[rows], "y": (self.x[rows].sum(axis=1) > 0).astype(np.int64)}

    def valid_stream(self, ctx):
        for rows in ctx.batches(32, 4):
            yield {"x": self.x[rows][:3], "y": (self.x[rows][:3, 0] > 0).astype(np.int64)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 2))

    def forward(self, x):
        return SCALE * self.layers(x)
"""
MAJORITY = Path(__file__).parents[2] / "sample_configs" / "majority.yaml"
CONFIG = """
seed: 3
dataset: {class: net.Data}
model:
  module: {class: net.Net}
  inputs: [x]
  outputs: [logits]
  loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, y]}
  optimizer: {class: Adam, lr: 0.01}
main_loop: {extra_streams: [{valid: {batches: 5}}], report: false}
hooks: [SaveBest, {StopAfter: {epochs: 3}}]
eval: {valid: {hooks: []}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, warm):
    """Return a directory with a project and its run."""
    place = tmp_path_factory.mktemp("project")
    (place / "net.py").write_text(NET)
    (place / "config.yaml").write_text(CONFIG)
    np.save(place / "data.npy", np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32))
    done = warm.run([str(EMRUN), "train", "-q", "config.yaml", "--output-dir", "run"], place, 60)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def project(trained, tmp_path):
    """Return a copy of the project in the current directory of the commands, which the run names as its place."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, symlinks=True)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(trained), str(tmp_path)))
    return tmp_path


@pytest.fixture
def verified(emrun):
    """Return a function that verifies `run` and returns the results of its parts, and all that was found."""

    def verify(*overrides, status=1):
        done = emrun("verify-run", "run", "-q", "--json", *overrides)
        assert done.returncode == status, done.stdout + done.stderr
        found = json.loads(done.stdout)
        return [row["result"] for row in found["rows"]], found

    return verify


def content(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_moved_run_gives_what_it_recorded_from_its_directory_alone(trained, tmp_path, emrun):
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run, symlinks=True)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(trained), str(tmp_path / "gone")))
    before = content(run)
    done = emrun("verify-run", "run", "-q", f"dataset.path={trained / 'data.npy'}")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "part         result",
        "-----------  ------  --------------------------------------------",
        "statistics   same    checkpoint best, 1 statistic to the last bit",
        "first steps  same    20 steps to the last bit",
        "",
        "the run gives what it recorded",
    ]
    assert content(run) == before


@pytest.mark.campaign
def test_nothing_can_be_compared_without_the_code_of_the_run(trained, tmp_path, emrun):
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run, symlinks=True)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(trained), str(tmp_path / "gone")))
    shutil.rmtree(run / "code" / "modules")
    done = emrun("verify-run", "run", "-q", ranks=2)  # of a dataset that cannot be found, new processes say so
    assert done.returncode == 1
    assert done.stdout.count("left out") == 2
    assert "net.Data" in done.stdout
    assert done.stdout.endswith("\nnothing could be compared\n")


@pytest.mark.campaign
def test_a_run_without_code_of_its_own_is_verified_without_the_directory_of_its_start(tmp_path, emrun, emrun_here):
    (tmp_path / "start").mkdir()
    start = f"code_directory={tmp_path / 'start'}"
    changes = (start, "dataset.n=100", "hooks.StopAfter.epochs=1")
    done = emrun_here("train", "-q", MAJORITY, *changes, "--output-dir", "run")
    assert done.returncode == 0, done.stderr
    (tmp_path / "start").rmdir()
    done = emrun("verify-run", "run", "-q")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.campaign
def test_the_evaluation_at_the_end_counts_and_steps_that_are_not_recorded_are_left_out(project, emrun, emrun_here):
    changes = ["main_loop.extra_streams=[{valid: 2 epochs}]", "main_loop.record_steps=24"]
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "other", *changes).returncode == 0
    assert '"at_end"' in (project / "other" / "metrics.jsonl").read_text().splitlines()[-1]
    done = emrun("verify-run", "other", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("  ")[-1] for line in done.stdout.splitlines()[2:4]] == [
        "checkpoint best, 1 statistic to the last bit",
        "none of the first 20 steps is recorded",
    ]


def test_a_part_whose_data_are_gone_is_left_out(project, verified):
    (project / "data.npy").unlink()
    results, found = verified()
    assert results == ["left out", "left out"]
    assert found["rows"][0]["text"].startswith("FileNotFoundError: [Errno 2] No such file or directory: 'data.npy' ")


def test_changed_code_is_the_cause(project, verified):
    (project / "net.py").write_text(NET.replace("SCALE = 1.0", "SCALE = 1.5"))
    results, found = verified()
    assert results == ["differs", "differs"]
    assert found["rows"][1]["text"].startswith("iteration 1, loss: 0.")
    assert found["cause"] == "code: module net has changed"


@pytest.mark.campaign  # test_diff.py has data of a run that have changed, and the code is the cause above
def test_changed_data_are_the_cause(project, verified):
    data = np.load(project / "data.npy")
    data[2, 0] += 1
    np.save(project / "data.npy", data)
    results, found = verified()
    assert "differs" in results
    assert found["cause"] == "data: the first batch of stream 'valid' has other values of x"


@pytest.mark.campaign
def test_a_changed_config_is_the_cause(project, verified):
    config = project / "run" / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("lr: 0.01", "lr: 0.02"))
    results, found = verified()
    assert results == ["same", "differs"]
    assert found["cause"].startswith("config: the learning rate is not that of the first steps")


@pytest.mark.campaign
def test_a_changed_statistic_is_in_the_record(project, verified):
    metrics = project / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        line["streams"]["valid"]["loss"]["mean"] *= 1 + 1e-15
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results, found = verified()
    assert results == ["differs", "same"]
    assert found["cause"].startswith("record: the first steps are the same")


@pytest.mark.campaign
def test_other_packages_and_another_device_are_listed_by_severity(project, verified):
    record = project / "run" / "code" / "record.json"
    code = json.loads(record.read_text())
    packages = {**code["packages"], "torch": "2.0.0", "click": "7.0"}
    record.write_text(json.dumps({**code, "packages": packages}))
    trace = project / "run" / "trace.yaml"
    trace.write_text(trace.read_text().replace("device: cpu", "device: cuda:0, NVIDIA H200; cpu"))
    steps = project / "run" / "steps.jsonl"
    step = json.loads(steps.read_text().splitlines()[0])
    step["loss"][6] += 1e-7
    steps.write_text(json.dumps(step) + "\n")
    results, found = verified()
    assert results == ["same", "differs"]
    assert found["rows"][1]["text"].startswith("iteration 7, loss: ")
    assert found["cause"].startswith("device: cuda:0, NVIDIA H200")
    differences = list(found["differences"].values())
    assert [[each.partition(":")[0] for each in texts] for texts in differences] == [
        [],
        ["device", "package torch"],
        ["package click"],
    ]


def test_a_run_of_more_ranks_than_this_machine_has_cores_and_gpus_is_not_verified_here(project, emrun_here):
    trace = project / "run" / "trace.yaml"
    trace.write_text(trace.read_text().replace("\nranks: 1\n", "\nranks: 4000\n"))
    done = emrun_here("verify-run", "run")
    assert done.returncode == 2
    assert "was trained by 4000 processes, but this machine has " in done.stderr
    assert "; verify it on a machine with as many" in done.stderr
