"""Models that could never be loaded again are refused before the first update; those that can be saved train.

State that no checkpoint has is named by `emrun check`.

Taken out once by hand, each made a test here fail: the comparison before the first update, the one after the zeroth
epoch, the look for what safetensors cannot hold, the own memory of expanded buffers, and, for `check`, the second run
on the batches that were seen, without which caches are named too.
"""

import json
from itertools import product

import pytest

MODELS = """
import warnings
import torch
from torch import nn
from emrun import AbstractHook

warnings.simplefilter("ignore")  # of what is new in torch, and what is old

class Net(nn.Module):
    def __init__(self, kind=""):
        super().__init__()
        self.kind, self.count = kind, 0
        self.linear = nn.Linear(11, 1)
        if kind in REGISTERED:
            self.register_buffer("b", REGISTERED[kind]())
        elif kind.startswith("becomes"):
            self.register_buffer("b", torch.zeros(1))

    def forward(self, x, y):
        self.change(x)
        return {"loss": nn.functional.binary_cross_entropy_with_logits(self.linear(x)[:, 0], y.float())}

    def change(self, x):
        kind = self.kind
        if kind == "parameter" and not hasattr(self, "w"):
            self.w = nn.Parameter(torch.ones(1))
        elif kind == "parameter of training" and self.training and not hasattr(self, "w"):
            self.w = nn.Parameter(torch.ones(1))
        elif kind == "buffer" and not hasattr(self, "w"):
            self.register_buffer("w", torch.ones(1))
        elif kind == "layer" and not hasattr(self, "w"):
            self.w = nn.Linear(2, 2)
        elif kind == "becomes larger":
            self.b = torch.zeros(len(x))
        elif kind == "becomes another dtype":
            self.b = self.b.double()
        elif kind == "becomes complex128":
            self.b = self.b.to(torch.complex128)
        elif kind == "becomes sparse":
            self.b = torch.eye(1).to_sparse()[0]

REGISTERED = {
    "complex128": lambda: torch.zeros(2, dtype=torch.complex128),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
}

class Grows(AbstractHook):
    def before_training(self):
        self.main_loop.model.module.register_buffer("grown", torch.zeros(1))

class Layers(nn.Module):
    def __init__(self, expanded=False):
        super().__init__()
        layers = nn.Linear(11, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        self.layers = nn.Sequential(*layers)
        shift = torch.full((1,), 0.5).expand(4)
        self.register_buffer("shift", shift if expanded else shift.contiguous())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, y):
        if self.shift.is_contiguous() and self.training:
            self.shift.mul_(0.9)
        self.seen += 1
        logit = self.layers(x)[:, 0] + self.shift.sum() + 1e-3 * self.seen
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logit, y.float())}

class Keeps(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(11, 1)
        self.value = {"tensor": torch.zeros(1), "list": [], "mapping": {"n": 0}, "text": ""}.get(kind, 0)
        for name in ("buffer", "constant", "rebuilt"):
            if kind.startswith(name):
                self.register_buffer("b", torch.zeros(4) if name != "rebuilt" else None, persistent=False)

    def get_extra_state(self):
        return {"value": self.value} if self.kind == "extra" else {}

    def set_extra_state(self, state):
        self.value = state.get("value", self.value)

    def forward(self, x, y):
        kind = self.kind
        if kind == "number in evaluations":
            self.value += 1
        elif kind == "rebuilt":
            self.b = x.mean() * torch.ones(len(x))
        elif kind == "longest":
            self.value = max(self.value, len(x))
        elif kind == "last" or (self.training and kind == "last of training"):
            self.value = x.mean()
        elif self.training and kind == "tensor":
            self.value = 0.9 * self.value + x.mean()
        elif self.training and kind == "list":
            self.value.append(1.0)
        elif self.training and kind == "mapping":
            self.value["n"] += 1
        elif self.training and kind == "text":
            self.value += "x"
        elif self.training and kind == "buffer":
            self.b += 1
        elif self.training and kind in ("number", "extra", "number that matters"):
            self.value += 1
        shift = self.value if kind == "number that matters" else 0
        return {"loss": nn.functional.binary_cross_entropy_with_logits(self.linear(x)[:, 0] + shift, y.float())}
"""

REFUSED = [
    "parameter",
    "parameter of training",
    "buffer",
    "layer",
    "becomes larger",
    "becomes another dtype",
    "becomes complex128",
    "becomes sparse",
    "complex128",
    "sparse",
    "sparse rows",
    "quantised",
    "grown by a hook",
]
LOST = ["number", "number in evaluations", "number that matters", "tensor", "list", "mapping", "text", "buffer"]
KEPT = ["extra", "longest", "last", "last of training", "rebuilt", "constant", "none"]
CUT = ["{iterations: %d}" % number for number in range(1, 12)]  # noqa: UP031 - braces


@pytest.fixture
def place(project, small):
    """Return a directory with the config of the small training and the models."""
    (project / "models.py").write_text(MODELS)
    config = {
        **small.config,
        "model": {"module": {"class": "models.Net"}, "optimizer": {"class": "Adam", "lr": 0.05}},
    }
    (project / "config.yaml").write_text(json.dumps(config, indent=2))
    return project


@pytest.mark.timeout(7200)
@pytest.mark.fault("a model that could be trained, but never loaded again")
def test_a_model_that_could_not_be_loaded_is_refused_before_the_first_update(place, small, trials):
    for trial in trials(product(REFUSED, ("false", "true")), small=7):
        kind, skip = trial.case
        run = f"{kind}-{skip}".replace(" ", "-")
        arguments = [f"model.module.kind={kind}", f"main_loop.skip_zeroth_epoch={skip}"]
        if kind == "grown by a hook":
            arguments.append("hooks=[models.Grows, {StopAfter: {epochs: 1}}]")
        with trial:
            done = small.command("train", "-q", "config.yaml", "--output-dir", run, *arguments, cwd=place)
            with trial.telling():
                assert done.returncode == 2, (done.returncode, done.stderr)
                assert "Traceback" not in done.stderr
                assert "module: " in done.stderr
                assert "could not load a checkpoint" in done.stderr or "cannot be saved" in done.stderr
                name = {"layer": "w.weight", "grown by a hook": "grown"}.get(kind, "")
                assert name in done.stderr
            assert "0 epochs, 0 iterations done" in done.stderr, done.stderr
            if skip == "true" or kind != "parameter of training":  # what the zeroth epoch saves of that can be loaded
                assert "no checkpoint was saved" in done.stderr, done.stderr
            assert "start again with: emrun train" in done.stderr, done.stderr


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("an expanded buffer: trained, interrupted, resumed, evaluated")
def test_an_expanded_buffer_is_trained_and_resumed_as_one_that_is_not(place, small, trials):
    def train(directory, stop, **module):
        module = json.dumps({"class": "models.Layers", **module})
        done = small.command(
            "train", "-q", "config.yaml", "--output-dir", directory, f"model.module={module}",
            f"hooks.StopAfter={stop}", cwd=place,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    train("straight", "{iterations: 12}")
    expected = small.result(place / "straight", ("latest", "best"))
    for number, trial in enumerate(trials(CUT, small=[CUT[0]])):
        stop = trial.case
        run = f"run-{number}"
        with trial:
            train(run, stop, expanded=True)
            done = small.command("resume", "-q", run, "hooks.StopAfter={iterations: 12}", cwd=place)
            assert done.returncode == 0, done.stderr
            assert small.result(place / run, ("latest", "best")) == expected
            done = small.command("eval", "-q", run, "valid", cwd=place)
            assert done.returncode == 0, done.stderr


@pytest.mark.timeout(7200)
@pytest.mark.fault("a model keeps state that no checkpoint has")
def test_check_names_the_state_that_no_checkpoint_has_and_nothing_else(place, small, trials):
    for trial in trials([*LOST, *KEPT], small=5):
        kind = trial.case
        name = "attribute 'value'" if kind != "buffer" else "buffer 'b' (persistent=False)"
        module = json.dumps({"class": "models.Keeps", "kind": kind})
        with trial, trial.telling():
            done = small.command("check", "--json", "config.yaml", f"model.module={module}", cwd=place)
            if kind == "number that matters":
                assert done.returncode == 2
                assert f"module Keeps, {name}" in done.stdout + done.stderr
                continue
            assert done.returncode == 0, done.stderr
            notes = [note for note in json.loads(done.stdout)["contract"]["notes"] if "Keeps" in note]
            assert [note.partition(" changes in training")[0] for note in notes] == (
                [f"module Keeps, {name}"] if kind in LOST else []
            )
