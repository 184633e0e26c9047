"""What the tests of run directories share."""

from datetime import datetime, timedelta, timezone

import pytest
from storage.committing import commit_at

from emrun.storage.run import Run

TIME = datetime(2026, 11, 20, 21, 3, 1, 987_654, tzinfo=timezone(timedelta(hours=1)))


class Clock:
    """Return a time that advances by a minute with every call."""

    def __init__(self):
        self.now = TIME

    def __call__(self):
        now, self.now = self.now, self.now + timedelta(minutes=1)
        return now


@pytest.fixture(autouse=True)
def default_format(monkeypatch):
    monkeypatch.delenv("EMRUN_OUTPUT_DIR_FORMAT", raising=False)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, seed=42, command=["emrun", "train", "x.yaml"], clock=Clock())


@pytest.fixture
def root(tmp_path):
    """Return where the checkpoints of a run are."""
    return tmp_path / "checkpoints"


@pytest.fixture
def place(root):
    """Return a checkpoint."""
    return commit_at(root, 120, epoch=3)


@pytest.fixture
def tmp_path(on_disk):
    """Return a directory on a disk: what is flushed, linked and renamed there is tested here."""
    return on_disk
