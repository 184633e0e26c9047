"""A run in 16 bits: its evaluations and the replay of a failed step have its precision, and a resume its scale."""

import json

import pytest
from training.resuming import config_of, train_with

from emrun import create_training, evaluate, resume_training
from emrun.diagnosis.replay import replay
from emrun.training.create import train

MODULE = """
import torch


class Bits(torch.nn.Module):
    fails = False

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x, y):
        logits = self.layer(x)
        if self.fails and self.training:
            raise RuntimeError(f"failed in {logits.dtype}")
        losses = 10 * torch.nn.functional.cross_entropy(logits, y, reduction="none")
        return {"loss": losses, "bits": torch.full((len(x),), torch.finfo(logits.dtype).bits)}
"""


@pytest.fixture
def config(project):
    (project / "bits.py").write_text(MODULE)
    config = config_of(extra_streams=["valid"])
    config["model"] = {
        "module": {"class": "bits.Bits"},
        "precision": "fp16",
        "optimizer": {"class": "SGD", "lr": 0.001},
        "device": "cpu",
    }
    config["hooks"] = [{"ComputeStats": {"variables": ["loss", "bits"]}}, {"StopAfter": {"epochs": 1}}]
    return config


def lines_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_evaluations_have_the_precision_and_skipped_updates_are_in_the_metrics(config, project):
    train_with(create_training(config, output_dir=project / "run"))
    zeroth, first = lines_of(project / "run")
    assert zeroth["streams"]["valid"]["bits"]["mean"] == first["streams"]["valid"]["bits"]["mean"] == 16
    assert "skipped_updates" not in zeroth["streams"]["train"]
    assert "skipped_updates" not in first["streams"]["valid"]
    assert 0 < first["streams"]["train"]["skipped_updates"] < 5
    assert evaluate(project / "run", "valid")["valid"]["bits"]["mean"] == 16
    assert evaluate(project / "run", "valid", ["model.precision=32"])["valid"]["bits"]["mean"] == 32


@pytest.mark.campaign
def test_a_resume_may_change_the_precision_and_begins_with_a_new_scale(config, project, caplog):
    config["model"]["precision"] = "bf16"
    train_with(create_training(config, output_dir=project / "run"))
    training = resume_training(project / "run", ["model.precision=fp16", "hooks.StopAfter.epochs=2"])
    assert "the checkpoint has no scale of the loss, which fp16 needs: the scale begins anew" in caplog.text
    train_with(training)
    assert [line["streams"]["train"].get("skipped_updates", -1) > 0 for line in lines_of(project / "run")[1:]] == [
        False,
        True,
    ]


def test_the_replay_of_a_failed_step_has_the_precision(config, project):
    training = create_training(config, output_dir=project / "run")
    module = type(training.model.module)
    module.fails = True
    try:
        with pytest.raises(RuntimeError, match=r"failed in torch\.float16"):
            train(training)
        found = replay(project / "run")
    finally:
        module.fails = False
    assert found.reproduced
    assert "torch.float16" in found.message
