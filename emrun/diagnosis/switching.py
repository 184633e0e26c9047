"""Sets an attribute for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def switched_on(owner: object, name: str, to: object = True) -> Iterator[None]:
    """Set an attribute in a block, by default to True."""
    before = getattr(owner, name)
    setattr(owner, name, to)
    try:
        yield
    finally:
        setattr(owner, name, before)
