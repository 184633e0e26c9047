"""Runs with several optimizers, or one with other weights for evaluations: what they save, and what they record."""

import pytest
import torch
from safetensors.torch import load_file
from training.resuming import config_of, interrupted, resumed

from emrun import load_run, read_steps
from emrun.errors import StateError
from emrun.training.resume import resume_training


def config_with(optimizer, scheduler=None):
    config = config_of(extra_streams=["valid"])
    config["model"] |= {"optimizer": optimizer, "scheduler": scheduler}
    return config


SEVERAL = {
    "first": {"class": "AdamW", "lr": 0.05, "match": r"layers\.[01]", "no_decay": "biases_and_norms"},
    "last": {"class": "SGD", "lr": 0.1, "momentum": 0.9, "match": r"layers\.3"},
}
SCHEDULES = {
    "first": {"class": "Cosine", "warmup": "2 updates"},
    "last": {"class": "StepLR", "step_size": 1, "gamma": 0.5},
}
OF_TWO_MODES = {"class": "schedulefree.AdamWScheduleFree", "lr": 0.05, "warmup_steps": 2}


def test_an_evaluation_and_a_checkpoint_have_the_weights_for_evaluations(project):
    interrupted(config_with(OF_TWO_MODES), project / "run", None)
    place = project / "run" / "checkpoints" / "latest"
    saved, state = load_file(place / "model.safetensors"), torch.load(place / "state.pt", weights_only=True)["model"]
    kept = state["training_weights"]
    assert state["optimizer"]["state"]["param_groups"][0]["train_mode"] is False
    model = load_run(project / "run", "latest").model
    assert not torch.equal(saved["layers.0.weight"], kept[0])
    assert torch.equal(model.module.layers[0].weight, saved["layers.0.weight"])


def test_learning_rates_have_the_names_of_the_optimizers(project):
    interrupted(config_with(SEVERAL, SCHEDULES), project / "run", "after_epoch 2")
    resumed(project / "run")
    steps = read_steps(project / "run")
    assert [name for name in steps if "rate" in name] == [
        "learning_rate_first", "learning_rate_first_1", "learning_rate_last",
    ]  # fmt: skip
    assert steps["learning_rate_first"][:3].tolist() == pytest.approx([0.025, 0.05, 0.05])
    assert steps["learning_rate_last"].tolist() == [0.1] * 5 + [0.05] * 5
    assert "learning_rate_last" in (project / "run" / "training.csv").read_text()


def test_a_checkpoint_of_other_optimizers_is_refused(project):
    config = config_with({"class": "SGD", "lr": 0.1})
    interrupted(config, project / "run", "after_epoch 1")
    override = ["~model.optimizer", "model.optimizer={all: {class: SGD, match: layers, lr: 0.1}}"]
    with pytest.raises(StateError, match=r"model.optimizer has all, but had no names; a resume cannot change that"):
        resume_training(project / "run", overrides=[*override, "hooks.StopAfter.epochs=3"])
