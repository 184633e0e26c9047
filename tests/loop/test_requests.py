"""What ends a training: terminations, errors and signals."""

import logging
import os
import signal
import threading

import pytest
from doubles import Doubler, SixExamples, loop_of, names, recording_hook, trained

from emrun import AbstractHook, MainLoop, TrainingAborted, TrainingTerminated
from emrun.base.errors import ArgumentError
from emrun.hook import EVENTS
from emrun.hooks import StopAfter
from emrun.storage.run import Run

# this model makes no updates and no checkpoints; tests/models/step/test_updater.py and test_saving.py have their events
ENDING_EVENTS = [
    event
    for event in EVENTS
    if event
    not in ("register_mainloop", "before_update", "after_update", "after_checkpoint", "on_error", "after_training")
]


@pytest.mark.parametrize("event", ENDING_EVENTS)
def test_a_termination_reaches_every_hook_and_ends_the_training(event):
    first, second = recording_hook(**{event: TrainingTerminated(event)}), recording_hook()
    loop = loop_of(first, second)
    outcome = loop.run_training()
    assert names(first) == names(second)
    assert event in names(second)
    assert second.events[-1] == ("after_training", {"success": True})
    assert (outcome.status, outcome.reason, outcome.exit_status) == ("finished", event, 0)


def test_after_a_termination_at_the_end_of_an_epoch_the_profile_still_comes():
    hook = recording_hook(after_epoch=TrainingTerminated)
    loop_of(hook).run_training()
    assert names(hook)[-3:] == ["after_epoch", "after_epoch_profile", "after_training"]


def test_the_reasons_of_several_hooks_are_all_given():
    loop = loop_of(
        recording_hook(after_batch=TrainingTerminated("a")), recording_hook(after_batch=TrainingTerminated("b"))
    )
    assert loop.run_training().reason == "a; b"


def test_a_termination_in_a_batch_leaves_the_epoch_uncounted():
    loop = loop_of(StopAfter(iterations=2), extra_streams=["valid"], skip_zeroth_epoch=True)
    loop.run_training()
    assert (loop.training_epochs_done, loop.iterations_done) == (0, 2)
    assert [name for name, _, _ in loop.model.calls] == ["train", "train", "valid", "valid"]


@pytest.mark.parametrize("event", ENDING_EVENTS)
def test_any_other_exception_ends_the_training_at_once(event):
    error = RuntimeError("broken")
    first, second = recording_hook(**{event: error}), recording_hook()
    loop = loop_of(first, second)
    with pytest.raises(RuntimeError, match="broken") as caught:
        loop.run_training()
    assert caught.value is error
    assert event not in names(second)
    for hook in (first, second):
        assert hook.events[-2:] == [("on_error", {"error": error}), ("after_training", {"success": False})]
    assert (loop.outcome.status, loop.outcome.exit_status) == ("failed", 1)
    assert loop.outcome.reason == "RuntimeError: broken"


def test_an_abort_fails_with_exit_status_3():
    loop = loop_of(recording_hook(after_batch=TrainingAborted("loss is NaN")))
    with pytest.raises(TrainingAborted):
        loop.run_training()
    assert (loop.outcome.status, loop.outcome.exit_status, loop.outcome.reason) == ("failed", 3, "loss is NaN")


def test_a_model_that_cannot_tell_its_loss_fails_before_the_last_checkpoint_and_hooks_hear_of_the_end(tmp_path):
    class Mute(Doubler):
        is_mute = False

        def step_values(self):
            if self.is_mute:
                raise ValueError("no loss")
            return {}

    class End(AbstractHook):
        def after_batch(self):
            if self.main_loop.iterations_done == 2:
                self.main_loop.model.is_mute = True
                raise TrainingTerminated

    hook, run = recording_hook(), Run(tmp_path)
    with pytest.raises(ValueError, match="no loss"):
        MainLoop(Mute(), SixExamples(), [End(), hook], run=run, record_steps=0).run_training()
    assert names(hook)[-2:] == ["on_error", "after_training"]
    assert "status: failed" in (tmp_path / "trace.yaml").read_text()


def test_after_training_of_every_hook_runs_and_the_first_error_is_raised(caplog):
    error = ValueError("first")
    hooks = [recording_hook(after_training=each) for each in (error, ValueError("second"))]
    last = recording_hook()
    with pytest.raises(ValueError, match="first") as caught:
        trained(*hooks, last)
    assert caught.value is error
    assert names(last)[-1] == "after_training"
    assert "second" in caplog.text


@pytest.mark.parametrize("event", ENDING_EVENTS)
def test_the_first_error_counts_when_after_training_fails_too(event):
    hook = recording_hook(**{event: RuntimeError("cause"), "after_training": ValueError("late")})
    with pytest.raises(RuntimeError, match="cause"):
        loop_of(hook, recording_hook()).run_training()


def test_an_error_in_on_error_does_not_hide_the_cause(caplog):
    hooks = [recording_hook(after_batch=RuntimeError("cause"), on_error=ValueError("late")), recording_hook()]
    with pytest.raises(RuntimeError, match="cause"):
        loop_of(*hooks).run_training()
    assert "on_error" in names(hooks[1])
    assert "late" in caplog.text


def test_outcome_is_there_in_after_training():
    seen = []

    class Look(AbstractHook):
        def after_training(self, success):
            seen.append((success, self.main_loop.outcome.reason))

    trained(Look())
    assert seen == [(True, "1 epoch done (StopAfter epochs: 1)")]


def test_a_failed_training_can_be_followed_by_a_good_one_in_the_same_process(patient):
    before, threads = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)], {*threading.enumerate()}
    with pytest.raises(RuntimeError):
        loop_of(recording_hook(after_batch=RuntimeError("broken")), buffer=2).run_training()
    trained(buffer=2)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert {*threading.enumerate()} <= threads  # those of other tests may end


@pytest.mark.parametrize("event", ["before_batch", "after_batch"])
def test_a_termination_in_a_batch_ends_the_training_after_the_batch(event):
    class End(AbstractHook):
        def end(self):
            if self.main_loop.training and self.main_loop.iterations_done == (1 if event == "before_batch" else 2):
                raise TrainingTerminated("enough")

    setattr(End, event, lambda self: self.end())
    hook = recording_hook()
    loop = loop_of(End(), hook, skip_zeroth_epoch=True)
    loop.run_training()
    assert loop.iterations_done == 2  # else the batch would be missing after a resume
    assert names(hook)[-2:] == ["after_batch", "after_training"]


# interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("buffer", [0, 2])
def test_a_signal_ends_the_training_after_the_current_batch(number, buffer, patient):
    class Interrupt(AbstractHook):
        def before_batch(self):
            if self.main_loop.iterations_done == 1:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    hook = recording_hook()
    loop = loop_of(Interrupt(), hook, buffer=buffer, skip_zeroth_epoch=True)
    outcome = loop.run_training()
    assert loop.iterations_done == 2
    assert names(hook)[-2:] == ["after_batch", "after_training"]
    assert (outcome.status, outcome.exit_status, outcome.signal_number) == ("interrupted", 128 + number, number)
    assert signal.getsignal(number) is before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("emrun-read")]


def test_a_signal_ends_a_wait_for_the_reader():
    waiting, first_done, release = threading.Event(), threading.Event(), threading.Event()

    class Stuck(SixExamples):
        def train_stream(self):
            yield {"x": [1]}
            waiting.set()
            release.wait()
            yield {"x": [2]}

    class Tell(AbstractHook):
        def after_batch(self):
            first_done.set()

    loop = loop_of(Tell(), dataset=Stuck(), buffer=1, skip_zeroth_epoch=True)

    def interrupt():
        waiting.wait()
        first_done.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        outcome = loop.run_training()
    finally:
        release.set()
        thread.join()
    assert outcome.status == "interrupted"
    assert loop.iterations_done == 1


def test_a_signal_in_the_zeroth_epoch_ends_it():
    class Interrupt(AbstractHook):
        def after_batch(self):
            os.kill(os.getpid(), signal.SIGTERM)

    loop = loop_of(Interrupt())
    assert loop.run_training().status == "interrupted"
    assert len(loop.model.calls) == 1


class SendAt(AbstractHook):
    """Sends a signal after an iteration of the training, or after the first batch of an evaluated stream."""

    def __init__(self, number, iteration, stream="train"):
        super().__init__()
        self.number, self.iteration, self.stream = number, iteration, stream

    def after_batch(self, stream_name):
        if (self.main_loop.iterations_done, stream_name) == (self.iteration, self.stream):
            os.kill(os.getpid(), self.number)
            self.iteration = -1


@pytest.mark.parametrize("buffer", [0, 2])
@pytest.mark.parametrize(
    ("numbers", "epochs", "iterations", "reason"),
    [
        ([signal.SIGINT], 2, 6, "SIGINT"),
        ([signal.SIGTERM], 1, 4, "SIGTERM"),
        ([signal.SIGINT, signal.SIGINT], 1, 4, "SIGINT"),
        ([signal.SIGINT, signal.SIGTERM], 1, 4, "SIGTERM"),
    ],
)
def test_with_on_interrupt_epoch_a_first_sigint_ends_after_the_epoch(
    buffer, caplog, numbers, epochs, iterations, reason
):
    caplog.set_level(logging.INFO)
    hook = recording_hook()
    sends = [SendAt(each, 4) for each in numbers]
    loop = loop_of(*sends, hook, buffer=buffer, on_interrupt="epoch", extra_streams=["valid"], skip_zeroth_epoch=True)
    outcome = loop.run_training()
    assert (loop.training_epochs_done, loop.iterations_done) == (epochs, iterations)
    assert (outcome.status, outcome.reason) == ("interrupted", f"interrupted by {reason}")
    ends_epoch = iterations == 6
    assert (names(hook)[-3:] == ["after_epoch", "after_epoch_profile", "after_training"]) == ends_epoch
    message = "SIGINT: the training ends after this epoch; SIGTERM or a second signal ends it after a batch"
    assert caplog.messages.count(message) == ends_epoch


def test_with_on_interrupt_epoch_a_signal_still_ends_an_evaluation_at_once():
    loop = loop_of(SendAt(signal.SIGINT, 0, "valid"), on_interrupt="epoch")
    with pytest.raises(TrainingTerminated, match="interrupted by SIGINT"):
        loop.run_evaluation("valid")
    assert len(loop.model.calls) == 1


@pytest.mark.parametrize(("iteration", "stream"), [(2, "train"), (3, "valid"), (0, "valid")])
def test_sigusr1_saves_the_latest_checkpoint_and_training_continues(tmp_path, iteration, stream, caplog):
    caplog.set_level(logging.INFO)
    seen = []

    class Look(AbstractHook):
        def before_batch(self):
            latest = tmp_path / "checkpoints" / "latest"
            seen.append(latest.readlink().name if latest.exists() else None)

    before = signal.getsignal(signal.SIGUSR1)
    loop = trained(SendAt(signal.SIGUSR1, iteration, stream), Look(), run=Run(tmp_path), extra_streams=["valid"])
    assert loop.outcome.status == "finished"
    assert [name for name in dict.fromkeys(seen) if name is not None] == [f"it-{iteration:08d}"]
    assert f"SIGUSR1: saving a checkpoint at iteration {iteration}" in caplog.messages
    assert signal.getsignal(signal.SIGUSR1) is before


def test_sigusr1_without_a_run_directory_only_warns(caplog):
    assert trained(SendAt(signal.SIGUSR1, 2)).outcome.status == "finished"
    assert "SIGUSR1: no checkpoint is saved, because no training with a run directory is running" in caplog.messages


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, (75, None)), (signal.SIGINT, (128 + signal.SIGINT, signal.SIGINT))]
)
def test_preempt_exit_code_is_the_exit_status_after_sigterm_only(number, expected):
    outcome = loop_of(SendAt(number, 2), preempt_exit_code=75).run_training()
    assert (outcome.status, outcome.exit_status, outcome.signal_number) == ("interrupted", *expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_interrupt": "batches"}, "on_interrupt: 'batches' is not one of batch, epoch"),
        *(({"preempt_exit_code": code}, "is not an exit status; use a whole number from 0 to 255") for code in (
            -1, 256, True, 7.5, "75")),
    ],
)  # fmt: skip
def test_wrong_arguments_about_signals_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        loop_of(**arguments)
