"""Hugging Face's library `datasets`, without access to the network."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def offline_and_quiet(library: Any) -> Iterator[None]:
    """Prevent the library from using the network, and from drawing progress bars, in a `with` block."""
    hub = importlib.import_module("huggingface_hub.constants")
    settings = [
        (owner, name, value)
        for owner, name, value in (
            (hub, "HF_HUB_OFFLINE", True),
            (library.config, "HF_HUB_OFFLINE", True),
            (library.config, "HF_DATASETS_OFFLINE", True),
            (library.config, "HF_UPDATE_DOWNLOAD_COUNTS", False),
        )
        if hasattr(owner, name)
    ]
    before = [getattr(owner, name) for owner, name, _ in settings]
    shows_bars = library.is_progress_bar_enabled()
    try:
        library.disable_progress_bars()
        for owner, name, value in settings:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(settings, before, strict=True):
            setattr(owner, name, value)
        if shows_bars:
            library.enable_progress_bars()
