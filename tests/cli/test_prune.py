"""`emrun prune`."""

import json
import os
import shutil

import pytest
from campaign import thinned
from here import run_here
from projects import LINEAR

from emrun.storage.lock import RunLock

CONFIG = (
    "seed: 1\ndataset: {class: Majority, n: 50}\n"
    + LINEAR
    + """\
main_loop: {extra_streams: [valid], on_unused_sources: ignore, report: false}
hooks:
  - ComputeStats: {variables: [loss]}
  - SaveBest
  - StopAfter: {epochs: 1}
"""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a finished run of the config."""
    place = tmp_path_factory.mktemp("trained")
    (place / "c.yaml").write_text(CONFIG)
    assert run_here(["train", "c.yaml", "-q", "--output-dir", "run"], place).returncode == 0
    return place / "run"


@pytest.fixture
def runs(make_run, tmp_path):
    """Return a function that returns the names of the runs that are there."""
    make_run("a", (0.1, 0.9))
    make_run("b", (0.1, 0.7, 0.6), status="failed")
    make_run("c", (0.05,), status="killed")
    return lambda: sorted(path.name for path in (tmp_path / "log").iterdir())


def test_runs_are_shown_and_removed_after_a_question(runs, emrun, emrun_here):
    done = emrun("prune", "--status", "failed")  # standard input is empty: there is no answer
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].split()[:3] == ["b", "failed", "2"]
    assert "remove them? [y/N]" in done.stderr
    assert "nothing was removed" in done.stderr
    assert runs() == ["a", "b", "c"]
    assert "nothing was removed" not in emrun_here("prune", "--status", "failed", "--yes").stderr
    assert runs() == ["a", "c"]


CHOICES = [
    (["--epochs", "2"], ["b"]),
    (["--status", "finished", "--status", "killed"], ["b"]),
    (["--keep-best", "1"], ["a"]),
    (["--keep-best", "1", "--by", "max:valid/loss"], ["c"]),
    (["--keep-best", "1", "--where", "epochs<2"], ["a", "b"]),
    (["--older", "1h", "--status", "failed"], ["a", "c"]),
    (["--older", "9000w"], ["a", "b", "c"]),
    (["--where", "valid/accuracy<0.3"], ["a", "b"]),
]


@pytest.mark.parametrize(("options", "left"), thinned(CHOICES, CHOICES[1::2]))
def test_runs_are_chosen_by_all_options_together(runs, emrun_here, options, left):
    done = emrun_here("prune", *options, "--yes")
    assert done.returncode == 0, done.stderr
    assert runs() == left


def test_the_column_by_which_runs_are_judged_is_shown(runs, emrun_here):
    shown = emrun_here("prune", "--keep-best", "1", "--by", "max:valid/accuracy", "--dry-run").stdout.splitlines()
    assert shown[0].split()[3] == "max:valid/accuracy"
    assert {line.split()[0]: line.split()[3] for line in shown[2:4]} == {"b": "0.7", "c": "0.05"}


def test_a_dry_run_removes_nothing_and_json_is_for_programs(runs, emrun_here, tmp_path):
    found = json.loads(emrun_here("prune", "--epochs", "2", "--dry-run", "--json").stdout)
    assert [each["directory"] for each in found["removes"]] == ["log/a", "log/c"]
    assert (found["what"], found["size_bytes"]) == ("runs", sum(each["size_bytes"] for each in found["removes"]))
    assert runs() == ["a", "b", "c"]


def test_a_run_in_use_stays_and_the_others_go(runs, emrun_here, tmp_path):
    lock = RunLock(tmp_path / "log" / "c")
    done = emrun_here("prune", "--epochs", "9", "--yes")
    lock.release()
    assert done.returncode == 0
    assert "c stays: it is in use by process" in done.stderr
    assert runs() == ["c"]


def test_a_module_of_the_user_beside_those_that_were_recorded_keeps_the_run(trained, emrun_here, tmp_path):
    shutil.copytree(trained, tmp_path / "r", symlinks=True)
    mine = tmp_path / "r" / "code" / "modules" / "mine.py"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    assert "1 name that the run does not write: code/modules/mine.py;" in emrun_here("prune", "r", "--yes").stderr
    assert (tmp_path / "r" / "config.yaml").exists()
    mine.unlink()
    assert emrun_here("prune", "r", "--yes").returncode == 0
    assert not (tmp_path / "r").exists()


WRONG = [
    ([], "say which runs: --epochs, --older, --status, --where, --keep-best, or the path of a run"),
    (["--older", "3"], "--older: '3' is not a time such as 30d, 12h or 5min; the unit is missing"),
    (["--status", "fialed"], "did you mean 'failed'"),
    (["--by", "min:valid/loss"], "add --keep-best N"),
    (["--keep-best", "1", "--by", "valid/loss"], "write --by min:valid/loss or --by max:valid/loss"),
    (["--keep-best", "1", "--by", "min:valid/los"], "did you mean 'valid/loss'"),
    (["--checkpoints", "--optimizer-states", "--epochs", "1"], "leave out --optimizer-states"),
    (["--json", "--epochs", "1"], "add --dry-run or --yes"),
]  # fmt: skip


def test_what_cannot_be_pruned_is_an_error(runs, emrun_here):
    for options, message in WRONG:
        done = emrun_here("prune", *options)
        assert done.returncode == 2, options
        assert message in done.stderr
        assert runs() == ["a", "b", "c"]


def test_without_optimizer_states_a_run_can_be_evaluated(trained, emrun_here, tmp_path):  # but not resumed
    shutil.copytree(trained, tmp_path / "log" / "a", symlinks=True)
    done = emrun_here("prune", "log/a", "--optimizer-states", "--yes")
    assert "they cannot be resumed any more" in done.stdout
    evaluated = emrun_here("eval", "log/a", "valid", "-q")
    assert evaluated.returncode == 0, evaluated.stderr


NAMES = ("config.yaml", "trace.yaml", "train.log", "code/record.json", "checkpoints/latest/manifest.json")
MORE = ("metrics.jsonl", "steps.jsonl", "code/batches.jsonl", "checkpoints/latest/state.pt", ".owner.json")
COMMANDS = {
    "report": ["report", "r", "-o", "out.html"],
    "ls": ["ls", "r", "-v"],
    "prune": ["prune", "r", "--yes"],
    "eval": ["eval", "-q", "r", "valid"],
    "resume": ["resume", "-q", "r", "hooks.StopAfter.epochs=2"],
}


CASES = [("report", NAMES), ("resume", NAMES[:2])]
CASES += [pytest.param(command, (*NAMES, *MORE), marks=pytest.mark.campaign) for command in COMMANDS]


@pytest.mark.parametrize(("command", "names"), CASES)
def test_no_command_follows_a_link_or_waits_for_a_pipe_in_a_run(trained, emrun_here, tmp_path, command, names):
    secret = tmp_path / "secret"
    secret.write_text("seed: SECRET-7781")
    for name in names:
        for make in (os.mkfifo, lambda path: path.symlink_to(secret)):
            shutil.rmtree(tmp_path / "r", ignore_errors=True)
            shutil.copytree(trained, tmp_path / "r", symlinks=True)
            place = tmp_path / "r" / name
            place.unlink(missing_ok=True)
            make(place)
            done = emrun_here(*COMMANDS[command])
            page = tmp_path / "out.html"
            written = page.read_text() if page.exists() else ""
            assert done.returncode in (0, 2, 74), (name, done.stderr)
            assert "SECRET-7781" not in f"{done.stdout}{done.stderr}{written}", name
            assert secret.read_text() == "seed: SECRET-7781", name
