"""StopOnPlateau: a plateau ends the training, also over a resume."""

import pytest

from emrun import MainLoop, create_training, resume_training
from emrun.hooks import StopAfter, StopOnPlateau
from emrun.training.create import train


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits(in_docstring(StopOnPlateau), batch_size=500)
    assert training.main_loop.training_epochs_done == 1


def test_it_ends_the_training_with_the_two_means(scripted, numbers, write):
    hooks = [write([3, 2, 1, 5, 1]), StopOnPlateau(4, 2, variable="score"), StopAfter(epochs=4)]
    loop = MainLoop(scripted(), numbers, hooks, extra_streams=["valid"])
    outcome = loop.run_training()
    assert (outcome.status, loop.training_epochs_done) == ("finished", 3)
    assert outcome.reason == (
        "valid/score/mean is on a plateau: its mean is 3 over the last 2 evaluations, 2.75 over the last 4 "
        "(StopOnPlateau)"
    )


@pytest.mark.campaign  # test_on_plateau.py has the values over a resume, and test_early_stopping.py a resumed run
def test_a_resumed_run_ends_in_the_same_epoch(tmp_path, digits_config):
    stop = {"StopOnPlateau": {"long_term": 4, "short_term": 2, "variable": "accuracy", "objective": "max"}}
    stats = {"ComputeStats": {"variables": ["accuracy"]}}
    config = digits_config([stats, stop, {"StopAfter": {"epochs": 60}}], batch_size=300)
    straight = create_training(config, output_dir=tmp_path / "straight")
    assert "StopOnPlateau" in train(straight).reason
    train(create_training(config, output_dir=tmp_path / "resumed", overrides=["hooks.StopAfter.iterations=17"]))
    resumed = resume_training(tmp_path / "resumed", overrides=["~hooks.StopAfter.iterations"])
    assert train(resumed).reason == straight.main_loop.outcome.reason
    again = resume_training(tmp_path / "resumed")
    assert again is None or train(again).reason == straight.main_loop.outcome.reason
