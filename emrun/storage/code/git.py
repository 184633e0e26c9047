"""Asks git about a repository, so that git changes nothing and runs no program that the repository's settings name."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO

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
_PAUSE = 0.1  # seconds between two looks at whether git has ended


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
            with tempfile.TemporaryFile() as errors:
                with subprocess.Popen(
                    command,
                    cwd=self.directory,
                    env={**kept, **_ENVIRONMENT},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is for the run
                ) as process:
                    assert process.stdout is not None
                    try:
                        answer = self._answer(process, process.stdout, arguments[0])
                    finally:
                        process.kill()
                errors.seek(0)
                said = errors.read(10_000).decode(errors="replace").strip().splitlines()
        except OSError as error:
            raise GitError(reason_of(error)) from error
        if process.returncode and not may_fail:
            raise GitError(said[0] if said else f"git {arguments[0]} failed")
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

    def _answer(self, process: subprocess.Popen[bytes], output: IO[bytes], command: str) -> bytes:
        """Read what git prints to its end."""
        answer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while True:
                has_ended = process.poll() is not None  # before the look: then nothing more comes
                left = self._ends - monotonic()
                if left <= 0:
                    raise GitError(f"git {command} took more than {self._seconds:g} seconds")
                if selector.select(0 if has_ended else min(left, _PAUSE)):
                    part = os.read(output.fileno(), 1 << 16)
                    if not part:
                        with suppress(subprocess.TimeoutExpired):  # it is killed, which counts as a failure
                            process.wait(max(left, _PAUSE))
                        return bytes(answer)
                    answer += part
                elif has_ended:  # a process that was forked meanwhile has the other end open
                    return bytes(answer)
                if len(answer) > self._most:
                    raise GitError(f"git {command} printed more than {size_of(self._most)}")


def head_of(directory: Path) -> str | None:
    """Return the commit of the repository that a directory is in; None without git, a repository or a commit."""
    try:
        answer = Git(directory).ask("rev-parse", "--verify", "HEAD").decode("ascii", "replace").strip()
    except GitError:
        return None
    return answer if re.fullmatch(r"[0-9a-f]{40,64}", answer) else None
