"""Says which tests execute a line, in children too: a plugin of coverage.py and of pytest, for `make coverage`.

Its folder is on PYTHONPATH, so that every process of the tests finds it. PYTEST_DONT_REWRITE: coverage.py has imported
it before pytest does.
"""

import os

import pytest
from coverage import Coverage, CoveragePlugin


def of_this_test():
    """Return the test that runs, in this process or in the one that has started it."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def begin(test):
    """Record from now on for a test."""
    if (coverage := Coverage.current()) is not None:
        coverage.switch_context(test)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid):
    """Record for the test that begins."""
    begin(nodeid)


class Contexts(CoveragePlugin):
    """Records in a new process for the test that has started it."""

    def configure(self, config):
        """Set the context with which a process begins."""
        config.set_option("run:context", of_this_test())


def coverage_init(registry, options):
    """Register the plugin, as coverage.py wants it."""
    registry.add_configurer(Contexts())
