"""What the tests of streams share."""

import sys
import threading

import pytest

from emrun.streams import read_ahead


@pytest.fixture
def no_reader_is_left(patient, monkeypatch):
    """Every test ends the threads that it began."""
    monkeypatch.setattr(read_ahead, "_LOOK_AGAIN", 60)
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def busy_switching():
    """Make threads take turns as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
