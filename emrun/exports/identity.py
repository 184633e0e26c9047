"""Which run, and which of its checkpoints, an export is of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from emrun.base.types import Json
from emrun.config.plan import Plan
from emrun.runs.stored_run import StoredRun
from emrun.storage.checkpoints.manifest import Manifest


def run_identity(
    run: StoredRun, plan: Plan, checkpoint: tuple[Path, Manifest] | None, overrides: Sequence[str]
) -> Json:
    """Return what tells a run and its checkpoint from others, without the path of the run."""
    trace = run.trace
    facts: Json = {
        "name": plan.get("name", None) or run.directory.name,
        "directory": run.directory.name,
        "seed": plan.get("seed", None),
        "began": trace.get("train_begin"),
        "config_sha256": hashlib.sha256(run.config_text.encode()).hexdigest(),
        "git_commit": trace.get("git_commit"),
        "emrun": trace.get("emrun"),
        "torch": trace.get("torch"),
        "overrides": list(overrides),
    }
    if checkpoint is not None:
        place, manifest = checkpoint
        weights = manifest.files.get("model.safetensors", {}).get("sha256")
        facts["checkpoint"] = {
            "directory": place.name,
            "epoch": manifest.epoch,
            "iteration": manifest.iteration,
            "sha256": weights,
        }
    return facts
