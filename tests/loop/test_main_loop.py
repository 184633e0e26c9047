"""The main loop, with models and hooks that record what they get."""

import json
import logging
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch

from emrun import AbstractHook, AbstractModel, MainLoop, TrainingAborted, TrainingTerminated
from emrun.errors import ArgumentError, HookError, StreamError, UsageError
from emrun.hook import EVENTS
from emrun.hooks import StopAfter
from emrun.loop.state import Phase
from emrun.storage.run import Run
from emrun.storage.state_file import load_state
from emrun.storage.trace import read_trace


class Model(AbstractModel):
    """Returns its input doubled and remembers how it was called."""

    input_names = ("x",)
    output_names = ("doubled",)

    def __init__(self):
        self.calls = []

    def run(self, batch, train, stream):
        self.calls.append((stream, train, list(batch["x"])))
        return {"doubled": [2 * value for value in batch["x"]]}

    def save(self, directory):
        (directory / "weights").write_text(str(len(self.calls)))

    def load(self, directory):
        pass


class Data:
    """Three train batches, two valid batches, one test batch, of two examples each."""

    def __init__(self):
        self.passes = []

    def train_stream(self, ctx):
        self.passes.append(ctx.epoch)
        for rows in ctx.batches(6, 2):
            yield {"x": rows.tolist()}

    def valid_stream(self):
        yield {"x": [10, 11]}
        yield {"x": [12, 13]}

    def test_stream(self):
        yield {"x": [20, 21]}


def recording_hook(**raising):
    """Return a hook that listens to every event and raises what `raising` gives for its name."""

    class Recorder(AbstractHook):
        def __init__(self):
            super().__init__()
            self.events = []

    def listen(event):
        def method(self, **arguments):
            self.events.append((event, arguments))
            if event in raising:
                error = raising[event]
                raise error(event) if isinstance(error, type) else error

        return method

    for event in EVENTS:
        if event != "register_mainloop":
            setattr(Recorder, event, listen(event))
    return Recorder()


def names(hook):
    return [name for name, _ in hook.events]


def loop_of(*hooks, model=None, dataset=None, **arguments):
    return MainLoop(model or Model(), dataset or Data(), hooks, **arguments)


def trained(*hooks, epochs=1, **arguments):
    loop = loop_of(*hooks, StopAfter(epochs=epochs), **arguments)
    loop.run_training()
    return loop


def test_the_zeroth_epoch_evaluates_and_the_others_train():
    loop = trained(extra_streams=["valid"])
    train = [("train", True, [0, 1]), ("train", True, [2, 3]), ("train", True, [4, 5])]
    valid = [("valid", False, [10, 11]), ("valid", False, [12, 13])]
    assert loop.model.calls == [(name, False, x) for name, _, x in train] + valid + train + valid


def test_the_zeroth_epoch_can_be_skipped():
    loop = trained(skip_zeroth_epoch=True)
    assert [train for _, train, _ in loop.model.calls] == [True] * 3


def test_stop_after_zero_epochs_evaluates_once():
    loop = trained(epochs=0, extra_streams=["valid"])
    assert [name for name, _, _ in loop.model.calls] == ["train"] * 3 + ["valid"] * 2
    assert loop.training_epochs_done == 0


def test_events_come_in_order():
    hook = recording_hook()
    trained(hook, extra_streams=["valid"], skip_zeroth_epoch=True)
    batch = ["before_batch", "after_batch"]
    streams = [*batch * 3, "after_stream", *batch * 2, "after_stream"]
    epoch = ["before_epoch", *streams, "after_epoch", "after_epoch_profile"]
    assert names(hook) == ["before_training", *epoch, "after_training"]


def test_epoch_ids_count_training_epochs_from_one():
    hook = recording_hook()
    trained(hook, epochs=2)
    ids = [(name, arguments["epoch_id"]) for name, arguments in hook.events if "epoch_id" in arguments]
    assert ids == [
        (name, epoch) for epoch in (0, 1, 2) for name in ("before_epoch", "after_epoch", "after_epoch_profile")
    ]


def test_the_counter_grows_before_after_epoch_and_after_the_extra_streams():
    seen = []

    class Count(AbstractHook):
        def after_stream(self, stream_name):
            seen.append((stream_name, self.main_loop.training_epochs_done))

        def after_epoch(self):
            seen.append(("epoch", self.main_loop.training_epochs_done))

    trained(Count(), extra_streams=["valid"], skip_zeroth_epoch=True)
    assert seen == [("train", 0), ("valid", 0), ("epoch", 1)]


def test_epoch_data_is_keyed_by_the_streams_in_order_and_shared():
    seen = []

    class Write(AbstractHook):
        def after_epoch(self, epoch_data):
            epoch_data["valid"]["found"] = 1

    class Read(AbstractHook):
        def after_epoch(self, epoch_data):
            seen.append(epoch_data)

    trained(Write(), Read(), epochs=0, extra_streams=["valid"])
    assert seen == [{"train": {}, "valid": {"found": 1}}]


def test_batch_data_has_sources_and_outputs_and_is_shared_in_order():
    seen = []

    class Change(AbstractHook):
        def after_batch(self, batch_data):
            batch_data["sum"] = sum(batch_data["doubled"])

    class See(AbstractHook):
        def after_batch(self, stream_name, batch_data):
            seen.append((stream_name, batch_data))

    with loop_of(Change(), See()) as loop:
        loop.epoch(eval_streams=["test"])
    assert seen == [("test", {"x": [20, 21], "doubled": [40, 42], "sum": 82})]


def test_training_is_true_in_training_passes_only():
    seen = []

    class Look(AbstractHook):
        def after_batch(self, stream_name):
            seen.append((stream_name, self.main_loop.training))

    trained(Look(), extra_streams=["test"])
    assert seen == [("train", False)] * 3 + [("test", False)] + [("train", True)] * 3 + [("test", False)]


def test_a_fixed_epoch_size_continues_one_iterator_over_the_epochs():
    loop = trained(epochs=3, fixed_epoch_size=2, skip_zeroth_epoch=True)
    assert [x[0] for _, _, x in loop.model.calls] == [0, 2, 4, 0, 2, 4]
    assert loop.iterations_done == 6


def test_the_zeroth_epoch_does_not_move_the_position_of_a_fixed_size_training():
    loop = trained(epochs=1, fixed_epoch_size=2)
    assert [(train, x[0]) for _, train, x in loop.model.calls] == [(False, 0), (False, 2), (True, 0), (True, 2)]
    assert loop.dataset.passes == [0, 1]


def test_passes_of_the_train_stream_are_numbered_from_one():
    assert trained(epochs=3).dataset.passes == [0, 1, 2, 3]


def test_an_extra_stream_with_an_interval_is_evaluated_now_and_then():
    loop = trained(epochs=4, extra_streams=["valid", {"test": "2 epochs"}])
    assert [name for name, _, _ in loop.model.calls].count("test") == 3  # epochs 0, 2 and 4
    assert loop.extra_streams == ["valid", "test"]


@pytest.mark.parametrize("buffer", [0, 2])
def test_batches_do_not_depend_on_the_buffer(buffer):
    plain, buffered = trained(epochs=3, fixed_epoch_size=2), trained(epochs=3, fixed_epoch_size=2, buffer=buffer)
    assert plain.model.calls == buffered.model.calls
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("emrun-read")]


def test_batches_of_another_size_are_dropped():
    class Uneven(Data):
        def train_stream(self):
            yield {"x": [0, 1]}
            yield {"x": [2]}

    loop = trained(dataset=Uneven(), fixed_batch_size=2, skip_zeroth_epoch=True)
    assert loop.model.calls == [("train", True, [0, 1])]
    assert loop.iterations_done == 1


def test_a_stream_without_a_batch_of_the_fixed_size_counts_as_empty():
    with pytest.raises(StreamError, match="on_empty_stream"):
        trained(fixed_batch_size=3)


@pytest.mark.parametrize(("policy", "logged"), [("warn", True), ("ignore", False)])
def test_empty_batches_reach_neither_model_nor_hooks(policy, logged, caplog):
    class Holes(Data):
        def train_stream(self):
            yield {"x": []}
            yield {}
            yield {"x": [1, 2]}

    hook = recording_hook()
    with caplog.at_level(logging.WARNING):
        loop = trained(hook, dataset=Holes(), on_empty_batch=policy, skip_zeroth_epoch=True)
    assert loop.model.calls == [("train", True, [1, 2])]
    assert names(hook).count("before_batch") == 1
    assert ("on_empty_batch" in caplog.text) is logged


def test_a_missing_extra_stream_is_found_before_anything_runs():
    loop = loop_of(StopAfter(epochs=1), extra_streams=["vaild"])
    with pytest.raises(AttributeError, match="vaild_stream"):
        loop.run_training()
    assert loop.model.calls == []


# epochs by hand


def test_an_epoch_by_hand_takes_names_wrappers_and_iterables():
    hook = recording_hook()
    with loop_of(hook) as loop:
        loop.epoch(["train"], [loop.get_stream("valid"), [{"x": [7]}]])
    assert loop.training_epochs_done == 1
    (data,) = [arguments["epoch_data"] for name, arguments in hook.events if name == "after_epoch"]
    assert list(data) == ["train", "valid", "unnamed_eval_1"]
    assert {arguments["stream_name"] for _, arguments in hook.events if "stream_name" in arguments} == set(data)


def test_an_epoch_without_train_streams_does_not_count():
    with loop_of() as loop:
        loop.epoch([], ["valid"])
    assert loop.training_epochs_done == 0


def test_two_streams_of_an_epoch_with_one_name_are_refused():
    with loop_of() as loop, pytest.raises(ValueError, match="'valid'"):
        loop.epoch(["train"], ["valid", "valid"])


def test_an_epoch_outside_a_with_block_is_refused():
    with pytest.raises(UsageError, match="with main_loop"):
        loop_of().epoch(["train"])


def test_a_termination_ends_a_with_block_quietly():
    with loop_of(StopAfter(epochs=1)) as loop:
        loop.epoch(["train"])
        raise AssertionError("not reached")
    assert loop.outcome.status == "finished"


def test_a_loop_is_entered_once_at_a_time():
    with loop_of() as loop, pytest.raises(UsageError, match="already entered"):
        loop.__enter__()


# evaluation


def test_an_evaluation_runs_one_pass_without_training():
    hook = recording_hook()
    loop = loop_of(hook)
    loop.run_evaluation("valid")
    assert loop.model.calls == [("valid", False, [10, 11]), ("valid", False, [12, 13])]
    assert names(hook)[0] == "before_training"
    assert hook.events[-1] == ("after_training", {"success": True})


@pytest.mark.parametrize("event", ["before_epoch", "before_batch", "after_batch", "after_stream", "after_epoch"])
def test_terminations_do_nothing_in_an_evaluation(event):
    hook = recording_hook(**{event: TrainingTerminated})
    loop = loop_of(hook)
    loop.run_evaluation("valid")
    assert len(loop.model.calls) == 2
    assert hook.events[-1] == ("after_training", {"success": True})


def test_requests_for_checkpoints_do_nothing_in_an_evaluation(tmp_path):
    class Ask(AbstractHook):
        def after_batch(self):
            self.main_loop.request_checkpoint("mine")

    loop_of(Ask(), run=Run(tmp_path)).run_evaluation("valid")
    assert not (tmp_path / "checkpoints").exists()


def test_evaluations_leave_the_random_states_of_the_training_alone():
    def drawn(skip):
        states = []

        class Noisy(Data):
            def valid_stream(self):
                random.random(), np.random.rand(), torch.rand(1)
                yield {"x": [1]}

        class Draw(AbstractHook):
            def before_batch(self):
                if self.main_loop.training:
                    states.append((random.random(), np.random.rand(), torch.rand(1).item()))

        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        streams = [] if skip else ["valid"]
        trained(Draw(), dataset=Noisy(), epochs=2, extra_streams=streams, skip_zeroth_epoch=skip)
        return states

    assert drawn(skip=True) == drawn(skip=False)


def test_every_evaluation_draws_the_same_random_numbers():
    draws = []

    class Noisy(Data):
        def valid_stream(self):
            draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
            yield {"x": [1]}

    trained(dataset=Noisy(), epochs=2, extra_streams=["valid"])
    assert len(draws) == 3
    assert len(set(draws)) == 1


# ends

# this model makes no updates; tests/test_torch_model.py has their events
ENDING_EVENTS = [
    event
    for event in EVENTS
    if event not in ("register_mainloop", "before_update", "after_update", "on_error", "after_training")
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
    assert [name for name, _, _ in loop.model.calls] == ["train", "train"]


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


def test_a_model_that_cannot_tell_its_loss_fails_when_the_checkpoint_is_saved_and_hooks_hear_of_the_end(tmp_path):
    class Mute(Model):
        def step_values(self):
            raise ValueError("no loss")

    class End(AbstractHook):
        def after_batch(self):
            if self.main_loop.iterations_done == 2:
                raise TrainingTerminated

    hook, run = recording_hook(), Run(tmp_path)
    with pytest.raises(ValueError, match="no loss"):
        MainLoop(Mute(), Data(), [End(), hook], run=run).run_training()
    assert names(hook)[-2:] == ["on_error", "after_training"]
    assert (tmp_path / "checkpoints" / "latest" / "manifest.json").exists()
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


def test_a_failed_training_can_be_followed_by_a_good_one_in_the_same_process():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.active_count()
    with pytest.raises(RuntimeError):
        loop_of(recording_hook(after_batch=RuntimeError("broken")), buffer=2).run_training()
    trained(buffer=2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.active_count()) == before


# interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("buffer", [0, 2])
def test_a_signal_ends_the_training_after_the_current_batch(number, buffer):
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

    class Stuck(Data):
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
def test_with_on_interrupt_epoch_a_signal_ends_the_training_after_the_current_epoch(buffer, caplog):
    caplog.set_level(logging.INFO)
    hook = recording_hook()
    send = SendAt(signal.SIGTERM, 4)
    loop = loop_of(send, hook, buffer=buffer, on_interrupt="epoch", extra_streams=["valid"], skip_zeroth_epoch=True)
    outcome = loop.run_training()
    assert (loop.training_epochs_done, loop.iterations_done) == (2, 6)
    assert names(hook)[-3:] == ["after_epoch", "after_epoch_profile", "after_training"]
    assert (outcome.status, outcome.reason) == ("interrupted", "interrupted by SIGTERM")
    message = "SIGTERM: the training ends after this epoch; a second signal ends the process at once"
    assert caplog.messages.count(message) == 1


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


def test_hooks_can_be_changed_before_the_training():
    first, second = recording_hook(), recording_hook()
    loop = loop_of(first, StopAfter(epochs=1))
    loop.change_hooks([second, *loop.hooks[1:]])
    loop.run_training()
    assert (names(first), "after_batch" in names(second)) == ([], True)
    with pytest.raises(HookError, match="already belongs to a main loop"):
        loop_of().change_hooks([second])


def test_what_a_hook_reads_that_was_added_later_is_checked_too():
    reading = recording_hook()
    reading.reads = ["nothing_there"]
    loop = loop_of(StopAfter(epochs=1))
    loop.change_hooks([reading, *loop.hooks])
    with pytest.raises(StreamError, match="nothing_there"):
        loop.run_training()


def test_outside_the_main_thread_training_works_without_handlers(caplog):
    with caplog.at_level(logging.INFO):
        thread = threading.Thread(target=trained)
        thread.start()
        thread.join()
    assert "not in the main thread" in caplog.text


# run directory


def test_every_epoch_is_a_line_of_metrics_and_the_trace_counts_them(tmp_path):
    class Write(AbstractHook):
        def after_epoch(self, epoch_data):
            epoch_data["train"]["loss"] = {"mean": 0.5}

    run = Run(tmp_path)
    trained(Write(), epochs=2, run=run)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["iteration"]) for line in lines] == [(0, 0), (1, 3), (2, 6)]
    assert lines[2]["streams"] == {"train": {"loss": {"mean": 0.5}}}
    assert "epochs_done: 2" in (tmp_path / "trace.yaml").read_text()
    assert "status: finished" in (tmp_path / "trace.yaml").read_text()


def test_requested_checkpoints_are_saved_after_the_metrics(tmp_path):
    seen = []

    class Ask(AbstractHook):
        def after_epoch(self):
            self.main_loop.request_checkpoint("mine")

    class SeeingModel(Model):
        def save(self, directory):
            seen.append(len((tmp_path / "metrics.jsonl").read_text().splitlines()))
            super().save(directory)

    trained(Ask(), epochs=1, run=Run(tmp_path), model=SeeingModel())
    assert seen == [1, 2]
    assert (tmp_path / "checkpoints" / "mine").readlink() == (tmp_path / "checkpoints" / "latest").readlink()


def test_a_checkpoint_requested_in_a_batch_is_saved_after_the_batch(tmp_path):
    class Ask(AbstractHook):
        def after_batch(self):
            if self.main_loop.iterations_done == 2:
                self.main_loop.request_checkpoint("two")

    trained(Ask(), run=Run(tmp_path))
    assert (tmp_path / "checkpoints" / "two").readlink().name == "it-00000002"


def test_a_checkpoint_cannot_be_requested_without_a_run():
    class Ask(AbstractHook):
        def after_epoch(self):
            self.main_loop.request_checkpoint("mine")

    with pytest.raises(HookError, match="no run directory"):
        trained(Ask())


def test_the_end_of_a_training_is_saved_as_latest(tmp_path):
    loop_of(StopAfter(iterations=2), run=Run(tmp_path), skip_zeroth_epoch=True).run_training()
    assert (tmp_path / "checkpoints" / "latest").readlink().name == "it-00000002"


def test_a_failed_training_saves_nothing(tmp_path):
    with pytest.raises(RuntimeError):
        loop_of(recording_hook(after_epoch=RuntimeError("broken")), run=Run(tmp_path)).run_training()
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "metrics.jsonl").exists()
    assert "status: failed" in (tmp_path / "trace.yaml").read_text()


# profile


def test_the_profile_has_an_entry_for_each_batch():
    hook = recording_hook()
    trained(hook, extra_streams=["valid"], skip_zeroth_epoch=True)
    (arguments,) = [arguments for name, arguments in hook.events if name == "after_epoch_profile"]
    assert arguments["streams"] == ["train", "valid"]
    assert {name: len(values) for name, values in arguments["profile"].items()} == {
        **{f"{what}_train": 3 for what in ("read_batch", "eval_batch", "after_batch_hooks")},
        **{f"{what}_valid": 2 for what in ("read_batch", "eval_batch", "after_batch_hooks")},
        "after_epoch_hooks": 1,
    }


# arguments


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"buffer": -1}, "buffer"),
        ({"buffer": "4"}, "buffer"),
        ({"buffer": True}, "buffer"),
        ({"fixed_batch_size": 0}, "fixed_batch_size"),
        ({"fixed_epoch_size": 1.5}, "fixed_epoch_size"),
        ({"on_empty_batch": "stop"}, "on_empty_batch"),
        ({"on_empty_stream": None}, "on_empty_stream"),
        ({"on_unused_sources": "raise"}, "on_unused_sources"),
        ({"on_incorrect_config": "no"}, "on_incorrect_config"),
        ({"extra_streams": "valid"}, "extra_streams"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_by_name(arguments, name):
    with pytest.raises(ArgumentError) as caught:
        loop_of(**arguments)
    assert caught.value.argument == name


def test_an_unknown_argument_is_an_error_with_the_nearest_name():
    with pytest.raises(ArgumentError, match=r"did you mean 'buffer'\?"):
        loop_of(bufer=3)


@pytest.mark.parametrize(("policy", "logged"), [("warn", True), ("ignore", False)])
def test_an_unknown_argument_can_be_warned_of_or_ignored(policy, logged, caplog):
    loop_of(on_incorrect_config=policy, bufer=3)
    assert ("did you mean 'buffer'?" in caplog.text) is logged


def test_a_hook_is_registered_in_one_loop_only():
    hook = recording_hook()
    loop_of(hook)
    with pytest.raises(HookError, match="already belongs"):
        loop_of(hook)


def test_a_model_gets_the_events_that_it_defines_after_the_hooks():
    order = []

    class Listening(Model):
        def after_epoch(self, epoch_id):
            order.append(("model", epoch_id))

    class Hook(AbstractHook):
        def after_epoch(self, epoch_id):
            order.append(("hook", epoch_id))

    trained(Hook(), model=Listening(), epochs=1)
    assert order == [("hook", 0), ("model", 0), ("hook", 1), ("model", 1)]


class RunsBetween(AbstractHook):
    """Calls a function with the loop after the first train stream, and records the phase during the evaluation."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.phases = []

    def after_stream(self, stream_name):
        if stream_name == "train" and self.main_loop.training_epochs_done == 0 and self.main_loop.iterations_done:
            self.act(self.main_loop)

    def after_batch(self, stream_name):
        if stream_name == "valid":
            self.phases.append(self.main_loop.epochs.state.phase)


def test_the_seconds_of_an_epoch_hold_those_of_an_evaluation_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr("emrun.loop.epochs.perf_counter", map(float, range(10**6)).__next__)
    hook = RunsBetween(lambda loop: loop.run_evaluation("test"))
    run = Run(tmp_path, seed=1, command=["emrun"])
    loop = MainLoop(Model(), Data(), [hook, StopAfter(epochs=1)], run=run, skip_zeroth_epoch=True)
    loop.run_training()
    evaluation, epoch = run.metrics
    assert epoch["epoch"] == 1
    assert epoch["seconds"] > evaluation["seconds"] + 6  # readings of the clock, two for each of the train batches


def test_an_epoch_by_hand_after_the_train_stream_leaves_the_loop_in_its_evaluations():
    hook = RunsBetween(lambda loop: loop.epoch([], ["test"]))
    loop = MainLoop(Model(), Data(), [hook, StopAfter(epochs=1)], extra_streams=["valid"], skip_zeroth_epoch=True)
    loop.run_training()
    assert hook.phases == [Phase.EVALUATE] * 2


def test_a_hook_may_ask_who_listens_when_it_is_registered():
    class Asks(AbstractHook):
        def register_mainloop(self, main_loop):
            super().register_mainloop(main_loop)
            assert not main_loop.listens("before_update")

    MainLoop(Model(), Data(), [Asks()])


class Counts(AbstractHook):
    """Counts evaluated batches; in an evaluation, runs another one and then requests a checkpoint."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def after_batch(self, stream_name):
        self.count += stream_name == "valid"
        if stream_name == "valid" and self.count == 1 and self.main_loop.iterations_done:
            self.main_loop.run_evaluation("test")
            self.main_loop.request_checkpoint("middle")

    def state_dict(self):
        return {"count": self.count}


def test_a_checkpoint_within_an_evaluation_has_the_state_before_it_also_after_another_evaluation(tmp_path):
    run = Run(tmp_path, seed=1, command=["emrun"])
    loop = MainLoop(
        Model(), Data(), [Counts(), StopAfter(epochs=1)], extra_streams=["valid"], run=run, skip_zeroth_epoch=True
    )
    loop.run_training()
    state = load_state(tmp_path / "checkpoints" / "middle")
    assert [each["state"] for each in state["hooks"] if "Counts" in str(each)] == [{"count": 0}]


def test_the_trace_of_a_session_that_fails_at_once_has_the_counters_of_the_loop(tmp_path):
    class Fails(AbstractHook):
        def before_training(self):
            raise RuntimeError("no")

    run = Run(tmp_path, seed=1, command=["emrun"])
    loop = MainLoop(Model(), Data(), [Fails()], run=run)
    loop.start_from(3, 9)
    with pytest.raises(RuntimeError):
        loop.run_training()
    trace = read_trace(tmp_path)
    assert (trace["status"], trace["epochs_done"], trace["iterations_done"]) == ("failed", 3, 9)
