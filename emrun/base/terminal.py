"""Standard output and error after the terminal was closed."""

from __future__ import annotations

import os
import select
from pathlib import Path


def leave_closed_terminal() -> None:
    """Drop what is written from now on to a terminal that was closed; to write there would be an error."""
    for place in (1, 2):
        look = select.poll()
        look.register(place, 0)
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in look.poll(0)):
            with Path(os.devnull).open("wb") as nothing:
                os.dup2(nothing.fileno(), place)
