"""Wrong configs, one for each kind of mistake, each with the exact text that emrun prints.

The first comment of each config says when the mistake is found: while `reading`, in phase `one` (nothing imported), in
phase `two` (classes imported), or while `building`. A second comment may hold overrides.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from emrun.config.config import load_config
from emrun.config.plan import check_statically
from emrun.errors import ConfigError

HOME = Path(__file__).parent / "wrong_configs"
SEVERAL = ("five_mistakes", "mistakes_in_the_structure")
"""The configs with more than one mistake."""
NAMES = sorted(path.stem for path in HOME.glob("*.yaml"))


def comment(name, word):
    """Return the text of the comment `# word: ...` in a wrong config."""
    text = (HOME / f"{name}.yaml").read_bytes().decode("latin-1")  # one config is not UTF-8
    found = re.search(rf"^# {word}: (.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def phase_is(*phases):
    return pytest.mark.parametrize("name", [name for name in NAMES if comment(name, "phase") in phases])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the files that wrong configs refer to; the configs are copied into it."""
    shutil.copytree(HOME / "parts", tmp_path / "parts", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def expected(name, folder):
    return (HOME / f"{name}.txt").read_text(encoding="utf-8").replace("FOLDER", str(folder))


def check(name, folder):
    """Run the checks that the command runs before importing torch, and return the error, if any."""
    shutil.copy(HOME / f"{name}.yaml", folder)
    try:
        check_statically(load_config(f"{name}.yaml", shlex.split(comment(name, "overrides"))), evaluations=True)
    except ConfigError as error:
        return error
    return None


def run_for_real(name):
    """Return whether every test run starts the command for a config: every fifth config; a campaign uses all."""
    return NAMES.index(name) % 5 == 0 or name in SEVERAL


RUNS = [pytest.param(name, marks=() if run_for_real(name) else pytest.mark.campaign) for name in NAMES]


@pytest.mark.parametrize("name", RUNS)
def test_the_command_prints_the_problem_and_ends_with_status_2(emrun, folder, name):
    shutil.copy(HOME / f"{name}.yaml", folder)
    done = emrun("train", "--quiet", f"{name}.yaml", *shlex.split(comment(name, "overrides")))
    assert done.stderr == expected(name, folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert not (folder / "log").exists()


@phase_is("reading", "one")
def test_the_mistake_is_found_without_importing_anything(folder, name):
    error = check(name, folder)
    assert error is not None
    count = f"{len(error.problems)} errors\n" if len(error.problems) > 1 else ""
    assert f"{error}\n{count}" == expected(name, folder)
    assert "parts.classes" not in sys.modules


@phase_is("two", "building")
def test_phase_one_does_not_report_what_it_cannot_know(folder, name):
    assert check(name, folder) is None


def test_every_wrong_config_has_its_text_and_its_phase():
    assert sorted(path.stem for path in HOME.glob("*.txt")) == NAMES
    assert {comment(name, "phase") for name in NAMES} == {"reading", "one", "two", "building"}
    assert len(NAMES) >= 100


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SEVERAL])
def test_a_mistake_is_reported_once(name):
    text = (HOME / f"{name}.txt").read_text(encoding="utf-8")
    assert not text.endswith(" errors\n")


def test_five_mistakes_are_five_blocks_in_the_order_of_the_file():
    *blocks, count = (HOME / "five_mistakes.txt").read_text(encoding="utf-8").splitlines()
    lines = [int(block.split(":")[1]) for block in blocks[::3]]
    assert (len(blocks), count) == (15, "5 errors")
    assert len(lines) == 5
    assert lines == sorted(set(lines))
