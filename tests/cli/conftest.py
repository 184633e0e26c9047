"""What the tests of this folder share."""

import shutil
import sys
from pathlib import Path

import pytest
from stored_runs import make_run

__all__ = ["make_run"]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of a sample with code of its own, the current directory; commands may be run in this process."""
    place = shutil.copytree(ROOT / "sample_configs" / "my_project", tmp_path / "project")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return place
