"""Configs of small projects, as texts that tests write to files and as mappings."""

MAJORITY = """\
dataset: {class: Majority, n: 50}
model:
  module:
    class: torch.nn.Sequential
    args:
      - {class: torch.nn.Linear, in_features: 11, out_features: 1}
      - {class: torch.nn.Flatten, start_dim: 0}
  inputs: [x]
  outputs: [logit]
  loss: {class: torch.nn.BCEWithLogitsLoss, inputs: [logit, y]}
"""
"""The dataset and the model of a config, up to its optimizer."""


LINEAR = """\
model:
  module: {class: torch.nn.Linear, in_features: 11, out_features: 1}
  inputs: [x]
  outputs: [logit]
  loss: {class: torch.nn.MSELoss, inputs: [logit, logit]}
  optimizer: {class: SGD, lr: 0.1}
"""
"""A linear model for `Majority` whose loss is always 0."""


def linear_on_majority(**more):
    """Return a config of a linear model whose loss is always 0, with these sections."""
    model = {
        "module": {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1},
        "inputs": ["x"],
        "outputs": ["logit"],
        "loss": {"class": "torch.nn.MSELoss", "inputs": ["logit", "logit"]},
        "optimizer": {"class": "SGD", "lr": 0.1},
    }
    return {"dataset": {"class": "Majority", "n": 50}, "model": model, **more}


def linear_with(hooks):
    """Return `linear_on_majority` with these hooks, evaluated on `valid`."""
    return linear_on_majority(main_loop={"extra_streams": ["valid"]}, hooks=hooks)


def linear_on_digits(**more):
    """Return a config of a linear classifier, with these sections."""
    model = {
        "module": {"class": "torch.nn.Linear", "in_features": 64, "out_features": 10},
        "inputs": ["image"],
        "outputs": ["logits"],
        "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "label"]},
        "optimizer": {"class": "SGD", "lr": 0.1},
    }
    return {"dataset": {"class": "Digits", "flat": True}, "model": model, **more}


SEVERAL_PARTS = """
import numpy as np
import torch


class Data:
    def __init__(self):
        self.x = np.random.default_rng(0).normal(size=(37, 5)).astype(np.float32)

    def train_stream(self, ctx):
        for rows in ctx.batches(37, 8, shuffle=True):
            yield {"x": self.x[rows], "y": (self.x[rows].sum(axis=1) > 0).astype(np.int64)}


def net():
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 2))
"""
"""`parts.py`: what several ranks train on, in batches whose rows do not divide evenly, and a module with dropout."""

SEVERAL = """
seed: 3
dataset: {class: parts.Data}
model:
  module: {class: parts.net}
  inputs: [x]
  outputs: [logits]
  loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, y], reduction: none}
  optimizer: {class: Adam, lr: 0.01}
"""
"""The config for `SEVERAL_PARTS`, up to its hooks."""
