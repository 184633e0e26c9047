"""A training step executes no more Python bytecodes of emrun's own code than its budget."""

import sys
from pathlib import Path

import pytest

CEILINGS = {"bare": 605, "typical": 944, "window": 649, "ranks": 989}
"""Case -> bytecodes of a step."""
COUNTED = {}
"""Case -> what was counted; the same in each run."""


@pytest.fixture
def count(monkeypatch, no_hooks_of_steps):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import bytecodes

    def count(case):
        if case not in COUNTED:
            COUNTED[case] = bytecodes.count(case)
        return COUNTED[case]

    before = sys.gettrace()
    yield count
    sys.settrace(before)


@pytest.mark.whole
@pytest.mark.parametrize("case", CEILINGS)
def test_bytecodes_of_a_step_stay_within_the_budget(count, case):
    counted = count(case)
    assert counted["models/torch_model.py"] > 0
    assert sum(counted.values()) <= CEILINGS[case], counted


def test_further_parameters_on_several_ranks_cost_nothing(count):
    shallow, deep = (count(case)["models/step/gradient_sums.py"] for case in ("ranks", "deep"))
    assert 0 < deep == shallow
