"""What the tests of the record share."""

import pytest

from emrun.storage.run import Run


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, seed=42, command=["emrun", "train", "x.yaml"])
