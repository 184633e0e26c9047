"""What cannot be pickled is named by its place."""

import threading

import pytest

from emrun.streams.pickling import what_cannot_be_pickled


class Holder:
    """An object with parts."""

    def __init__(self, parts):
        self.name, self.parts = "h", parts

    def method(self):
        """Do nothing."""


def in_a_circle():
    holder = Holder([threading.Lock()])
    holder.parts.insert(0, holder)
    return holder


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (Holder(threading.Lock()).method, "Holder.parts (lock)"),
        (Holder({"files": [1, threading.Lock()]}).method, "Holder.parts['files'][1] (lock)"),
        (Holder(Holder((1, {2: threading.Lock()}))).method, "Holder.parts.parts[1][2] (lock)"),
        (Holder(lambda: 1).method, "Holder.parts (function)"),
        (lambda: 1, "its function <lambda> (function)"),
    ],
)
def test_the_innermost_part_is_named(part, named):
    assert what_cannot_be_pickled(part) == named


def test_a_reference_cycle_ends():
    assert what_cannot_be_pickled(in_a_circle().method).startswith("Holder.parts[0].parts[0]")
