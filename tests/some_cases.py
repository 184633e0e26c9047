"""Few of many cases of a test for `make test`, where all of them show the same kind of behaviour."""

import pytest
from _pytest.mark import ParameterSet


def one_in(number, cases):
    """Return the parameters of a test: every `number`-th, from the first, is for `make test`, the others for campaigns.

    `campaign.thinned` names those for `make test` instead.
    """
    return [case if at % number == 0 else _for_campaigns(case) for at, case in enumerate(cases)]


def _for_campaigns(case):
    if isinstance(case, ParameterSet):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.campaign], id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.campaign)
