"""NaN and infinity in a loss, a gradient or a metric: the guard ends the training, and neither ever becomes the best.

Taken out once by hand, each of these made this fail: the look at gradients before the update; SaveBest passing over
NaN.
"""

import json
from itertools import product

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

MODULE = """
import torch
from emrun import AbstractHook


class Bad(torch.autograd.Function):
    # passes values on, and gives a gradient that is not finite

    @staticmethod
    def forward(ctx, values, bad):
        ctx.bad = bad
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.bad, None


class Net(torch.nn.Module):
    def __init__(self, where="", bad="nan", at=7):
        super().__init__()
        self.layer = torch.nn.Linear(11, 1)
        self.where, self.bad, self.at, self.count = where, float(bad), at, 0

    def forward(self, x, y):
        self.count += self.training
        is_due = self.training and self.count == self.at
        logits = self.layer(x).flatten()
        if is_due and self.where == "gradient":
            logits = Bad.apply(logits, self.bad)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="none")
        if is_due and self.where == "loss":
            losses = losses * self.bad
        metric = (logits.detach() > 0).float()
        if is_due and self.where == "metric":
            metric = metric + self.bad
        return {"loss": losses, "metric": metric}


class Spoil(AbstractHook):
    # spoils a statistic of the first epochs, as a hook or a metric of one's own could

    def __init__(self, bad, epochs):
        super().__init__()
        self.bad, self.epochs = float(bad), epochs

    def after_epoch(self, epoch_id, epoch_data):
        if epoch_id in self.epochs:
            epoch_data["valid"]["loss"]["mean"] = self.bad
"""

FEW = [  # each two of where, what and when
    ("loss", "nan", "batch"), ("loss", "inf", "epoch"), ("gradient", "nan", "epoch"), ("gradient", "inf", "batch"),
    ("metric", "nan", "batch"), ("metric", "inf", "epoch"),
]  # fmt: skip


def config_of(small, where, bad, hooks):
    return {
        "seed": 5,
        "dataset": small.config["dataset"],
        "model": {
            "module": {"class": "bad.Net", "where": where, "bad": bad},
            "inputs": ["x", "y"],
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "main_loop": {"extra_streams": ["valid"], "buffer": 2},
        "hooks": hooks,
    }


@pytest.mark.timeout(7200)
@pytest.mark.fault("NaN or infinity in a loss, a gradient, a metric")
def test_the_guard_names_variable_and_iteration_and_keeps_the_weights_before(project, small, trials):
    (project / "bad.py").write_text(MODULE)
    stats = {"ComputeStats": {"variables": ["loss", "metric"]}}
    cases = product(("loss", "gradient", "metric"), ("nan", "inf"), ("batch", "epoch"))
    for number, trial in enumerate(trials(cases, small=FEW)):
        where, bad, when = trial.case
        after_batch = when == "batch"
        guard = {"StopOnNaN": {"after_batch": after_batch, "stop_on_inf": True}}
        hooks = [stats, guard, {"SaveEvery": {"every": "1 iterations", "keep": 3}}, {"StopAfter": {"epochs": 2}}]
        (project / "config.yaml").write_text(json.dumps(config_of(small, where, bad, hooks)))
        directory = project / f"run{number}"
        with trial:
            done = small.command("train", "-q", "config.yaml", "--output-dir", directory, cwd=project)
            with trial.telling():
                assert done.returncode == 3, done.stderr
                message = done.stderr.splitlines()[0]
                assert "StopOnNaN" in message
                assert "Traceback" not in done.stderr
                spoilt = "gradient of layer" if where == "gradient" and after_batch else where
                if where == "gradient" and not after_batch:
                    spoilt = "loss"  # of the batch behind it
                assert f"train/{spoilt}" in message
                at = {"loss": 7, "gradient": 8, "metric": 12}[where]  # SaveEvery saves after each iteration
                assert f"at iteration {7 if after_batch else at} " in message
                trace = YAML(typ="safe", pure=True).load(directory / "trace.yaml")
                assert (trace["status"], trace["exit_status"]) == ("failed", 3)
            if after_batch:
                latest = max((directory / "checkpoints").glob("it-*"))
                assert latest.name == "it-00000006"
                for tensor in load_file(latest / "model.safetensors").values():
                    assert torch.isfinite(tensor).all()


@pytest.mark.timeout(7200)
@pytest.mark.fault("a statistic that is NaN or infinite is monitored by SaveBest")
def test_a_nan_never_becomes_the_best(project, small, trials):
    (project / "bad.py").write_text(MODULE)
    stats = {"ComputeStats": {"variables": ["loss"]}}
    cases = product(("nan", "inf"), ([0], [0, 1], [1], [2], [0, 1, 2]), ("min", "max"))
    few = [
        ("nan", [0], "min"),
        ("inf", [0, 1], "max"),
        ("nan", [1], "max"),
        ("inf", [0, 1, 2], "min"),
        ("nan", [0, 1, 2], "min"),
    ]
    for number, trial in enumerate(trials(cases, small=few)):
        bad, epochs, condition = trial.case
        if bad == "inf" and condition == "max":
            bad = "-inf"
        hooks = [stats, {"bad.Spoil": {"bad": bad, "epochs": epochs}}]
        hooks += [{"SaveBest": {"condition": condition}}, {"StopAfter": {"epochs": 2}}]
        (project / "config.yaml").write_text(json.dumps(config_of(small, "", "nan", hooks)))
        directory = project / f"run{number}"
        with trial:
            done = small.command("train", "-q", "config.yaml", "--output-dir", directory, cwd=project)
            assert done.returncode == 0, done.stderr
            best = directory / "checkpoints" / "best"
            good = {0, 1, 2} - set(epochs)
            if bad == "nan" or good:
                assert best.exists() == bool(good)
            if good:
                assert json.loads((best / "manifest.json").read_text())["epoch"] in good
