"""`emrun init`: a project that trains, in a directory that has nothing to lose."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from emrun.cli import emrun as commands
from emrun.cli.init import samples

ROOT = Path(__file__).parent.parent.parent
FILES = ["README.md", "config.yaml", "my_data.py", "my_hooks.py", "my_model.py", "test_project.py"]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def begin(directory, *arguments):
    return CliRunner().invoke(commands, ["init", str(directory), *arguments])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A directory with the content of the wheel, built from a copy of the source."""
    place = tmp_path_factory.mktemp("wheel")
    copied = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("emrun", "hooks", "datasets", "sample_configs"):
        shutil.copytree(ROOT / folder, place / "source" / folder, symlinks=True, ignore=copied)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, place / "source")
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=place / "source", capture_output=True, timeout=60, check=True)
    (file,) = place.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(place / "content")
    return place / "content"


def test_a_new_project_trains_at_once(tmp_path, emrun_here, run_directory):
    done = emrun_here("init", "mine")
    assert (done.returncode, done.stderr) == (0, "")
    assert names(tmp_path / "mine") == FILES
    done = emrun_here("train", "-q", "config.yaml", "hooks.StopAfter.epochs=1", cwd=tmp_path / "mine")
    assert (done.returncode, done.stderr) == (0, "")
    assert (run_directory(tmp_path / "mine" / "log") / "checkpoints" / "best").exists()


@pytest.mark.campaign  # tests/test_house.py compares the folders
def test_the_wheel_has_every_sample(wheel, tmp_path):
    code = "import sys; from emrun.cli import main; sys.argv = ['emrun', 'init', 'mine', '--from', 'gan']; main()"
    env = {**os.environ, "PYTHONPATH": str(wheel)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, timeout=60, check=True)
    assert names(tmp_path / "mine") == ["README.md", "config.yaml", "my_gan.py", "test_project.py"]
    for folder in ("hooks", "datasets", "sample_configs"):
        shipped = {path.name for path in (wheel / "emrun" / folder).iterdir()} - {"__pycache__"}
        assert shipped == {path.name for path in (ROOT / folder).iterdir()} - {"__pycache__"}
    assert not any((wheel / name).exists() for name in ("hooks", "datasets", "sample_configs"))


@pytest.mark.campaign
def test_a_project_made_by_the_wheel_trains_and_passes_its_own_test(wheel, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(wheel)}
    lines = [["init", "."], ["train", "config.yaml", "hooks.StopAfter.epochs=1"]]
    for line in lines:
        subprocess.run([sys.executable, "-m", "emrun", *line], cwd=tmp_path, env=env, timeout=100, check=True)
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, env=env, timeout=100, check=True)


@pytest.mark.parametrize("sample", samples())
def test_every_sample_becomes_a_project_with_a_config_a_readme_and_a_test(sample, tmp_path):
    done = begin(tmp_path / "new" / "mine", "--from", sample)
    assert done.exit_code == 0, done.output
    found = names(tmp_path / "new" / "mine")
    assert {"README.md", "config.yaml", "test_project.py"} <= set(found)
    prepares = "python prepare.py" in (tmp_path / "new" / "mine" / "README.md").read_text()
    assert prepares == ("prepare.py" in found)
    assert prepares == ("prepare.py" in (tmp_path / "new" / "mine" / "test_project.py").read_text())
    compile((tmp_path / "new" / "mine" / "test_project.py").read_text(), "test_project.py", "exec")


def test_a_directory_that_has_only_git_files_is_empty(tmp_path):
    (tmp_path / ".git").mkdir()
    assert begin(tmp_path).exit_code == 0
    assert names(tmp_path) == [".git", *FILES]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_with_files_is_refused_and_left_as_it_is(is_link, tmp_path):
    place = tmp_path / "mine"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    if is_link:
        (tmp_path / "link").symlink_to(place)
        place = tmp_path / "link"
    done = begin(place)
    assert done.exit_code == 2
    assert f"{place} is not empty (it has notes.txt); name a new or an empty directory" in done.output
    assert names(place) == ["notes.txt"]


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), lambda path: path.symlink_to("nowhere")])
def test_what_is_not_a_directory_is_refused(make, tmp_path):
    make(tmp_path / "mine")
    done = begin(tmp_path / "mine")
    assert done.exit_code == 2
    assert "mine is not a directory" in done.output


def test_an_unknown_sample_is_answered_with_all_samples(tmp_path):
    done = begin(tmp_path / "mine", "--from", "digits_convet")
    assert done.exit_code == 2
    assert "there is no sample 'digits_convet'; did you mean 'digits_convnet'? (there are " in done.output
    assert all(name in done.output for name in samples())
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("is_removed", [True, False], ids=["", "a directory that cannot be removed is not told"])
def test_a_project_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, is_removed):
    whole = Path.open

    def full(path, mode="r", **others):
        if path.name == "README.md" and "x" in mode:
            raise OSError(28, "No space left on device", str(path))
        return whole(path, mode, **others)

    monkeypatch.setattr(Path, "open", full)
    if not is_removed:
        monkeypatch.setattr(Path, "rmdir", lambda path: path.rename(path / "into itself"))  # an error of the system
    done = begin(tmp_path / "mine")
    assert f"error: cannot write the project: the disk is full: {tmp_path / 'mine' / 'README.md'}" in done.stderr
    assert (tmp_path / "mine").exists() is not is_removed
    assert [*(tmp_path / "mine").glob("*")] == []


def test_a_directory_that_cannot_be_created_is_an_error_of_storage(emrun_here, tmp_path):
    (tmp_path / "file").write_text("")
    done = emrun_here("init", "file/mine")
    assert done.returncode == 74
    assert done.stderr == "error: cannot write the project: not a directory: file/mine\n"
