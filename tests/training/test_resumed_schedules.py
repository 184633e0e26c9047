"""Schedules at a resume: those that continue, those that change, and those that are over."""

import pytest
from campaign import thinned
from training.resuming import FEW_HOOKS, config_of, ended, result, stopped, straight

from emrun import create_training, resume_training
from emrun.base.errors import ConfigError, StateError
from emrun.training.create import train


def sequence(*schedulers, kind="SequentialLR", **arguments):
    return {"class": kind, "schedulers": list(schedulers), "step_on": "update", **arguments}


WARM_UP = {"class": "LinearLR", "start_factor": 0.25, "total_iters": 3}
SCHEDULES = {
    "sequential": sequence(WARM_UP, {"class": "CosineAnnealingLR", "T_max": 20}, milestones=[4]),
    "chained": sequence(WARM_UP, {"class": "MultiStepLR", "milestones": [4, 6], "gamma": 0.5}, kind="ChainedScheduler"),
    "nested": sequence(
        {"class": "ChainedScheduler", "schedulers": [WARM_UP, {"class": "ExponentialLR", "gamma": 0.9}]},
        {"class": "CosineAnnealingLR", "T_max": 20},
        milestones=[4],
    ),
}


@pytest.mark.campaign
def test_a_new_peak_of_a_one_cycle_schedule_counts(project):
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["scheduler"] = {"class": "OneCycleLR", "max_lr": 0.1, "total_steps": 40, "step_on": "update"}
    directory = stopped(project, config)
    training = resume_training(directory, ["hooks.StopAfter.epochs=2", "model.scheduler.max_lr=0.01"])
    train(training)
    lower = create_training(config, output_dir=project / "lower", overrides=["model.scheduler.max_lr=0.01"])
    train(lower)
    rates = [each.model.optimizer.param_groups[0]["lr"] for each in (training, lower)]
    assert rates[0] == pytest.approx(rates[1])


@pytest.mark.campaign
def test_a_new_rate_leaves_the_schedule_of_a_sequence_where_it_is(project):
    (project / "schedules.py").write_text(
        "from torch.optim import lr_scheduler as each\n\n\ndef sequence(optimizer):\n"
        "    parts = [each.ConstantLR(optimizer, 1.0), each.ExponentialLR(optimizer, 0.5)]\n"
        "    return each.SequentialLR(optimizer, parts, milestones=[2])\n"
    )
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["scheduler"] = {"class": "schedules.sequence", "step_on": "update"}
    directory = stopped(project, config)
    training = resume_training(directory, ["hooks.StopAfter.epochs=2", "model.optimizer.lr=0.5"])
    before = training.model.optimizer.param_groups[0]["lr"]
    assert before == pytest.approx(0.5 * 0.5**3)  # of five updates, three were behind the milestone
    train(training)
    assert training.model.optimizer.param_groups[0]["lr"] == pytest.approx(before * 0.5**5)


CONTINUED = [("sequential", 3), ("sequential", 5), ("chained", 3), ("nested", 5)]


@pytest.mark.parametrize(("name", "updates"), thinned(CONTINUED, [("nested", 5)]))
def test_a_schedule_of_schedules_continues_before_and_after_its_milestone(project, name, updates):
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["scheduler"] = SCHEDULES[name]
    ended(project, config, f"hooks.StopAfter.iterations={updates}")
    train(resume_training(project / "run", ["hooks.StopAfter.iterations=99"]))
    assert result(project / "run") == straight(project, config)


def test_an_argument_of_a_nested_scheduler_that_changed_wins_over_the_saved_one(project):
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["scheduler"] = SCHEDULES["sequential"]
    directory = stopped(project, config)
    changed = ["hooks.StopAfter.epochs=2", "model.scheduler.schedulers.1.T_max=40", "model.optimizer.lr=0.5"]
    scheduler = resume_training(directory, changed).model.scheduler.scheduler
    warm_up, cosine = scheduler._schedulers
    assert (cosine.T_max, cosine.base_lrs, warm_up.base_lrs) == (40, [0.5], [0.5])
    assert (scheduler.last_epoch, warm_up.total_iters) == (5, 3)
    assert scheduler.get_last_lr() == cosine.get_last_lr() == [scheduler.optimizer.param_groups[0]["lr"]]


def test_other_parts_of_a_schedule_are_refused_at_a_resume(project):
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["scheduler"] = SCHEDULES["sequential"]
    directory = stopped(project, config)
    parts = "[{class: LinearLR}, {class: ExponentialLR, gamma: 0.9}]"
    message = r"is SequentialLR\(LinearLR, ExponentialLR\), but was SequentialLR\(LinearLR, CosineAnnealingLR\)"
    with pytest.raises(StateError, match=message):
        resume_training(directory, ["hooks.StopAfter.epochs=2", f"model.scheduler.schedulers={parts}"])


@pytest.mark.campaign
def test_a_resume_that_outlives_its_schedule_warns_once_and_is_exact(project, caplog):
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["scheduler"] = {"class": "PolynomialLR", "total_iters": 4, "step_on": "update"}
    directory = stopped(project, config)
    caplog.clear()
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    (warning,) = [each.getMessage() for each in caplog.records if "a learning rate of 0" in each.getMessage()]
    assert warning.startswith("model.scheduler: PolynomialLR gives a learning rate of 0 in 5 of 5 updates; write its")
    assert result(directory) == straight(project, config)


@pytest.mark.campaign
def test_a_longer_schedule_that_begins_at_a_rate_of_0_is_warned_of(project, caplog):
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["scheduler"] = {"class": "PolynomialLR", "total_iters": 5, "step_on": "update"}
    directory = stopped(project, config)
    caplog.clear()
    train(resume_training(directory, ["hooks.StopAfter.epochs=2", "model.scheduler.total_iters=10"]))
    assert "PolynomialLR gives a learning rate of 0 in 5 of 5 updates" in caplog.text


def test_a_one_cycle_schedule_that_is_over_is_an_error_before_any_update(project):
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["scheduler"] = {"class": "OneCycleLR", "max_lr": 0.1, "total_steps": 5, "step_on": "update"}
    directory = stopped(project, config)
    before = (directory / "checkpoints" / "latest").resolve(), (directory / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="OneCycleLR makes 5 steps, but the run has 10 updates") as caught:
        resume_training(directory, ["hooks.StopAfter.epochs=2"])
    assert caught.value.exit_status == 2
    assert ((directory / "checkpoints" / "latest").resolve(), (directory / "config.yaml").read_text()) == before
    longer = resume_training(directory, ["hooks=[{StopAfter: {epochs: 2}}]", "model.scheduler.total_steps=20"])
    train(longer)
    assert longer.main_loop.iterations_done == 10


@pytest.mark.campaign
def test_a_one_cycle_schedule_that_would_end_in_a_longer_run_is_refused_before_the_run_is_changed(project):
    config = config_of(hooks=FEW_HOOKS)
    config["model"]["scheduler"] = {"class": "OneCycleLR", "max_lr": 0.1, "total_steps": 7, "step_on": "update"}
    directory = stopped(project, config)
    before = (directory / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="OneCycleLR makes 7 steps, but the run has 10 updates"):
        resume_training(directory, ["hooks.StopAfter.epochs=2"])
    assert (directory / "config.yaml").read_text() == before
    train(resume_training(directory, ["hooks.StopAfter.epochs=2", "model.scheduler.total_steps=10"]))
