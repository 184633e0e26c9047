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
        numbers: name -> value of each `${data:NAME}` of the config that is known.
        is_new_data: whether only data that the run has not seen are read.
        trains: whether the datasets are built for a training, which may need more libraries than an evaluation.
    """

    given: Mapping[str, Json] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    is_new_data: bool = False
    trains: bool = True
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
        return {key: dict(each) for key, each in {**self.given, **found}.items() if each}


def named_classes(dataset: Any) -> Any:
    """Return the `classes_names` of a dataset, a method or an attribute; None if it has neither."""
    names = getattr(dataset, "classes_names", None)
    return names() if callable(names) else names


def data_numbers(dataset: Any) -> dict[str, int]:
    """Return the numbers that a config can name by `${data:NAME}`: name -> number.

    Args:
        dataset: any object. Its `classes_names`, or else `num_classes`, tell `classes` of a single list, or
            `classes.SOURCE` and `embeddings.SOURCE`, one more; an attribute `data_numbers` has others.
    """
    names = named_classes(dataset)
    found: dict[str, int] = {}
    if isinstance(names, Mapping):
        for source, each in names.items():
            found |= {f"classes.{source}": len(each), f"embeddings.{source}": len(each) + 1}
    elif count := len(names or ()) or getattr(dataset, "num_classes", None):
        found["classes"] = int(count)
    return found | {name: int(each) for name, each in getattr(dataset, "data_numbers", {}).items()}
