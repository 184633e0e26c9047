"""Examples that are alike are counted, and the first ones named."""

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from emrun.base.temporary import temporary_folder
from emrun.diagnosis.example_store import ExampleStore, in_words

STREAMS = st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), max_size=12), min_size=1, max_size=3)


def filled(folder, streams):
    store = ExampleStore(folder / "examples")
    for number, examples in enumerate(streams):
        store.begin(str(number))
        half = len(examples) // 2
        rows = [(f"{index}", bytes([content]), bytes([label])) for index, (content, label) in enumerate(examples)]
        store.add(rows[:half])
        store.add(rows[half:])
    store.end()
    return store


@settings(deadline=None, max_examples=12)
@given(streams=STREAMS)
def test_the_counts_are_those_of_a_comparison_of_all_with_all(streams):
    with temporary_folder("test") as folder:
        store = filled(folder, streams)
        labels = {}
        for examples in streams:
            for content, label in examples:
                labels.setdefault(content, set()).add(label)
        for number, examples in enumerate(streams):
            contents = [content for content, _ in examples]
            found = store.twice(str(number))
            assert found.count == len(contents) - len(set(contents))
            for first, *others in found.groups:
                assert int(first) == contents.index(contents[int(first)])
                assert all(contents[int(each)] == contents[int(first)] for each in others)
            for other, there in enumerate(streams):
                both = store.in_both(str(number), str(other))
                assert both.count == sum(content in {each for each, _ in there} for content in contents)
        conflicts = sum(len(labels[content]) > 1 for examples in streams for content, _ in examples)
        assert store.with_other_labels().count == conflicts
        store.close()


def test_the_first_ones_are_named(tmp_path):
    store = filled(tmp_path, [[(1, 0), (2, 0), (1, 0), (1, 1)], [(3, 0), (2, 0), (1, 0)]])
    assert in_words(store.twice("0")) == "0 (2, 3)"
    assert in_words(store.in_both("1", "0"), "0") == "1 (0 1), 2 (0 0, 2, 3)"
    assert store.with_other_labels().groups == [["0 0", "0 2", "0 3", "1 2"]]


@pytest.mark.campaign
def test_many_examples_take_little_memory(tmp_path):
    resource = pytest.importorskip("resource")
    store = ExampleStore(tmp_path / "examples")
    store.begin("train")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = 300_000
    for first in range(0, count, 1_000):
        store.add((str(index), (index % 299_999).to_bytes(16, "big"), b"") for index in range(first, first + 1_000))
    store.end()
    assert store.twice("train").count == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB; the checksums alone are 30 MB
    assert Counter(path.name for path in tmp_path.iterdir()) == {"examples": 1}
    store.close()
