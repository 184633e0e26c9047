"""Random seeds as pure functions of their purpose, and the global random states of the process."""

from __future__ import annotations

import hashlib
import random
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from emrun.base.errors import UsageError

Key = str | int
_USE = threading.RLock()
_OPEN: list[str] = []  # what the thread that has the lock does now, one within the other


def derived_seed(seed: int, *key: Key) -> int:
    """Return a seed of 128 bits that is a pure function of `seed` and `key`, the same on every machine.

    Different keys give independent seeds: the seed is the BLAKE2b digest of the key's parts.
    """
    return int.from_bytes(hashlib.blake2b(repr((seed, *key)).encode(), digest_size=16).digest(), "little")


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
    seed_generators(derived_seed(seed, *key), devices=devices)


def seed_generators(value: int, *, devices: bool = False) -> None:
    """Seed the global generators with a value of `derived_seed`; see `seed_everything`."""
    random.seed(value)
    np.random.seed(value % 2**32)
    if torch := sys.modules.get("torch"):
        generator = torch if devices and _has_accelerator(torch) else torch.default_generator
        generator.manual_seed(value % 2**63)


def _has_accelerator(torch: Any) -> bool:
    try:
        return torch.accelerator.current_accelerator() is not None
    except RuntimeError:  # so torch 2.6 says that there is none
        return False


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Restore the global random states of Python, NumPy and, if it is imported, torch at the end of the block."""
    python = random.getstate()
    numpy = np.random.get_state()
    torch = sys.modules.get("torch")
    devices = range(torch.cuda.device_count()) if torch and torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices, device_type="cuda") if torch else nullcontext():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def sole_use(what: str) -> Iterator[None]:
    """Use the global random states in this block, which no other thread may do meanwhile.

    A block within another one of the same thread restores the random states at its end.

    Args:
        what: what is done: `training`, which cannot lie within another block, or something else.

    Raises:
        UsageError: another thread is in such a block; or a training begins inside such a block.
    """
    if not _USE.acquire(blocking=False):
        raise UsageError(
            "another thread of this process trains or evaluates, and both would draw from the same random numbers and "
            "write into one log; use a process for each, or one after the other"
        )
    try:
        if what == "training" and _OPEN:
            raise UsageError(f"this training begins within a {_OPEN[-1]}, as in a hook; begin it afterwards")
        with preserved_randomness() if _OPEN else nullcontext():
            _OPEN.append(what)
            try:
                yield
            finally:
                _OPEN.pop()
    finally:
        _USE.release()
