"""The steps and CSV files of a run that is interrupted, ended or killed at any moment equal those of a straight run.

Each trial ends a run one to three times, in different ways, and then lets it come to its end.
"""

import json
import os
import shutil
import signal

import pytest
from training.resuming import DATA, MODEL, Interrupt, config_of, train_with

from emrun import TrainingTerminated, create_training, resume_training
from emrun.loop import step_log as steps
from emrun.storage.trace import read_trace

HOOK = """
import torch

from emrun import AbstractHook


class Records(AbstractHook):
    def before_batch(self):
        self.main_loop.record("before", self.main_loop.iterations_done / 3)

    def before_update(self, model):
        norms = [parameter.grad.norm() for parameter in model.module.parameters()]
        self.main_loop.record("gradient_norm", torch.stack(norms).norm())

    def after_batch(self, batch_data):
        done = self.main_loop.iterations_done
        if done % 3 == 0:
            self.main_loop.record("thirds", batch_data["loss"].double().mean())
        if done in (7, 8):
            self.main_loop.record("rarely", float("nan") if done == 7 else float("-inf"))


class InATensor(torch.optim.Adam):
    def __init__(self, params, lr):
        super().__init__(params, lr=torch.tensor(lr))
"""

GROUPS = {"class": "Adam", "lr": 0.05, "groups": [{"match": "layers.0", "lr": 0.01}, {"match": "layers.3", "lr": 0.1}]}
PER_UPDATE = {"class": "ExponentialLR", "gamma": 0.93, "step_on": "update"}
KINDS = [  # changes of the model, of the main loop
    ({}, {}),
    ({"optimizer": GROUPS, "scheduler": PER_UPDATE}, {"fixed_epoch_size": 3, "extra_streams": ["valid", "train"]}),
    ({"optimizer": {"class": "step_hooks.InATensor", "lr": 0.05}, "scheduler": PER_UPDATE}, {"record_steps": 3}),
    ({"scheduler": PER_UPDATE}, {"fixed_epoch_size": 7, "skip_zeroth_epoch": True, "buffer": 2}),
    ({"optimizer": GROUPS}, {"record_steps": 3, "skip_zeroth_epoch": True, "extra_streams": []}),
]
CURVES = {"WriteCSV": {"output_file": "curves.csv", "every": "2 updates"}}
HOOKS = [
    "step_hooks.Records",
    {"ComputeStats": {"variables": ["loss", {"accuracy": ["mean", "std"]}]}},
    {"SaveEvery": {"every": "4 iterations", "keep": 2}},
    "SaveLatest",
    "WriteCSV",
    CURVES,
]
WAYS = (signal.SIGTERM, signal.SIGKILL, "hook")


class End(Interrupt):
    """Ends the run at the n-th event: by a signal to this process, or as a hook does."""

    def __init__(self, way, at):
        super().__init__()
        self.way, self.moment = way, at

    def happened(self, what):
        self.events.append(what)
        if len(self.events) == self.moment or what == self.moment:
            if self.way == "hook":
                raise TrainingTerminated("enough")
            os.kill(os.getpid(), self.way)

    def after_update(self):
        self.happened(f"iteration {self.main_loop.iterations_done + 1}")


def config(model, main_loop, epochs=4):
    found = config_of(**main_loop)
    return {**found, "model": {**found["model"], **model}, "hooks": [*HOOKS, {"StopAfter": {"epochs": epochs}}]}


def run(directory, config, way=None, at=None):
    """Begin the run, or resume it; end it at the n-th event."""
    if (directory / "config.yaml").exists():
        has_ended = read_trace(directory)["status"] == "finished"
        training = resume_training(directory, checkpoint_name="latest" if has_ended else None)
    else:
        training = create_training(config, output_dir=directory)
    hook = End(way, at)
    train_with(training, hook)
    return hook.events


def files(directory):
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    names = ("steps.jsonl", "training.csv", "curves.csv", "checkpoints/latest/model.safetensors")
    return {"metrics": [{**line, "seconds": None} for line in metrics]} | {
        name: (directory / name).read_bytes() for name in names
    }


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in (("resume_data", DATA), ("resume_model", MODEL), ("step_hooks", HOOK)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def early(monkeypatch):
    """Let chunks end within the epochs, and the thinning begin soon."""
    monkeypatch.setattr(steps, "CHUNK_LENGTH", 4)
    monkeypatch.setattr(steps, "THINNING", ((8, 1), (16, 2)))
    monkeypatch.setattr(steps, "_AT_LAST", 3)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.fault("runs ended at random moments: steps and CSV files")
def test_the_files_of_a_run_that_was_ended_at_random_moments_are_those_of_a_straight_run(project, early, small, trials):
    straight = {}
    for trial in trials(range(300), small=[180]):
        with trial:
            kind = trial.case % len(KINDS) if trial.case % 60 else trial.case // 60
            if kind not in straight:
                events = run(project / f"straight-{kind}", config(*KINDS[kind]))
                straight[kind] = len(events), files(project / f"straight-{kind}")
            count, expected = straight[kind]
            draw, directory = trial.random, project / f"run-{trial.case}"
            for number in range(draw.randint(1, 3)):
                way, at = draw.choice(WAYS), draw.randint(1, count if number == 0 else 15)
                status = small.forked(run, directory, config(*KINDS[kind]), way, at)
                assert status in (0, -signal.SIGKILL)
            assert small.forked(run, directory, config(*KINDS[kind])) == 0
            found = files(directory)
            assert {name: found[name] == expected[name] for name in expected} == dict.fromkeys(expected, True)
            shutil.rmtree(directory)
