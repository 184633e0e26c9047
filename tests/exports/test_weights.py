"""Weights of safetensors and adapters, loaded into their class where emrun cannot be imported."""

import json

import pytest
import torch
from campaign import thinned
from exports.forked import let_fork
from safetensors.torch import load_file
from training.tiny import CONFIG, trained

import emrun
from emrun.base.errors import ExportError

PARTS = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.embedding = nn.Embedding(2, width)
        self.last = nn.Linear(width, 2, bias=False)
        self.last.weight = self.embedding.weight
        self.register_buffer("cache", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return {"logit": self.last(self.norm(self.first(x)).relu())[:, 0]}


class Drawn(Tied):
    def __init__(self, width):
        super().__init__(width)
        self.shift = torch.randn(())  # not a buffer, so that no file has it

    def forward(self, x):
        return {"logit": super().forward(x)["logit"] + self.shift}


class InHalf(Tied):
    def __init__(self, width):
        super().__init__(width)
        self.bfloat16()


class Parametrized(Tied):
    def __init__(self, width):
        super().__init__(width)
        nn.utils.parametrizations.weight_norm(self.first)


class Extra(Tied):
    def get_extra_state(self):
        return {"of": 1}

    def set_extra_state(self, state):
        pass


class Named(Parametrized):
    def __init__(self, width, token):
        super().__init__(width)


class DrawnAndParametrized(Drawn):
    def __init__(self, width):
        super().__init__(width)
        nn.utils.parametrizations.weight_norm(self.first)


class Noisy(Tied):
    def forward(self, x):
        return {"logit": super().forward(x)["logit"] + torch.rand(len(x))}
"""


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return a function that trains a module of the name, with averages of its weights."""
    place = tmp_path_factory.mktemp("weights")
    (place / "my_weights.py").write_text(PARTS)
    hooks = ["ComputeStats", {"AverageWeights": {"decay": 0.5}}, {"StopAfter": {"epochs": 1}}]

    def run(name, **more):
        module = {"class": f"my_weights.{name}", "width": 7, **more}
        model = {**CONFIG["model"], "module": module}
        model.pop("outputs")
        config = {**CONFIG, "model": model, "hooks": hooks, "code_directory": str(place)}
        return trained(place, f"name={name}", config=config).output_dir

    return run


@pytest.mark.parametrize(
    ("name", "where", "forks"),
    thinned(
        [
            *(("Tied", "without emrun", forks) for forks in (True, False)),
            ("InHalf", "without emrun", False),
            ("Parametrized", "in this process", True),
        ],
        [("Tied", "without emrun", True), ("Parametrized", "in this process", True)],
    ),
)
def test_weights_are_loaded_strictly_into_their_class(run_of, tmp_path, monkeypatch, warm, name, where, forks):
    run = run_of(name)
    if forks:
        let_fork(monkeypatch, warm)
    made = emrun.export(run, to="safetensors", output=tmp_path / "out", license="mit")
    assert made.files == ["model.safetensors", "export.json", "README.md"]
    facts = json.loads((tmp_path / "out" / "export.json").read_text())
    assert where in facts["comparison"]["where"]
    (found,) = facts["comparison"]["differences"].values()
    assert found["largest"] <= found["tolerance"]
    assert (facts["class"], facts["module"]) == (f"my_weights.{name}", {"class": f"my_weights.{name}", "width": 7})
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["last.weight"], weights["embedding.weight"])
    assert "cache" not in weights
    saved = load_file(run / "checkpoints" / "latest" / "model.safetensors")
    assert all(torch.equal(weights[key], each) for key, each in saved.items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "load_state_dict" in card
    assert "`preparation` of `export.json` says how" in card


def test_values_of_the_environment_are_not_given_away(run_of, tmp_path, monkeypatch):
    monkeypatch.setenv("EXPORT_TOKEN", "hf_not-for-others")
    place = emrun.export(run_of("Named", token="${env:EXPORT_TOKEN}"), to="safetensors", output=tmp_path / "out").place
    text = (place / "export.json").read_text()
    assert "hf_not" not in text + (place / "README.md").read_text()
    assert json.loads(text)["module"]["token"] == "${env:EXPORT_TOKEN}"


DIFFERS = "differs by .* on a batch of stream 'valid', and .* uses what is neither a parameter nor"
REFUSED = [
    ("DrawnAndParametrized", DIFFERS),  # cannot be pickled, and so is loaded in this process
    ("Drawn", DIFFERS),
    ("Noisy", "forward draws random numbers"),
    ("Extra", "outside of emrun, the weights cannot be loaded: .*_extra_state"),
]


@pytest.mark.parametrize(("name", "message"), thinned(REFUSED, REFUSED[:1]))
def test_what_the_weights_do_not_have_is_refused_and_nothing_is_left(run_of, tmp_path, name, message):
    with pytest.raises(ExportError, match=message):
        emrun.export(run_of(name), to="safetensors", output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_adapters_is_refused(run_of, tmp_path):
    with pytest.raises(ExportError, match="Tied has no adapter of peft; --to safetensors has all weights"):
        emrun.export(run_of("Tied"), to="adapter", output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
