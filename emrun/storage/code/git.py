"""Asks git about a repository, so that git changes nothing and runs no program that the repository's settings name."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from emrun.base.errors import EmrunError, reason_of
from emrun.base.wording import size_of

_SECONDS = 5.0  # for a question
_MOST = 5_000_000  # bytes of an answer
_KEPT = ("GIT_CEILING_DIRECTORIES", "GIT_CONFIG_", "GIT_EXEC_PATH")
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "none",  # an incomplete clone fetches nothing
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
_SETTINGS = (
    "core.bigFileThreshold=50m",  # larger files are not compared line by line, which takes several times their size
    "core.fsmonitor=false",
    f"core.hooksPath={os.devnull}",
    "core.safecrlf=false",
)
_NO_FILTER = ("clean=", "process=", "required=false")
_DIFF = ("--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short", "--ignore-submodules=dirty",
         f"-O{os.devnull}", "--src-prefix=a/", "--dst-prefix=b/")  # fmt: skip


class GitError(EmrunError):
    """Git could not answer."""


def ask(directory: Path, *question: str, settings: Sequence[str] = ()) -> bytes:
    """Return what git prints about the repository that a directory is in.

    Variables of the environment that name another repository have no effect. Hooks, monitors of files and pagers of the
    repository do not run, and nothing is fetched.

    Args:
        directory: the directory.
        question: the command of git and its options.
        settings: more settings of git, `NAME=VALUE`.

    Raises:
        GitError: git is missing, failed, took too long or printed too much.
    """
    options = [part for setting in (*_SETTINGS, *settings) for part in ("-c", setting)]
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT) or not name.startswith("GIT_")}
    try:
        # files, since a worker that is forked meanwhile keeps the end of a pipe open
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
            status = subprocess.run(
                ["git", "--no-pager", *options, *question],
                check=False,
                cwd=directory,
                env={**kept, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the run
                timeout=_SECONDS,
            ).returncode
            printed.seek(0)
            answer = printed.read(_MOST + 1)
            errors.seek(0)
            said = errors.read(10_000).decode(errors="replace").strip().splitlines()
    except subprocess.TimeoutExpired:
        raise GitError(f"git {question[0]} took more than {_SECONDS:g} seconds") from None
    except OSError as error:
        raise GitError(reason_of(error)) from error
    if status:
        raise GitError(said[0] if said else f"git {question[0]} failed")
    if len(answer) > _MOST:
        raise GitError(f"git {question[0]} printed more than {size_of(_MOST)}")
    return answer


def is_in_repository(directory: Path) -> bool:
    """Return whether it is worth to ask git about a directory: it, or one that it is in, has an entry `.git`."""
    return any((place / ".git").exists() for place in (directory, *directory.parents))


def top_of(directory: Path) -> Path:
    """Return the directory of the repository that a directory is in.

    Raises:
        GitError: git cannot answer, or gives no path.
    """
    answer = os.fsdecode(ask(directory, "rev-parse", "--show-toplevel")).removesuffix("\n")
    if not answer.startswith("/") or "\0" in answer:
        raise GitError(f"git gives {answer[:100]!r} for its directory")
    return Path(answer)


def head_of(directory: Path) -> str | None:
    """Return the commit of the repository that a directory is in; None without git, a repository or a commit."""
    try:
        if not is_in_repository(directory.absolute()):
            return None
        answer = ask(directory, "rev-parse", "--verify", "HEAD").decode("ascii", "replace").strip()
    except (GitError, OSError):  # also if the directory is gone
        return None
    return answer if re.fullmatch(r"[0-9a-f]{40,64}", answer) else None


def diff_of(directory: Path, commit: str, paths: Sequence[str]) -> bytes:
    """Return the changes in a repository since a commit, as a patch.

    The filters through which the settings pass changed files, such as those of Git LFS, do not run.

    Args:
        directory: the directory of the repository.
        commit: the commit.
        paths: patterns of the paths that count; all paths if there are none.

    Raises:
        GitError: git cannot answer.
    """
    names = os.fsdecode(ask(directory, "config", "--null", "--name-only", "--list")).split("\0")
    filters = {name.rpartition(".")[0] for name in names if name.startswith("filter.")}
    settings = [f"{name}.{entry}" for name in filters for entry in _NO_FILTER]
    return ask(directory, "diff", *_DIFF, commit, "--", *paths, settings=settings)
