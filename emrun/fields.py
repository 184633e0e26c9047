"""What the fields of a file may hold: a table of kinds for each file, and the error for a field of another kind."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from emrun.errors import EmrunError, StateError

_MOST = 2**63 - 1  # what an integer of any library can hold

ANOTHER_CHECKPOINT = "choose another checkpoint (--checkpoint NAME), or put this one back from a copy"
"""What to do about a checkpoint with a field that cannot be used."""


class FieldError(StateError):
    """A field with a value that it cannot have; `reading` adds the name of the file."""

    def __init__(self, key: str, found: str, allowed: str) -> None:
        super().__init__(f"{key or 'the content'} {found}, but must be {allowed}")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Args:
        allowed: what it is called in messages.
        fits: tells whether a value is of the kind; it may raise, which counts as no.
        look_inside: checks the parts of a value that fits; gets its key too.
    """

    allowed: str
    fits: Callable[[Any], Any]
    look_inside: Callable[[Any, str], None] = lambda value, key: None

    def check(self, value: Any, key: str = "") -> None:
        """Check a value.

        Args:
            value: anything.
            key: what it is called in messages.

        Raises:
            FieldError: it, or a part of it, is of another kind.
        """
        try:
            fits = self.fits(value)
        except Exception:  # whatever a comparison with something strange raises
            fits = False
        if not fits:
            raise FieldError(key, f"is {shown(value)}", self.allowed)
        self.look_inside(value, key)


def whole(least: int = 0, most: int = _MOST) -> Kind:
    """Return the kind of the integers from `least` to `most`, by default as far as 64 bits go."""
    last = "2**63 - 1" if most == _MOST else most
    return Kind(f"a whole number from {least} to {last}", lambda value: type(value) is int and least <= value <= most)


def choice(*allowed: Any) -> Kind:
    """Return the kind that is one of these values."""
    words = ", ".join(map(repr, allowed))
    return Kind(f"one of {words}", lambda value: any(type(value) is type(each) and value == each for each in allowed))


def optional(kind: Kind) -> Kind:
    """Return the kind that may also be None."""

    def look_inside(value: Any, key: str) -> None:
        if value is not None:
            kind.look_inside(value, key)

    return Kind(f"{kind.allowed}, or nothing", lambda value: value is None or kind.fits(value), look_inside)


def sequence_of(kind: Kind) -> Kind:
    """Return the kind of lists and tuples with entries of a kind."""

    def look_inside(value: Sequence[Any], key: str) -> None:
        for index, each in enumerate(value):
            kind.check(each, f"{key}[{index}]")

    return Kind("a list", lambda value: isinstance(value, list | tuple), look_inside)


def mapping_of(kind: Kind, names: Kind | None = None) -> Kind:
    """Return the kind of mappings with values of a kind, and keys of another, by default texts."""
    of_names = TEXT if names is None else names

    def look_inside(value: Mapping[Any, Any], key: str) -> None:
        for name, each in value.items():
            of_names.check(name, f"a key of {key}" if key else "a key")
            kind.check(each, _joined(key, name))

    return Kind("a mapping", lambda value: isinstance(value, Mapping), look_inside)


def record(fields: Mapping[str, Kind], may_lack: Collection[str] = ()) -> Kind:
    """Return the kind of mappings with these fields; what else is in one is nobody's and is not looked at.

    Args:
        fields: name -> kind.
        may_lack: names of those that may be missing.
    """

    def look_inside(value: Mapping[Any, Any], key: str) -> None:
        for name, kind in fields.items():
            if name in value:
                kind.check(value[name], _joined(key, name))
            elif name not in may_lack:
                raise FieldError(_joined(key, name), "is missing", kind.allowed)

    return Kind(f"a mapping with {', '.join(fields)}", lambda value: isinstance(value, Mapping), look_inside)


ANYTHING = Kind("anything", lambda value: True)
TEXT = Kind("a text", lambda value: type(value) is str)
FLAG = Kind("true or false", lambda value: type(value) is bool)
NUMBER = Kind("a number", lambda value: type(value) is float or (type(value) is int and abs(value) <= _MOST))
SHA256 = Kind("64 hexadecimal digits", lambda value: len(value) == 64 and not set(value) - set("0123456789abcdef"))


_BY_ANNOTATION = {"str": TEXT, "bool": FLAG, "int": whole()}


def kinds_of(owner: Any, **others: Kind) -> dict[str, Kind]:
    """Return the fields of a dataclass with their kinds: those of `str`, `bool` and `int`, maybe `| None`, and others.

    Args:
        owner: the dataclass, of a module with `from __future__ import annotations`.
        others: the kinds of the fields that are something else, or not any number.
    """
    found: dict[str, Kind] = {}
    for field in dataclasses.fields(owner):
        name, _, or_none = str(field.type).partition(" | ")
        kind = others.get(field.name) or _BY_ANNOTATION[name]
        found[field.name] = optional(kind) if or_none else kind
    return found


def _is_file_name(name: Any) -> bool:
    if type(name) is not str or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    return len(name.encode(errors="surrogateescape")) <= 255


FILES = mapping_of(
    record({"sha256": SHA256, "size": whole()}),
    Kind("the name of a file beside it, not a path", _is_file_name),
)
"""Files with their checksums, in a directory with a manifest."""


def fitting(value: Any, kind: Kind) -> bool:
    """Tell whether a value is of a kind, with all its parts."""
    try:
        kind.check(value)
    except FieldError:
        return False
    return True


@contextmanager
def reading(what: str, advice: str, reader: Callable[..., Any] | None = None) -> Iterator[None]:
    """Name the file, and what to do, in the error for a field; turn what reads its content wrongly into such an error.

    Args:
        what: the file, and the part of it.
        advice: what to do.
        reader: the function that the block calls. Where that is a user's, an error may as well be one of its code, and
            is raised as it is, with a note.

    Raises:
        StateError: the block raised an error that is not one of emrun's, of the system or of a memory that is full.
        Exception: likewise, and the reader is not emrun's.
    """
    try:
        yield
    except FieldError as error:
        raise StateError(f"{what}: {error}; {advice}") from error
    except (EmrunError, OSError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, of a device
            raise
        if reader is not None and not getattr(reader, "__module__", "").startswith("emrun."):
            error.add_note(f"while {reader.__qualname__} took back {what}")
            raise
        kind = type(error).__name__
        raise StateError(f"{what}: its content cannot be used ({kind}: {error}); {advice}") from error


def shown(value: Any) -> str:
    """Return what a value is, in a few words, however large it is."""
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
