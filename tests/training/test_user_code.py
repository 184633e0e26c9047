"""What a run is made from: gathered from this process and its repositories, recorded by runs and resumes."""

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from campaign import thinned

from emrun import create_training, resume_training
from emrun.storage.code.files import patch_path, read_code
from emrun.storage.code.git import head_of
from emrun.training import user_code
from emrun.training.create import train
from emrun.training.evaluate import evaluate
from tests.training.resuming import DATA, FEW_HOOKS, MODEL, config_of, trained


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a directory on the path; the modules that are imported from it are forgotten afterwards."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.syspath_prepend(place)
    for name, _ in list(user_code._user_modules()):  # those of other tests
        monkeypatch.delitem(sys.modules, name)
    yield place
    for name in [name for name in sys.modules if name.startswith("user_")]:
        del sys.modules[name]


def gather(*directories, run="/nowhere"):
    return user_code.gather(directories, Path(run))


def problems_of(*directories):
    return gather(*directories).record["problems"]


def repositories(place):
    """Return the repositories, each with its patch."""
    found = gather(place)
    entries = enumerate(found.record["repositories"], 1)
    return [{**each, "diff": found.files.get(patch_path(number))} for number, each in entries]


def git(directory, *arguments):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    done = subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def user_modules(found):
    return {name: module for name, module in found.record["modules"].items() if name.startswith("user_")}


ANSWERS = ["", "\\n", "caf\\351\\n", "\\000\\377\\376", "it is here\\n", "relative\\n"]


@pytest.mark.parametrize("answer", thinned(ANSWERS, ["", "\\000\\377\\376", "relative\\n"]))
def test_a_git_that_answers_something_else_is_left_out_and_named(place, monkeypatch, answer):
    (place / ".git").mkdir()
    (place / "git").write_text(f"#!/bin/sh\nprintf '{answer}'\n")
    (place / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    assert head_of(place) is None
    assert repositories(place) == []
    (problem,) = problems_of(place)
    assert problem.startswith(f"the git repository of {place} is left out: git gives")


def test_modules_are_those_that_belong_to_no_package(place):
    (place / "user_a.py").write_text("a = 1\n")
    (place / "user_b").mkdir()
    (place / "user_b/__init__.py").write_text("")
    (place / "user_b/parts.py").write_bytes(b"# coding: latin-1\nb = '\xe4'\n")
    (place / "user_c").mkdir()  # a namespace
    (place / "user_c/inner.py").write_text("")
    (place / "user_c/with-dash.py").write_text("")
    for name in ("user_a", "user_b.parts", "user_c.inner", "user_c.with-dash"):
        importlib.import_module(name)
    found = gather(place)
    assert found.record["problems"] == []
    sources = {
        name.removeprefix("modules/"): data for name, data in found.files.items() if name.startswith("modules/user_")
    }
    assert sources == {
        "user_a.py": b"a = 1\n",
        "user_b/__init__.py": b"",
        "user_b/parts.py": b"# coding: latin-1\nb = '\xe4'\n",
        "user_c/inner.py": b"",
        "user_c/with-dash.py": b"",
    }
    assert user_modules(found)["user_b"]["file"] == str(place / "user_b/__init__.py")
    assert not {"torch", "json", "pytest", "numpy", "emrun", "emrun.hook"} & found.record["modules"].keys()


def test_packages_have_their_versions_and_their_modules_are_not_of_the_user(place):
    installed = place.parent / "installed"
    (installed / "mine_too-1.0rc1.dist-info").mkdir(parents=True)
    (installed / "user_installed.py").write_text("")
    (place / "user_project.egg-info").mkdir()  # of `pip install -e`
    (place / "user_project.py").write_text("")
    sys.path.append(str(installed))
    try:
        for name in ("user_installed", "user_project"):
            importlib.import_module(name)
        found = gather()
    finally:
        sys.path.remove(str(installed))
    assert found.record["packages"]["mine_too"] == "1.0rc1"
    assert found.record["packages"]["torch"] == version("torch")
    assert f"torch=={version('torch')}\n".encode() in found.files["packages.txt"]
    assert user_modules(found).keys() == {"user_project"}


def test_a_directory_of_the_config_has_modules_of_the_user_although_packages_are_installed_in_it(place):
    (place / "mine-1.dist-info").mkdir()
    (place / "user_a.py").write_text("")
    importlib.import_module("user_a")
    assert user_modules(gather()) == {}
    assert user_modules(gather(place)).keys() == {"user_a"}


def test_modules_without_a_source_have_a_checksum(place):
    (place / "user_compiled.py").write_text("a = 1\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-b", place], check=True, timeout=60)
    (place / "user_compiled.py").unlink()
    importlib.import_module("user_compiled")
    found = gather(place)
    assert len(user_modules(found)["user_compiled"]["sha256"]) == 64
    assert found.files.keys() == {"packages.txt"}
    assert found.record["problems"] == []


def test_modules_that_a_package_makes_elsewhere_belong_to_it(place, monkeypatch):
    """torch.compile does so."""
    for name in ("json.made", "user_made"):
        made = types.ModuleType(name)
        made.__file__ = str(place / "made.py")
        monkeypatch.setitem(sys.modules, name, made)
    (place / "made.py").write_text("")
    assert gather(place).record["modules"].keys() == {"user_made"}


def test_kernels_that_torch_compile_has_built_are_not_of_the_user(place, monkeypatch):
    (place / "kernel.so").write_bytes(b"")
    spec = importlib.util.spec_from_file_location("c2qm.kernel", place / "kernel.so")
    made = types.ModuleType("c2qm.kernel")
    made.__file__, made.__spec__ = str(place / "kernel.so"), spec
    monkeypatch.setitem(sys.modules, "c2qm.kernel", made)
    assert gather(place).record["modules"] == {}


def test_files_that_cannot_be_read_are_large_or_are_no_files_are_problems(place, monkeypatch):
    for name in ("user_gone", "user_large", "user_pipe", "user_link"):
        (place / f"{name}.py").write_text("")
        importlib.import_module(name)
    (place / "user_gone.py").unlink()
    (place / "user_large.py").write_text("#" * 5_000_001)
    (place / "user_pipe.py").unlink()
    subprocess.run(["mkfifo", place / "user_pipe.py"], check=True, timeout=30)
    (place / "user_link.py").unlink()
    (place / "user_link.py").symlink_to(place / "other.py")
    (place / "other.py").write_text("other = 1\n")
    for name in ("user_odd/../name", "user_" + "n" * 300, "user_a..b"):
        monkeypatch.setitem(sys.modules, name, sys.modules["user_link"])
    monkeypatch.setitem(sys.modules, "user_none", None)
    found = gather(place)
    assert [problem.replace(str(place), "DIR") for problem in found.record["problems"]] == [
        "module user_gone is left out: cannot read DIR/user_gone.py: No such file or directory",
        "module user_large is left out: cannot read DIR/user_large.py: it is larger than 5 MB",
        "module user_pipe is left out: cannot read DIR/user_pipe.py: it is not a regular file",
    ]
    assert found.files.keys() == {"packages.txt", "modules/user_link.py"}
    assert found.files["modules/user_link.py"] == b"other = 1\n"


@pytest.fixture
def repository(place):
    git(place, "init", "-q")
    (place / "user_a.py").write_text("a = 1\n")
    git(place, "add", ".")
    git(place, "commit", "-q", "-m", "first")
    return place


def test_a_repository_has_its_commit_and_its_changes(repository):
    (repository / "user_a.py").write_text("a = 2\n")
    (repository / "inner").mkdir()
    (found,) = repositories(repository / "inner")
    assert (found["directory"], found["commit"]) == (str(repository), git(repository, "rev-parse", "HEAD"))
    git(repository, "checkout", "-q", "user_a.py")
    subprocess.run(["git", "apply"], cwd=repository, input=found["diff"], check=True, timeout=30)
    assert (repository / "user_a.py").read_text() == "a = 2\n"


def test_modules_of_another_repository_count_too(repository):
    other = repository.parent / "other"
    shutil.copytree(repository, other)
    (other / "user_other").mkdir()
    (other / "user_other/__init__.py").write_text("")
    sys.path.append(str(other))
    try:
        importlib.import_module("user_other")
    finally:
        sys.path.remove(str(other))
    assert [each["directory"] for each in repositories(repository)] == [str(repository), str(other)]


def test_without_a_repository_or_git_there_is_a_reason_at_most(place, monkeypatch):
    assert (repositories(place), problems_of(place)) == ([], [])
    git(place, "init", "-q")
    assert repositories(place) == [{"directory": str(place), "commit": None, "diff": None, "sha256": None}]
    monkeypatch.setenv("PATH", str(place))
    assert repositories(place) == []
    assert problems_of(place) == [f"the git repository of {place} is left out: no such file or directory: git"]
    shutil.rmtree(place / ".git")
    assert problems_of(place) == []


def test_a_repository_that_git_refuses_is_left_out_with_the_reason(place, monkeypatch):
    git(place, "init", "-q")
    (place / "git").write_text("#!/bin/sh\necho 'fatal: detected dubious ownership' >&2\nexit 128\n")
    (place / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(place))
    assert repositories(place) == []
    assert problems_of(place) == [f"the git repository of {place} is left out: fatal: detected dubious ownership"]


@pytest.mark.campaign
def test_changes_that_are_too_large_are_left_out(repository):
    (repository / "user_a.py").write_text("a = 2\n" * 1_000_000)
    assert problems_of(repository) == [
        f"the uncommitted changes in {repository} are left out: git diff printed more than 5 MB"
    ]
    assert repositories(repository)[0]["sha256"] is None


def test_a_git_that_hangs_is_left_out(repository, monkeypatch):
    (repository / "git").write_text("#!/bin/sh\nexec sleep 600\n")
    (repository / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{repository}:/usr/bin:/bin")
    monkeypatch.setattr("emrun.storage.code.git._SECONDS", 0.2)
    assert repositories(repository) == []
    said = "git rev-parse took more than 0.2 seconds"
    assert problems_of(repository) == [f"the git repository of {repository} is left out: {said}"]


@pytest.mark.parametrize("name", [b"two\nlines", b"not utf-8 \xff"])
def test_a_repository_may_have_any_name(place, name):
    place = Path(os.fsdecode(bytes(place) + b"/" + name))
    place.mkdir()
    git(place, "init", "-q")
    git(place, "commit", "-q", "--allow-empty", "-m", "first")
    (found,) = gather(place).record["repositories"]
    assert (found["directory"], found["commit"]) == (str(place), git(place, "rev-parse", "HEAD"))
    assert found["sha256"] is None


def test_in_a_repository_at_the_home_directory_only_the_directories_of_modules_count(repository, monkeypatch):
    for name in ("project", "other"):
        (repository / name).mkdir()
        (repository / name / "tracked.py").write_text("a = 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "second")
    for name in ("project", "other"):
        (repository / name / "tracked.py").write_text("a = 2\n")
    (found,) = repositories(repository / "project")
    assert found["diff"].count(b"diff --git") == 2
    monkeypatch.setenv("HOME", str(repository))
    (found,) = repositories(repository / "project")
    assert found["diff"].count(b"diff --git") == 1
    assert b"project/tracked.py" in found["diff"]


def test_changes_in_the_run_itself_do_not_count(repository):
    (repository / "log/run [1]").mkdir(parents=True)
    log = repository / "log/run [1]/train.log"
    log.write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "second")
    log.write_text("changed\n")
    for run, changed in ((log.parent, False), (repository / "log/run 1", True), (repository.parent, True)):
        assert ("diff.patch" in gather(repository, run=run).files) is changed


def test_a_patch_can_be_applied_whatever_the_settings_say(repository):
    git(repository, "clone", "-q", ".", "inner")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", "./inner")
    git(repository, "commit", "-q", "-m", "second")
    for name, value in {"diff.submodule": "log", "diff.noprefix": "true", "color.ui": "always"}.items():
        git(repository, "config", name, value)
    git(repository / "inner", "commit", "-q", "--allow-empty", "-m", "more")
    (repository / "user_a.py").write_text("a = 2\n")
    (found,) = repositories(repository)
    git(repository, "checkout", "-q", "user_a.py")
    subprocess.run(["git", "apply"], cwd=repository, input=found["diff"], check=True, timeout=30)
    assert b"+Subproject commit" in found["diff"]
    assert (repository / "user_a.py").read_text() == "a = 2\n"


def test_a_run_and_a_resume_of_its_copy_record_their_code(project, monkeypatch, caplog):
    for name in ("resume_data", "resume_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(project.parent))
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "first")
    config = {**config_of(hooks=FEW_HOOKS), "code_directory": str(project)}
    train(create_training(config, output_dir=project / "run", overrides=["hooks.StopAfter.epochs=1"]))
    code = project / "run/code"
    assert (code / "modules/resume_data.py").read_text() == DATA
    assert (code / "modules/resume_model.py").read_text() == MODEL
    assert f"torch=={version('torch')}\n" in (code / "packages.txt").read_text()
    assert read_code(code)["repositories"][0]["commit"] == git(project, "rev-parse", "HEAD")
    lines = [json.loads(line) for line in (code / "batches.jsonl").read_text().splitlines()]
    assert [(line["stream"], line["pass"], list(line["digests"])) for line in lines] == [
        ("train", 0, ["x", "y"]),
        ("valid", 0, ["x", "y"]),
        ("train", 1, ["x", "y"]),
    ]
    evaluate(project / "run", "valid")
    assert not (project / "run/eval/valid-1/code").exists()
    before = {path: path.read_bytes() for path in code.rglob("*") if path.is_file()}
    caplog.clear()
    train(resume_training(project / "run", ["hooks.StopAfter.epochs=2"]))
    assert {path: path.read_bytes() for path in code.rglob("*") if path.is_file()} == before
    assert not (project / "run/code-2").exists()
    (project / "resume_model.py").write_text(MODEL + "\n")
    shutil.copytree(project / "run", project / "fork", symlinks=True)
    train(resume_training(project / "fork", ["hooks.StopAfter.epochs=3"]))
    assert {path: (project / "fork/code" / path.relative_to(code)).read_bytes() for path in before} == before
    second = project / "fork/code-2"
    assert (second / "modules/resume_model.py").read_text() == MODEL + "\n"
    assert b"+\n" in (second / "diff.patch").read_bytes()
    (line,) = [each for each in caplog.messages if "the code has changed" in each]
    assert "module resume_model, other git commits or uncommitted changes; see" in line
    assert line in (project / "fork/train.log").read_text().replace("\n", "")
    assert not (project / "run/code-2").exists()
    caplog.clear()
    evaluate(project / "run", "valid")
    code = project / "run/code"
    told = f"the code is not that of the run: module resume_model; {code} has the code of the run"
    assert [each for each in caplog.messages if "the code" in each] == [told]
    caplog.clear()
    evaluate(project / "fork", "valid")  # has recorded this code
    assert not [each for each in caplog.messages if "the code" in each]


@pytest.mark.campaign
def test_a_resumed_run_has_the_first_batches_of_an_uninterrupted_one(project):
    config = config_of(hooks=FEW_HOOKS, extra_streams=[{"valid": "2 epochs"}])
    trained(config, project / "straight")
    trained(config, project / "run", "hooks.StopAfter.iterations=3")
    path = project / "run/code/batches.jsonl"
    before = path.read_text()
    train(resume_training(project / "run", ["~hooks.StopAfter.iterations"]))
    assert path.read_text() == (project / "straight/code/batches.jsonl").read_text()
    assert len(path.read_text()) >= len(before)


FAILS = """
from emrun import AbstractHook


class Fails(AbstractHook):
    def before_training(self):
        raise ValueError("too early")
"""


def test_a_start_after_a_failed_start_replaces_its_code(project):
    config = config_of(hooks=FEW_HOOKS)
    (project / "failing_hook.py").write_text(FAILS)
    broken = {**config, "hooks": ["failing_hook.Fails"]}
    with pytest.raises(ValueError, match="too early"):
        train(create_training(broken, output_dir=project / "run"))
    assert "failing_hook" in read_code(project / "run/code")["modules"]
    del sys.modules["failing_hook"]
    train(create_training(config, output_dir=project / "run"))
    assert "failing_hook" not in read_code(project / "run/code")["modules"]
    assert not (project / "run/code-2").exists()


def test_python_and_its_packages_are_found_where_they_are(monkeypatch):
    paths = {name: Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    found = list(user_code._user_modules())
    assert not [file for _, file in found if any(Path(file).is_relative_to(path) for path in paths.values())]
