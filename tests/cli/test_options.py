"""A wrong option says what to write instead, and a command looks for a run where the user points."""

import json

import pytest
from projects import linear_on_majority


@pytest.mark.parametrize("given", ["train c.yaml --lr 0.1", "train c.yaml --rmm", "sweep c.yaml --seed=3"])
def test_an_unknown_option_is_answered_with_how_to_write_a_value_and_never_deletes(emrun_here, given):
    done = emrun_here(*given.split())
    assert done.returncode == 2
    assert " For a value of the config, write KEY=VALUE, such as model.optimizer.lr=0.1." in done.stderr
    assert "'--rm'" not in done.stderr


def test_a_command_without_overrides_says_nothing_of_values(emrun_here):
    assert "KEY=VALUE" not in emrun_here("ls", "--name", "x").stderr


def test_a_run_is_looked_for_where_the_user_points(emrun_here, tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps(linear_on_majority(hooks=[{"StopAfter": {"epochs": 1}}])))
    for name in ("one", "two"):
        done = emrun_here("train", "-q", "config.yaml", "--output-dir", f"log/{name}")
        assert done.returncode == 0, done.stderr
    done = emrun_here("resume", "log")
    assert done.returncode == 2
    assert "log is not a run directory: it has no config.yaml; the newest runs in it: log/two, log/one" in done.stderr
    done = emrun_here("eval", "log/one")
    assert done.returncode == 2
    assert "name a stream to evaluate: train, valid" in done.stderr
    done = emrun_here("ls", "log", "--where", "model.optimizer.lr==0.1", "--where", "seed!=0")
    assert done.stdout.count("finished") == 2
