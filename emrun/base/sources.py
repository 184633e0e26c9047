"""The sources of a batch: how many examples they have, and the parts of a source that is a mapping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

NEW = "new"
"""The stream of data that a run has not seen: the stream function of a dataset takes their path."""
ID = "id"
POSITION = "position"
"""The sources that say which example is in a row, by its name and its number; the model need not read them."""


def length(values: Any) -> int:
    """Return the number of examples in a source, -1 if it has no length or its parts have different lengths."""
    if isinstance(values, Mapping):
        lengths = {length(part) for part in values.values()}
        return lengths.pop() if len(lengths) == 1 else -1
    if is_nested(values):
        return int(values.size(0))
    shape = getattr(values, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else -1
    try:
        return len(values)
    except TypeError:
        return -1


def examples_of(batch: Mapping[str, Any]) -> int:
    """Return the number of examples of a batch whose sources have been checked; takes little time for a tensor."""
    values = next(iter(batch.values()))
    try:
        return values.shape[0]  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # no tensor or array; a nested tensor
        return length(values)


def is_nested(values: Any) -> bool:
    """Return whether a source is a nested tensor of torch, whose entries have different shapes."""
    return getattr(values, "is_nested", False) is True


def parts(batch: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, values) for each source that is not a mapping, and `source.key` for the parts of mappings.

    A list of mappings with the same keys, such as the boxes and labels of each picture, is a mapping of lists here.
    """
    for name, values in batch.items():
        if isinstance(values, list | tuple) and values and all(isinstance(entry, Mapping) for entry in values):
            keys = values[0].keys()
            if keys and all(entry.keys() == keys for entry in values):
                values = {key: [entry[key] for entry in values] for key in keys}  # noqa: PLW2901 - as another form
        if isinstance(values, Mapping):
            yield from parts(values, f"{path}{name}.")
        else:
            yield f"{path}{name}", values


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value whose parts are changed: those in mappings, lists and tuples, at any depth.

    Args:
        value: a source or an output. Of a sequence with a method `to`, such as a packed sequence, the whole is a part.
        change: returns what takes the place of a part.
    """
    if isinstance(value, Mapping):
        return {key: changed(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "to"):
        items = [changed(part, change) for part in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return change(value)
