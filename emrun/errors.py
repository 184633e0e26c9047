"""The errors that emrun raises for its users, each with the exit status it ends the command with."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass

from emrun.wording import listed


class EmrunError(Exception):
    """Base of emrun's own errors; `exit_status` is what the command line ends with."""

    exit_status = 1


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a config: a file with a line and a column that count from 1, or something without lines (line 0)."""

    source: str
    line: int = 0
    column: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a config: where it stands, at which key, and what to do about it."""

    position: Position | None
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.position or ""), self.key, self.message) if part)

    def block(self) -> str:
        """Return the problem in one line, followed by the line of the config with a caret, where there is one."""
        if self.position is None or not self.position.text:
            return str(self)
        text = self.position.text.rstrip()
        indent = "".join(char if char == "\t" else " " for char in text[: self.position.column - 1])
        return f"{self}\n    {text}\n    {indent}^"


class ConfigError(EmrunError, ValueError):
    """A config that cannot be used; `problems` holds all that were found."""

    exit_status = 2

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        found = (problems,) if isinstance(problems, Problem) else tuple(problems)
        sources = [problem.position.source for problem in found if problem.position]

        def place(problem: Problem) -> tuple[int, int, int]:
            if problem.position is None:
                return len(sources), 0, 0
            return sources.index(problem.position.source), problem.position.line, problem.position.column

        self.problems = tuple(sorted(found, key=place))
        super().__init__("\n".join(problem.block() for problem in self.problems))


class ArgumentError(EmrunError, ValueError):
    """An argument that a constructor cannot use; in a config it is reported at the argument's line.

    A user's class may raise it too.
    """

    exit_status = 2

    def __init__(self, argument: str, message: str) -> None:
        self.argument = argument
        self.message = message
        super().__init__(f"{argument}: {message}")


class HookError(EmrunError, ValueError):
    """A hook that cannot work in this main loop: a misspelt event, or one that needs what no hook before it writes."""

    exit_status = 2

    def __init__(self, message: str, hook_index: int | None = None) -> None:
        self.hook_index = hook_index
        super().__init__(message)


class UsageError(EmrunError, ValueError):
    """A command or a call that makes no sense, such as evaluating a directory that holds no run."""

    exit_status = 2


class MissingExtra(EmrunError, ImportError):
    """A library that only some hook, dataset or model needs is not installed; the message has the command."""

    exit_status = 2

    def __init__(self, what: str, library: str, extra: str) -> None:
        super().__init__(f"{what} needs {library}, which is not installed: pip install 'emrun[{extra}]'")


class StreamError(EmrunError, ValueError):
    """A stream or one of its batches that breaks its contract: empty, ragged, without a source that the model needs.

    What the first batch of a stream shows is a mistake in the config or the dataset, found before any update: exit
    status 2. What comes later is a failure: exit status 1.
    """

    def __init__(self, message: str, *, first_batch: bool = False) -> None:
        self.exit_status = 2 if first_batch else 1
        super().__init__(message)


class StorageError(EmrunError, OSError):
    """A file of a run that cannot be read or written: disk full, read-only directory, damaged checkpoint."""

    exit_status = 74

    def __str__(self) -> str:
        return str(self.strerror or super().__str__())  # without Python's `[Errno 28]`


class ReadTimeout(StorageError):
    """A file that the file system does not give in time, as one of a network may do; it may well be intact."""


class DownloadError(EmrunError):
    """A file that a server does not give, or not the right one, or an archive that is refused."""


class RunExists(UsageError):
    """A directory for a new run that holds one already."""


class RunInUse(EmrunError):
    """A run that another process, or another training of this one, writes at the moment."""

    exit_status = 75


class StateError(EmrunError, ValueError):
    """A state that cannot be saved, or does not fit what it is loaded into."""

    exit_status = 2


def reason_of(error: BaseException) -> str:
    """Return an error's message; that of an operating system's error without its number: `permission denied: PATH`."""
    if not isinstance(error, OSError) or isinstance(error, EmrunError) or error.errno is None:
        return str(error)
    known = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk is full", errno.ETIMEDOUT: "timed out"}
    words = known.get(error.errno) or str(error.strerror or os.strerror(error.errno))
    paths = [
        os.fsdecode(path) for path in (error.filename, error.filename2) if isinstance(path, str | bytes | os.PathLike)
    ]
    return ": ".join([words[:1].lower() + words[1:], *([" -> ".join(paths)] if paths else [])])


TIMED_OUT = "timed out; the file system does not answer, what is in the file is not known: try again"
"""What is said of a file that cannot be read in time."""


def is_timeout(error: BaseException) -> bool:
    """Tell whether an operating system's error says that something was not there in time."""
    return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno == errno.ETIMEDOUT)


def exit_status(error: BaseException) -> int:
    """Return the exit status that an error ends the command with: its own, or 1 for what is not emrun's; never 0."""
    status = getattr(error, "exit_status", 1) if has_exit_status(error) else 1
    return status if isinstance(status, int) and 0 < status < 256 else 1


def has_exit_status(error: BaseException) -> bool:
    """Tell whether an error's class is emrun's, or inherits from such; others may call anything `exit_status`."""
    return any(
        "exit_status" in each.__dict__ and str(each.__module__).startswith("emrun.") for each in type(error).__mro__
    )


def add_inputs(error: Exception, what: str, inputs: Iterable[str]) -> None:
    """Add a note to an error of other code than emrun's that says what the code was called with.

    Args:
        error: the error.
        what: what was called.
        inputs: its inputs as they are shown, e.g. `x: float32 (32, 10)`.
    """
    if not isinstance(error, EmrunError) and not has_inputs(error):
        error.add_note(f"{what} got {listed(list(inputs))}")
        error.__dict__["has_inputs"] = True


def has_inputs(error: BaseException) -> bool:
    """Tell whether a note of an error says what the code was called with."""
    return getattr(error, "has_inputs", False) is True
