"""Send the metrics of a run to MLflow."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from emrun.base.errors import ArgumentError, HookError, needing
from emrun.record.facts import Facts
from emrun.record.rows import Row
from emrun.record.trackers import AbstractTracker
from emrun.shown import Picture, Text

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_PARAMETERS = 100  # MLflow's limit of a request
_VALUE = 6000  # its limit of a value
_METRICS = 1000  # its limit of metrics of a request


class WriteMLflow(AbstractTracker):
    """Sends the statistics of each epoch, and means between epochs, to MLflow.

        hooks:
          - ComputeStats: {variables: [loss, accuracy]}
          - WriteMLflow: {uri: "http://127.0.0.1:5000", experiment: digits, every: 50 updates}

    The run of MLflow has the name of the run directory, the config as parameters, and the command, the git commit and
    `tags` as tags. The step of a metric is the iteration. Pictures and texts that hooks show are artifacts. A run that
    is interrupted has the status KILLED until it is resumed, as the same run of MLflow.

    When rows are sent, and what happens when the server is down: see "Trackers" in the documentation of hooks. This
    hook needs `pip install 'emrun[mlflow]'`.

    Args:
        uri: the address of the server, or a database such as `sqlite:///mlflow.db`.
        experiment: the name of the experiment, which is created if it does not exist.
        tags: name -> value.
        every: how often means between epochs are sent: `50 updates`, `500 iterations` or `5 minutes`; by default never.
        timeout: how many seconds to wait for the server at the start and at the end.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: the server cannot be reached at the start of a new run.
        MissingExtra: mlflow is not installed.
    """

    def __init__(
        self,
        uri: str,
        experiment: str = "emrun",
        tags: Mapping[str, str] | None = None,
        every: str | None = None,
        timeout: float = 20.0,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(every=every, timeout=timeout, output_dir=output_dir)
        for argument, value in (("uri", uri), ("experiment", experiment)):
            if not isinstance(value, str) or not value.strip():
                raise ArgumentError(argument, f"{value!r} is not a string")
        if "://" not in uri:
            raise ArgumentError(
                "uri", f"{uri!r} is not an address such as http://127.0.0.1:5000 or sqlite:///mlflow.db"
            )
        with needing("WriteMLflow", "mlflow", "mlflow"):
            import mlflow  # noqa: F401 - takes a second, and most runs do not need it
        self._uri = uri
        self._experiment = experiment
        self._tags = {str(name): str(value) for name, value in (tags or {}).items()}
        self._client: Any = None
        self._metrics: list[Any] = []  # that are not sent yet
        self._run = ""

    def before_training(self) -> None:
        """Make the tables of a database file that is new, one process at a time; then see `AbstractTracker`."""
        scheme, _, path = urlsplit(self._uri)[:3]
        if scheme.startswith("sqlite") and not self.main_loop.evaluating:
            from mlflow.tracking import MlflowClient

            with suppress(Exception), _alone_in(Path(unquote(path)[1:]).parent):  # `start` raises it again
                MlflowClient(self._uri).search_experiments(max_results=1)
        super().before_training()

    def begin(self, facts: Facts, identity: str | None) -> str:
        """Create the run of MLflow, or set the one that exists to running."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(self._uri)
        if identity is not None:
            self._run = identity
            try:
                client.update_run(identity, status="RUNNING")
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                raise HookError(f"WriteMLflow: {self._uri} has no run {identity}, which this run continues") from error
            return identity
        experiment: Any = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            with suppress(MlflowException):  # another process has created it at this moment
                client.create_experiment(self._experiment)
            experiment = client.get_experiment_by_name(self._experiment)
        about = {"command": facts.command, "mlflow.source.git.commit": facts.git_commit, "host": facts.host}
        tags = {name: value for name, value in about.items() if value}
        self._run = client.create_run(
            experiment.experiment_id, run_name=facts.name, tags={**tags, **self._tags}
        ).info.run_id
        if not self._run:
            raise HookError(f"WriteMLflow: {self._uri} has given no run; is this the address of an MLflow server?")
        values = [Param(_key(name), str(value)[:_VALUE]) for name, value in facts.config.items()]
        for first in range(0, len(values), _PARAMETERS):
            client.log_batch(self._run, params=values[first : first + _PARAMETERS])
        return str(self._run)

    def newest(self) -> int | None:
        """Return the largest step of the run's metrics."""
        names = self._client.get_run(self._run).data.metrics
        return max(
            [metric.step for name in names for metric in self._client.get_metric_history(self._run, name)], default=None
        )

    def write(self, row: Row) -> None:
        """Collect the row as metrics, and send pictures and texts as artifacts."""
        from mlflow.entities import Metric

        more = [Metric(_key(name), value, int(row.time * 1000), row.iteration) for name, value in row.values.items()]
        if len(self._metrics) + len(more) > _METRICS:
            self.flush()
        self._metrics += more
        for name, shown in row.shown.items():
            if isinstance(shown, Picture | Text):
                content = shown.png if isinstance(shown, Picture) else shown.text.encode()
                kind = "png" if isinstance(shown, Picture) else "md"
                self._add_file(f"shown/{_key(name)}", f"it-{row.iteration:08d}.{kind}", content)

    def flush(self) -> None:
        """Send the metrics, each row whole."""
        metrics = self._metrics
        self._metrics = []
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def _add_file(self, place: str, name: str, content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_bytes(content)
            self._client.log_artifact(self._run, str(Path(folder) / name), place)

    def finish(self, status: str, reason: str | None) -> None:
        """Set the status of the run."""
        if reason is not None:
            self._client.set_tag(self._run, "reason", reason)
        self._client.set_terminated(self._run, _STATUS[status])


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Wait until no other process is in this block for the directory; the lock leaves no file."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _key(name: str) -> str:
    """Return a name for MLflow, with the letters that it allows and no part `.` or `..`.

    Brackets and quotes become `_`; other letters become their code, so that names that differ stay apart.
    """
    parts = "".join(letter if letter.isalnum() or letter in "_-. :/" else _code(letter) for letter in name).split("/")
    return "/".join(part.replace(".", _code(".")) if part in (".", "..") else part for part in parts)


def _code(letter: str) -> str:
    return "_" if letter in "()[]{}'\"" else f"_x{ord(letter):02x}"
