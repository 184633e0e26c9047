"""SaveLatest: a checkpoint after every epoch, and what happens when it cannot be saved."""

import json
import logging

import pytest

from emrun import AbstractHook, MainLoop
from emrun.base.errors import ArgumentError, HookError, StorageError
from emrun.hooks import SaveLatest, StopAfter


class Look(AbstractHook):
    """Keeps the epoch of the checkpoint `latest` at the beginning of each epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_epoch(self):
        place = self.main_loop.run.checkpoints / "latest"
        self.seen.append(json.loads((place / "manifest.json").read_text())["epoch"] if place.exists() else None)


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits(in_docstring(SaveLatest), batch_size=500)
    assert (training.output_dir / "checkpoints" / "latest" / "model.safetensors").is_file()
    assert len([hook for hook in training.hooks if isinstance(hook, SaveLatest)]) == 1


def test_every_run_has_this_hook(train_digits):
    training = train_digits([], batch_size=500)
    assert [type(hook).__name__ for hook in training.hooks] == ["StopAfter", "SaveLatest"]


def test_after_every_epoch_the_newest_state_is_the_latest(scripted, numbers, run):
    look = Look()
    MainLoop(scripted(), numbers, [look, SaveLatest(), StopAfter(epochs=3)], run=run).run_training()
    assert look.seen == [None, 0, 1, 2]
    assert len([path for path in run.checkpoints.iterdir() if not path.is_symlink()]) == 1


def test_an_evaluation_saves_nothing(scripted, numbers, run):
    MainLoop(scripted(), numbers, [SaveLatest()], run=run).run_evaluation("valid")
    assert not run.checkpoints.exists()


def test_without_a_run_directory_it_is_an_error_at_the_start(scripted, numbers):
    with pytest.raises(HookError, match=r"SaveLatest saves checkpoints, but the main loop has no run directory"):
        MainLoop(scripted(), numbers, [SaveLatest()])


def test_a_checkpoint_that_cannot_be_saved_fails_the_training(scripted, numbers, run):
    loop = MainLoop(scripted(failures=1), numbers, [SaveLatest(), StopAfter(epochs=2)], run=run)
    with pytest.raises(StorageError, match=r"the disk is full"):
        loop.run_training()
    assert (loop.outcome.status, loop.outcome.exit_status, loop.training_epochs_done) == ("failed", 74, 0)


@pytest.mark.parametrize(("policy", "warnings"), [("warn", 2), ("ignore", 0)])
def test_the_training_continues_without_the_checkpoint(scripted, numbers, run, policy, warnings, caplog):
    look = Look()
    hooks = [look, SaveLatest(on_save_failure=policy), StopAfter(epochs=3)]
    loop = MainLoop(scripted(failures=2), numbers, hooks, run=run)
    assert loop.run_training().status == "finished"
    assert look.seen == [None, None, None, 2]
    told = [record for record in caplog.records if "no checkpoint was saved" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING] * warnings


def test_a_failed_checkpoint_leaves_the_previous_one_unchanged(scripted, numbers, run):
    class FailFrom(AbstractHook):
        def before_epoch(self, epoch_id):
            self.main_loop.model.failures = int(epoch_id in (2, 3))

    look = Look()
    hooks = [FailFrom(), look, SaveLatest(on_save_failure="ignore"), StopAfter(epochs=4)]
    MainLoop(scripted(), numbers, hooks, run=run).run_training()
    assert look.seen == [None, 0, 1, 1, 1]


def test_a_wrong_policy_is_refused_at_once():
    with pytest.raises(ArgumentError, match=r"on_save_failure: 'fail' is not one of error, warn, ignore"):
        SaveLatest(on_save_failure="fail")
