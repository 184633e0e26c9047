"""Asks git about a repository, so that git changes nothing and runs no program that the repository's settings name."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from time import monotonic

from emrun.base.errors import EmrunError, reason_of
from emrun.base.wording import size_of

_KEPT = ("GIT_CEILING_DIRECTORIES", "GIT_CONFIG_", "GIT_EXEC_PATH")
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "none",  # an incomplete clone fetches nothing
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
_SETTINGS = {
    "core.bigFileThreshold": "50m",  # larger files are not compared line by line, which takes several times their size
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.safecrlf": "false",
}
_FILTER = {"clean": "", "smudge": "", "process": "", "required": "false"}


class GitError(EmrunError):
    """Git could not answer."""


class Git:
    """Asks git about the repository that a directory is in.

    Variables of the environment that name another repository have no effect. Hooks, monitors of files, pagers and
    filters of the repository do not run, and nothing is fetched; `diff` needs `--no-ext-diff` and `--no-textconv` too.

    Args:
        directory: a directory.
        seconds: the time for all questions together.
        most: the most bytes of an answer.
    """

    def __init__(self, directory: Path, seconds: float = 5.0, most: int = 5_000_000) -> None:
        self.directory = directory
        self._ends = monotonic() + seconds
        self._seconds = seconds
        self._most = most
        self._settings = dict(_SETTINGS)

    def ask(self, *arguments: str, may_fail: bool = False) -> bytes:
        """Return what git prints.

        Args:
            arguments: the command and its options.
            may_fail: return what was printed, also if git ends with an error.

        Raises:
            GitError: git is missing, failed, took too long or printed too much.
        """
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        command = ["git", "--no-pager", *settings, *arguments]
        kept = {
            name: value for name, value in os.environ.items() if name.startswith(_KEPT) or not name.startswith("GIT_")
        }
        try:
            # files, since a worker that is forked meanwhile keeps the end of a pipe open
            with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
                status = subprocess.run(
                    command,
                    check=False,
                    cwd=self.directory,
                    env={**kept, **_ENVIRONMENT},
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is for the run
                    timeout=max(0.0, self._ends - monotonic()),
                ).returncode
                printed.seek(0)
                answer = printed.read(self._most + 1)
                errors.seek(0)
                said = errors.read(10_000).decode(errors="replace").strip().splitlines()
        except subprocess.TimeoutExpired:
            raise GitError(f"git {arguments[0]} took more than {self._seconds:g} seconds") from None
        except OSError as error:
            raise GitError(reason_of(error)) from error
        if status and not may_fail:
            raise GitError(said[0] if said else f"git {arguments[0]} failed")
        if len(answer) > self._most:
            raise GitError(f"git {arguments[0]} printed more than {size_of(self._most)}")
        return answer

    def ignore_filters(self) -> None:
        """Do not run the filters, such as those of Git LFS, through which the settings pass changed files.

        Raises:
            GitError: the settings cannot be read, or a filter has a name that cannot be given to git.
        """
        names = self.ask("config", "--null", "--name-only", "--get-regexp", r"^filter\.", may_fail=True)
        for name in {key.rpartition(".")[0] for key in os.fsdecode(names).split("\0") if key}:
            if "=" in name:
                raise GitError(f"the settings have a filter with an unusual name: {name}")
            self._settings.update({f"{name}.{key}": value for key, value in _FILTER.items()})


def is_in_repository(directory: Path) -> bool:
    """Return whether it is worth to ask git about a directory: it, or one that it is in, has an entry `.git`."""
    return any((each / ".git").exists() for each in (directory, *directory.parents))


def head_of(directory: Path) -> str | None:
    """Return the commit of the repository that a directory is in; None without git, a repository or a commit."""
    try:
        if not is_in_repository(directory.absolute()):
            return None
        answer = Git(directory).ask("rev-parse", "--verify", "HEAD").decode("ascii", "replace").strip()
    except (GitError, OSError):  # also if the directory is gone
        return None
    return answer if re.fullmatch(r"[0-9a-f]{40,64}", answer) else None
