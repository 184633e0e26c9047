"""Send the metrics of a run to Weights & Biases."""

from __future__ import annotations

import html
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from emrun.base.arguments import check_choice, check_names
from emrun.base.errors import ArgumentError, needing
from emrun.record.facts import Facts
from emrun.record.rows import Row
from emrun.record.trackers import AbstractTracker

Mode = Literal["online", "offline"]


class WriteWandb(AbstractTracker):
    """Sends the statistics of each epoch, and means between epochs, to Weights & Biases.

        hooks:
          - ComputeStats: {variables: [loss, accuracy]}
          - WriteWandb: {project: digits, every: 50 updates, mode: offline}

    The run of W&B has the name of the run directory and the config, with the command and the git commit. The step is
    the iteration. Pictures, texts and histograms that hooks show are sent too. W&B's own recording of the terminal, the
    code and the machine is off.

    With `mode: offline`, W&B writes to a directory in `RUN_DIR/wandb`, which a resume makes again; `wandb sync
    RUN_DIR/wandb/offline-run-*` sends it later. With `mode: online`, log in first, with `wandb login`.

    When rows are sent, and what happens when W&B cannot be reached: see "Trackers" in the documentation of hooks. This
    hook needs `pip install 'emrun[wandb]'`.

    Args:
        project: the name of the project.
        entity: the user or team; by default yours.
        tags: a list of tags.
        mode: `online` or `offline`.
        every: how often means between epochs are sent: `50 updates`, `500 iterations` or `5 minutes`; by default never.
        timeout: how many seconds to wait for W&B at the start and at the end.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: W&B cannot be reached at the start of a new run.
        MissingExtra: wandb is not installed.
    """

    files = ("trackers/", "wandb/")

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        tags: Sequence[str] = (),
        mode: Mode = "online",
        every: str | None = None,
        timeout: float = 20.0,
        output_dir: str | Path | None = None,
    ) -> None:
        super().__init__(every=every, timeout=timeout, output_dir=output_dir)
        if not isinstance(project, str) or not project.strip() or any(letter in project for letter in "/\\#?%:"):
            raise ArgumentError("project", f"{project!r} is not the name of a project, without / \\ # ? % :")
        check_choice("mode", mode, Mode)
        check_names("tags", list(tags) if isinstance(tags, tuple) else tags)
        with needing("WriteWandb", "wandb", "wandb"):
            import wandb  # noqa: F401 - takes a second, and most runs do not need it
        self._project = project
        self._entity = entity
        self._tags = list(tags)
        self._mode: Mode = mode
        self._run: Any = None

    def begin(self, facts: Facts, identity: str | None) -> str:
        """Begin a run of W&B, or continue one; offline, make its directory again."""
        import wandb

        if self._mode == "offline":
            for old in Path(self.output_dir).glob(f"wandb/offline-run-*-{identity}"):
                shutil.rmtree(old)
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            name=facts.name,
            id=identity,
            resume="allow",
            mode=self._mode,
            dir=str(self.output_dir),
            tags=self._tags,
            config={**facts.config, "emrun": facts.about},
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                save_code=False,
                silent=True,
                x_disable_stats=True,
                init_timeout=self._timeout,
            ),
        )
        return str(self._run.id)

    def newest(self) -> int | None:
        """Return the newest step that W&B has; a process that was killed may not have written all that it was given."""
        if self._mode == "offline":
            return -1
        return int(self._run.step) - 1 if self._run.resumed else None

    def write(self, row: Row) -> None:
        """Log a row, with what hooks have shown."""
        import wandb

        text = lambda content: wandb.Html(f"<pre>{html.escape(content)}</pre>")  # noqa: E731
        shown = self.objects_of(row, wandb.Image, wandb.Histogram, text)
        epoch = {"epoch": row.epoch} if row.every is None else {}
        self._run.log({**row.values, **shown, **epoch}, step=row.iteration)

    def finish(self, status: str, reason: str | None) -> None:
        """End the run of W&B, as failed unless it has finished."""
        self._run.summary["status"] = status
        self._run.summary["reason"] = reason
        self._run.finish(exit_code=0 if status == "finished" else 1)
