"""The folder that is published: a program or weights, `export.json` and a model card, whole or absent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from emrun.storage.files import flush_directory, flush_file, make_directory, storing, write_flushed, written_aside

FACTS = "export.json"
CARD = "README.md"


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Let the block fill a folder beside `place`, which gets this name at the end; after an error nothing is left.

    Raises:
        StorageError: something cannot be written.
    """
    missing = [parent for parent in place.parents if not parent.exists()]
    try:
        with storing(place, "write"):
            make_directory(place.parent, exist_ok=True)
            with written_aside(place) as aside:
                aside.mkdir()
                yield aside
                for file in aside.iterdir():
                    flush_file(file)
                flush_directory(aside)
    except BaseException:
        for parent in missing:
            with suppress(OSError):  # somebody else has put something into it
                parent.rmdir()
        raise


def describe(folder: Path, facts: Mapping[str, object], card: str) -> None:
    """Write `export.json` and the card into a folder."""
    text = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False)
    write_flushed(folder / FACTS, f"{text}\n".encode())
    write_flushed(folder / CARD, card.encode())


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder, the program first."""
    described = (FACTS, CARD)
    names = sorted(each.name for each in folder.iterdir())
    return [*(name for name in names if name not in described), *described]
