"""The samples that `emrun init` copies."""

from __future__ import annotations

from pathlib import Path

_SAMPLES = Path(__file__).parent.parent / "sample_configs"


def samples() -> dict[str, Path]:
    """Return the samples: name -> a directory with a `config.yaml`, or a config."""
    found = sorted(_SAMPLES.iterdir())
    projects = {path.name: path for path in found if (path / "config.yaml").is_file()}
    configs = {path.stem: path for path in found if path.suffix == ".yaml"}
    return dict(sorted({**projects, **configs}.items()))
