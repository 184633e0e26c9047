"""StopAfter: the first limit that is reached ends the training successfully; the end is evaluated."""

import math
import time

import pytest

from emrun import AbstractHook, MainLoop
from emrun.base.errors import ArgumentError
from emrun.base.wording import counted
from emrun.hooks import StopAfter


class Trace(AbstractHook):
    """Keeps which batches were run, and what for."""

    def __init__(self):
        super().__init__()
        self.epochs = []
        self.batches = []

    def before_epoch(self, epoch_id):
        self.epochs.append(epoch_id)

    def after_batch(self, stream_name):
        self.batches.append((stream_name, self.main_loop.training))

    @property
    def trained(self):
        return sum(training for _, training in self.batches)


@pytest.fixture
def train(scripted, numbers):
    """Train with a StopAfter; return the loop and the trace."""

    def run(stop, extra_streams=("valid",), **arguments):
        trace = Trace()
        loop = MainLoop(scripted(), numbers, [trace, stop], extra_streams=extra_streams, **arguments)
        assert loop.run_training().status == "finished"
        return loop, trace

    return run


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits(in_docstring(StopAfter))
    assert training.main_loop.training_epochs_done == 20
    assert training.main_loop.outcome.reason == "20 epochs done (StopAfter epochs: 20)"


@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_it_ends_the_training_after_so_many_epochs(train, epochs):
    loop, trace = train(StopAfter(epochs=epochs))
    assert loop.training_epochs_done == epochs
    assert trace.epochs == list(range(epochs + 1))
    assert trace.batches[-1] == ("valid", False)
    assert loop.outcome.reason == f"{counted(epochs, 'epoch')} done (StopAfter epochs: {epochs})"


@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 7])
def test_it_ends_the_training_after_so_many_iterations(train, iterations):
    loop, trace = train(StopAfter(iterations=iterations))
    assert loop.iterations_done == trace.trained == iterations
    assert trace.batches[-2:] == [("train", True), ("valid", False)]
    assert loop.outcome.reason == f"{counted(iterations, 'iteration')} done (StopAfter iterations: {iterations})"


@pytest.mark.parametrize("limits", [{"epochs": 0}, {"passes": 0}, {"updates": 0}, {"epochs": 0, "iterations": 5}])
@pytest.mark.parametrize("skip_zeroth_epoch", [True, False])
def test_a_limit_of_nothing_trains_nothing(train, limits, skip_zeroth_epoch):
    loop, trace = train(StopAfter(**limits), skip_zeroth_epoch=skip_zeroth_epoch)
    assert loop.iterations_done == trace.trained == 0
    assert len(trace.batches) == (0 if skip_zeroth_epoch else 4)


@pytest.mark.parametrize(
    ("limits", "iterations"), [({"epochs": 2, "iterations": 4}, 4), ({"epochs": 1, "iterations": 4}, 3)]
)
def test_the_first_limit_that_is_reached_counts(train, limits, iterations):
    loop, _ = train(StopAfter(**limits))
    assert loop.iterations_done == iterations


@pytest.mark.parametrize("updates", [1, 3, 4])
def test_it_ends_the_training_after_so_many_updates(train, updates):
    loop, trace = train(StopAfter(updates=updates))
    assert loop.updates_done == trace.trained == updates
    assert trace.batches[-2:] == [("train", True), ("valid", False)]
    assert loop.outcome.reason == f"{counted(updates, 'update')} done (StopAfter updates: {updates})"


@pytest.mark.parametrize("passes", [1, 2])
def test_a_pass_is_an_epoch_without_a_fixed_size(train, passes):
    loop, trace = train(StopAfter(passes=passes))
    assert loop.training_epochs_done == loop.passes_done == passes
    assert trace.batches[-1] == ("valid", False)
    assert loop.outcome.reason == f"{counted(passes, 'pass', 'es')} done (StopAfter passes: {passes})"


@pytest.mark.parametrize(("size", "epochs"), [(2, 3), (3, 2), (4, 1), (5, 1)])
def test_with_a_fixed_size_it_ends_the_training_at_the_last_batch_of_a_pass(scripted, numbers, size, epochs):
    numbers.num_batches = {"train": 3}
    loop = MainLoop(scripted(), numbers, [StopAfter(passes=2)], fixed_epoch_size=size)
    loop.run_training()
    assert (loop.iterations_done, loop.passes_done) == (6, 2)
    assert loop.training_epochs_done == epochs
    assert tuple(loop.get_stream("train").position) == (2, 3)
    assert loop.outcome.reason == "2 passes done (StopAfter passes: 2)"


def test_batches_of_an_evaluation_do_not_count_as_iterations(train):
    loop, trace = train(StopAfter(iterations=4))
    assert trace.batches.count(("train", False)) == 3
    assert loop.iterations_done == 4


def test_iterations_of_another_stream_may_count(scripted, numbers):
    numbers.other_stream = numbers.train_stream
    trace = Trace()
    hooks = [trace, StopAfter(iterations=2, train_stream_name="other")]
    with MainLoop(scripted(), numbers, hooks) as loop:
        while True:
            loop.epoch(["train", "other"])
    assert trace.batches == [("train", True)] * 3 + [("other", True)] * 2


def test_the_train_stream_of_the_main_loop_counts_by_default(train, numbers):
    numbers.other_stream = numbers.train_stream
    loop, trace = train(StopAfter(iterations=4), train_stream_name="other", skip_zeroth_epoch=True)
    assert loop.iterations_done == trace.batches.count(("other", True)) == 4


class Clock:
    """Tells a later time whenever it is asked."""

    def __init__(self, seconds, now=1000.0):
        self.now = now
        self.seconds = seconds

    def __call__(self):
        self.now += self.seconds
        return self.now


@pytest.mark.parametrize(
    ("seconds", "minutes", "batches"), [(10, 1, 7), (30, 2, 4), (15, 0.5, 4), (60, 0, 4), (31, 1, 4)]
)
def test_it_ends_the_training_after_so_many_minutes(train, seconds, minutes, batches):
    stop = StopAfter(minutes=minutes)
    stop.clock = Clock(seconds)
    loop, trace = train(stop)
    assert len(trace.batches) == batches  # 4 of the zeroth epoch, which is completed; the last one is of the end
    assert loop.outcome.reason == f"{minutes} minutes have passed (StopAfter minutes: {minutes})"


def test_time_of_the_training_before_a_resume_counts(train):
    first, second = StopAfter(minutes=0.5), StopAfter(minutes=1)
    first.clock, second.clock = Clock(10), Clock(10, now=1e6)
    _, trace = train(first, skip_zeroth_epoch=True)
    assert trace.trained == 3
    second.load_state_dict(first.state_dict())  # after 40 seconds
    _, trace = train(second, skip_zeroth_epoch=True)
    assert trace.trained == 1
    assert second.state_dict()["seconds"] == 80


def test_time_before_the_training_does_not_count(train):
    stop = StopAfter(minutes=1, epochs=1)
    stop.clock = Clock(0, now=1e9)
    loop, _ = train(stop)
    assert loop.training_epochs_done == 1


def test_the_clock_is_one_that_never_goes_back():
    assert StopAfter(minutes=1).clock is time.monotonic


@pytest.mark.parametrize("limits", [{"epochs": 2}, {"passes": 2}, {"updates": 5}, {"iterations": 6}])
def test_a_training_that_reached_a_limit_before_begins_no_epoch(train, limits):
    loop, trace = train(StopAfter(**limits))
    trace.batches.clear()
    trace.epochs.clear()
    done = loop.iterations_done
    assert loop.run_training().status == "finished"
    assert trace.epochs == trace.batches == []
    assert loop.iterations_done == done


def test_epochs_that_were_done_before_count(scripted, numbers):
    trace = Trace()
    loop = MainLoop(scripted(), numbers, [trace, StopAfter(epochs=5)])
    loop.start_from(3, 9)
    loop.run_training()
    assert trace.epochs == [4, 5]


def test_iterations_of_its_state_count(scripted, numbers):
    first = StopAfter(iterations=9)
    first.load_state_dict({"iterations_done": 7, "seconds": 0.0})
    trace = Trace()
    loop = MainLoop(scripted(), numbers, [trace, first])
    loop.start_from(2, 7)
    loop.run_training()
    assert trace.trained == 2
    assert first.state_dict()["iterations_done"] == 9


def test_without_a_limit_of_batches_or_time_it_does_not_listen_to_batches(train):
    stop = StopAfter(epochs=2)
    loop, _ = train(stop)
    assert loop.training_epochs_done == 2
    assert not [call for call in loop.epochs.events.listeners["after_batch"] if getattr(call, "__self__", None) is stop]
    assert StopAfter(epochs=2, minutes=1).after_batch is not None
    assert StopAfter(iterations=2).after_batch is not None


def test_a_hook_derived_from_it_gets_the_batches_that_it_listens_to(train):
    class Counts(StopAfter):
        count = 0

        def after_batch(self, stream_name, batch_data):
            super().after_batch(stream_name, batch_data)
            self.count += 1

    stop = Counts(epochs=2)
    train(stop)
    assert stop.count > 0


@pytest.mark.parametrize("between", [[], [{"minutes": 60}], [{"epochs": 9}], [{"iterations": 99}]], ids=str)
def test_iterations_that_it_did_not_count_are_those_of_the_training(scripted, numbers, between):
    state = StopAfter(epochs=2).state_dict()
    assert state["iterations_done"] is None
    for limits in [*between, {"iterations": 9}]:  # each resume has other limits
        trace, stop = Trace(), StopAfter(**limits)
        loop = MainLoop(scripted(), numbers, [trace, stop])
        loop.start_from(2, 7)
        stop.load_state_dict(state)
        state = stop.state_dict()
    loop.run_training()
    assert trace.trained == 2


def test_it_does_not_end_an_evaluation(scripted, numbers):
    trace = Trace()
    loop = MainLoop(scripted(), numbers, [trace, StopAfter(epochs=0, iterations=0, minutes=0)])
    loop.start_from(1, 3)
    loop.run_evaluation("train")
    assert len(trace.batches) == 3
    assert loop.outcome.reason is None


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({}, "epochs", "give at least one of epochs, passes, updates, iterations, minutes"),
        ({"train_stream_name": "train"}, "epochs", "give at least one of epochs, passes, updates, iterations, minutes"),
        ({"passes": 1.5}, "passes", "1.5 is not a whole number"),
        ({"updates": -3}, "updates", "-3 is not a number of at least 0"),
        ({"epochs": -1}, "epochs", "-1 is not a number of at least 0"),
        ({"iterations": "10"}, "iterations", "'10' is not a number of at least 0"),
        ({"minutes": True}, "minutes", "True is not a number of at least 0"),
        ({"minutes": math.nan}, "minutes", "nan is not a number of at least 0"),
        ({"epochs": math.nan}, "epochs", "nan is not a number of at least 0"),
        ({"epochs": 2.5}, "epochs", "2.5 is not a whole number"),
        ({"iterations": math.inf}, "iterations", "inf is not a whole number"),
        ({"epochs": 1, "minutes": -0.1}, "minutes", "-0.1 is not a number of at least 0"),
    ],
)
def test_wrong_limits_are_refused_at_once(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        StopAfter(**arguments)
    assert (caught.value.argument, caught.value.message) == (argument, message)


def test_the_loop_knows_the_smallest_limits(scripted, numbers):
    hooks = [StopAfter(epochs=3, minutes=5), StopAfter(epochs=2, updates=70), AbstractHook()]
    assert MainLoop(scripted(), numbers, hooks).limits == {"epochs": 2, "updates": 70}
    assert StopAfter(iterations=70, train_stream_name="other").limits == {}
