"""The log of a run: the records of all modules, without values of the environment."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path

from emrun.base.censor import hidden
from emrun.base.errors import reason_of
from emrun.base.terminal import kept_on
from emrun.storage.files import opened_regular, storing

_LOG = logging.getLogger(__name__)

LOG = "train.log"
LOG_OF_RANK = "train-{}.log"
"""The log of a rank other than 0."""
_LINE = "%(asctime)s.%(msecs)03d: %(levelname)-8s@%(module)-14s: %(message)s"


class RunLog:
    """Writes the log records of all modules into a file from `open` to `close`; sessions may be nested.

    Other handlers of the root logger receive the same records as before, even if the run's log has more.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """The file."""
        self._depth = 0
        self._root = logging.getLogger()
        self._kept = ExitStack()

    def open(self) -> None:
        """Begin a session.

        Raises:
            StorageError: the file cannot be opened.
        """
        if self._depth == 0:
            with storing(self.path, "write"):
                if os.path.lexists(self.path):
                    with opened_regular(self.path):  # a pipe would wait for a reader
                        pass
                self._file = _LogFile(self.path, encoding="utf-8", errors="backslashreplace")
            self._file.setFormatter(_Formatter(_LINE, datefmt="%Y-%m-%d %H:%M:%S"))
            self._level = self._root.level
            self._others = list(self._root.handlers)
            if not self._others and logging.lastResort is not None:  # shows warnings if no handler is configured
                self._root.addHandler(logging.lastResort)
            if self._root.getEffectiveLevel() > logging.INFO:
                self._root.setLevel(logging.INFO)
                for handler in self._others:
                    handler.addFilter(self._passed_before)
            self._kept.enter_context(kept_on(self._file))
        self._depth += 1

    def close(self, error: BaseException | None = None) -> None:
        """End a session; the outermost session writes its error with the traceback and restores the root logger."""
        if self._depth == 0:  # no session is open
            return
        self._depth -= 1
        if self._depth:
            return
        if error is not None:
            text = "".join(traceback.format_exception(error)).rstrip()
            self._file.emit(logging.LogRecord("emrun", logging.ERROR, __file__, 0, text, None, None))
            error.__dict__["kept_in"] = self.path  # so that the caller can print the error without its traceback
        self._kept.close()
        if not self._others and logging.lastResort is not None:
            self._root.removeHandler(logging.lastResort)
        for handler in self._others:
            handler.removeFilter(self._passed_before)
        self._root.setLevel(self._level)
        with suppress(OSError):  # the failed write was logged before
            self._file.close()

    __enter__ = open

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _passed_before(self, record: logging.LogRecord) -> bool:
        """Return whether a record would have reached the root's handlers at the root logger's former level."""
        logger = logging.getLogger(record.name)
        while logger.level == logging.NOTSET and logger.parent is not None:
            logger = logger.parent
        return logger is not self._root or record.levelno >= self._level


class _Formatter(logging.Formatter):
    """Formats the lines of the log and their tracebacks without values of the environment.

    Below a record with `names`, such as those of files that were left out, each of them has a line.
    """

    def format(self, record: logging.LogRecord) -> str:
        return hidden("\n  ".join([super().format(record), *getattr(record, "names", ())]))


class _LogFile(logging.FileHandler):
    """Writes the log; if a write fails, one warning is logged and the run continues without a log."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            error = sys.exc_info()[1]
            _LOG.warning("cannot write %s: %s", self.baseFilename, "" if error is None else reason_of(error))
