"""How the names in a config are found."""

from __future__ import annotations

from typing import Any, Protocol

from emrun.config.signatures import Parameters


class Finder(Protocol):
    """How the names in a config are found."""

    def find(self, path: str) -> Any:
        """Return what a dotted path names; None where only importing it would tell.

        Raises:
            LookupError: there is no such thing.
        """

    def classes(self, package: str) -> list[str] | None:
        """Return the names of the classes that a package defines, None where only importing it would tell."""

    def parameters(self, target: Any) -> Parameters | None:
        """Return what a target takes, None when that cannot be known."""

    def refusal(self, target: Any, kind: str) -> str | None:
        """Return why a target cannot be a `dataset`, a `model`, a `hook`, or called at all; None when it can."""

    def mistaken_event(self, target: Any) -> str | None:
        """Return what is wrong with the events of a hook's class."""

    def streams(self, target: Any) -> list[str] | None:
        """Return the names of the streams of a dataset's class, None where only a built dataset shows them."""
