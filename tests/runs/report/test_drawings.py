"""Where values lie on an axis, and that each run is drawn."""

import re

import pytest

from emrun.runs.report.drawings import Axis, parallel, scatter
from emrun.runs.report.templates import environment


def test_numbers_lie_by_their_size_and_over_a_wide_range_by_their_logarithm():
    narrow = Axis.of([1, 2, 5])
    assert [narrow.place(each) for each in (1, 2, 5)] == [0, 0.25, 1]
    wide = Axis.of([1e-4, 1e-3, 1e-2])
    assert [wide.place(each) for each in (1e-4, 1e-3, 1e-2)] == pytest.approx([0, 0.5, 1])
    assert wide.ticks == [(0, "0.0001"), (pytest.approx(0.5), "0.001"), (1, "0.01")]


def test_other_values_have_equal_distances():
    words = Axis.of(["b", "a", None, True, [1]])
    assert sorted(words.places.values()) == [0, 0.25, 0.5, 0.75, 1]
    assert Axis.of(["a", "a"]).place("a") == 0.5
    assert Axis.of([3, 3]).place(3) == 0.5
    assert [Axis.of([3, 10**400]).place(each) for each in (3, 10**400)] == [1, 0]  # too large for a float


def test_ticks_that_are_too_near_are_left_out():
    assert [text for _, text in Axis.of([0, 1, 2, 100, 1000]).ticks] == ["0", "1e+03"]


def drawn(macro, found):
    source = f'{{% from "drawings.html" import {macro} %}}{{{{ {macro}(found) }}}}'
    return environment().from_string(source).render(found=found)


def test_each_run_is_a_point_and_a_line_and_names_are_only_text():
    names = ["<a>", "b"]
    picture = drawn("scatter", scatter("<key>", [1, 2], [0.5, 0.25], names, "lowest valid/loss"))
    assert picture.count("<circle") == 2
    assert "<title>&lt;a&gt;</title>" in picture
    assert "<key>" not in picture
    lines = drawn("parallel", parallel(["<key>", "z", "loss"], [[1, "x", 0.5], [2, "y", 0.25]], names, True))
    assert lines.count("<polyline") == 2
    assert "<key>" not in lines
    places = [float(each) for each in re.findall(r'c[xy]="([\d.]+)"', picture)]
    assert all(0 <= each <= 320 for each in places)
