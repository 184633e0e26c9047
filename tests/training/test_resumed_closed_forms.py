"""emrun's schedules at a resume: those that continue, those of a longer run, those that change."""

import pytest
from campaign import thinned
from training.resuming import FEW_HOOKS, config_of, interrupted, result, resumed, stopped, straight

from emrun import create_training, resume_training
from emrun.base.errors import StateError
from emrun.models.schedules import built_in
from emrun.training.create import train


def scheduled(**schedule):
    return {**config_of(hooks=FEW_HOOKS), "model": {**config_of()["model"], "scheduler": schedule}}


ALL = {
    "Constant": {"warmup": "30%", "cooldown": "2 updates"},
    "Linear": {"final": 0.1},
    "Cosine": {"warmup": "1 pass", "cycles": 2},
    "Polynomial": {"power": 2.0},
    "Exponential": {},
    "InverseSqrt": {"warmup": "2 updates", "cooldown": "20%"},
    "Steps": {"milestones": ["40%", "7 updates"]},
}


def test_every_schedule_is_resumed_below():
    assert {each for each, value in vars(built_in).items() if getattr(value, "__module__", "") == built_in.__name__
            and isinstance(value, type)} == set(ALL)  # fmt: skip


@pytest.mark.parametrize("name", thinned(ALL, ["Cosine"]))
def test_a_resume_continues_the_schedule_bit_for_bit(project, name):
    config = scheduled(**{"class": name, **ALL[name]})
    events = interrupted(config, project / "run", 55)  # in the middle of the second epoch
    assert events.count("after_update") in (6, 7, 8, 9)
    resumed(project / "run")
    assert result(project / "run") == straight(project, config)


LONGER = {
    "Constant": {"warmup": "2 updates"},
    "Constant, cooling later": {"class": "Constant", "cooldown": "4 updates"},
    "InverseSqrt": {"warmup": "2 updates"},
    "Steps": {"milestones": ["3 updates", "4 updates"]},
}


@pytest.mark.campaign  # test_longer_runs.py has others in `make test`
@pytest.mark.parametrize("name", LONGER)
def test_a_longer_run_is_that_of_a_straight_one_where_the_rates_so_far_stay_the_same(project, name):
    config = scheduled(**{"class": name, **LONGER[name]})
    more = {} if "cooldown" not in LONGER[name] else {"checkpoint_name": "epoch-1"}
    if more:
        config["hooks"] = [each for each in config["hooks"] if "SaveEvery" not in each]
        config["hooks"].insert(-2, {"SaveEvery": {"n_epochs": 1}})
        train(create_training(config, output_dir=project / "run"))  # the cool-down begins after six updates
    else:
        stopped(project, config)
    train(resume_training(project / "run", ["hooks.StopAfter.epochs=3"], **more))
    config["hooks"] = [*config["hooks"][:-1], {"StopAfter": {"epochs": 3, "minutes": 60}}]
    whole = straight(project, config)
    found = result(project / "run")
    assert {key: found[key] for key in ("weights", "model", "steps")} == {
        key: whole[key] for key in ("weights", "model", "steps")
    }


@pytest.mark.parametrize("name", thinned(["Linear", "Cosine", "Polynomial", "Exponential"], ["Cosine"]))
def test_another_length_of_a_schedule_that_depends_on_it_is_refused(project, name):
    directory = stopped(project, scheduled(**{"class": name}), epochs=2)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*.*")}
    message = f"{name} was planned for 10 updates, and the run now makes 20: this changes the rates of the 10 updates"
    with pytest.raises(StateError, match=message) as caught:
        resume_training(directory, ["hooks.StopAfter.epochs=4"])
    assert "StopAfter.epochs: 2 -> 4" in caught.value.__notes__[0]
    after = {path: path.stat().st_mtime_ns for path in directory.rglob("*.*")}
    assert {path for path in before if before[path] != after[path]} <= {directory / "train.log"}


def test_changed_arguments_win_over_the_saved_plan(project):
    directory = stopped(project, scheduled(**{"class": "Linear"}), epochs=1)
    training = resume_training(directory, ["hooks.StopAfter.epochs=2", "model.scheduler.final=0.5"])
    train(training)
    schedule = training.model.scheduler
    assert schedule.planned["began"] == 5
    assert training.model.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5)


@pytest.mark.campaign
def test_a_changed_base_rate_scales_the_schedule(project):
    directory = stopped(project, scheduled(**{"class": "Constant", "warmup": "2 updates"}))
    training = resume_training(directory, ["hooks.StopAfter.epochs=2", "model.optimizer.lr=0.01"])
    train(training)
    assert training.model.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.campaign
def test_another_schedule_is_refused(project):
    directory = stopped(project, scheduled(**{"class": "Constant"}))
    with pytest.raises(StateError, match=r"model.scheduler is Cosine, but was Constant; a resume cannot change it"):
        resume_training(directory, ["hooks.StopAfter.epochs=2", "model.scheduler.class=Cosine"])
