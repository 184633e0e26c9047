"""The first iteration in which two step records differ, however the records are cut into chunks."""

import math

from emrun.record.steps import Chunk
from emrun.runs.comparison import compare_steps

NAN = float("nan")


def chunk(first, *losses, every=1, **columns):
    return Chunk(first, every, {"loss": list(losses), **columns})


def test_equal_records_are_equal_wherever_their_chunks_end():
    one = [chunk(1, 0.5, 0.4), chunk(3, 0.3, 0.2)]
    for other in (one, [chunk(1, 0.5, 0.4, 0.3, 0.2)], [chunk(1, 0.5), chunk(2, 0.4, 0.3), chunk(4, 0.2)]):
        for pair in ((one, other), (other, one)):
            found = compare_steps(*pair)
            assert found == {
                "equal": True,
                "compared": 4,
                "last_equal": 4,
                "first": None,
                "last": [4, 4],
                "alone": [0, 0],
            }


def test_the_first_difference_has_all_its_values():
    one = [chunk(1, 0.5, 0.4), chunk(3, 0.3, 0.1, learning_rate=[1.0, 2.0])]
    other = [chunk(1, 0.5, 0.4), chunk(3, 0.3, 0.2, learning_rate=[1.0, None])]
    found = compare_steps(one, other)
    assert found["first"] == {"iteration": 4, "every": 1, "values": {"loss": [0.1, 0.2], "learning_rate": [2.0, None]}}
    assert (found["equal"], found["compared"], found["last_equal"]) == (False, 3, 3)


def test_the_last_bit_counts():
    found = compare_steps([chunk(1, 0.1)], [chunk(1, math.nextafter(0.1, 1))])
    assert found["first"]["iteration"] == 1


def test_nan_is_equal_to_nan_and_nothing_to_nothing():
    assert compare_steps([chunk(1, NAN, None)], [chunk(1, float("nan"), None)])["equal"]
    for other in (chunk(1, 0.5, None), chunk(1, NAN, 0.0), chunk(1, None, None)):
        assert not compare_steps([chunk(1, NAN, None)], [other])["equal"]


def test_a_column_that_one_lacks_differs():
    found = compare_steps([chunk(1, 0.5)], [chunk(1, 0.5, norm=[2.0])])
    assert found["first"]["values"] == {"norm": [None, 2.0]}


def test_a_longer_record_is_equal_up_to_its_last_common_iteration():
    found = compare_steps([chunk(1, 0.5, 0.4)], [chunk(1, 0.5, 0.4), chunk(3, 0.3)])
    assert found == {"equal": False, "compared": 2, "last_equal": 2, "first": None, "last": [2, 3], "alone": [0, 0]}


def test_iterations_that_only_one_has_recorded_are_passed():
    one = [chunk(10, 0.5, 0.4, 0.3, every=10)]
    other = [chunk(11, 0.1), chunk(20, 0.4), chunk(25, 0.1), chunk(30, 0.2)]
    found = compare_steps(one, other)
    assert (found["compared"], found["last_equal"], found["first"]["iteration"]) == (1, 20, 30)
    assert found["first"]["every"] == 10
    alike = compare_steps([chunk(1, 0.5), chunk(3, 0.3)], [chunk(1, 0.5, 0.4, 0.3)])
    assert (alike["equal"], alike["compared"], alike["first"], alike["alone"]) == (False, 2, None, [0, 1])


def test_without_a_record_nothing_is_compared():
    assert compare_steps([], [])["last"] == [None, None]
    assert compare_steps([], [chunk(1, 0.5)])["last"] == [None, 1]
