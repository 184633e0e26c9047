"""A tiny config, and what its runs leave."""

import json

from ruamel.yaml import YAML
from training import resuming

from emrun.training.create import create_training, train

CONFIG = {
    "seed": 5,
    "name": "tiny",
    "dataset": {"class": "Majority", "n": 50},
    "model": {
        "module": {
            "class": "torch.nn.Sequential",
            "args": [
                {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1},
                {"class": "torch.nn.Flatten", "start_dim": 0},
            ],
        },
        "inputs": ["x"],
        "outputs": ["logit"],
        "loss": {"class": "torch.nn.BCEWithLogitsLoss", "inputs": ["logit", "y"]},
        "optimizer": {"class": "SGD", "lr": 0.5},
    },
    "main_loop": {"extra_streams": ["valid"]},
    "hooks": [{"ComputeStats": {"variables": ["loss"]}}, "SaveBest", {"StopAfter": {"epochs": 2}}],
}


def trained(tmp_path, *overrides, config=CONFIG):
    training = create_training(config, tmp_path, overrides=overrides)
    train(training)
    return training


def finished(tmp_path, *overrides, config=CONFIG):
    """Return the directory of a run that is trained once by each process: a further one is its copy."""
    return resuming.trained(config, tmp_path / "run", *overrides)


def metrics(training):
    return metrics_in(training.output_dir)


def metrics_in(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": None} for line in lines]


def weights(training, name="latest"):
    return weights_in(training.output_dir, name)


def weights_in(directory, name="latest"):
    return (directory / "checkpoints" / name / "model.safetensors").read_bytes()


def trace(directory):
    return YAML(typ="safe", pure=True).load(directory / "trace.yaml")
