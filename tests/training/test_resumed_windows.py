"""A run whose updates have several batches, ended by a signal at any event and resumed."""

import shutil
import sys

import numpy as np
import pytest
import torch
from training.resuming import FEW_HOOKS, config_of, interrupted, result, resumed, train_with

from emrun import AbstractHook, create_training, read_steps
from emrun.diagnosis.replay import replay
from emrun.training.create import train


def config_with_windows(**model):
    config = config_of(hooks=FEW_HOOKS, extra_streams=["valid"])
    config["model"]["accumulate"] = 2  # windows of 2, 2 and 1 batches
    config["model"]["scheduler"] = {"class": "Cosine", "warmup": "2 updates"}
    config["model"] |= model
    config["hooks"] = [*config["hooks"], {"SaveEvery": {"every": "3 updates", "keep": 1, "model_name": "update"}}]
    return config


@pytest.mark.campaign
@pytest.mark.parametrize(("model", "step"), [
    ({}, 40),
    pytest.param({}, 1, marks=pytest.mark.campaign),
    pytest.param({"micro_batch_size": 2}, 3, marks=pytest.mark.campaign),
])  # fmt: skip
def test_a_resume_is_exact_from_every_event(project, model, step):
    events = interrupted(config_with_windows(**model), project / "straight", None)
    expected = result(project / "straight")
    assert expected["loop"]["updates_done"] == 6
    assert "update-10" in expected["names"]  # of the short window that ends the last epoch
    first = events.index("before_epoch 1")
    for at in range(first, len(events), step):
        interrupted(config_with_windows(**model), project / "run", at + 1)
        state = torch.load(project / "run" / "checkpoints" / "latest" / "state.pt", weights_only=True)
        done = state["loop"]
        assert done["iterations_done"] in (0, 2, 4, 5, 7, 9, 10), events[at]
        resumed(project / "run")
        assert result(project / "run") == expected, events[at]
        shutil.rmtree(project / "run")


def test_a_checkpoint_that_is_requested_within_a_window_is_saved_at_its_end(project):
    config = config_with_windows()
    config["hooks"] = [{"SaveEvery": {"every": "1 iterations"}}, {"StopAfter": {"epochs": 1}}]
    interrupted(config, project / "run", None)
    checkpoints = project / "run" / "checkpoints"
    saved = {path.name: path.resolve().name for path in checkpoints.iterdir() if path.is_symlink()}
    assert saved["iteration-2"] == "it-00000002"
    assert saved["iteration-4"] == "it-00000004"
    assert saved["iteration-5"] == "it-00000005"
    assert "iteration-1" not in saved
    assert "iteration-3" not in saved


class Norm(AbstractHook):
    """Records a value with each update."""

    def before_update(self, model):
        self.main_loop.record("norm", 100 * self.main_loop.updates_done)


def test_the_rows_of_a_window_have_its_learning_rate_and_the_last_one_what_hooks_record_at_its_update(project):
    training = create_training(config_with_windows(), output_dir=project / "run")
    train_with(training, Norm())
    steps = read_steps(project / "run")
    assert steps["learning_rate"][:6].tolist() == [0.025, 0.025, 0.05, 0.05, 0.05, steps["learning_rate"][6]]
    assert steps["learning_rate"][5] < 0.05
    given = [None if np.isnan(value) else value for value in steps["norm"]]
    assert given == [None, 0, None, 100, 200, None, 300, None, 400, 500]


class FailsAtAnUpdate(AbstractHook):
    def before_update(self, model, optimizer):
        if self.main_loop.updates_done == 2:  # the last window of the epoch, of one batch
            raise RuntimeError("no more updates")


def test_a_failure_in_the_update_of_a_window_is_replayed(project):
    (project / "fails.py").write_text("from tests_of_windows import FailsAtAnUpdate  # noqa: F401\n")
    sys.modules["tests_of_windows"] = sys.modules[__name__]
    config = config_with_windows()
    config["hooks"] = [{"fails.FailsAtAnUpdate": {}}, {"StopAfter": {"epochs": 1}}]
    training = create_training(config, output_dir=project / "run")
    with pytest.raises(RuntimeError, match="no more updates"):
        train(training)
    found = replay(project / "run")
    del sys.modules["tests_of_windows"]
    assert any("the batch makes an update alone" in note for note in found.notes)
    assert found.error is None or found.reproduced
    assert (found.capsule.step.iteration, found.capsule.step.batch) == (4, 4)
