"""Commands whose process ends with its first update."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent.parent

PEER = """\
import sys
sys.path.insert(0, {here!r})
from runners import {name} as runner
from runners.work import Last, Work
runner.bare(Work(1, optimizer=Last))
sys.exit("no update was made")
"""

CONFIG = """\
dataset: {class: first_update.Random}
model:
  module:
    class: torch.nn.Sequential
    args:
      - {class: torch.nn.Linear, in_features: 784, out_features: 128}
      - {class: torch.nn.ReLU}
      - {class: torch.nn.Linear, in_features: 128, out_features: 10}
  inputs: [image]
  outputs: [logits]
  loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}
  optimizer: {class: SGD, lr: 0.01}
main_loop: {skip_zeroth_epoch: true}
hooks:
  - ComputeStats: {variables: [loss]}
  - LogVariables
  - first_update.Exit
  - StopAfter: {epochs: 1}
"""

CODE = """\
import os
import numpy as np
from emrun import AbstractHook

class Random:
    def train_stream(self):
        generator = np.random.default_rng(0)
        yield {"image": generator.random((32, 784), dtype="float32"), "label": generator.integers(0, 10, 32)}

class Exit(AbstractHook):
    def after_update(self):
        os._exit(0)
"""


def command(name: str, place: Path) -> list[str]:
    """Return the command for a runner; for emrun, write its config and its code into the directory."""
    if name != "emrun":
        return [sys.executable, "-W", "ignore", "-c", PEER.format(here=str(HERE), name=name)]
    (place / "config.yaml").write_text(CONFIG)
    (place / "first_update.py").write_text(CODE)
    return [sys.executable, "-m", "emrun", "train", "-q", "config.yaml"]
