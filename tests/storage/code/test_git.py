"""Questions to git: nothing that a repository names is run, and an answer is limited."""

import shutil
import subprocess
from pathlib import Path

import pytest

from emrun.storage.code import git as asking
from emrun.storage.code.git import GitError, ask, diff_of, head_of, top_of


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a function that calls git in a repository with one committed file, which has changed since."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    place = tmp_path / "repository"
    place.mkdir()

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=place, check=True, capture_output=True, text=True, timeout=30).stdout.strip()

    git("init", "-q")
    (place / "code.py").write_text("before = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (place / "code.py").write_text("after = 2\n")
    git.place = place
    return git


def test_a_repository_runs_none_of_its_programs(repository, tmp_path):
    place, trap = repository.place, tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung-$1\nexec cat\n")
    trap.chmod(0o755)
    programs = ("core.fsmonitor", "core.pager", "pager.diff", "diff.external", "diff.d.textconv", "diff.d.command",
                "filter.f.clean", "filter.f.process", "core.sshCommand")  # fmt: skip
    for name in programs:
        repository("config", name, f"{trap} {name}")
    repository("config", "filter.f.required", "true")
    (place / ".git/hooks").mkdir(exist_ok=True)
    (place / ".git/hooks/post-index-change").symlink_to(trap)
    (place / ".git/info").mkdir(exist_ok=True)
    (place / ".git/info/attributes").write_text("*.py diff=d filter=f\n")
    before = (place / ".git/index").stat().st_mtime_ns
    patch = diff_of(place, head_of(place), []).decode()
    assert "-before = 1" in patch
    assert "+after = 2" in patch
    assert top_of(place) == place
    assert not list(tmp_path.glob("sprung-*"))
    assert (place / ".git/index").stat().st_mtime_ns == before
    subprocess.run(["git", "diff", "HEAD"], cwd=place, check=False, capture_output=True, timeout=30)
    assert list(tmp_path.glob("sprung-*"))  # the trap works


def test_an_answer_that_is_too_long_is_an_error(repository, monkeypatch):
    monkeypatch.setattr(asking, "_MOST", 10)
    with pytest.raises(GitError, match=r"git diff printed more than 10 B"):
        ask(repository.place, "diff", "HEAD")


def test_git_that_takes_too_long_is_an_error(repository, tmp_path, monkeypatch):
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(asking, "_SECONDS", 0.2)
    with pytest.raises(GitError, match=r"git rev-parse took more than 0.2 seconds"):
        top_of(repository.place)
    assert head_of(repository.place) is None


def test_the_variables_of_a_hook_of_git_do_not_name_another_repository(repository, tmp_path, monkeypatch):
    head = repository("rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert head_of(repository.place) == head


def test_without_git_a_repository_or_a_commit_there_is_no_head(repository, tmp_path, monkeypatch):
    assert head_of(tmp_path) is None
    (tmp_path / "empty").mkdir()
    subprocess.run(["git", "init", "-q", tmp_path / "empty"], check=True, timeout=30)
    assert head_of(tmp_path / "empty") is None
    with pytest.raises(GitError, match="not a git repository"):
        ask(tmp_path, "rev-parse", "HEAD")
    monkeypatch.chdir(tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty")
    assert head_of(Path()) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert head_of(repository.place) is None
    with pytest.raises(GitError, match="no such file or directory: git"):
        ask(repository.place, "rev-parse", "HEAD")


def test_settings_of_the_environment_count(repository, monkeypatch):
    """Containers allow the directories of others in this way."""
    for name, value in {"COUNT": "1", "KEY_0": "user.name", "VALUE_0": "from the environment"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    assert ask(repository.place, "config", "user.name") == b"from the environment\n"


def test_large_files_are_only_named(repository, monkeypatch):
    size, *others = asking._SETTINGS
    assert size == "core.bigFileThreshold=50m"
    monkeypatch.setattr(asking, "_SETTINGS", (size.replace("50m", "1m"), *others))  # of which git reads less
    with (repository.place / "code.py").open("w") as file:
        file.write("a = 1\n" * 180_000)
    assert b"Binary files a/code.py and b/code.py differ" in ask(repository.place, "diff", "HEAD")


def test_without_a_directory_for_temporary_files_git_is_not_asked(repository, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(GitError, match="no such file or directory"):
        ask(repository.place, "rev-parse", "HEAD")
    assert head_of(repository.place) is None
