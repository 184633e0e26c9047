"""The rows of the table: what is compared, the result, and what to know about it."""

from __future__ import annotations

from dataclasses import dataclass

SAME, DIFFERS, DEPENDS = "same", "differs", "depends on the batch"
RANDOM, LEFT_OUT = "random", "not applicable"


@dataclass(frozen=True, slots=True)
class Row:
    """A row.

    Args:
        what: what is compared.
        result: one of the five words of this file.
        text: what differs, by how much and why; or why nothing was compared.
        name: the parameter, source, output or statistic that differs most; the part that depends on the batch.
        by: how much it differs, relative to its norm.
    """

    what: str
    result: str
    text: str = ""
    name: str | None = None
    by: float | None = None


class NotApplicableError(Exception):
    """Raised where nothing can be compared; the message says why."""


class RandomError(Exception):
    """Raised where two runs of the same differ; the message says in what."""
