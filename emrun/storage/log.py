"""The log of a run: what every module writes to it, without what came from the environment."""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from emrun.censor import Censor
from emrun.errors import reason_of
from emrun.storage.files import storing

_LOG = logging.getLogger(__name__)

LOG = "train.log"
_LINE = "%(asctime)s.%(msecs)03d: %(levelname)-8s@%(module)-14s: %(message)s"


class RunLog:
    """Writes the log, from every module, into a file from `open` to `close`; sessions may lie within each other.

    Other handlers of the root logger get what they got before, also where the log of the run has more.

    Args:
        path: the file.
        censor: what its lines go through.
    """

    def __init__(self, path: Path, censor: Censor) -> None:
        self._path = path
        self._censor = censor
        self._depth = 0
        self._root = logging.getLogger()

    def open(self) -> None:
        """Begin a session.

        Raises:
            StorageError: the file cannot be opened.
        """
        if self._depth == 0:
            with storing(self._path, "write"):
                self._file = _LogFile(self._path, encoding="utf-8")
            self._file.setFormatter(_CensoredFormatter(self._censor))
            self._level = self._root.level
            self._others = list(self._root.handlers)
            if not self._others and logging.lastResort is not None:  # what shows warnings when nothing is configured
                self._root.addHandler(logging.lastResort)
            if self._root.getEffectiveLevel() > logging.INFO:
                self._root.setLevel(logging.INFO)
                for handler in self._others:
                    handler.addFilter(self._passed_before)
            self._root.addHandler(self._file)
        self._depth += 1

    def close(self, error: BaseException | None = None) -> None:
        """End a session; the outermost one writes its error with the traceback and leaves the root logger as it was."""
        if self._depth == 0:  # there is none
            return
        self._depth -= 1
        if self._depth:
            return
        if error is not None:
            text = "".join(traceback.format_exception(error)).rstrip()
            self._file.emit(logging.LogRecord("emrun", logging.ERROR, __file__, 0, text, None, None))
            error.__dict__["kept_in"] = self._path  # who shows the error may leave out the traceback
        self._root.removeHandler(self._file)
        if not self._others and logging.lastResort is not None:
            self._root.removeHandler(logging.lastResort)
        for handler in self._others:
            handler.removeFilter(self._passed_before)
        self._root.setLevel(self._level)
        with suppress(OSError):  # what could not be written was told of
            self._file.close()

    __enter__ = open

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _passed_before(self, record: logging.LogRecord) -> bool:
        """Tell whether a record would have come to the root's handlers at the level that the root logger had."""
        logger = logging.getLogger(record.name)
        while logger.level == logging.NOTSET and logger.parent is not None:
            logger = logger.parent
        return logger is not self._root or record.levelno >= self._level


class _CensoredFormatter(logging.Formatter):
    """Writes the lines of the log, with their tracebacks, without what came from the environment."""

    def __init__(self, censor: Censor) -> None:
        super().__init__(_LINE, datefmt="%Y-%m-%d %H:%M:%S")
        self._censor = censor

    def format(self, record: logging.LogRecord) -> str:
        return self._censor(super().format(record))


class _LogFile(logging.FileHandler):
    """Writes the log; when that is not possible any more it says so once, and the training goes on without."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            error = sys.exc_info()[1]
            _LOG.warning("cannot write %s: %s", self.baseFilename, "" if error is None else reason_of(error))
