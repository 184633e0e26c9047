"""Write the metrics of a run to trackio."""

from __future__ import annotations

import contextlib
import io
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emrun.base.errors import ArgumentError, needing
from emrun.record.facts import Facts
from emrun.record.rows import Row
from emrun.record.trackers import AbstractTracker


class WriteTrackio(AbstractTracker):
    """Writes the statistics of each epoch, and means between epochs, to trackio.

        hooks:
          - ComputeStats: {variables: [loss, accuracy]}
          - WriteTrackio: {project: digits, every: 50 updates}

    `trackio show --project digits` shows the runs. trackio keeps them in a database on this machine, in the directory
    that the environment variable `TRACKIO_DIR` names. The run of trackio has the name of the run directory and a few
    letters, because names are not unique there; it has the config, with the command and the git commit. The step is the
    iteration. Pictures, texts and histograms that hooks show are written too.

    When rows are written: see "Trackers" in the documentation of hooks. This hook needs
    `pip install 'emrun[trackio]'`.

    Args:
        project: the name of the project.
        group: the name of a group of runs.
        every: how often means between epochs are written: `50 updates`, `500 iterations` or `5 minutes`; by default
            never.
        timeout: how many seconds to wait for trackio at the start and at the end.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: trackio cannot write its database at the start of a new run.
        MissingExtra: trackio is not installed.
    """

    def __init__(
        self,
        project: str,
        group: str | None = None,
        every: str | None = None,
        timeout: float = 20.0,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(every=every, timeout=timeout, output_dir=output_dir)
        if not isinstance(project, str) or not project.strip():
            raise ArgumentError("project", f"{project!r} is not the name of a project")
        with needing("WriteTrackio", "trackio", "trackio"):
            import trackio  # noqa: F401 - takes a second, and most runs do not need it
        self._project = project
        self._group = group
        self._name = ""
        self._config: dict[str, Any] = {}
        self._entries: list[tuple[int, dict[str, Any]]] = []  # that are not written yet

    def begin(self, facts: Facts, identity: str | None) -> str:
        """Choose the name of the run, which `send` begins."""
        self._name = identity or f"{facts.name}-{uuid.uuid4().hex[:6]}"
        self._config = {**facts.config, "emrun": facts.about}
        self._log([])
        return self._name

    def newest(self) -> int | None:
        """Return the largest step of the run in the database."""
        from trackio.sqlite_storage import SQLiteStorage

        step = SQLiteStorage.get_max_step_for_run(self._project, self._name)
        return -1 if step is None else int(step)

    def write(self, row: Row) -> None:
        """Collect a row, with what hooks have shown."""
        import trackio

        shown = self.objects_of(row, trackio.Image, trackio.Histogram, trackio.Markdown)
        self._entries.append((row.iteration, {**row.values, **shown}))

    def flush(self) -> None:
        """Write the rows."""
        entries = self._entries
        self._entries = []
        self._log(entries)

    def _log(self, entries: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Begin or continue the run, and end it: only the end waits until the entries are in the database."""
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # trackio prints what it does
            run: Any = trackio.init(
                self._project,
                name=self._name,
                group=self._group,
                config=self._config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            for step, values in entries:
                run.log(values, step=step)
            run.finish()
