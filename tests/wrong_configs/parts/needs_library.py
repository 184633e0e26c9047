"""Imports a library that nobody has."""

import nobody_has_this_library  # noqa: F401


class Data:
    """A dataset."""
