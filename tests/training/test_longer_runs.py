"""Runs that a resume makes longer: equal to straight ones where the schedule allows it, or as `on_extend` says."""

import math
import shutil

import pytest
import torch
from campaign import thinned
from doubles import SGD, Affine, Streams
from training import resuming
from training.resuming import Interrupt, config_of, ended, result, train_with

from emrun import Factory, MainLoop, TorchModel, create_training, read_steps, resume_training
from emrun.base.errors import StateError
from emrun.hooks import StopAfter
from emrun.models.schedules.built_in import Constant
from emrun.training.create import train

RATE = 0.05
LONGER = ["hooks.StopAfter.epochs=4"]  # of five updates each, or of three windows


def trained(project, schedule, *overrides):
    """Train two epochs, which are ten updates; return the run directory and the config."""
    config = config_of()
    config["model"]["scheduler"] = schedule
    config["hooks"] = [{"ComputeStats": {"variables": ["loss"]}}, {"StopAfter": {"epochs": 2}}]
    return ended(project, config, *overrides), config


@pytest.mark.campaign
def test_windows_of_batches_go_on_as_a_straight_run_too(project):
    directory, config = trained(project, {"class": "Constant", "cooldown": "2 updates"}, "model.accumulate=2")
    config["model"]["accumulate"] = 2
    longer(directory, checkpoint_name="before-cooldown")
    assert not differing(directory, project, config)


def longer(directory, *overrides, **arguments):
    train(resume_training(directory, [*LONGER, *overrides], **arguments))
    return read_steps(directory)["learning_rate"].tolist()


def differing(directory, project, config):
    """Return what differs from a run of four epochs: weights, optimizer, step record, ..."""
    config["hooks"][-1] = {"StopAfter": {"epochs": 4}}
    whole, found = (
        result(each, has_best=False) for each in (resuming.trained(config, project / "straight"), directory)
    )
    return {key for key in found if found[key] != whole[key]}


EXACT = {
    "Constant": {},
    "InverseSqrt": {"warmup": "3 updates"},
    "Steps": {"milestones": ["4 updates", "7 updates"]},
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", thinned(EXACT, ["Steps"]))
def test_a_schedule_that_does_not_depend_on_the_length_goes_on_as_a_straight_run(project, name):
    directory, config = trained(project, {"class": name, **EXACT[name]})
    longer(directory)
    assert not differing(directory, project, config)


@pytest.mark.parametrize("cooldown", thinned(["4 updates", "30%"], ["30%"]))
def test_from_before_its_cool_down_a_run_goes_on_as_a_straight_one(project, cooldown):
    directory, config = trained(project, {"class": "Constant", "warmup": "2 updates", "cooldown": cooldown})
    made = 6 if cooldown == "4 updates" else 7
    message = f"--checkpoint before-cooldown, after {made} updates, to get what a run of this length gives"
    with pytest.raises(StateError, match=message):
        resume_training(directory, LONGER)
    longer(directory, checkpoint_name="before-cooldown")
    assert not differing(directory, project, config)


def test_a_loop_without_a_run_directory_cools_down_without_a_checkpoint():
    model = TorchModel(Affine(), optimizer=SGD, scheduler=Factory(Constant, cooldown="2 updates"))
    MainLoop(model, Streams(train=[{"x": [1.0], "y": [3.0]}] * 4), [StopAfter(epochs=1)]).run_training()
    assert model.optimizer.param_groups[0]["lr"] == 0.0


def cosine(done, total):
    return RATE * (1 + math.cos(math.pi * done / total)) / 2


def warmed(done, total, warmup):
    return RATE * (done + 1) / warmup if done < warmup else cosine(done - warmup, total - warmup)


def test_a_cosine_is_refused_with_the_rates_before_and_after(project):
    directory, _ = trained(project, {"class": "Cosine"})
    with pytest.raises(StateError) as caught:
        resume_training(directory, LONGER)
    assert str(caught.value) == (
        "model.scheduler: Cosine was planned for 10 updates, and the run now makes 20: this changes the rates of the "
        "10 updates that were made already. model.scheduler.on_extend=replan accepts the rates of the longer run: "
        "0.025, 0.0103, 0.000308 in the next update, halfway, and in the last one, after 0.00122 in the update before. "
        "Or resume with the limits that the run had, or train anew"
    )


def test_an_accepted_plan_gives_the_rates_that_it_promised(project, caplog):
    directory, _ = trained(project, {"class": "Cosine", "warmup": "20%"})
    caplog.set_level("INFO")
    before = read_steps(directory)["learning_rate"].tolist()
    assert before[-1] == pytest.approx(warmed(9, 10, 2))
    expected = [warmed(done, 20, 4) for done in range(10, 20)]
    with pytest.raises(StateError) as caught:
        resume_training(directory, LONGER)
    rates = longer(directory, "model.scheduler.on_extend=replan")
    assert rates[:10] == before
    assert rates[10:] == pytest.approx(expected, rel=1e-12)
    promised = ", ".join(f"{expected[place]:.3g}" for place in (0, 4, 9))
    assert f"accepts the rates of the longer run: {promised} in the next" in str(caught.value)
    assert f"; on_extend=replan after 10 updates, from {before[-1]:.3g} to {expected[0]:.3g}" in caplog.text


@pytest.mark.campaign
def test_a_number_that_is_set_over_time_follows_the_same_rules(project):
    def weight_decay(run):
        state = torch.load(run / "checkpoints" / "latest" / "state.pt", weights_only=True)
        return state["model"]["optimizer"]["state"]["param_groups"][0]["weight_decay"]

    config = config_of()
    schedule = {"class": "Linear", "cooldown": "2 updates"}
    own = {"SetOverTime": {"target": "optimizer.weight_decay", "value": 0.1, "schedule": schedule}}
    config["hooks"] = [own, {"StopAfter": {"epochs": 2}}]
    directory = project / "run"
    train(create_training(config, output_dir=directory))
    with pytest.raises(StateError) as caught:
        resume_training(directory, LONGER)
    message = str(caught.value)
    assert message.startswith("hooks.SetOverTime.schedule, of optimizer.weight_decay; rates are shares of its value: ")
    assert "hooks.SetOverTime.schedule.on_extend=replan accepts the rates of the longer run: 0.444, 0.222, 0" in message
    assert "before-cooldown" not in message
    assert weight_decay(directory) == 0
    train(resume_training(directory, [*LONGER, "hooks.SetOverTime.schedule.on_extend=replan"]))
    assert weight_decay(directory) == 0


@pytest.mark.campaign
def test_a_second_extension_has_the_rates_of_the_run_of_its_length(project):
    directory, _ = trained(project, {"class": "Linear", "warmup": "20%", "on_extend": "replan"})
    first = longer(directory)
    train(resume_training(directory, ["hooks.StopAfter.epochs=6"]))
    rates = read_steps(directory)["learning_rate"].tolist()
    assert rates[:20] == first
    assert rates[20:] == pytest.approx([RATE * (1 - (done - 6) / 24) for done in range(20, 30)])


@pytest.mark.campaign
def test_an_extended_run_that_is_interrupted_goes_on_exactly(project):
    directory, _ = trained(project, {"class": "Cosine", "on_extend": "replan", "warmup": "3 updates"})
    shutil.copytree(directory, project / "other", symlinks=True)
    longer(directory)
    training = resume_training(project / "other", LONGER)
    interrupt = Interrupt("after_batch train")
    train_with(training, interrupt)
    assert len(read_steps(project / "other")["learning_rate"]) == 11
    train(resume_training(project / "other"))
    one, two = (result(each, has_best=False) for each in (directory, project / "other"))
    assert {key for key in one if one[key] != two[key]} == set()


def test_a_schedule_that_is_over_needs_a_limit_of_updates(project):
    directory, _ = trained(project, {"class": "Cosine"})
    message = "the 10 updates for which Cosine was planned were made, and no hook limits the updates of the run now: "
    with pytest.raises(StateError, match=message + "the learning rate would stay 0; give StopAfter"):
        resume_training(directory, ["hooks.StopAfter.minutes=1", "~hooks.StopAfter.epochs"])


@pytest.mark.campaign
def test_a_shorter_run_is_refused_whatever_on_extend_says(project):
    directory, _ = trained(project, {"class": "Cosine", "on_extend": "replan"}, *LONGER)
    with pytest.raises(StateError, match="planned for 20 updates, and the run now makes 15: this changes the rates"):
        resume_training(directory, ["hooks.StopAfter.epochs=3"])


@pytest.mark.campaign
def test_groups_of_different_rates_are_shown_apart(project):
    directory, _ = trained(
        project, {"class": "Linear"}, "model.optimizer.groups=[{match: 'bias$', lr: 0.5}]", "hooks.StopAfter.epochs=1"
    )
    with pytest.raises(StateError, match=r"after group 0: 0\.01; group 1: 0\.1 in the update before"):
        resume_training(directory, ["hooks.StopAfter.epochs=2"])


@pytest.mark.campaign
def test_a_longer_run_of_another_schedule_is_not_an_extension(project):
    directory, _ = trained(project, {"class": "Linear"})
    rates = longer(directory, "model.scheduler.final=0.5")
    assert rates[10:] == pytest.approx([RATE * (1 - 0.5 * done / 20) for done in range(10, 20)])
