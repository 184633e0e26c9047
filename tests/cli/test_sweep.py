"""The options of `emrun sweep`, its bad input, and what it prints; tests/launch/test_sweep.py has faults."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from campaign import thinned
from sweeps import statuses, trace, trials, write_project

EMRUN = Path(sys.executable).with_name("emrun")


@pytest.fixture
def project(tmp_path):
    return write_project(tmp_path)


@pytest.fixture(scope="module")
def once(tmp_path_factory, warm):
    """Return a directory with the project and the two trials of its sweep."""
    place = write_project(tmp_path_factory.mktemp("once"))
    done = warm.run([str(EMRUN), "sweep", "-q", "config.yaml"], place, timeout=100)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def project_with_trials(once, tmp_path):
    """Return a copy of the directory, in which the sweep continues."""
    return shutil.copytree(once, tmp_path, symlinks=True, dirs_exist_ok=True)


def test_a_sweep_prints_a_table_with_the_best_first(project_with_trials, emrun, emrun_here):
    project = project_with_trials
    done = emrun("sweep", "config.yaml", "--repeats", "2")
    assert done.returncode == 0
    counts = [line[-8:] for line in done.stderr.splitlines() if ": finished in " in line]
    assert counts == [f"({number} of 4)" for number in (2, 4)]
    header, _, *rows = done.stdout.splitlines()
    assert header.split() == ["lr", "status", "valid/loss/mean", "std", "95", "%", "interval", "runs"]
    assert [row.split()[0] for row in rows] == ["0.3", "0.1"]
    assert all(row.endswith("2 of 2") for row in rows)
    best = emrun_here("sweep", "config.yaml", "--repeats", "2", "--status", "--json")
    found, _ = json.loads(best.stdout)["experiments"]
    assert found["values"] == {"model.lr": 0.3}
    assert found["count"] == 2
    assert found["mean"] == pytest.approx(sum(run["value"] for run in found["runs"]) / 2)
    assert emrun_here("sweep", "config.yaml", "--status").stdout.count("finished") == 2
    (directory,) = (project / "log").iterdir()
    place = f"log/{directory.name}"
    refused = emrun_here("sweep", place, "--status")
    how = f"emrun sweep CONFIG --status --output-dir {place}, with the config of the sweep; its runs: emrun ls {place}"
    assert (refused.returncode, how in refused.stderr) == (2, True), refused.stderr
    assert emrun_here("sweep", "config.yaml", "--status", "--output-dir", place).stdout.count("finished") == 2


def test_the_config_of_a_trial_has_no_section_sweep(project_with_trials, emrun_here):
    project = project_with_trials
    assert len(trials(project)) == 2
    assert all("sweep" not in (run / "config.yaml").read_text() for run in trials(project))
    assert trace(trials(project)[0])["command"][:3] == ["emrun", "train", "config.yaml"]
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "alone").returncode == 0
    assert "sweep" not in (project / "alone" / "config.yaml").read_text()
    assert emrun_here("check", "config.yaml", "sweep.repeats=zero").returncode == 2


def test_dry_run_prints_the_commands_of_the_trials_that_are_left(project_with_trials, emrun_here):
    done = emrun_here("sweep", "config.yaml", "-p", "model.lr=[0.3, 0.5]", "--jobs", "2", "--dry-run")
    (line,) = done.stdout.splitlines()
    words = shlex.split(line)
    assert words[:5] == ["OMP_NUM_THREADS=1", "emrun", "train", "config.yaml", "model.lr=0.5"]
    assert (words[5], words[7]) == ("--output-dir", "--auto-resume")
    assert len(trials(project_with_trials)) == 2


@pytest.mark.campaign
def test_an_adaptive_method_continues_from_the_directories(project, emrun, emrun_here):
    arguments = ("-p", "model.lr={low: 0.01, high: 0.5, log: true}", "sweep.method=tpe")
    assert emrun("sweep", "-q", "config.yaml", *arguments, "sweep.trials=2").returncode == 0
    assert len(trials(project)) == 2
    done = emrun("sweep", "config.yaml", *arguments, "sweep.trials=3")
    assert (done.returncode, done.stderr.count("finished")) == (0, 1)
    assert len(trials(project)) == 3
    refused = emrun_here("sweep", "config.yaml", *arguments, "sweep.trials=3", "--dry-run")
    assert "tpe chooses by the results" in refused.stderr


def test_a_pruned_trial_says_so_and_is_not_trained_again(project, emrun, emrun_here):
    arguments = ("-p", "model.lr=[0.5, 0.0001]", "hooks.StopAfter.epochs=15", "dataset.delay=0.02")
    pruner = "sweep.pruner={median: {n_startup_trials: 1}}"
    done = emrun("sweep", "config.yaml", *arguments, pruner)
    assert (done.returncode, done.stderr.count(": pruned in ")) == (0, 1)
    assert sorted(statuses(project)) == ["finished", "pruned"]
    pruned = trials(project)[statuses(project).index("pruned")]
    assert trace(pruned)["reason"].startswith("pruned after epoch ")
    assert emrun_here("sweep", "config.yaml", *arguments, pruner).stderr.count("trial-") == 0


BAD = [
    (
        ["-p", "model.widht=[1, 2]"],
        "-p 'model.widht=[1, 2]': model: unknown argument 'widht'; did you mean 'width'?",
    ),
    (["-p", "seed=[1, 2]"], "seed: is not a parameter: repeats trains each combination with several seeds"),
    (["-p", "model.lr={low: 0.1, high: 0.2}"], "a grid needs a list, or a range with step"),
    (["-p", "model.lr={low: 0, high: 9.0e+6, step: 1.0e-3}"], "the grid has 9,000,000,001 runs"),
    (["--repeats", "1000000000"], "at most 100,000 are tried; use fewer values"),
    (["~sweep.parameters"], "nothing to try: give -p"),
    (["sweep.jbos=2"], "sweep: unknown argument 'jbos'; did you mean 'jobs'?"),
    (["-p", "model.lr=[0.5]", "sweep=5"], "sweep: 5 is not a mapping"),
    (["sweep.condition=best"], "sweep.condition: 'best' is not one of min, max"),
    (["sweep.parameters=lr"], "sweep.parameters: 'lr' is not a mapping"),
    (["seed=abc"], "seed: 'abc' is not a whole number"),
    (["sweep.pruner=nothing"], "override 'sweep.pruner=nothing': sweep.pruner: Optuna has no 'nothing'"),
    (["sweep.folds=2", "dataset.fold=0"], "no value of the config is ${vars.fold}"),
    (["--status", "--dry-run"], "use one of --status, --dry-run"),
]


def test_bad_input_is_an_error_before_the_first_trial(project, emrun_here):
    for arguments, message in BAD:
        done = emrun_here("sweep", "config.yaml", *arguments)
        assert done.returncode == 2, arguments
        assert message in done.stderr
        assert not (project / "log").exists()


def test_an_objective_that_no_hook_writes_is_an_error_before_the_first_trial(project, emrun):
    done = emrun("sweep", "config.yaml", "sweep.objective=valid/los/mean")
    assert done.returncode == 2
    assert "override 'sweep.objective=valid/los/mean': sweep.objective: Sweep monitors valid/los/mean" in done.stderr
    assert "no hook writes 'los/mean'; did you mean 'loss/mean'?" in done.stderr
    assert done.stdout == ""
    assert trials(project) == []


@pytest.mark.campaign
def test_a_dry_run_of_an_objective_that_no_hook_writes_has_the_same_error(project, emrun):
    done = emrun("sweep", "config.yaml", "sweep.objective=valid/los/mean")
    dry = emrun("sweep", "config.yaml", "sweep.objective=valid/los/mean", "--dry-run")
    assert (dry.returncode, dry.stdout, dry.stderr) == (2, "", done.stderr)


def test_without_an_objective_the_end_says_what_to_add(project_with_trials, emrun_here):
    words = "nothing was compared: the sweep has no objective; repeat the command with --status and "
    done = emrun_here("sweep", "-q", "config.yaml", "sweep.objective=null")
    assert done.stdout.splitlines()[-1].startswith(f"{words}sweep.objective=valid/loss/mean")
    assert words in emrun_here("sweep", "config.yaml", "sweep.objective=null", "--status").stdout
    compared = emrun_here("sweep", "config.yaml", "--status", "sweep.objective=valid/loss/mean")
    assert [row.split()[0] for row in compared.stdout.splitlines()[2:]] == ["0.3", "0.1"]
    assert compared.stderr == ""
    wrong = emrun_here("sweep", "config.yaml", "--status", "sweep.objective=valid/los/mean")
    assert "warning: no finished trial has a value of valid/los/mean" in wrong.stderr


CONDITIONS = [
    ("valid/loss/mean", [], "min"),
    ("valid/accuracy/mean", [], "max"),
    ("valid/energy/mean", [], "min"),
    ("valid/energy/max", ["hooks.SaveBest={variable: energy, condition: max}"], "max"),
    ("test/energy/mean", ["hooks.SaveBest={variable: energy, condition: max}"], "min"),
    ("valid/energy/mean", ["hooks.SaveBest={variable: energy, condition: max}", "sweep.condition=min"], "min"),
]


@pytest.mark.parametrize(("objective", "more", "condition"), thinned(CONDITIONS, CONDITIONS[1::2]))
def test_the_condition_is_that_of_save_best_or_of_the_name(project, emrun_here, objective, more, condition):
    arguments = ["~sweep.condition"] if "condition" in (project / "config.yaml").read_text() else []
    found = emrun_here("sweep", "config.yaml", "--status", "--json", *arguments, f"sweep.objective={objective}", *more)
    assert json.loads(found.stdout)["condition"] == condition


@pytest.mark.campaign
def test_equal_values_have_no_interval(project, emrun):
    done = emrun("sweep", "-q", "config.yaml", "-p", "model.lr=[0.0]", "--repeats", "2")
    assert done.stdout.splitlines()[2].split()[-4:] == ["0", "2", "of", "2"]


@pytest.mark.campaign
def test_folds_and_repeats_are_one_experiment(project, emrun):
    done = emrun("sweep", "-q", "config.yaml", "sweep.folds=2", "-p", "model.lr=[0.3]", "--repeats", "2", "--json")
    (found,) = json.loads(done.stdout)["experiments"]
    assert [(run["fold"], run["status"]) for run in found["runs"]] == [(0, "finished"), (1, "finished")] * 2
    assert found["interval"] > 0


def test_without_optuna_the_message_has_the_command_that_installs_it(project, monkeypatch):
    from emrun.base.errors import MissingExtra
    from emrun.cli import emrun as commands

    monkeypatch.chdir(project)
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "emrun.launch.search", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'emrun\[sweep\]'"):
        commands.commands["sweep"].main(["config.yaml", "sweep.pruner=median"], standalone_mode=False)


@pytest.mark.campaign
def test_a_search_ends_when_all_combinations_are_tried(project, emrun):
    arguments = ("sweep", "config.yaml", "sweep.method=brute_force", "sweep.trials=5", "hooks.StopAfter.epochs=1")
    done = emrun(*arguments)
    assert done.returncode == 0, done.stderr
    assert "method brute_force has tried all combinations: the sweep ends" in done.stderr
    assert len(trials(project)) == 2
    assert emrun(*arguments).returncode == 0
    assert len(trials(project)) == 2
