"""The main loop: its hooks, its run directory, its profile, its arguments."""

import json
import logging
import re
import threading

import pytest
from doubles import Doubler, LossOfOne, Numbers, SixExamples, loop_of, names, recording_hook, trained

from emrun import AbstractHook, MainLoop
from emrun.base.errors import ArgumentError, HookError, StreamError, UsageError
from emrun.hook import Loop, TrainingAborted
from emrun.hooks import StopAfter
from emrun.shown import Text
from emrun.storage.checkpoints.state_file import load_state
from emrun.storage.run import Run
from emrun.storage.trace import read_trace


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

    class SeeingModel(Doubler):
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
        **{f"{what}_train": 3 for what in ("read_batch", "eval_batch", "after_batch_hooks", "batch_length")},
        **{f"{what}_valid": 2 for what in ("read_batch", "eval_batch", "after_batch_hooks", "batch_length")},
        "after_epoch_hooks": 1,
        "save_checkpoints": 0,
        f"hook_{type(hook).__name__}": 1,
        "hook_StopAfter": 1,
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

    class Listening(Doubler):
        def after_epoch(self, epoch_id):
            order.append(("model", epoch_id))

    class Hook(AbstractHook):
        def after_epoch(self, epoch_id):
            order.append(("hook", epoch_id))

    trained(Hook(), model=Listening(), epochs=1)
    assert order == [("hook", 0), ("model", 0), ("hook", 1), ("model", 1)]


def test_a_hook_may_ask_who_listens_when_it_is_registered():
    class Asks(AbstractHook):
        def register_mainloop(self, main_loop):
            super().register_mainloop(main_loop)
            assert not main_loop.listens("before_update")

    MainLoop(Doubler(), SixExamples(), [Asks()])


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
        Doubler(),
        SixExamples(),
        [Counts(), StopAfter(epochs=1)],
        extra_streams=["valid"],
        run=run,
        skip_zeroth_epoch=True,
    )
    loop.run_training()
    state = load_state(tmp_path / "checkpoints" / "middle")
    assert state["hooks"][f"{__name__}.Counts"] == {"count": 0}


def test_the_trace_of_a_session_that_fails_at_once_has_the_counters_of_the_loop(tmp_path):
    class Fails(AbstractHook):
        def before_training(self):
            raise RuntimeError("no")

    run = Run(tmp_path, seed=1, command=["emrun"])
    loop = MainLoop(Doubler(), SixExamples(), [Fails()], run=run)
    loop.start_from(3, 9)
    with pytest.raises(RuntimeError):
        loop.run_training()
    trace = read_trace(tmp_path)
    assert (trace["status"], trace["epochs_done"], trace["iterations_done"]) == ("failed", 3, 9)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("iterations_done", "start_from sets the counters"),
        ("training", "a hook cannot change which stream"),
        ("evaluating", "call run_evaluation"),
        ("hooks", "call change_hooks before the training begins"),
        ("model", "give it to the constructor of MainLoop"),
        ("horizon", "a hook declares `limits`"),
        ("stream_name", "the loop sets it, and hooks read it"),
        ("notify", "the loop sets it, and hooks read it"),
        ("request_checkpoint", "the loop sets it, and hooks read it"),
        ("recorded", "call record"),
    ],
)
def test_what_hooks_read_of_the_loop_cannot_be_set(name, advice):
    loop = MainLoop(LossOfOne(), Numbers())
    before = getattr(loop, name)
    with pytest.raises(HookError, match=rf"^main_loop\.{name} cannot be set: {re.escape(advice)}"):
        setattr(loop, name, 3)
    assert getattr(loop, name) == before


def misusing(event, use):
    """Return a hook that uses the main loop in an event."""
    return type("Misuses", (AbstractHook,), {event: lambda self: use(self.main_loop)})()


def count(loop):
    loop.iterations_done = 3


MISUSES = [
    ("before_training", count, "before_training"),
    ("before_batch", count, "before_batch of stream 'train'"),
    ("before_evaluation", count, "before_evaluation"),
    ("after_batch", count, "after_batch of stream 'train'"),
    ("after_epoch", count, "after_epoch of epoch 0"),
    ("after_training", count, "after_training"),
    ("after_epoch", lambda loop: loop.record("norm", 1.0), "after_epoch of epoch 0"),
    ("after_batch", lambda loop: loop.request_checkpoint("mine"), "after_batch of stream 'train'"),
    ("after_epoch", lambda loop: loop.epoch(["train", "train"]), "after_epoch of epoch 0"),
]


@pytest.mark.parametrize(("event", "use", "place"), MISUSES)
def test_a_wrong_use_of_the_loop_names_the_hook_and_the_event(event, use, place):
    zeroth = event != "after_epoch"
    loop = MainLoop(LossOfOne(), Numbers(), [misusing(event, use), StopAfter(epochs=1)], skip_zeroth_epoch=zeroth)
    with pytest.raises((HookError, UsageError)) as raised:
        loop.run_training()
    assert raised.value.__notes__ == [f"in hook Misuses, {place}"]


def test_a_wrong_use_of_the_loop_when_it_is_built_has_the_index_of_the_hook():
    class Misuses(AbstractHook):
        def register_mainloop(self, main_loop):
            count(main_loop)

    with pytest.raises(HookError, match=r"^main_loop\.iterations_done cannot be set") as raised:
        MainLoop(LossOfOne(), Numbers(), [StopAfter(epochs=1), Misuses()])
    assert raised.value.hook_index == 1


@pytest.mark.parametrize("error", [HookError("Misuses: no such file"), TrainingAborted("the loss is too large")])
def test_a_reason_that_a_hook_gives_is_not_named_again(error):
    def give(loop):
        raise error

    with pytest.raises(type(error)) as raised:
        MainLoop(LossOfOne(), Numbers(), [misusing("after_batch", give)]).run_training()
    assert not hasattr(raised.value, "__notes__")


def test_a_hook_may_keep_values_of_its_own_on_the_loop():
    loop = MainLoop(LossOfOne(), Numbers())
    loop.found = 1
    loop.found = 2
    assert loop.found == 2


def test_every_name_of_the_contract_is_there_and_cannot_be_set():
    loop = MainLoop(LossOfOne(), Numbers())
    names = {*Loop.__annotations__, *vars(Loop)}
    names = {name for name in names if not name.startswith("__")}
    assert len(names) > 30
    for name in names:
        getattr(loop, name)
        with pytest.raises(HookError, match="cannot be set"):
            setattr(loop, name, None)


def test_a_loop_in_a_test_of_a_hook_is_plain():
    loop = Loop()
    loop.iterations_done = 5
    loop.show("text", Text("found"))
    loop.record("norm", 1.0)
    assert (loop.iterations_done, loop.training, loop.extra_streams, loop.horizon.updates) == (5, False, (), None)
    assert not loop.listens("after_batch")
    assert list(loop.evaluation_pass("valid")) == []
