"""`emrun check` without a config: what it prints, and its exit status."""

import json

import pytest
from click.testing import CliRunner

from emrun.cli import emrun as commands
from emrun.diagnosis import environment
from emrun.diagnosis.environment import Environment


def test_the_installed_command_prints_facts_and_devices(emrun, tmp_path):
    done = emrun("check")
    assert done.returncode == 0, done.stderr
    facts, devices, *_, last = done.stdout.split("\n\n")
    assert {"emrun", "Python", "PyTorch"} <= {line.split()[0] for line in facts.splitlines()}
    assert devices.splitlines()[2].startswith("cpu ")
    assert last in ("nothing is wrong\n", f"0 errors, {done.stderr.count('warning: ')} warnings\n")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def faulty(monkeypatch):
    """Make the environment one with an error and a warning."""
    row = {"device": "cpu", "memory": ""}
    found = Environment({"emrun": "1"}, [row], ["cpu fails: no"], ["few files"])
    monkeypatch.setattr(environment, "inspect_environment", lambda: found)
    return found


def test_problems_are_errors_with_exit_status_1(faulty, monkeypatch):
    result = CliRunner().invoke(commands, ["check"], standalone_mode=False)
    assert result.return_value == 1
    assert result.stderr == "warning: few files\nerror: cpu fails: no\n"
    assert result.stdout.endswith("\n\n1 errors, 1 warnings\n")
    faulty.problems.clear()
    assert CliRunner().invoke(commands, ["check"], standalone_mode=False).return_value == 0


def test_json_has_the_problems_in_the_form_of_those_of_a_config(faulty):
    result = CliRunner().invoke(commands, ["check", "--json"], standalone_mode=False)
    assert result.return_value == 1
    found = json.loads(result.stdout)
    assert found["problems"] == [{"file": None, "line": None, "column": None, "key": None, "message": "cpu fails: no"}]
    assert (found["facts"], found["warnings"]) == ({"emrun": "1"}, ["few files"])


def test_a_pytorch_that_cannot_be_imported_is_one_line(emrun, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    done = emrun("check", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == "Error: libcudart.so.12: cannot open shared object file; install emrun and PyTorch again\n"


def test_static_needs_a_config():
    result = CliRunner().invoke(commands, ["check", "--static"])
    assert result.exit_code == 2
    assert "--static needs a CONFIG" in result.stderr
