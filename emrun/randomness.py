"""Random seeds as pure functions of what they are for, and the random states of the process."""

from __future__ import annotations

import hashlib
import random
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np

Key = str | int


def derived_seed(seed: int, *key: Key) -> int:
    """Return a seed of 128 bits that is a pure function of `seed` and `key`, the same on every machine.

    Different keys give independent seeds: the seed is the BLAKE2b digest of the key's parts.
    """
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=16)
    return int.from_bytes(digest.digest(), "little")


def draw_seed() -> int:
    """Return a seed that nobody chose, small enough to be typed again."""
    return secrets.randbelow(2**31)


def seed_everything(seed: int, *key: Key, devices: bool = True) -> None:
    """Seed the global generators of Python, NumPy and, if it is imported, torch.

    Args:
        seed: see `derived_seed`.
        key: likewise.
        devices: torch's generators of GPUs too; before a GPU is used that costs a tenth of a millisecond.
    """
    value = derived_seed(seed, *key)
    random.seed(value)
    np.random.seed(value % 2**32)
    if torch := sys.modules.get("torch"):
        (torch if devices else torch.default_generator).manual_seed(value % 2**63)


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Put the global random states of Python, NumPy and, if it is imported, torch back at the end of the block."""
    python, numpy = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    devices = range(torch.cuda.device_count()) if torch and torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices, device_type="cuda") if torch else nullcontext():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
