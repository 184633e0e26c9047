"""Options and commands of other tools are answered with the command to write."""

import json

import pytest
from projects import linear_on_majority


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("train config.yaml --lr 0.1", "train config.yaml model.optimizer.lr=0.1"),
        ("train --config config.yaml --epochs=3 a=1", "train config.yaml a=1 hooks.StopAfter.epochs=3"),
        ("train config.yaml --name x -q", "train config.yaml -q name=x"),
        ("train config.yaml --seed 3 --batch-size 16", "train config.yaml seed=3 dataset.batch_size=16"),
        ("check config.yaml --device cpu", "check config.yaml model.device=cpu"),
        ("train config.yaml --gpus 2", "train config.yaml --nproc 2"),
        ("train config.yaml --set model.a=2", "train config.yaml model.a=2"),
        ("train config.yaml --resume log/run", "resume log/run"),
        ("train config.yaml --fast-dev-run", "check config.yaml"),
        ("eval log/run valid --device cpu", "eval log/run valid model.device=cpu"),
        ("fit config.yaml", "train config.yaml"),
        ("test log/run valid", "eval log/run valid"),
        ("validate log/run valid", "eval log/run valid"),
        ("help", "--help"),
        ("help train", "train --help"),
    ],
)
def test_a_habit_is_answered_with_the_command_to_write(emrun, given, written):
    done = emrun(*given.split())
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"Write: emrun {written}"), done.stderr


@pytest.mark.parametrize("given", ["train config.yaml --lr", "ls --name x", "train config.yaml --rmm", "trian x"])
def test_what_is_no_habit_or_has_no_value_is_not_guessed_and_never_deletes(emrun, given):
    done = emrun(*given.split())
    assert done.returncode == 2
    assert "Write:" not in done.stderr
    assert "--rm'" not in done.stderr


@pytest.mark.parametrize("given", ["train config.yaml --lr", "train config.yaml --lr -q"])
def test_a_habit_without_its_value_is_answered_with_the_place_of_the_value(emrun, given):
    done = emrun(*given.split())
    assert done.returncode == 2
    written = given.replace(" --lr", "") + " model.optimizer.lr=VALUE"
    assert done.stderr.splitlines()[-1] == f"Error: No such option '--lr'. It needs a value: emrun {written}"


def test_what_no_command_does_is_answered_with_python(emrun):
    done = emrun("export", "log/run")
    assert done.returncode == 2
    assert "No such command 'export'. In Python, emrun.load_run(RUN).model.module is the trained module" in done.stderr
    assert "report" not in done.stderr


def test_a_run_is_looked_for_where_the_user_points(emrun, tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps(linear_on_majority(hooks=[{"StopAfter": {"epochs": 1}}])))
    for name in ("one", "two"):
        done = emrun("train", "-q", "config.yaml", "--output-dir", f"log/{name}")
        assert done.returncode == 0, done.stderr
    done = emrun("resume", "log")
    assert done.returncode == 2
    assert "log is not a run directory: it has no config.yaml; the newest runs in it: log/two, log/one" in done.stderr
    done = emrun("eval", "log/one")
    assert done.returncode == 2
    assert "name a stream to evaluate: train, valid" in done.stderr
    assert emrun("ls", "log", "--where", "model.optimizer.lr==0.1", "--where", "seed!=0").stdout.count("finished") == 2
