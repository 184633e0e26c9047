"""Kinds of values for the fields of a file, and the error for a field with a value of another kind."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from emrun.base.errors import EmrunError, StateError

_MOST = 2**63 - 1  # the largest integer that every library can store

ANOTHER_CHECKPOINT = "choose another checkpoint (--checkpoint NAME), or restore this one from a copy"
"""The advice for a checkpoint with an invalid field."""


class FieldError(StateError):
    """A field has an invalid value; `reading` adds the name of the file."""

    def __init__(self, key: str, found: str, allowed: str) -> None:
        super().__init__(f"{key or 'the content'} {found}, but must be {allowed}")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Args:
        allowed: the description of the kind in messages.
        fits: returns whether a value is of the kind; an exception counts as False.
        parts: returns the parts of a value that fits, each as its kind, itself and its key; called with the value and
            its key.
    """

    allowed: str
    fits: Callable[[Any], Any]
    parts: Callable[[Any, str], Iterable[tuple[Kind, Any, str]]] = lambda value, key: ()

    def check(self, value: Any, key: str = "") -> None:
        """Check a value.

        Args:
            value: any value.
            key: the name of the value in messages.

        Raises:
            FieldError: the value, or a part of it, is of another kind.
        """
        try:
            fits = self.fits(value)
        except Exception:  # comparisons with unexpected values may raise any error
            fits = False
        if not fits:
            raise FieldError(key, f"is {shown(value)}", self.allowed)
        for kind, part, name in self.parts(value, key):
            kind.check(part, name)


def whole(least: int = 0, most: int = _MOST) -> Kind:
    """Return the kind of the integers from `least` to `most`, by default the largest signed 64-bit integer."""
    last = "2**63 - 1" if most == _MOST else most
    return Kind(f"a whole number from {least} to {last}", lambda value: type(value) is int and least <= value <= most)


def choice(*allowed: Any) -> Kind:
    """Return the kind of the values in `allowed`."""
    words = ", ".join(map(repr, allowed))
    return Kind(f"one of {words}", lambda value: any(type(value) is type(one) and value == one for one in allowed))


def optional(kind: Kind) -> Kind:
    """Return the kind of None and the values of another kind."""
    return Kind(
        f"{kind.allowed}, or None",
        lambda value: value is None or kind.fits(value),
        lambda value, key: () if value is None else kind.parts(value, key),
    )


def sequence_of(kind: Kind) -> Kind:
    """Return the kind of lists and tuples whose entries are all of one kind."""
    return Kind(
        "a list",
        lambda value: isinstance(value, list | tuple),
        lambda value, key: ((kind, entry, f"{key}[{index}]") for index, entry in enumerate(value)),
    )


def mapping_of(kind: Kind, names: Kind | None = None) -> Kind:
    """Return the kind of mappings whose values are of one kind, and whose keys are of `names`, by default strings."""

    def parts(value: Mapping[Any, Any], key: str) -> Iterator[tuple[Kind, Any, str]]:
        for name, entry in value.items():
            yield names or TEXT, name, f"a key of {key}" if key else "a key"
            yield kind, entry, _joined(key, name)

    return Kind("a mapping", lambda value: isinstance(value, Mapping), parts)


def record(fields: Mapping[str, Kind], may_lack: Collection[str] = ()) -> Kind:
    """Return the kind of mappings with these fields; other fields are not checked.

    Args:
        fields: name -> kind.
        may_lack: the names of fields that may be missing.
    """

    def parts(value: Mapping[Any, Any], key: str) -> Iterator[tuple[Kind, Any, str]]:
        for name, kind in fields.items():
            if name in value:
                yield kind, value[name], _joined(key, name)
            elif name not in may_lack:
                raise FieldError(
                    _joined(key, name), "is missing (an earlier version may have made the file)", kind.allowed
                )

    return Kind(f"a mapping with {', '.join(fields)}", lambda value: isinstance(value, Mapping), parts)


ANYTHING = Kind("anything", lambda value: True)
TEXT = Kind("a string", lambda value: type(value) is str)
FLAG = Kind("true or false", lambda value: type(value) is bool)
SHA256 = Kind("64 hexadecimal digits", lambda value: len(value) == 64 and not set(value) - set("0123456789abcdef"))


def _is_file_name(name: Any) -> bool:
    if type(name) is not str or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    return len(name.encode(errors="surrogateescape")) <= 255


FILE_NAME = Kind("the name of a file in the same directory, not a path", _is_file_name)
FILES = mapping_of(record({"sha256": SHA256, "size": whole()}), FILE_NAME)
"""File name -> checksum and size, for the files of a directory with a manifest."""


def fitting(value: Any, kind: Kind) -> bool:
    """Return whether a value and all its parts are of a kind."""
    try:
        kind.check(value)
    except FieldError:
        return False
    return True


@contextmanager
def reading(what: str, advice: str, reader: Callable[..., Any] | None = None) -> Iterator[None]:
    """Add the file and advice to errors for a field; turn other errors of the block into such an error.

    Args:
        what: the file, and the part of it.
        advice: what the user can do.
        reader: the function that the block calls. If it is a user's function, an error may also be a bug in its code;
            the error is then raised unchanged, with a note.

    Raises:
        StateError: the block raised a `FieldError` or an unexpected error. Other errors of emrun, errors of the
            operating system and out-of-memory errors are raised unchanged.
        Exception: the block raised an unexpected error, and `reader` is a user's function.
    """
    try:
        yield
    except FieldError as error:
        raise StateError(f"{what}: {error}; {advice}") from error
    except (EmrunError, OSError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch raises it for a device
            raise
        if reader is not None and not getattr(reader, "__module__", "").startswith("emrun."):
            error.add_note(f"while {reader.__qualname__} loaded {what}")
            raise
        kind = type(error).__name__
        raise StateError(f"{what}: its content cannot be used ({kind}: {error}); {advice}") from error


def shown(value: Any) -> str:
    """Return a short description of a value, however large the value is."""
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, type):
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return _SHORT.repr(value)


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 200 else f"an integer of {x.bit_length()} bits"


_SHORT = _Short()


def _joined(key: str, name: Any) -> str:
    part = name if isinstance(name, str) and name.isidentifier() else shown(name)
    return f"{key}.{part}" if key else part
