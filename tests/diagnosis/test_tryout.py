"""Trying out a config does not change the process; tests/cli/test_check.py tests the rest with the command."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from emrun.base.errors import StateError
from emrun.config.config import load_config
from emrun.diagnosis.tryout import try_out

ROOT = Path(__file__).parents[2]


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_no_random_state_changes_and_no_file_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(ROOT / "sample_configs" / "digits_convnet.yaml", ["deterministic=true"])
    before = states()
    found = try_out(config)
    assert states() == before
    assert list(Path().iterdir()) == []
    assert not torch.are_deterministic_algorithms_enabled()
    assert found["streams"]["test"]["runs"] == "not used in training"


def test_a_mistake_that_is_found_leaves_no_temporary_file(tmp_path, monkeypatch):
    (tmp_path / "forgetful_model.py").write_text(
        "import torch\n"
        "class Forgetful(torch.nn.Linear):\n"
        "    steps = 0\n"
        "    def forward(self, x, y):\n"
        "        self.steps += self.training\n"
        "        return {'loss': super().forward(x)[:, 0] - y + self.steps}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    config = {
        "dataset": {"class": "Majority"},
        "model": {
            "module": {"class": "forgetful_model.Forgetful", "in_features": 11, "out_features": 1},
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "hooks": [{"StopAfter": {"epochs": 1}}],
    }
    with pytest.raises(StateError, match="a checkpoint does not restore the model exactly"):
        try_out(load_config(config))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_same_config_gives_the_same_contract(tmp_path):
    config = load_config(ROOT / "sample_configs" / "majority.yaml")
    one, other = try_out(config), try_out(config)
    for found in (one, other):
        del found["seconds_per_epoch"], found["memory"]
    assert one == other


def test_shared_parameters_count_once(tmp_path, monkeypatch):
    (tmp_path / "tied_model.py").write_text(
        "import torch\n"
        "class Tied(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(11, 11), torch.nn.Linear(11, 11, bias=False)\n"
        "        self.b.weight = self.a.weight\n"
        "        self.a.bias.requires_grad = False\n"
        "    def forward(self, x, y):\n"
        "        return {'loss': self.b(self.a(x)).mean(1) - y}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    optimizer = {"class": "SGD", "lr": 0.1}
    config = {
        "dataset": {"class": "Majority"},
        "model": {"module": {"class": "tied_model.Tied"}, "optimizer": optimizer},
        "hooks": [{"StopAfter": {"epochs": 1}}],
    }
    (row,) = try_out(load_config(config))["parameters"]
    assert (row["module"], row["count"], row["trained"]) == ("a", 132, 121)


def test_the_groups_of_each_optimizer_are_there_with_their_rates_and_parameters():
    config = {
        "dataset": {"class": "Majority"},
        "model": {
            "module": {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1},
            "inputs": ["x"],
            "outputs": ["loss"],
            "optimizer": {
                "weights": {"class": "AdamW", "lr": 0.5, "match": "weight"},
                "others": {"class": "Rprop", "lr": 0.1, "match": "bias"},
            },
            "scheduler": {"class": "Constant", "warmup": "5 updates"},
        },
        "main_loop": {"on_unused_sources": "ignore"},
        "hooks": [{"StopAfter": {"epochs": 1}}],
    }
    found = try_out(load_config(config))
    assert {"optimizer weights", "optimizer others"} <= set(found["memory"])
    first, second = found["parameter_groups"]
    assert (first["optimizer"], first["class"], first["group"]) == ("weights", "AdamW", 0)
    assert (first["lr"], first["weight_decay"], first["parameters"], first["count"]) == (0.5, 0.01, ["weight"], 11)
    assert (second["lr"], second["weight_decay"], second["parameters"]) == (0.1, None, ["bias"])
