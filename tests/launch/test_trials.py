"""The configs of trials and their identity."""

from pathlib import Path

import pytest
from sweeps import write_project

from emrun.base.errors import ConfigError, UsageError
from emrun.config.config import load_config
from emrun.launch.parameters import read_parameters
from emrun.launch.settings import Sweep
from emrun.launch.trials import Trials, identity


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(write_project(tmp_path))
    return tmp_path


def made(*given, overrides=(), **settings):
    config = load_config("config.yaml", overrides)
    return Trials(config, read_parameters(config.root, given), Sweep(**settings), Path("log"))


def names(trials):
    return [trial.directory.name for each in trials.grid() for trial in each.trials]


def test_a_grid_has_all_combinations_each_with_a_directory_of_its_own(project):
    found = list(made("model.width=[1, 2, 3]").grid())
    assert [each.values for each in found[:2]] == [{"model.lr": 0, "model.width": 0}, {"model.lr": 0, "model.width": 1}]
    assert len({trial.directory for each in found for trial in each.trials}) == len(found) == 6
    assert found[1].trials[0].overrides == ("model.lr=0.1", "model.width=2")


def test_more_repeats_and_choices_keep_the_trials_that_are_there(project):
    before = names(made())
    assert set(before) < set(names(made(repeats=3)))
    assert set(before) < set(names(made("model.lr=[0.05, 0.1, 0.3]")))


def test_a_trial_is_named_for_its_values_and_found_under_another_name(project):
    (trial,) = next(made("model.lr=[0.1]", overrides=["model.width=1"]).grid()).trials
    assert trial.directory.name == f"trial-lr=0.1-{trial.directory.name[-12:]}"
    trial.directory.mkdir(parents=True)
    (again,) = next(made("model.lr=[0.1]", "model.width=[1]").grid()).trials
    assert again.directory == trial.directory


def test_repeats_have_seeds_that_the_seed_of_the_config_determines(project):
    seeds = [trial.seed for trial in next(made(repeats=3).grid()).trials]
    assert seeds[0] == 3
    assert len(set(seeds)) == 3
    assert seeds == [trial.seed for trial in next(made(repeats=3).grid()).trials]
    assert seeds[1:] != [trial.seed for trial in next(made(repeats=3, overrides=["seed=4"]).grid()).trials[1:]]
    first, second = next(made(repeats=2, overrides=["~seed"]).grid()).trials
    assert (first.seed, first.overrides) == (0, ("model.lr=0.1", "seed=0"))
    assert second.overrides[1] == f"seed={second.seed}"


def test_folds_set_a_free_value(project):
    found = next(made(folds=3, repeats=2).grid()).trials
    assert [(trial.seed == 3, trial.fold) for trial in found] == [
        *((True, 0), (True, 1), (True, 2)),
        *((False, 0), (False, 1), (False, 2)),
    ]
    assert found[1].overrides[-1] == "vars.fold=1"


def test_folds_without_a_use_of_the_free_value_are_an_error(project):
    with pytest.raises(ConfigError, match="no value of the config is"):
        made(folds=3, overrides=["dataset.fold=0"]).check()


def test_the_identity_is_that_of_the_values(project, monkeypatch):
    one = identity(load_config("config.yaml"))
    assert one == identity(load_config("config.yaml", ["name=other", "sweep.repeats=3", "code_directory=somewhere"]))
    assert one == identity(load_config(dict(reversed(dict(load_config("config.yaml")).items()))))
    assert one != identity(load_config("config.yaml", ["model.lr=0.2"]))
    monkeypatch.setenv("DELAY", "0")
    two = identity(load_config("config.yaml", ["dataset.delay=${env:DELAY}"]))
    monkeypatch.setenv("DELAY", "1")
    assert two == identity(load_config("config.yaml", ["dataset.delay=${env:DELAY}"])) != one


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("model.widht=[1, 2]", "-p 'model.widht=[1, 2]': model: unknown argument 'widht'; did you mean 'width'?"),
        ("modle.width=[1]", "-p 'modle.width=[1]': unknown key 'modle'; did you mean 'model'?"),
        ("dataset.class=[my_code.Data, my_code.Date]", "has no 'Date'"),
        ("x=[{model.width: 1, main_loop.bufer: 2}]", "main_loop: unknown argument 'bufer'; did you mean 'buffer'?"),
    ],
)
def test_a_parameter_that_is_not_there_is_an_error_at_its_position(project, given, message):
    with pytest.raises(ConfigError) as raised:
        made(given).check()
    assert message in str(raised.value)
    assert all(str(each.position).startswith("-p ") for each in raised.value.problems)


def test_a_parameter_of_the_config_has_its_position_there(project):
    text = (project / "config.yaml").read_text()
    (project / "config.yaml").write_text(text.replace("model.lr: [", "model.rl: ["))
    with pytest.raises(ConfigError, match=r"config\.yaml:14:16: model: unknown argument 'rl'"):
        made().check()


def test_what_the_directories_say_is_all_that_is_known(project, emrun_here):
    for each in made("model.width=[1, 2]", "model.lr=[0.1]").grid():
        (trial,) = each.trials
        words = ("train", "-q", "config.yaml", *trial.overrides, "--output-dir", trial.directory)
        assert emrun_here(*words).returncode == 0
    (project / "log" / "trial-0123456789ab").mkdir()
    trials = made("model.lr={low: 0.0, high: 0.2}", "model.width=[2, 1]")
    found = sorted(sorted(each.values.items()) for each in trials.known())
    assert found == [[("model.lr", 0.1), ("model.width", 0)], [("model.lr", 0.1), ("model.width", 1)]]


def test_a_trial_that_is_a_link_is_refused(project):
    (trial,) = next(made(overrides=["model.width=1"]).grid()).trials
    (project / "other").mkdir()
    trial.directory.parent.mkdir()
    trial.directory.symlink_to(project / "other")
    shown = f"log/{trial.directory.name} is a link, and the directory of a trial is its own; remove the link"
    with pytest.raises(UsageError, match=shown):
        list(made(overrides=["model.width=1"]).grid())


def test_the_directory_of_a_sweep_is_resolved_once(project):
    (project / "log").symlink_to("first")
    trials = made()
    (project / "log").unlink()
    (project / "log").symlink_to("second")
    assert {trial.directory.parent for each in trials.grid() for trial in each.trials} == {project / "first"}
