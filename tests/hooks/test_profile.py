"""Profiles of some iterations: the table in the log, and the traces."""

import gzip
import json
import logging
import re
from pathlib import Path

import pytest

from emrun import resume_training
from emrun.base.errors import ArgumentError
from emrun.hooks import Profile


def tables(caplog):
    return [each.getMessage() for each in caplog.records if each.getMessage().startswith("Profile: ")]


def traces(training):
    return sorted(path.name for path in (Path(training.output_dir) / "profile").glob("*"))


def steps_in(path):
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return sum(each.get("name", "").startswith("Optimizer.step") and each.get("ph") == "X" for each in events)


def test_a_profile_has_its_iterations_in_a_trace_and_a_table(train_digits, in_docstring, caplog):
    caplog.set_level(logging.INFO)
    training = train_digits(in_docstring(Profile))
    assert traces(training) == ["it-00000010.json.gz"]
    assert steps_in(Path(training.output_dir) / "profile" / "it-00000010.json.gz") == 5
    table, place = tables(caplog)
    assert table.startswith("Profile: 5 iterations after iteration 10\n")
    assert re.search(r"^operation +calls +ms on the CPU +share$", table, re.MULTILINE)
    assert re.search(r"^aten::addmm +5 ", table, re.MULTILINE)
    assert len(table.splitlines()) == 13
    assert place.endswith("it-00000010.json.gz")


def test_profiles_are_repeated_and_the_newest_kept(train_digits, caplog):
    caplog.set_level(logging.INFO)
    every = {"after": "2 iterations", "iterations": 3, "every": "6 iterations", "keep": 2, "memory": True}
    training = train_digits([{"Profile": every}])
    assert traces(training) == ["it-00000008.json.gz", "it-00000014.json.gz"]
    assert steps_in(Path(training.output_dir) / "profile" / "it-00000014.json.gz") == 1  # the epoch ends
    assert "memory" in tables(caplog)[0].splitlines()[1]


def test_a_window_beyond_the_end_is_a_warning(train_digits, caplog):
    training = train_digits([{"Profile": {"after": "100 iterations"}}])
    assert tables(caplog) == ["Profile: nothing was profiled: the run ended after 15 iterations; set `after` to less"]
    assert not (Path(training.output_dir) / "profile").exists()


def test_a_resume_does_not_repeat_a_profile(train_digits, caplog):
    caplog.set_level(logging.INFO)
    training = train_digits([{"Profile": {"after": "2 iterations", "iterations": 3}}, {"StopAfter": {"epochs": 1}}])
    caplog.clear()
    again = resume_training(training.output_dir, ["hooks.StopAfter.epochs=2"])
    assert again.main_loop.run_training().status == "finished"
    assert tables(caplog) == []
    assert traces(training) == ["it-00000002.json.gz"]


@pytest.mark.parametrize(("arguments", "argument"), [
    ({"after": "2 epochs"}, "after"), ({"iterations": 0}, "iterations"), ({"every": "5 epochs"}, "every"),
    ({"every": "3 iterations"}, "every"), ({"keep": 0}, "keep"), ({"memory": "yes"}, "memory"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(arguments, argument):
    with pytest.raises(ArgumentError) as caught:
        Profile(**arguments)
    assert caught.value.argument == argument
