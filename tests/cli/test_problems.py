"""Errors for programs: codes, fixes and one object on standard output. tests/test_wrong_configs.py has every code."""

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from emrun.base.errors import MissingExtra, RunInUse, StorageError
from emrun.cli import emrun as commands
from emrun.cli.problems import code_of, fix_of, problems_of

ROOT = Path(__file__).parent.parent.parent


def failed(*arguments):
    done = CliRunner().invoke(commands, [*arguments, "--json"], standalone_mode=False)
    found = json.loads(done.stdout)
    assert (found["status"], found["exit_status"]) == ("failed", done.return_value)
    return found["problems"]


def test_every_code_is_in_the_docs_and_every_code_of_the_docs_is_used():
    sources = [path.read_text() for path in (ROOT / "emrun").rglob("*.py")]
    own = re.compile(r'"(config\.[a-z-]+)"|\bcode(?:: str)? = "([a-z.-]+)"|"(code\.[a-z-]+)"')
    used = {next(filter(None, found)) for text in sources for found in own.findall(text)} - {"config.yaml"}
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert used == set(re.findall(r"^\| `([a-z.-]+)` \|", text, re.MULTILINE))


def test_all_mistakes_are_in_one_object_with_their_places(project):
    config = project / "config.yaml"
    config.write_text(config.read_text().replace("lr:", "lrr:"))
    first, second = failed("train", "config.yaml", "sed=3")
    assert (first["line"], first["key"]) == (None, None)
    assert first["fix"] == {"overrides": ["~sed", "seed=3"]}
    assert (second["file"], second["code"], second["retry"]) == ("config.yaml", "config.unknown-key", False)
    assert config.read_text().splitlines()[second["line"] - 1][second["column"] - 1 :].startswith("lrr:")


def test_a_fix_of_an_override_keeps_its_value_though_the_right_key_is_there(project):
    (problem,) = failed("check", "config.yaml", "hooks.StopAfter.epoch=2")
    assert problem["fix"]["overrides"][-1].endswith(".epochs=2")


@pytest.mark.parametrize("name", ["diff", "eval", "ls", "predict", "report", "resume", "trace"])
def test_commands_on_what_is_not_a_run_fail_with_an_object(project, emrun_here, name):
    more = {"diff": ["b"], "eval": ["valid"], "predict": ["valid", "-o", "f.csv"]}
    done = emrun_here(name, "nowhere", *more.get(name, []), "--json")
    (problem,) = json.loads(done.stdout)["problems"]
    assert (done.returncode, problem["code"]) == (2, "usage")
    assert "nowhere" in problem["message"]


def test_other_errors_have_a_code_and_tell_whether_to_try_again():
    (problem,) = problems_of(MissingExtra("WriteMLflow", "mlflow", "mlflow"))
    assert problem["fix"] == {"command": ["pip", "install", "emrun[mlflow]"]}
    (problem,) = problems_of(RunInUse("busy"))
    assert (problem["code"], problem["retry"]) == ("run.in-use", True)
    (problem,) = problems_of(KeyError("row"))
    assert (problem["code"], problem["message"]) == ("code.failed", "KeyError: 'row'")
    assert code_of(MemoryError()) == "code.out-of-memory"
    assert code_of(StorageError(28, "full")) == "storage"
    assert code_of(click.UsageError("no")) == "usage"


def test_a_problem_without_a_config_has_no_fix(tmp_path):
    from emrun.base.errors import Position, Problem

    problem = Problem(Position("c.yaml", 1, 1), "", "unknown key 'a'; did you mean 'b'?", "config.unknown-key")
    assert fix_of(problem, None) is None
