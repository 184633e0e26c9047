"""What the tests of this folder share."""

from stored_runs import make_run

__all__ = ["make_run"]
