"""What the tests of windows and micro batches share."""

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """A small network with a loss for each example, or their mean, or token weights."""

    def __init__(self, kind="examples"):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.kind = kind

    def forward(self, x, y, tokens=None):
        losses = ((self.layers(x).squeeze(1) - y) ** 2).float()
        if self.kind == "mean":
            return {"loss": losses.mean()}
        if self.kind == "loss_weight":
            return {"loss": losses, "scalar": losses.detach().mean(), "loss_weight": tokens}
        return {"loss": losses} if self.kind == "examples" else {"loss": losses, "example_weight": tokens}


def batches(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.random((size, 3), np.float32),
            "y": rng.random(size, np.float32),
            "tokens": rng.integers(1, 9, size).astype(np.float32),
        }
        for size in sizes
    ]


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
