"""Check: a success when the value is exceeded, a failure when it is not in time."""

import pytest

from emrun import MainLoop, TrainingAborted, create_training
from emrun.base.errors import ArgumentError
from emrun.hooks import Check


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits([*in_docstring(Check), {"StopAfter": {"epochs": 10}}])
    assert "more than 0.93" in training.main_loop.outcome.reason


@pytest.fixture
def loop_with(scripted, numbers, write):
    """Return a loop with a Check on a variable with these values."""

    def build(values, extra_streams=("valid",), stream="valid", aggregation="mean", **arguments):
        hooks = [write(values, stream, aggregation=aggregation), Check("score", stream=stream, **arguments)]
        return MainLoop(scripted(), numbers, hooks, extra_streams=extra_streams)

    return build


@pytest.mark.parametrize("more", [{}, {"stream": "train"}, {"aggregation": None}], ids=str)
def test_a_value_that_is_exceeded_ends_the_training_successfully(loop_with, more):
    loop = loop_with([0, 2, 3], required_min_value=2, max_epoch=2, **more)  # 2 is not more than 2
    outcome = loop.run_training()
    assert (outcome.status, loop.training_epochs_done) == ("finished", 2)
    assert outcome.reason == f"{more.get('stream', 'valid')}/score/mean is 3, more than 2, in epoch 2 (Check)"


@pytest.mark.parametrize(
    ("extra_streams", "message"),
    [
        (["valid"], r"valid/score/mean is 2, not more than 2, in epoch 1 \(Check max_epoch: 1\)"),
        ([{"valid": "2 epochs"}], r"valid/score/mean was not evaluated in epoch 1 \(Check max_epoch: 1\)"),
    ],
)
def test_a_value_that_is_not_exceeded_in_time_ends_it_as_failed(loop_with, extra_streams, message):
    loop = loop_with([0, 2, 3], extra_streams, required_min_value=2, max_epoch=1)
    with pytest.raises(TrainingAborted, match=message):
        loop.run_training()
    assert (loop.outcome.status, loop.outcome.exit_status) == ("failed", 3)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [({"required_min_value": "high", "max_epoch": 1}, "required_min_value"),
     ({"required_min_value": float("nan"), "max_epoch": 1}, "required_min_value"),
     ({"required_min_value": 1, "max_epoch": -1}, "max_epoch")],
)  # fmt: skip
def test_wrong_arguments_are_refused_at_once(arguments, argument):
    with pytest.raises(ArgumentError) as caught:
        Check("accuracy", **arguments)
    assert caught.value.argument == argument


def test_a_run_that_ends_before_the_check_is_decided_says_so(tmp_path, digits_config, caplog):
    check = {"Check": {"variable": "accuracy", "required_min_value": 0.9, "max_epoch": 10}}
    config = digits_config(["ComputeStats", check, {"StopAfter": {"epochs": 3}}])
    create_training(config, output_root=tmp_path / "log")
    assert "Check: max_epoch: 10 is never reached, because the run ends after 3 epochs" in caplog.text
