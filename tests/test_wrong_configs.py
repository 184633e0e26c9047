"""Wrong configs, one for each kind of mistake, each with the exact text that emrun prints.

The first comment of each config says when the mistake is found: while `reading`, in phase `one` (nothing imported), in
phase `two` (classes imported), or while `building`. A second comment may hold overrides.
"""

import functools
import json
import re
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from campaign import thinned

from emrun import create_training
from emrun.base.errors import ConfigError
from emrun.cli.problems import fix_of
from emrun.config.config import load_config, read_config
from emrun.config.plan import Plan
from emrun.config.source_finder import Unimported

ROOT = Path(__file__).parent.parent
HOME = Path(__file__).parent / "wrong_configs"
SEVERAL = ("five_mistakes", "hook_intervals", "mistakes_in_the_structure")
"""The configs with more than one mistake."""
COMMANDS = {"five_mistakes", "not_utf_8", "override_twice", "hook_class", "hook_order"}
"""The configs for which every test run starts the command; a campaign starts it for all."""
FEW = 6
"""How many configs with the same code of a phase every test run reads or builds; a campaign has all."""
SOURCES = Unimported()  # which reads the files of torch once
CODES = json.loads((HOME / "codes.json").read_text(encoding="utf-8"))
"""Config -> for each of its problems the code, and the overrides that make the problem go away."""
NAMES = sorted(path.stem for path in HOME.glob("*.yaml"))


def comment(name, word):
    """Return the text of the comment `# word: ...` in a wrong config."""
    text = (HOME / f"{name}.yaml").read_bytes().decode("latin-1")  # one config is not UTF-8
    found = re.search(rf"^# {word}: (.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def few_of_each_kind(names):
    """Return the first configs with each code, and all with more than one mistake."""
    kinds = Counter()
    few = []
    for name in names:
        kind = CODES[name][0][0]
        kinds[kind] += 1
        if kinds[kind] <= FEW or name in SEVERAL:
            few.append(name)
    return few


def phase_is(*phases):
    names = [name for name in NAMES if comment(name, "phase") in phases]
    return pytest.mark.parametrize("name", thinned(names, few_of_each_kind(names)))


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A directory with the files that wrong configs refer to; one for all, since `SOURCES` remembers their places."""
    place = tmp_path_factory.mktemp("wrong_configs")
    shutil.copytree(HOME / "parts", place / "parts", ignore=shutil.ignore_patterns("__pycache__"))
    return place


@pytest.fixture
def folder(place, monkeypatch):
    """The current directory, into which the configs are copied."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield place
    shutil.rmtree(place / "log", ignore_errors=True)  # of a test that has failed
    for name in [each for each in sys.modules if each.partition(".")[0] == "parts"]:
        del sys.modules[name]


def expected(name, folder):
    return (HOME / f"{name}.txt").read_text(encoding="utf-8").replace("FOLDER", str(folder)).replace("ROOT", str(ROOT))


@functools.cache
def read(name):
    """Return a wrong config, without its overrides; tests read it several times."""
    return read_config(f"{name}.yaml")


def loaded(name, folder):
    shutil.copy(HOME / f"{name}.yaml", folder)
    return load_config(read(name), shlex.split(comment(name, "overrides")))


def problems_and_fixes(name, error):
    """Return each problem of an error with its code and the overrides of its `fix`."""
    try:
        tree = read_config(read(name), shlex.split(comment(name, "overrides"))).root
    except ConfigError:
        tree = None
    return [(each, each.code, (fix_of(each, tree) or {}).get("overrides", [])) for each in error.problems]


def check_codes_and_fixes(name, error):
    found = [[code, *fix] for _, code, fix in problems_and_fixes(name, error)]
    assert found == CODES[name]


def printed(error):
    """Return what the command prints for an error."""
    return f"{error}\n" + (f"{len(error.problems)} errors\n" if len(error.problems) > 1 else "")


RUNS = [pytest.param(name, marks=() if name in COMMANDS else pytest.mark.campaign) for name in NAMES]


@pytest.mark.parametrize("name", RUNS)
def test_the_command_prints_the_problem_and_ends_with_status_2(emrun_here, folder, name):
    shutil.copy(HOME / f"{name}.yaml", folder)
    done = emrun_here("train", "--quiet", f"{name}.yaml", *shlex.split(comment(name, "overrides")), cwd=folder)
    assert done.stderr == expected(name, folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert not (folder / "log").exists()


@phase_is("reading", "one")
def test_the_mistake_is_found_without_importing_anything(folder, name):
    with pytest.raises(ConfigError) as caught:
        Plan.with_evaluations(loaded(name, folder), SOURCES)
    assert printed(caught.value) == expected(name, folder)
    check_codes_and_fixes(name, caught.value)
    assert "parts.classes" not in sys.modules


@phase_is("two", "building")
def test_the_mistake_is_found_when_everything_is_built_and_not_before(folder, name):
    config = loaded(name, folder)
    Plan.with_evaluations(config, SOURCES)
    with pytest.raises(ConfigError) as caught:
        create_training(config, folder / "log")
    assert printed(caught.value) == expected(name, folder)
    check_codes_and_fixes(name, caught.value)
    assert not (folder / "log").exists()


FIXED = {name: [code for code, *fix in CODES[name] if fix] for name in NAMES}
"""Config -> the codes of its problems with a fix."""
OF_CODES = {code: name for name in reversed(NAMES) for code in FIXED[name]}
"""Code -> the first config that has a problem of it with a fix."""


@pytest.mark.parametrize("name", thinned([name for name in NAMES if FIXED[name]], OF_CODES.values()))
def test_the_overrides_of_a_fix_make_the_problem_go_away(folder, name):
    problems = problems_of(name, folder, [])
    with_fix = [(each, fix) for each, _, fix in problems_and_fixes(name, ConfigError(problems)) if fix]
    assert len(with_fix) == len(FIXED[name])
    for problem, fix in with_fix:
        left = problems_of(name, folder, fix)
        assert (problem.key, problem.message) not in [(each.key, each.message) for each in left]


def problems_of(name, folder, fix):
    """Return the problems that a config has with the overrides of a fix besides its own."""
    shutil.copy(HOME / f"{name}.yaml", folder)
    try:
        config = load_config(read(name), [*shlex.split(comment(name, "overrides")), *fix])
        Plan.with_evaluations(config, SOURCES)
        if comment(name, "phase") in ("two", "building"):
            training = create_training(config, folder / "log")
            training.main_loop.run.release()
            shutil.rmtree(folder / "log")
    except ConfigError as error:
        return error.problems
    return []


def test_every_wrong_config_has_its_text_its_codes_and_its_phase():
    assert sorted(CODES) == NAMES
    assert sorted(path.stem for path in HOME.glob("*.txt")) == NAMES
    assert {comment(name, "phase") for name in NAMES} == {"reading", "one", "two", "building"}
    assert len(NAMES) >= 100


def test_a_mistake_is_reported_once():
    texts = {name: (HOME / f"{name}.txt").read_text(encoding="utf-8") for name in NAMES}
    assert {name for name, text in texts.items() if text.endswith(" errors\n")} == set(SEVERAL)


def test_five_mistakes_are_five_blocks_in_the_order_of_the_file():
    *blocks, count = (HOME / "five_mistakes.txt").read_text(encoding="utf-8").splitlines()
    lines = [int(block.split(":")[1]) for block in blocks[::3]]
    assert (len(blocks), count) == (15, "5 errors")
    assert len(lines) == 5
    assert lines == sorted(set(lines))
