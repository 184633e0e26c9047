"""What the datasets of a run have learnt from the train rows, which the run keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from emrun.base.types import Json

PREPARATION = "preparation"
"""The parameter by which the constructor of a dataset gets what the run keeps, and the attribute that has this."""

BINDS = "binds"
"""The key of a preparation that says whether a dataset needs it even where the train rows are at hand; true if absent.

If it is false, only new data are read by it, perhaps on a machine without the train rows."""


@dataclass(eq=False)
class Preparations:
    """The preparations of the datasets of a config, each under the key of its dataset, such as `dataset`.

    Args:
        given: those that the run has; nothing for a new run.
        is_new_data: whether only data that the run has not seen are read.
    """

    given: Mapping[str, Json] = field(default_factory=dict)
    is_new_data: bool = False
    _datasets: dict[str, Any] = field(default_factory=dict, init=False)

    def of(self, key: str) -> Json | None:
        """Return the preparation to build a dataset with."""
        kept = self.given.get(key)
        return kept if kept is None or self.is_new_data or kept.get(BINDS, True) else None

    def add(self, key: str, dataset: Any) -> None:
        """Note a dataset that was built with its preparation."""
        self._datasets[key] = dataset

    @property
    def made(self) -> dict[str, Json]:
        """The preparations that the datasets have now; one that has learnt nothing has none."""
        found = {key: getattr(dataset, PREPARATION, None) for key, dataset in self._datasets.items()}
        return {key: dict(each) for key, each in found.items() if each}
