"""A curve keeps few enough points, and every peak."""

import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from emrun.runs.report.thinning import Curve

VALUES = st.lists(st.one_of(st.none(), st.floats(width=32)), max_size=300)


def finite(values):
    return [value for value in values if value is not None and math.isfinite(value)]


@settings(max_examples=30, deadline=None)
@given(chunks=st.lists(VALUES, max_size=5), every=st.integers(1, 7), most=st.integers(2, 20))
def test_the_lowest_and_the_highest_value_are_kept_at_their_places(chunks, every, most):
    curve, expected, first = Curve(most), [], 1
    for values in chunks:
        curve.add_all(first, every, values)
        expected += [(first + every * index, value) for index, value in enumerate(values) if value is not None]
        first += every * len(values)
    numbers = [(x, value) for x, value in expected if math.isfinite(value)]
    others = [x for x, value in expected if not math.isfinite(value)]
    points = curve.points(2 * most)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert {point for point in points if point[1] is not None} <= set(numbers)
    assert len(points) <= 3 * most + 1
    assert (curve.count, curve.not_finite) == (len(expected), len(others))
    assert curve.first_not_finite == (others[0] if others else None)
    if numbers:
        low, high = min(value for _, value in numbers), max(value for _, value in numbers)
        assert (curve.lowest()[1], curve.highest()[1]) == (low, high)
        assert {low, high} <= {value for _, value in points}
        assert curve.lowest() in numbers
        assert curve.highest() in numbers
    else:
        assert curve.lowest() is None


def test_every_peak_of_a_long_curve_is_drawn():
    rng = random.Random(1)
    values = [rng.random() for _ in range(100_000)]
    peaks = {rng.randrange(100_000): 10.0 + index for index in range(100)}
    for place, peak in peaks.items():
        values[place] = peak
    curve = Curve()
    for first in range(0, 100_000, 1_000):
        curve.add_all(first, 1, values[first : first + 1_000])
    points = curve.points(2_000)
    assert len(points) <= 2_001
    assert sum((place, peak) in set(points) for place, peak in peaks.items()) >= 90  # two may be in a stretch
    assert max(points, key=lambda point: point[1]) == max(peaks.items(), key=lambda item: item[1])


def test_single_values_and_chunks_give_the_same_curve():
    values = [math.sin(index / 7) for index in range(5_000)]
    one, other = Curve(100), Curve(100)
    one.add_all(1, 3, values)
    for index, value in enumerate(values):
        other.add(1 + 3 * index, value)
    assert one.points(80) == other.points(80)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_interrupts_the_curve(bad):
    curve = Curve()
    curve.add_all(1, 1, [1.0, 2.0, bad, 3.0])
    assert curve.points(100) == [(1, 1.0), (2, 2.0), (3, None), (4, 3.0)]
    assert (curve.not_finite, curve.first_not_finite) == (1, 3)


def test_of_equal_values_in_a_row_only_the_first_and_the_last_are_drawn():
    curve = Curve()
    curve.add_all(1, 1, [0.1] * 500 + [0.2] * 500)
    assert curve.points(2_000) == [(1, 0.1), (500, 0.1), (501, 0.2), (1_000, 0.2)]


def test_the_last_value_is_drawn():
    curve = Curve(10)
    curve.add_all(1, 1, [0.0, 1.0] * 500 + [0.5])
    assert curve.points(20)[-1] == (1_001, 0.5)


def test_huge_and_sparse_places_take_little_memory():
    curve = Curve(10)
    for power in range(62):
        curve.add(2**power, float(power))
    assert len(curve.points(20)) <= 21
    assert curve.highest() == (2**61, 61.0)
