"""Epochs and evaluations: which streams run, the order of events, what hooks are given, counters."""

import logging
import random
import threading

import numpy as np
import pytest
import torch
from doubles import Doubler, SixExamples, loop_of, names, recording_hook, trained

from emrun import AbstractHook, MainLoop, TrainingTerminated
from emrun.base.errors import StreamError, UsageError
from emrun.hooks import StopAfter
from emrun.loop.progress import Phase
from emrun.storage.run import Run


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
    trained_on = ["before_stream", *batch * 3, "after_stream"]
    streams = [*trained_on, "before_evaluation", "before_stream", *batch * 2, "after_stream"]
    epoch = ["before_epoch", *streams, "after_epoch", "after_epoch_profile"]
    assert names(hook) == ["before_training", *epoch, "after_training"]


def test_before_stream_comes_before_each_stream_also_of_the_zeroth_epoch():
    seen = []

    class See(AbstractHook):
        def before_stream(self, stream_name):
            seen.append((stream_name, self.main_loop.training))

        def before_batch(self, stream_name):
            seen.append(stream_name)

    trained(See(), extra_streams=["test"])
    assert seen == [("train", False), *["train"] * 3, ("test", False), "test", ("train", True), *["train"] * 3,
                    ("test", False), "test"]  # fmt: skip


def test_a_termination_in_before_stream_ends_the_run_before_the_first_batch():
    class End(AbstractHook):
        def before_stream(self, stream_name):
            if self.main_loop.training:
                raise TrainingTerminated("enough")

    loop = trained(End(), epochs=3)
    assert (loop.iterations_done, loop.outcome.reason) == (0, "enough")


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
def test_batches_do_not_depend_on_the_buffer(buffer, patient):
    plain, buffered = trained(epochs=3, fixed_epoch_size=2), trained(epochs=3, fixed_epoch_size=2, buffer=buffer)
    assert plain.model.calls == buffered.model.calls
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("emrun-read")]


def test_batches_of_another_size_are_dropped():
    class Uneven(SixExamples):
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
    class Holes(SixExamples):
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

        class Noisy(SixExamples):
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

    class Noisy(SixExamples):
        def valid_stream(self):
            draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
            yield {"x": [1]}

    trained(dataset=Noisy(), epochs=2, extra_streams=["valid"])
    assert len(draws) == 3
    assert len(set(draws)) == 1


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
            self.phases.append(self.main_loop.progress.phase)


def test_the_seconds_of_an_epoch_hold_those_of_an_evaluation_in_it(tmp_path, monkeypatch):
    clock = map(float, range(10**6)).__next__
    for name in ("main_loop", "progress", "training"):
        monkeypatch.setattr(f"emrun.loop.{name}.perf_counter", clock)
    monkeypatch.setattr("emrun.loop.profiling.perf_counter", clock)
    spent = []

    def evaluate(loop):
        began = clock()
        loop.run_evaluation("test")
        spent.append(clock() - began)

    hook = RunsBetween(evaluate)
    run = Run(tmp_path, seed=1, command=["emrun"])
    loop = MainLoop(Doubler(), SixExamples(), [hook, StopAfter(epochs=1)], run=run, skip_zeroth_epoch=True)
    loop.run_training()
    (epoch,) = loop.metrics  # the evaluation is no epoch
    assert epoch["epoch"] == 1
    assert epoch["seconds"] > spent[0] > 0


def test_an_epoch_by_hand_after_the_train_stream_leaves_the_loop_in_its_evaluations():
    hook = RunsBetween(lambda loop: loop.epoch([], ["test"]))
    loop = MainLoop(
        Doubler(), SixExamples(), [hook, StopAfter(epochs=1)], extra_streams=["valid"], skip_zeroth_epoch=True
    )
    loop.run_training()
    assert hook.phases == [Phase.EVALUATE] * 2


# --- learning rates in the data of an epoch ---------------------------------------------------------------------------


def with_rates(*rates):
    """Return a model that has these learning rates, multiplied by the number of the epoch's last batch."""
    model = Doubler()
    model.step_values = lambda: {"learning_rate": rates}
    return model


def epochs_of(model, **arguments):
    found = []

    class Look(AbstractHook):
        def after_epoch(self, epoch_id, epoch_data):
            found.append({stream: dict(variables) for stream, variables in epoch_data.items()})

    MainLoop(model, SixExamples(), [Look(), StopAfter(epochs=1)], extra_streams=["valid"], **arguments).run_training()
    return found


def test_every_epoch_of_the_train_stream_has_the_learning_rate():
    assert epochs_of(with_rates(0.5)) == [{"train": {"learning_rate": 0.5}, "valid": {}}] * 2


def test_further_parameter_groups_have_learning_rates_of_their_own():
    found = epochs_of(with_rates(0.5, torch.tensor(0.25)), skip_zeroth_epoch=True)
    assert found == [{"train": {"learning_rate": 0.5, "learning_rate_1": 0.25}, "valid": {}}]


def test_a_model_without_learning_rates_adds_none():
    assert epochs_of(Doubler(), skip_zeroth_epoch=True) == [{"train": {}, "valid": {}}]


def test_an_evaluation_has_no_learning_rate():
    assert MainLoop(with_rates(0.5), SixExamples()).run_evaluation("train") == {"train": {}}
