"""The Python bytecodes of emrun's own code in a training step: a budget, which changes of the loop keep."""

import sys
from pathlib import Path

import pytest

CEILINGS = {"bare": 1372, "typical": 1774, "window": 1508}


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
