"""The short training of `emrun check` calls events and states of the user's hooks and streams, but no tracker."""

import logging
import sys

import pytest
from campaign import thinned

from emrun.config.config import load_config
from emrun.diagnosis.tryout import try_out

CODE = """
import numpy as np
import torch
from emrun import AbstractHook, TorchModel
from emrun.record.trackers import AbstractTracker

class Stream:
    left = 3
    def __init__(self, fails):
        self.fails = fails
    def __iter__(self):
        while self.left:
            self.left -= 1
            yield {"x": np.ones((4, 2), "float32"), "y": np.ones((4, 1), "float32")}
        self.left = 3
    def state_dict(self):
        return {"left": self.left}
    def load_state_dict(self, state):
        if self.fails:
            raise RuntimeError("load_state_dict of the stream")
        self.left = state["left"]

class Data:
    def __init__(self, fails=False):
        self.fails = fails
    def train_stream(self):
        return Stream(self.fails)

class Loud(AbstractHook):
    changes_batches = False
    reads = ()
    def __init__(self, event=None):
        super().__init__()
        self.event = event
    def called(self, event):
        if event == self.event:
            raise RuntimeError(event)
    def before_training(self):
        self.called("before_training")
    def after_batch(self, stream_name, batch_data):
        self.called(f"after_batch of {stream_name}")
    def after_epoch(self, epoch_id, epoch_data):
        self.called(f"after_epoch {epoch_id}")
    def after_checkpoint(self, name, directory):
        self.called("after_checkpoint")
    def state_dict(self):
        return {"seen": 1}
    def load_state_dict(self, state):
        self.called("load_state_dict")

class Sent(Loud, AbstractTracker):
    def begin(self, facts, identity):
        raise RuntimeError("sent")
    write = newest = begin

class Late(TorchModel):
    def before_training(self):
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
"""


@pytest.fixture
def tried(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "rehearsed_code.py").write_text(CODE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rehearsed_code", raising=False)

    def run(hook=None, data=None, **model):
        module = {"class": "torch.nn.Linear", "in_features": 2, "out_features": 1}
        loss = {"class": "torch.nn.MSELoss", "inputs": ["z", "y"]}
        optimizer = {"class": "SGD", "lr": 0.1}
        parts = {"module": module, "inputs": ["x"], "outputs": ["z"], "loss": loss, "optimizer": optimizer}
        config = {
            "dataset": {"class": "rehearsed_code.Data", **(data or {})},
            "model": {**parts, **model},
            "hooks": [{"StopAfter": {"epochs": 9}}, *([{f"rehearsed_code.{hook[0]}": hook[1]}] if hook else [])],
        }
        try:
            return try_out(load_config(config))
        finally:
            assert list((tmp_path / "tmp").glob("emrun*")) == []  # PyTorch has a folder of its own
            assert logging.getLogger("emrun.hooks").level == logging.NOTSET

    return run


EVENTS = ["before_training", "after_batch of train", "after_epoch 0", "after_epoch 1", "after_checkpoint"]
FEW = ["after_batch of train", "after_epoch 1", "load_state_dict", None]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("event", thinned([*EVENTS, "load_state_dict", None], FEW))
def test_events_and_states_of_hooks_and_streams_are_tried(tried, event):
    hook, data = (("Loud", {"event": event}), None) if event else (None, {"fails": True})
    with pytest.raises(RuntimeError, match=f"^{event or 'load_state_dict of the stream'}") as caught:
        tried(hook, data)
    assert any("while training on 2 batches of each stream" in note for note in caught.value.__notes__)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_trackers_are_left_out_and_a_subclass_with_a_schedule_needs_no_num_batches(tried):
    schedule = {"class": "Cosine", "warmup": "10%"}
    found = tried(("Sent", {}), **{"class": "rehearsed_code.Late", "scheduler": schedule})
    assert found["notes"] == []
