"""How the tests of this folder look at the problems of a config."""

import pytest

from emrun.base.errors import ConfigError


def problem_of(function, *arguments):
    """Return the only problem that calling the function raises."""
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    (problem,) = caught.value.problems
    return problem
