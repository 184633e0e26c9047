"""StopAfter: the first limit that is reached ends the training successfully; the end is evaluated."""

import json
import math
import time

import pytest
from in_ranks import in_ranks

from emrun import AbstractHook, MainLoop, TrainingTerminated, create_training, resume_training
from emrun.base.errors import ArgumentError, ConfigError
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
    training = train_digits(in_docstring(StopAfter), batch_size=1500)
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
    ("seconds", "minutes", "batches"), [(10, 1, 6), (30, 2, 4), (15, 0.5, 4), (60, 0, 4), (31, 1, 4)]
)
def test_it_ends_the_training_after_so_many_minutes(train, seconds, minutes, batches):
    stop = StopAfter(minutes=minutes)
    stop.clock = Clock(seconds)
    loop, trace = train(stop)
    assert len(trace.batches) == batches  # 4 of the zeroth epoch, which is completed; the last one is of the end
    assert loop.outcome.reason == f"{minutes} minutes have passed (StopAfter minutes: {minutes})"


class Slow(AbstractHook):
    """Takes so many minutes after each epoch that is trained."""

    def __init__(self, clock, minutes):
        super().__init__()
        self.clock, self.minutes = clock, minutes

    def after_epoch(self, epoch_id):
        self.clock.now += 60 * self.minutes * (epoch_id > 0)


def test_minutes_that_pass_after_the_last_batch_of_an_epoch_end_the_training_with_it(scripted, numbers):
    stop = StopAfter(minutes=30)
    stop.clock = Clock(0)
    loop = MainLoop(scripted(), numbers, [Slow(stop.clock, 40), stop])
    loop.run_training()
    assert (loop.training_epochs_done, loop.iterations_done) == (1, 3)
    assert loop.outcome.reason == "30 minutes have passed (StopAfter minutes: 30)"


def test_time_of_the_training_before_a_resume_counts(train):
    first, second = StopAfter(minutes=0.5), StopAfter(minutes=1)
    first.clock, second.clock = Clock(10), Clock(10, now=1e6)
    _, trace = train(first, skip_zeroth_epoch=True)
    assert trace.trained == 3
    second.load_state_dict(first.state_dict())  # after 50 seconds
    _, trace = train(second, skip_zeroth_epoch=True)
    assert trace.trained == 1
    assert second.state_dict()["seconds"] == 100


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


def test_iterations_before_a_resume_count(scripted, numbers):
    trace = Trace()
    loop = MainLoop(scripted(), numbers, [trace, StopAfter(iterations=9)])
    loop.start_from(2, 7)
    loop.run_training()
    assert trace.trained == 2


def test_iterations_of_another_stream_before_a_resume_count(scripted, numbers):
    numbers.other_stream = numbers.train_stream
    first = StopAfter(iterations=9, train_stream_name="other")
    first.load_state_dict({"iterations_done": 7, "seconds": 0.0})
    trace = Trace()
    with MainLoop(scripted(), numbers, [trace, first]) as loop:
        loop.epoch(["other"])
    assert trace.trained == 2
    assert first.state_dict()["iterations_done"] == 9


def test_without_a_limit_of_time_it_does_not_listen_to_batches(train):
    stop = StopAfter(epochs=2, iterations=5)
    loop, _ = train(stop)
    assert loop.iterations_done == 5
    assert not [
        call for call in loop.parts.callbacks.listeners["after_batch"] if getattr(call, "__self__", None) is stop
    ]
    assert StopAfter(epochs=2, minutes=1).after_batch is not None
    assert StopAfter(iterations=2, train_stream_name="other").after_batch is not None


class EndsItself(AbstractHook):
    """Ends the training with the same batch as a limit."""

    def after_batch(self):
        if self.main_loop.iterations_done == 4:
            raise TrainingTerminated("own reason")


def test_the_loop_compares_the_limits_of_any_hook_and_joins_the_reasons_of_a_batch(scripted, numbers):
    hook = EndsItself()
    hook.limits = {"updates": 4}
    trace = Trace()
    loop = MainLoop(scripted(), numbers, [trace, hook], extra_streams=["valid"])
    assert loop.run_training().reason == "own reason; 4 updates done (EndsItself updates: 4)"
    assert trace.batches[-2:] == [("train", True), ("valid", False)]


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
        ({}, "epochs", "give at least one of epochs, passes, updates, iterations, minutes, training_minutes"),
        (
            {"train_stream_name": "train"},
            "epochs",
            "give at least one of epochs, passes, updates, iterations, minutes, training_minutes",
        ),
        ({"passes": 1.5}, "passes", "1.5 is not a whole number"),
        ({"updates": -3}, "updates", "-3 is not a finite number of at least 0"),
        ({"epochs": -1}, "epochs", "-1 is not a finite number of at least 0"),
        ({"iterations": "10"}, "iterations", "'10' is not a finite number of at least 0"),
        ({"minutes": True}, "minutes", "True is not a finite number of at least 0"),
        ({"minutes": math.nan}, "minutes", "nan is not a finite number of at least 0"),
        ({"epochs": math.nan}, "epochs", "nan is not a finite number of at least 0"),
        ({"epochs": 2.5}, "epochs", "2.5 is not a whole number"),
        ({"iterations": math.inf}, "iterations", "inf is not a finite number of at least 0"),
        ({"minutes": math.inf}, "minutes", "inf is not a finite number of at least 0"),
        ({"training_minutes": math.inf}, "training_minutes", "inf is not a finite number of at least 0"),
        ({"epochs": 1, "minutes": -0.1}, "minutes", "-0.1 is not a finite number of at least 0"),
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


class Second(AbstractHook):
    """Lets each batch of the train stream take a second of training, and all else an hour."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def register_mainloop(self, main_loop):
        super().register_mainloop(main_loop)
        main_loop.time.clock = lambda: self.now

    def before_stream(self, stream_name):
        self.now += 3600

    def before_batch(self, stream_name, batch):
        self.now += 1 if self.main_loop.training else 3600


BUDGET = {
    "seed": 1,
    "dataset": {"class": "Majority", "n": 40, "batch_size": 4},
    "model": {
        "module": {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1},
        "inputs": {"input": "x"},
        "outputs": ["logit"],
        "loss": {"class": "torch.nn.MSELoss", "inputs": ["logit", "logit"]},
        "optimizer": {"class": "SGD", "lr": 1.0},
        "scheduler": {"class": "Linear", "warmup": "20%"},
    },
    "main_loop": {"extra_streams": ["valid"]},
}


def trained(tmp_path, budget, **more):
    hooks = [f"{__name__}.Second", {"StopAfter": {"training_minutes": budget / 60, **more}}]
    training = create_training({**BUDGET, "hooks": hooks}, output_dir=tmp_path / "run")
    training.main_loop.run_training()
    return training


def rates(run):
    chunks = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    return [rate for chunk in chunks for rate in chunk["learning_rate"]]


def test_a_budget_of_training_counts_batches_alone_and_rates_follow_its_shares(tmp_path):
    training = trained(tmp_path, 10)
    assert training.main_loop.iterations_done == 11  # the first one does not count
    assert training.main_loop.outcome.reason.startswith("trained for 0.1666")
    eighths = [0, 0, 4, 8, 7, 6, 5, 4, 2, 2, 1]  # the first rate of an epoch is set in the first second of its batch
    assert rates(tmp_path / "run") == pytest.approx([each / 8 for each in eighths], abs=1e-5)
    lines = training.model.schedule_plan().lines()
    assert lines[0] == "learning rate: Linear, warm-up 20%; shares of the time in which the run trains"
    assert "25% 0.938, 50% 0.625" in lines[1]


def test_a_resume_keeps_the_time_that_was_used(tmp_path):
    trained(tmp_path, 10, updates=5)
    training = resume_training(tmp_path / "run", ["~hooks.StopAfter.updates"])
    training.main_loop.run_training()
    assert training.main_loop.iterations_done == 5 + 7  # 4 seconds were used; the first batch of each process is free
    last = rates(tmp_path / "run")[-6:]
    assert last == pytest.approx([6 / 8, 5 / 8, 3 / 8, 3 / 8, 2 / 8, 1 / 8], abs=1e-5)


class Minute(Second):
    """Lets the time of training pass twice as fast on rank 1."""

    def before_batch(self, stream_name, batch):
        self.now += (1 + self.main_loop.ranks.rank) if self.main_loop.training else 3600


def of_rank(place):
    hooks = [f"{__name__}.Minute", {"StopAfter": {"training_minutes": 10 / 60}}]
    seen = []
    model = {**BUDGET["model"], "optimizer": {"class": "SGD", "lr": 1.0}}
    training = create_training({**BUDGET, "model": model, "hooks": hooks}, output_dir=place / "run")
    update = training.model.optimizer.step
    rate = training.model.optimizer.param_groups[0]
    training.model.optimizer.step = lambda *given: seen.append(rate["lr"]) or update(*given)
    training.main_loop.run_training()
    return training.main_loop.iterations_done, training.main_loop.outcome.reason, seen


def test_ranks_end_together_when_the_slowest_has_used_the_budget_and_have_the_same_rates(tmp_path):
    first, second = in_ranks(2, of_rank, tmp_path)
    assert first == second
    iterations, reason, rates_of_updates = first
    assert iterations == 7  # 2 seconds each; the first one does not count, and the others are known a batch later
    assert reason.startswith("trained for 0.1666")
    assert rates_of_updates == pytest.approx([each / 8 for each in (0, 0, 0, 0, 8, 6, 4)], abs=1e-5)


def test_other_limits_count_for_the_share_that_is_over(tmp_path):
    trained(tmp_path, 1000, updates=10)
    assert rates(tmp_path / "run")[5:] == pytest.approx([5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8], abs=1e-5)


def test_lengths_in_updates_do_not_fit_a_budget_of_time(tmp_path):
    config = {**BUDGET, "hooks": [{"StopAfter": {"training_minutes": 1}}]}
    config["model"] = {**BUDGET["model"], "scheduler": {"class": "Linear", "warmup": "5 updates"}}
    with pytest.raises(ConfigError, match="warmup: 5 updates: time ends the run; write a share such as 5%"):
        create_training(config, output_dir=tmp_path / "run")
