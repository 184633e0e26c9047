"""A project in which a run is interrupted and resumed."""

import pytest
from training.resuming import DATA, MODEL


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "resume_data.py").write_text(DATA)
    (tmp_path / "resume_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path
