"""A training step executes no more Python bytecodes of emrun's own code than its budget."""

import sys
from pathlib import Path

import pytest

CEILINGS = {"bare": 1366, "typical": 1768, "window": 1493}
"""With up to 12 bytecodes for the hook of torch's optimizers that other tests in the process leave (`Traces`)."""


@pytest.mark.parametrize("case", CEILINGS)
def test_bytecodes_of_a_step_stay_within_the_budget(case, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import bytecodes

    before = sys.gettrace()
    try:
        counted = bytecodes.count(case)
    finally:
        sys.settrace(before)
    assert counted["models/torch_model.py"] > 0
    assert sum(counted.values()) <= CEILINGS[case], counted
