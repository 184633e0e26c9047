"""Errors: positions, messages, exit statuses."""

import pytest
import torch
from torch.nn import functional

from emrun.base import errors
from emrun.base.errors import ConfigError, MissingExtra, Position, Problem, add_inputs, exit_status, needing
from emrun.hook import TrainingAborted
from emrun.loop.outcome import Outcome


@pytest.mark.parametrize(
    "position, text",
    [
        (Position("c.yaml", 3, 5), "c.yaml:3:5"),
        (Position("c.yaml"), "c.yaml"),
        (Position("override 'a=1'"), "override 'a=1'"),
    ],
)
def test_a_position_is_file_line_and_column_where_there_are_lines(position, text):
    assert str(position) == text


@pytest.mark.parametrize(
    "problem, text",
    [
        (Problem(Position("c.yaml", 1, 2), "model.lr", "is wrong"), "c.yaml:1:2: model.lr: is wrong"),
        (Problem(Position("c.yaml", 1, 2), "", "is wrong"), "c.yaml:1:2: is wrong"),
        (Problem(None, "hooks", "is wrong"), "hooks: is wrong"),
    ],
)
def test_a_problem_is_position_key_and_message(problem, text):
    assert str(problem) == text


def test_a_problem_quotes_its_line_with_a_caret():
    problem = Problem(Position("c.yaml", 1, 7, "  lr:  x  "), "lr", "is wrong")
    assert problem.block() == "c.yaml:1:7: lr: is wrong\n      lr:  x\n          ^"


def test_the_caret_stands_right_behind_tabs():
    assert Problem(Position("c.yaml", 1, 4, "\ta b"), "", "x").block().splitlines()[-1] == "    \t  ^"


def test_a_problem_without_a_line_is_one_line():
    assert Problem(Position("override 'a=1'"), "a", "is wrong").block() == "override 'a=1': a: is wrong"


def test_a_config_error_tells_all_its_problems():
    first, second = Problem(None, "a", "x"), Problem(None, "b", "y")
    error = ConfigError([first, second])
    assert error.problems == (first, second)
    assert str(error) == "a: x\nb: y"
    assert ConfigError(first).problems == (first,)


@pytest.mark.parametrize(
    "error, status",
    [
        (ConfigError([]), 2),
        (errors.ArgumentError("lr", "is wrong"), 2),
        (errors.HookError("x"), 2),
        (errors.UsageError("x"), 2),
        (errors.StreamError("x"), 1),
        (errors.StreamError("x", first_batch=True), 2),
        (errors.StorageError("x"), 74),
        (TrainingAborted("x"), 3),
        (errors.EmrunError("x"), 1),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_an_error_has_an_exit_status(error, status):
    assert exit_status(error) == status


@pytest.mark.parametrize("status", ["seven", 0, -1, 256])
def test_an_exit_status_that_is_none_of_a_failure_is_1(status):
    error = errors.EmrunError("x")
    error.exit_status = status
    assert exit_status(error) == 1


@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_of_an_error_that_is_not_emrun_s_is_1(status):
    error = type("Wrong", (ValueError,), {"exit_status": status})("x")
    assert exit_status(error) == 1
    assert Outcome.of(error) == Outcome("failed", "Wrong: x", 1)


def test_an_error_that_inherits_from_emrun_s_has_its_exit_status():
    assert exit_status(type("Worse", (TrainingAborted,), {})("x")) == 3


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.UsageError, errors.HookError, errors.StreamError])
def test_wrong_use_is_a_value_error(kind):
    assert issubclass(kind, ValueError)


def test_a_failure_of_the_disk_is_an_os_error():
    assert issubclass(errors.StorageError, OSError)


def test_an_argument_error_names_the_argument():
    error = errors.ArgumentError("lr", "is wrong")
    assert (error.argument, error.message, str(error)) == ("lr", "is wrong", "lr: is wrong")


FLOATS, WHOLE = torch.ones(4, 3), torch.ones(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "way_out"),
    [
        (lambda: functional.cross_entropy(FLOATS, torch.ones(4)), "classes are whole numbers: make y int64"),
        (
            lambda: functional.cross_entropy(FLOATS, WHOLE[:, None]),
            "classes have the shape (B,), not (B, 1): write y[:, 0]",
        ),
        (lambda: torch.nn.Linear(1, 2)(WHOLE[:, None]), "y has whole numbers: make y float32 in the dataset, or write"),
        (lambda: torch.nn.LayerNorm(1)(WHOLE[:, None]), "y has whole numbers: make y float32 in the dataset, or write"),
        (
            lambda: functional.binary_cross_entropy_with_logits(torch.ones(4), WHOLE),
            "y has whole numbers: make y float32 in the dataset, or write {PARAMETER: {source: y, dtype: float32}} in",
        ),
        (
            lambda: torch.nn.Linear(5, 2)(FLOATS),
            "a linear layer with in_features 5 got a last axis of 3: set in_features: 3",
        ),
        (
            lambda: functional.binary_cross_entropy_with_logits(torch.ones(4, 1), torch.ones(4)),
            "in the dataset, give y the shape (4, 1) of the output",
        ),
        (lambda: functional.embedding(FLOATS, FLOATS), "indices are whole numbers: make z int64"),
        (lambda: FLOATS @ "x", None),
    ],
)
def test_an_error_of_torch_about_its_inputs_says_the_way_out(call, way_out):
    with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
        call()
    is_whole = way_out is not None and "whole numbers: make y float32" in way_out
    shown = ["z: float32 (4, 3)", "y: int64 (4,) from 1 to 1" if is_whole else "y: float32 (4,)"]
    add_inputs(raised.value, "model.loss", shown)
    (note,) = raised.value.__notes__
    assert note.startswith(f"model.loss got {shown[0]}, {shown[1]}; {way_out}" if way_out else "model.loss got z")
    assert way_out is not None or note.endswith(shown[1])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'track'"), "which is not installed: pip install 'emrun[trackio]'"),
        (
            ImportError("cannot import name 'Op' from 'hub'"),
            "which cannot be imported (cannot import name 'Op' from 'hub'); install versions that fit together: "
            "pip install --upgrade 'emrun[trackio]'",
        ),
    ],
    ids=["missing", "does not fit"],
)
def test_a_library_that_is_installed_and_does_not_fit_is_not_said_to_be_missing(error, message):
    with pytest.raises(MissingExtra) as raised, needing("WriteTrackio", "trackio", "trackio"):
        raise error
    assert str(raised.value) == f"WriteTrackio needs trackio, {message}"
