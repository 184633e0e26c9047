"""The errors that emrun raises for users, each with the exit status of the command."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from emrun.base.censor import hidden
from emrun.base.wording import listed

OF_BASE = "emrun:"
"""What the name of a base of emrun begins with, a config that `extends` can name."""


class EmrunError(Exception):
    """Base class of emrun's errors.

    `exit_status` is the exit status of the command, `code` what programs know the error by (docs/reference/errors.md),
    and `retry` whether the same command may succeed later.
    """

    exit_status = 1
    code = "failed"
    retry = False


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a config: a file with a line and a column, counted from 1, or a source without lines (line 0)."""

    source: str
    line: int = 0
    column: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    @property
    def is_of_base(self) -> bool:
        """Whether the place is in a base of emrun."""
        return self.source.startswith(OF_BASE)


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a config: its position, its key, and a message that says what to do.

    Args:
        position: the place; None if it is not known.
        key: the key.
        message: what is wrong, and what to do.
        code: what programs know the mistake by; docs/reference/errors.md lists all codes.
        fix: what to change at this place: `set VALUE`, `delete`, or `move` a hook to the end; or
            `override KEY=VALUE`, or `command WORDS`; empty if only the message tells, or only the user knows.
    """

    position: Position | None
    key: str
    message: str
    code: str = "config.value"
    fix: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.position or ""), self.key, self.message) if part)

    def block(self) -> str:
        """Return the problem in one line, followed by the line of the config (if known) with a caret below it."""
        if self.position is None or not self.position.text:
            return str(self)
        text = self.position.text.rstrip()
        indent = "".join(char if char == "\t" else " " for char in text[: self.position.column - 1])
        return f"{self}\n    {text}\n    {indent}^"


class ConfigError(EmrunError, ValueError):
    """A config that cannot be used; `problems` holds all mistakes that were found."""

    exit_status = 2

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        given = (problems,) if isinstance(problems, Problem) else tuple(problems)
        sources = [problem.position.source for problem in given if problem.position]

        def place(problem: Problem) -> tuple[int, int, int]:
            if problem.position is None:
                return len(sources), 0, 0
            return sources.index(problem.position.source), problem.position.line, problem.position.column

        self.problems = tuple(sorted(given, key=place))
        super().__init__(hidden("\n".join(problem.block() for problem in self.problems)))


class ArgumentError(EmrunError, ValueError):
    """An argument that a constructor cannot use. If it comes from a config, it is reported at its line.

    Classes of users may raise this error too. `argument` may point into the argument: `groups[0].match`. `fix` is
    that of a `Problem`.
    """

    exit_status = 2
    code = "config.value"

    def __init__(self, argument: str, message: str, fix: str = "") -> None:
        self.argument = argument
        self.message = message
        self.fix = fix
        super().__init__(f"{argument}: {message}")


class HookError(EmrunError, ValueError):
    """A hook that cannot work in this main loop: it misspells an event, or reads what no earlier hook writes.

    `hook_index` is the index of the hook; `about` has the values that its arguments may have, in this order, because of
    which it cannot work. If one of its arguments has such a value, the error is reported at the line of the argument.
    `code` and `fix` are those of a `Problem`.
    """

    exit_status = 2

    def __init__(
        self,
        message: str,
        hook_index: int | None = None,
        about: Sequence[str] = (),
        code: str = "config.hook",
        fix: str = "",
    ) -> None:
        self.hook_index = hook_index
        self.about = about
        self.code = code
        self.fix = fix
        super().__init__(message)


class UsageError(EmrunError, ValueError):
    """A command or a call that makes no sense, such as an evaluation of a directory that is not a run."""

    exit_status = 2
    code = "usage"


class MissingExtra(EmrunError, ImportError):
    """An optional library that a hook, dataset or model needs is not installed; the message has the install command.

    With `reason`, it is installed and cannot be imported.
    """

    exit_status = 2
    code = "extra.missing"

    def __init__(self, what: str, library: str, extra: str, reason: str = "") -> None:
        self.fix = "" if reason else f"command pip install emrun[{extra}]"
        advice = f"which is not installed: pip install 'emrun[{extra}]'"
        super().__init__(f"{what} needs {library}, {reason or advice}")


@contextmanager
def needing(what: str, library: str, extra: str) -> Iterator[None]:
    """Let the block import an optional library.

    Raises:
        MissingExtra: it is not installed, or does not fit what else is installed; see there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(what, library, extra) from error
    except ImportError as error:
        advice = f"install versions that fit together: pip install --upgrade 'emrun[{extra}]'"
        raise MissingExtra(what, library, extra, f"which cannot be imported ({error}); {advice}") from error


@contextmanager
def fitting_torchvision(what: str) -> Iterator[None]:
    """Let the block import modules that may import torchvision.

    Args:
        what: what needs the modules.

    Raises:
        MissingExtra: torchvision was compiled for another torch; see there.
    """
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        if "torchvision" not in str(error):
            raise
        build = sys.modules["torch"].__version__
        reason = f"which was compiled for another build of torch than {build} ({error}); install the two "
        advice = "together, from the same place: pip install --force-reinstall torch torchvision"
        raise MissingExtra(what, "torchvision", "vision", reason + advice) from error


class StreamError(EmrunError, ValueError):
    """A stream or a batch that breaks the contract: empty, ragged, or without a source that the model needs.

    An error in the first batch of a stream is a mistake in the config or the dataset, found before any update: exit
    status 2. An error in a later batch is a failure: exit status 1.
    """

    code = "stream.contract"

    def __init__(self, message: str, *, first_batch: bool = False) -> None:
        self.exit_status = 2 if first_batch else 1
        super().__init__(message)

    def refuse_data(self, path: object) -> None:
        """Say that data which a command names cannot be used: a mistake in any batch."""
        self.exit_status = 2
        self.add_note(f"in {path}")

    def name_batch(self, stream: str, index: int) -> None:
        """Add which batch of the epoch has caused this."""
        if index == 0:
            self.exit_status = 2
        self.add_note(f"stream {stream!r}, batch {index} of the epoch")


class StorageError(EmrunError, OSError):
    """A file of a run that cannot be read or written: full disk, read-only directory, damaged checkpoint."""

    exit_status = 74
    code = "storage"

    def __str__(self) -> str:
        return str(self.strerror or super().__str__())  # without Python's `[Errno 28]`


class ReadTimeout(StorageError):
    """A file that a (network) file system did not deliver in time; the file may be intact."""

    code = "storage.timeout"
    retry = True


class DownloadError(EmrunError):
    """A download that failed: no answer, a wrong file, or an archive that is damaged or not safe to unpack."""

    code = "download"
    retry = True


class RunExists(UsageError):
    """The directory for a new run already holds a run."""

    code = "usage.run-exists"


class RunInUse(EmrunError):
    """Another process, or another main loop in this process, is writing this run."""

    exit_status = 75
    code = "run.in-use"
    retry = True


class RankFailed(EmrunError):
    """Another of the processes that train together has failed or has ended; that process reports the cause.

    `exit_status` is that of the other process, as far as it is known. `is_cause` is true if that process hangs, so that
    only this one can report it.
    """

    code = "ranks.failed"

    def __init__(self, message: str, exit_status: int = 1, *, is_cause: bool = False) -> None:
        self.exit_status = exit_status
        self.is_cause = is_cause
        super().__init__(message)


class DifferentRanks(EmrunError):
    """The processes that train together have different batches or parameters, or exchange different things."""

    code = "ranks.different"


class StateError(EmrunError, ValueError):
    """A state that cannot be saved, or that does not fit the object that loads it."""

    exit_status = 2
    code = "state"


class ExportError(EmrunError, ValueError):
    """A model that cannot leave its run as asked: it cannot be traced, or what was traced differs from it."""

    exit_status = 2
    code = "export"


class DataChanged(StateError):
    """The data of a stream are not those of the checkpoint that a resume begins from."""

    code = "state.data"
    key = "main_loop.on_changed_data=warn"
    fix = f"override {key}"


def reason_of(error: BaseException) -> str:
    """Return the message of an error; for an error of the operating system without its number: `reason: PATH`."""
    if not isinstance(error, OSError) or isinstance(error, EmrunError) or error.errno is None:
        return str(error)
    known = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk is full", errno.ETIMEDOUT: "timed out"}
    words = known.get(error.errno) or str(error.strerror or os.strerror(error.errno))
    paths = [
        os.fsdecode(path) for path in (error.filename, error.filename2) if isinstance(path, str | bytes | os.PathLike)
    ]
    message = words[:1].lower() + words[1:]
    return f"{message}: {' -> '.join(paths)}" if paths else message


TIMED_OUT = "timed out, because the file system does not answer; the file may be intact, so try again"
"""The message about a file that could not be read in time."""


def is_timeout(error: BaseException) -> bool:
    """Return whether an error is a timeout of the operating system."""
    return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno == errno.ETIMEDOUT)


def exit_status(error: BaseException) -> int:
    """Return the exit status of the command for an error: that of an emrun error, 1 for other errors, never 0."""
    status = getattr(error, "exit_status", 1) if has_exit_status(error) else 1
    return status if isinstance(status, int) and 0 < status < 256 else 1


def has_exit_status(error: BaseException) -> bool:
    """Return whether the `exit_status` of an error is from a class of emrun; other classes may use it differently."""
    return any(
        "exit_status" in ancestor.__dict__ and str(ancestor.__module__).startswith("emrun.")
        for ancestor in type(error).__mro__
    )


def add_inputs(error: Exception, what: str, inputs: Iterable[str]) -> None:
    """Add a note to an error that is not emrun's: what was called with which inputs.

    Args:
        error: the error.
        what: what was called.
        inputs: its inputs as they are shown, e.g. `x: float32 (32, 10)`.
    """
    if not isinstance(error, EmrunError) and not getattr(error, "has_inputs", False):
        shown = list(inputs)
        error.add_note(f"{what} got {listed(shown)}{_way_out(error, shown)}")
        error.__dict__["has_inputs"] = True


_FLOAT32 = (
    "make {0} float32 in the dataset, or write {{PARAMETER: {{source: {0}, dtype: float32}}}} in model.inputs, with "
    "{0} as PARAMETER if only the loss reads {0}"
)
_WAYS_OUT = (
    ("expected target dtype to be Long|scalar type Long but found", "float", -1,
     "classes are whole numbers: make {0} int64 in the dataset, or add {{{0}: {{dtype: int64}}}} to a mapping in "
     "model.inputs"),
    ("following scalar types: Long", "float", 0, "indices are whole numbers: make {0} int64 in the dataset"),
    ("multi-target not supported", "", -1, "classes have the shape (B,), not (B, 1): write {0}[:, 0] in the dataset"),
    ("cast to the desired output type Long|Found dtype Long but", "int", -1, "{0} has whole numbers: " + _FLOAT32),
    (r"got Long and|found Long|type \(long|mixed dtype|for 'Long'|input dtype \(torch.int64", "int", 0,
     "{0} has whole numbers: " + _FLOAT32),
    (r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x", "", 0,
     "a linear layer with in_features {2} got a last axis of {1}: set in_features: {1}, or change what it gets"),
    (r"arget size \(torch.Size\(\[(.*)\]\)\) .* input size \(torch.Size\(\[(.*)\]\)", "", -1,
     "in the dataset, give {0} the shape ({2}) of the output"),
)  # fmt: skip
"""Pattern of a message of torch, the dtype of the input that it is about, which of several it is, and what to write."""


def _way_out(error: Exception, inputs: Sequence[str]) -> str:
    """Return what to write after an error of torch about its inputs; nothing for other errors."""
    for pattern, dtype, index, advice in _WAYS_OUT:
        names = [shown.partition(":")[0] for shown in inputs if f": {dtype}" in shown]
        if names and (match := re.search(pattern, str(error))):
            return f"; {advice.format(names[index], *match.groups())}"
    return _limit_of(error) if str(error).startswith(("Target ", "index out of range in self")) else ""


_LIMITS = {"cross_entropy": ("input", 1), "nll_loss": ("input", 1), "embedding": ("weight", 0)}
"""Function of torch -> its argument, and the axis of it that limits the whole numbers that it takes."""


def _limit_of(error: Exception) -> str:
    """Return what the function of torch takes that has refused a whole number; nothing if it was another function."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        argument, axis = _LIMITS.get(frame.f_code.co_name, ("", 0))
        shape = getattr(frame.f_locals.get(argument), "shape", ())
        if len(shape) > axis and frame.f_globals.get("__name__") == "torch.nn.functional":
            return f"; {frame.f_code.co_name} takes whole numbers from 0 to {shape[axis] - 1} here"
    return ""
