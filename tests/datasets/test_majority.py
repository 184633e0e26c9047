"""Majority: its streams, sources and order, and that it can be learned."""

import numpy as np
import pytest

from emrun.base.errors import ArgumentError
from emrun.datasets import Majority
from emrun.streams.stream import StreamWrapper


def passes(dataset, name, n=1, seed=0):
    """Return the batches of each of the first passes over a stream."""
    stream = StreamWrapper(getattr(dataset, f"{name}_stream"), name=name, seed=seed, training=name == "train")
    return [list(stream) for _ in range(n)]


def together(batches, source="x"):
    return np.concatenate([batch[source] for batch in batches])


@pytest.mark.parametrize(("n", "train", "valid"), [(500, 400, 100), (5, 4, 1), (7, 5, 2), (1003, 802, 201)])
def test_four_fifths_of_the_examples_are_for_training(n, train, valid):
    dataset = Majority(n=n)
    assert [len(together(passes(dataset, name)[0])) for name in ("train", "valid")] == [train, valid]


@pytest.mark.parametrize("name", ["train", "valid"])
@pytest.mark.parametrize("dim", [1, 11, 30])
def test_sources_have_the_dtypes_shapes_and_values_of_the_docstring(name, dim):
    (batches,) = passes(Majority(dim=dim), name)
    for batch in batches:
        assert list(batch) == ["x", "y"]
        assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.float32)
        assert batch["x"].shape == (len(batch["y"]), dim)
    x, y = together(batches), together(batches, "y")
    assert set(np.unique(x)) == {0.0, 1.0}
    assert np.array_equal(y, (x.sum(axis=1) > dim / 2).astype(np.float32))
    assert 0.2 < y.mean() < 0.8


def test_no_example_is_in_two_streams():
    dataset = Majority(dim=101)
    rows = [row.tobytes() for name in ("train", "valid") for row in together(passes(dataset, name)[0])]
    assert len(set(rows)) == len(rows) == 500


def test_both_streams_together_are_all_examples_whatever_the_batch_size():
    first, second = (
        sorted(row.tobytes() for name in ("train", "valid") for row in together(passes(dataset, name)[0]))
        for dataset in (Majority(dim=101, batch_size=10), Majority(dim=101, batch_size=333))
    )
    assert first == second


@pytest.mark.parametrize("batch_size", [1, 10, 33, 100, 1000])
@pytest.mark.parametrize("name", ["train", "valid"])
def test_num_batches_is_right(name, batch_size):
    dataset = Majority(batch_size=batch_size)
    (batches,) = passes(dataset, name)
    assert len(batches) == dataset.num_batches[name]
    assert all(len(batch["y"]) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]["y"]) <= batch_size


def test_training_passes_are_shuffled_each_differently():
    orders = [[row.tobytes() for row in together(batches)] for batches in passes(Majority(dim=101), "train", 3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])


def test_the_same_seed_gives_the_same_order():
    first, second, other = (
        [together(batches) for batches in passes(Majority(), "train", 2, seed)] for seed in (3, 3, 4)
    )
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_the_seed_of_the_run_does_not_change_the_examples():
    first, other = (sorted(row.tobytes() for row in together(passes(Majority(), "train", 1, s)[0])) for s in (3, 4))
    assert first == other


def test_the_seed_of_the_data_changes_the_examples():
    first, same, other = (together(passes(Majority(data_seed=seed), "valid")[0]) for seed in (0, 0, 1))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)


def test_building_the_dataset_leaves_the_global_random_state_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()
    Majority()
    assert np.random.get_state()[1].tolist() == before


def test_the_validation_stream_is_the_same_in_each_pass():
    first, second = (together(batches) for batches in passes(Majority(), "valid", 2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 4}, "n: 4 is not a whole number of at least 5"),
        ({"n": "many"}, "n: 'many' is not a whole number"),
        ({"dim": 0}, "dim: 0 is not a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size: 0 is not a whole number of at least 1"),
        ({"batch_size": 2.0}, "batch_size: 2.0 is not a whole number"),
        ({"data_seed": -1}, "data_seed: -1 is not a whole number of at least 0"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        Majority(**arguments)
    assert str(caught.value).startswith(message)


def test_the_yaml_in_its_docstring_trains(train_docstring):
    losses = [streams["valid"]["loss"]["mean"] for streams in train_docstring(Majority, "x", "y", 11, 1, epochs=3)]
    assert losses[-1] < 0.7 * losses[0]
