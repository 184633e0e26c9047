"""Which run, and which of its checkpoints, an export is of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from emrun.base.types import Json
from emrun.runs.stored_run import StoredRun
from emrun.storage.checkpoints.manifest import Manifest

_OF_TRACE = ("seed", "train_begin", "git_commit", "emrun", "torch")


def run_identity(run: StoredRun, checkpoint: tuple[Path, Manifest] | None, overrides: Sequence[str]) -> Json:
    """Return what tells a run and its checkpoint from others, without the path of the run."""
    facts: Json = {name: run.trace.get(name) for name in _OF_TRACE}
    facts |= {"name": run.written.get("name") or run.directory.name, "overrides": list(overrides)}
    facts["config_sha256"] = hashlib.sha256(run.config_text.encode()).hexdigest()
    if checkpoint is not None:
        place, manifest = checkpoint
        kept = {"epoch": manifest.epoch, "iteration": manifest.iteration, "files": manifest.files}
        facts["checkpoint"] = {"directory": place.name, **kept}
    return facts
