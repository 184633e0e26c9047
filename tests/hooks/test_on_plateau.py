"""OnPlateau: when the recent mean is worse than the long one, and that a resume remembers the values."""

import math

import pytest

from emrun import MainLoop
from emrun.base.errors import ArgumentError
from emrun.hooks import OnPlateau, StopAfter


class Note(OnPlateau):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.epochs = []

    def on_plateau(self):
        self.epochs.append(self.main_loop.training_epochs_done)


@pytest.fixture
def plateaus(scripted, numbers, write):
    """Return the epochs in which a training with these values is on a plateau."""

    def run(values, extra_streams=("valid",), **arguments):
        note = Note(variable="score", **arguments)
        hooks = [write(values), note, StopAfter(epochs=len(values) - 1)]
        MainLoop(scripted(), numbers, hooks, extra_streams=extra_streams).run_training()
        return note.epochs

    return run


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits(in_docstring(OnPlateau), batch_size=500)
    assert training.main_loop.training_epochs_done == 1


@pytest.mark.parametrize(
    ("values", "objective", "epochs"),
    [
        ([5, 4, 3, 2, 1], "min", []),
        ([5, 5, 5, 5, 5], "min", []),  # equal means are no plateau
        ([0.7] * 9, "min", []),  # also where their sums are rounded
        ([0.7] * 9, "max", []),
        ([5, 4, 3, 3, 5], "min", [4]),  # means 4 and 3.75 of the last 2 and 4
        ([1, 2, 2, 3, 0, 0, 0], "max", [4, 5, 6]),
        ([1, 2], "min", []),  # the means over all that there is are equal
        ([1, 2, 3], "min", [2]),
        ([1, math.nan, 9, 9, 9, 9, 99], "min", [6]),  # while a NaN is among the values, nothing can be said
    ],
)
def test_the_recent_mean_is_worse_than_the_long_one(plateaus, values, objective, epochs):
    assert plateaus(values, long_term=4, short_term=2, objective=objective) == epochs


def test_epochs_that_do_not_evaluate_the_stream_are_passed_over(plateaus):
    values = [1, 0, 2, 0, 3, 0, 0]
    assert plateaus(values, [{"valid": "2 epochs"}], long_term=3, short_term=1) == [2, 4]


def test_it_logs_the_two_means(scripted, numbers, write, caplog):
    caplog.set_level("INFO")
    hooks = [write([1, 2]), OnPlateau(2, 1, variable="score"), StopAfter(epochs=1)]
    MainLoop(scripted(), numbers, hooks, extra_streams=["valid"]).run_training()
    expected = "valid/score/mean is on a plateau: its mean is 2 over the last 1 evaluations, 1.5 over the last 2"
    assert caplog.messages.count(expected) == 1


def test_a_resume_continues_with_the_values_of_its_state(scripted, numbers, write):
    first = Note(variable="score", long_term=3, short_term=1)
    first.load_state_dict({**first.state_dict(), "values": [7.0, 1.0, 2.0, 3.0]})
    hooks = [write([2.5, 3]), first, StopAfter(epochs=1)]
    MainLoop(scripted(), numbers, hooks, extra_streams=["valid"]).run_training()
    assert (first.epochs, first.state_dict()["values"]) == ([1], [3.0, 2.5, 3.0])


def test_another_statistic_begins_anew(caplog):
    hook = OnPlateau(objective="max")
    hook.load_state_dict({**OnPlateau().state_dict(), "values": [1.0]})
    assert hook.state_dict()["values"] == []
    assert "OnPlateau now watches another statistic, valid/loss/mean" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"long_term": 5}, "long_term", "5 is less than short_term, 10"),
        ({"short_term": 0}, "short_term", "0 is not a whole number of at least 1"),
        ({"objective": "less"}, "objective", "'less' is not one of min, max"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        OnPlateau(**arguments)
    assert caught.value.argument == argument
    assert message in str(caught.value)
