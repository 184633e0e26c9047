"""EarlyStopping: what counts as an improvement, when the patience is used up, and that a resume changes neither."""

import json
import math

import pytest
from campaign import thinned

from emrun import MainLoop, create_training, resume_training
from emrun.base.errors import ArgumentError, ConfigError
from emrun.hooks import EarlyStopping, StopAfter
from emrun.training.create import train

NAN = math.nan


@pytest.fixture
def ended(scripted, numbers, write):
    """Return the number of epochs and the reason of a training whose zeroth, first, ... epoch has these values."""

    def run(values, extra_streams=("valid",), stream="valid", skip_zeroth_epoch=False, **arguments):
        hooks = [
            write([*values, *[values[-1]] * 20], stream, "score", arguments.get("aggregation", "mean")),
            EarlyStopping(variable="score", stream=stream, **arguments),
            StopAfter(epochs=15),
        ]
        loop = MainLoop(scripted(), numbers, hooks, extra_streams=extra_streams, skip_zeroth_epoch=skip_zeroth_epoch)
        outcome = loop.run_training()
        assert outcome.status == "finished"
        return loop.training_epochs_done, outcome.reason

    return run


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits([*in_docstring(EarlyStopping), {"StopAfter": {"epochs": 2}}], batch_size=500)
    assert training.main_loop.training_epochs_done == 2


ENDED = [
    ({"patience": 2}, [9, 8, 7, 7, 7], 4),  # equal is not better
    ({"patience": 1}, [9, 8, 8.5], 2),
    ({"patience": 2}, [5, 6, 6], 2),  # the zeroth epoch counts
    ({"patience": 2, "skip_zeroth_epoch": True}, [None, 5, 6, 6], 3),
    ({"patience": 2}, [9, 10, 8, 10, 7, 10, 10], 6),  # an improvement renews it
    ({"patience": 2, "condition": "max"}, [1, 2, 3, 3, 2], 4),
    ({"patience": 2, "min_delta": 0.5}, [9, 8, 7.6, 7.5], 3),
    ({"patience": 2, "min_delta": 0.5}, [9, 8, 7.6, 7.4, 7.2, 7.1], 5),  # slow steps add up
    ({"patience": 2}, [9, NAN, 8, NAN, NAN], 4),  # NaN never improves
    ({"patience": 2}, [NAN, NAN], 1),
    ({"patience": 2, "not_before": 6}, [9, 8, 10], 6),
    ({"patience": 2, "not_before": "10 iterations"}, [9, 8, 10], 4),  # an epoch has three
    ({"patience": 2, "not_before": "9 updates"}, [9, 8, 10], 3),
    ({"patience": 2, "aggregation": "std"}, [9, 9, 9], 2),
    ({"patience": 2, "aggregation": None}, [9, 9, 9], 2),
    ({"patience": 2, "stream": "train"}, [9, 9, 9], 2),
    ({"patience": 2, "extra_streams": [{"valid": "2 epochs"}]}, [9, 0, 8, 0, 8, 0, 8], 6),  # evaluations count
    ({"patience": None, "threshold": 3, "not_before": 4}, [9, 8, 4, 3.5, 3.2, 1], 4),
    ({"patience": None, "threshold": 3, "not_before": 4}, [9, 8, 3, 5, 5], 15),  # as good is good enough
    ({"patience": None, "threshold": 3, "not_before": 4, "condition": "max"}, [1, 2, 2], 4),
    ({"patience": None, "threshold": 3, "not_before": 2}, [NAN, NAN, NAN], 2),
    ({"patience": 3, "threshold": 3, "not_before": 2}, [9, 2, 2, 2, 2], 4),
]
LIKE_OTHERS = [ENDED[number] for number in (1, 5, 6, 9, 12, 14, 19, 20)]
"""Those of which others show what is special in them."""


@pytest.mark.parametrize(
    ("arguments", "values", "epochs"), thinned(ENDED, [each for each in ENDED if each not in LIKE_OTHERS])
)
def test_it_ends_the_training_when_the_patience_is_used_up_or_the_threshold_missed(ended, arguments, values, epochs):
    assert ended(values, **arguments)[0] == epochs


@pytest.mark.parametrize(
    ("arguments", "values", "reason"),
    [
        (
            {"patience": 2},
            [9, 7, 7, 8],
            "valid/score/mean has not improved since epoch 1 (7): 2 evaluations (EarlyStopping patience: 2)",
        ),
        ({"patience": 1}, [NAN], "valid/score/mean was never a number: 1 evaluation (EarlyStopping patience: 1)"),
        (
            {"patience": None, "threshold": 3, "not_before": "2 epochs"},
            [9, 7, 8],
            "valid/score/mean has come to 7 at best, in epoch 1, after 2 epochs (EarlyStopping threshold: 3, "
            "not_before: 2 epochs)",
        ),
    ],
    ids=["patience", "NaN", "threshold"],
)
def test_the_reason_says_since_when_and_which_argument(ended, arguments, values, reason):
    assert ended(values, **arguments)[1] == reason


def test_an_evaluation_does_not_count(scripted, numbers, write):
    hook = EarlyStopping(variable="score", patience=1)
    loop = MainLoop(scripted(), numbers, [write([1.0]), hook])
    for _ in range(3):
        loop.run_evaluation("valid")
    assert hook.state_dict()["evaluations"] == 0


def history(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["epoch"], line["streams"]) for line in lines]


@pytest.mark.parametrize("iterations", thinned([10, 13, 15], [13]))
def test_patience_over_a_resume_is_that_of_the_uninterrupted_run(tmp_path, digits_config, iterations):
    """An epoch has 5 iterations: two resumes are between epochs, one in the middle of an epoch."""
    stop = {"EarlyStopping": {"variable": "accuracy", "condition": "max", "patience": 2, "min_delta": 0.05}}
    stats = {"ComputeStats": {"variables": ["loss", "accuracy"]}}
    config = digits_config([stats, stop, {"StopAfter": {"epochs": 40}}], batch_size=300)
    straight = create_training(config, output_dir=tmp_path / "straight")
    assert "EarlyStopping" in train(straight).reason
    directory = tmp_path / "resumed"
    train(create_training(config, output_dir=directory, overrides=[f"hooks.StopAfter.iterations={iterations}"]))
    resumed = resume_training(directory, overrides=["~hooks.StopAfter.iterations"])
    assert train(resumed).reason == straight.main_loop.outcome.reason
    assert history(directory) == history(tmp_path / "straight")
    again = resume_training(directory)
    assert again is None or train(again).reason == straight.main_loop.outcome.reason
    assert history(directory) == history(tmp_path / "straight")
    longer = resume_training(directory, overrides=["hooks.EarlyStopping.patience=4"])
    train(longer)
    assert longer.main_loop.training_epochs_done >= straight.main_loop.training_epochs_done + 2


def test_another_statistic_begins_anew(caplog):
    before = EarlyStopping(variable="accuracy")
    hook = EarlyStopping()
    hook.load_state_dict({**before.state_dict(), "evaluations": 3, "since_best": 3})
    assert hook.state_dict() == EarlyStopping().state_dict()
    assert "EarlyStopping now watches another statistic, valid/loss/mean (min); its patience begins anew" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"patience": 0}, "patience", "0 is not a whole number of at least 1"),
        ({"patience": None}, "patience", "give patience, or threshold with not_before"),
        ({"min_delta": -1}, "min_delta", "-1 is not a number of at least 0"),
        ({"min_delta": NAN}, "min_delta", "nan is not a number of at least 0"),
        ({"threshold": NAN, "not_before": 3}, "threshold", "nan is not a number"),
        ({"threshold": 3}, "threshold", "add not_before, when the threshold must have been reached: 10 epochs"),
        ({"not_before": "3 minutes"}, "not_before", "the units here are epochs, updates, iterations"),
        ({"condition": "less"}, "condition", "'less' is not one of min, max"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        EarlyStopping(**arguments)
    assert caught.value.argument == argument
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variable": "los"}, "EarlyStopping monitors valid/los/mean, but no hook writes 'los/mean'; did you mean"),
        ({"stream": "test"}, "EarlyStopping monitors test/loss/mean, but stream 'test' is not run"),
    ],
)
def test_a_statistic_that_does_not_exist_is_an_error_before_the_training(tmp_path, digits_config, arguments, message):
    hooks = [{"ComputeStats": {"variables": ["loss"]}}, {"EarlyStopping": arguments}]
    with pytest.raises(ConfigError) as caught:
        create_training(digits_config([*hooks, {"StopAfter": {"epochs": 1}}]), output_root=tmp_path)
    assert f"hooks[1].EarlyStopping: {message}" in str(caught.value)
