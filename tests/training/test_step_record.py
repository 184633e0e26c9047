"""The step record of a run that is interrupted or killed and resumed equals, in bytes, that of an uninterrupted one."""

import json
import random
import shutil

import numpy as np
import pytest

from emrun import create_training, read_steps, resume_training
from emrun.hook import AbstractHook
from emrun.loop import steps
from emrun.training.create import train
from tests.training.resuming import Interrupt, config_of, interrupted, result, resumed, train_with


class Losses(AbstractHook):
    """Keeps the loss that is minimised, as a hook of a user sees it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def after_batch(self, batch_data):
        if self.main_loop.training:
            self.seen.append(batch_data["loss"].mean().item())


class CopyingInterrupt(Interrupt):
    """Copies the run directory at some events, as a kill at these moments would leave it."""

    def __init__(self, moments=()):
        super().__init__()
        self.moments = moments
        self.copies = []

    def happened(self, what):
        super().happened(what)
        if len(self.events) in self.moments:
            self.main_loop.wait_for_checkpoints()  # which delete others
            place = self.main_loop.run.directory
            self.copies.append(place.with_name(f"{place.name}-{len(self.events)}"))
            shutil.copytree(place, self.copies[-1], symlinks=True)


@pytest.fixture
def short_chunks(monkeypatch):
    """Let chunks end within the epochs of five iterations, and the thinning begin soon."""
    monkeypatch.setattr(steps, "CHUNK_LENGTH", 4)
    monkeypatch.setattr(steps, "THINNING", ((8, 1), (12, 2)))
    monkeypatch.setattr(steps, "_AT_LAST", 3)


def config(epochs=3):
    found = config_of()
    hooks = [hook for hook in found["hooks"] if "StopAfter" not in hook]
    return {**found, "hooks": [*hooks, {"StopAfter": {"epochs": epochs}}]}


def trained(directory, *hooks):
    train_with(create_training(config(), output_dir=directory), *hooks)
    return result(directory)


def test_the_losses_are_those_that_a_hook_sees_bit_for_bit(project):
    hook = Losses()
    trained(project / "run", hook)
    found = read_steps(project / "run")
    assert found["loss"].tolist() == hook.seen
    assert found["iteration"].tolist() == list(range(1, 16))
    np.testing.assert_array_equal(found["learning_rate"], np.repeat([0.05, 0.025, 0.0125], 5))


def test_the_record_is_complete_when_a_run_has_been_interrupted(project, short_chunks):
    interrupted(config(), project / "run", "after_update")
    assert read_steps(project / "run")["iteration"].tolist() == [1]


@pytest.mark.parametrize("moments", [5, pytest.param(30, marks=pytest.mark.campaign)])
def test_interruptions_and_kills_at_random_moments_change_no_byte(project, short_chunks, moments):
    expected = trained(project / "straight")
    count = CopyingInterrupt()
    trained(project / "counted", count)
    drawn = random.Random(moments).sample(range(1, len(count.events) + 1), moments)
    kills = CopyingInterrupt(drawn)
    assert trained(project / "killed", kills) == expected
    for copy in kills.copies:
        resumed(copy)
        assert result(copy) == expected, copy.name
    for at in drawn:
        directory = project / f"interrupted-{at}"
        interrupted(config(), directory, at)
        resumed(directory)
        assert result(directory) == expected, at


@pytest.mark.parametrize("content", ['{"format": 2, "blocks": []}\n', "my notes\n"], ids=["newer", "foreign"])
def test_a_record_that_is_not_that_of_this_emrun_is_reported_and_left_as_it_is(project, short_chunks, content, caplog):
    directory = project / "run"
    interrupted(config(), directory, "after_update")
    (directory / "steps.jsonl").write_text(content)
    resumed(directory)
    assert "the file is left as it is, and the steps of this run are not recorded" in caplog.text
    assert (directory / "steps.jsonl").read_text() == content
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2, 3]


def test_a_record_that_was_cut_is_reported_and_continued(project, short_chunks, caplog):
    directory = project / "run"
    interrupted(config(), directory, "before_epoch 2")
    file = directory / "steps.jsonl"
    file.write_bytes(file.read_bytes()[:99])
    resumed(directory)
    assert "has lost lines since the checkpoint was saved" in caplog.text
    assert read_steps(directory)["iteration"].tolist()[-1] == 15


def test_a_run_that_is_resumed_without_recording_keeps_what_was_recorded(project, short_chunks):
    directory = project / "run"
    interrupted(config(), directory, "before_epoch 2")  # after the next batch
    train(resume_training(directory, ["main_loop.record_steps=0"]))
    assert read_steps(directory)["iteration"].tolist() == [1, 2, 3, 4, 5, 6]
