"""Random seeds as pure functions of their purpose, and the global random states of the process."""

from __future__ import annotations

import hashlib
import random
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

Key = str | int


def derived_seed(seed: int, *key: Key) -> int:
    """Return a seed of 128 bits that is a pure function of `seed` and `key`, the same on every machine.

    Different keys give independent seeds: the seed is the BLAKE2b digest of the key's parts.
    """
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=16)
    return int.from_bytes(digest.digest(), "little")


def draw_seed() -> int:
    """Return a random seed that is short enough to be typed."""
    return secrets.randbelow(2**31)


def seed_everything(seed: int, *key: Key, devices: bool = True) -> None:
    """Seed the global generators of Python, NumPy and, if it is imported, torch.

    Args:
        seed: the seed of the run.
        key: what the generators are seeded for; see `derived_seed`.
        devices: also seed torch's generators of accelerators; before the first use of one, this costs 0.1 ms, and
            nothing where torch is built without one.
    """
    value = derived_seed(seed, *key)
    random.seed(value)
    np.random.seed(value % 2**32)
    if torch := sys.modules.get("torch"):
        (torch if devices and _has_accelerator(torch) else torch.default_generator).manual_seed(value % 2**63)


def _has_accelerator(torch: Any) -> bool:
    try:
        return torch.accelerator.current_accelerator() is not None
    except RuntimeError:  # so torch 2.6 says that there is none
        return False


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Restore the global random states of Python, NumPy and, if it is imported, torch at the end of the block."""
    python, numpy = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    devices = range(torch.cuda.device_count()) if torch and torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices, device_type="cuda") if torch else nullcontext():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
