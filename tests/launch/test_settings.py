"""The arguments of the section `sweep`."""

import pytest

from emrun.base.errors import ArgumentError
from emrun.launch.settings import Sweep


def test_the_jobs_are_as_many_as_the_devices():
    assert Sweep(devices=[0, 1]).jobs == 2
    assert Sweep().jobs == 1
    assert Sweep(devices=[0], jobs=3).jobs == 3


def test_a_method_or_a_pruner_may_have_arguments():
    settings = Sweep(method={"TPE": {"n_startup_trials": 5}}, trials=3, objective="valid/loss", pruner="median")
    assert (settings.method, settings.method_arguments) == ("tpe", {"n_startup_trials": 5})
    assert (settings.pruner, settings.pruner_arguments) == ("median", {})


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"trials": 3}, "trials", "a grid tries all combinations"),
        ({"method": "tpe", "objective": "valid/loss"}, "method", "tpe needs the number of combinations: set trials"),
        ({"method": "tpe", "trials": 3}, "objective", "method: tpe needs an objective"),
        ({"pruner": "median"}, "objective", "pruner: median needs an objective"),
        ({"pruner": "median", "objective": "valid/loss", "repeats": 2}, "pruner", "compares single runs"),
        ({"method": {"tpe": {}, "random": {}}}, "method", "is neither a name nor"),
        ({"method": {"grid": {"a": 1}}}, "method", "grid has no arguments"),
        ({"objective": "loss"}, "objective", "'loss' is not an address such as valid/loss"),
        ({"objective": "valid//mean"}, "objective", "is not an address"),
        *(({"devices": each}, "devices", "is not a list of devices") for each in ([], {"a": 1}, [None], [0.5], 1)),
        ({"repeats": 0}, "repeats", "0 is not a whole number of at least 1"),
        ({"folds": 1}, "folds", "1 is not a whole number of at least 2"),
        ({"epoch": "first"}, "epoch", "'first' is not one of best, last"),
    ],
)
def test_a_wrong_argument_is_an_error(arguments, argument, message):
    with pytest.raises(ArgumentError, match=message) as raised:
        Sweep(**arguments)
    assert raised.value.argument == argument


@pytest.mark.parametrize("written", ["max:valid/loss/mean", "max: valid/loss/mean"])
def test_a_condition_before_the_objective_is_told_as_what_works(written):
    with pytest.raises(ArgumentError) as raised:
        Sweep(objective=written)
    assert raised.value.message == "write `objective: valid/loss/mean` and `condition: max`"
    assert Sweep(objective="valid/loss/mean", condition="max").condition == "max"
