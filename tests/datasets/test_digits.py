"""Digits: its streams, sources and order, and where the images are moved."""

import inspect
import sys

import numpy as np
import pytest
from campaign import thinned
from doubles import together
from sklearn.datasets import load_digits

from emrun.base.errors import ArgumentError, MissingExtra
from emrun.datasets import Digits, digits as module
from emrun.streams.stream import StreamWrapper

SIZES = {"train": 1437, "valid": 180, "test": 180}


def passes(dataset, name, n=1, seed=0, training=None):
    """Return the batches of each of the first passes over a stream."""
    training = name == "train" if training is None else training
    stream = StreamWrapper(getattr(dataset, f"{name}_stream"), name=name, seed=seed, training=training)
    return [list(stream) for _ in range(n)]


@pytest.fixture(scope="module")
def digits():
    return Digits()


def test_scikit_learn_which_has_the_file_is_not_imported(monkeypatch):
    for name in [each for each in sys.modules if each.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    Digits()
    assert "sklearn" not in sys.modules


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setattr(module, "_load", inspect.unwrap(module._load))  # which the tests have cached
    with pytest.raises(MissingExtra, match=r"emrun\[metrics\]"):
        Digits()


@pytest.mark.parametrize("name", SIZES)
def test_each_stream_has_its_examples(digits, name):
    (batches,) = passes(digits, name)
    images, labels = together(batches), together(batches, "label")
    assert images.shape == (SIZES[name], 1, 8, 8)
    assert labels.shape == (SIZES[name],)
    assert set(labels) == set(range(10))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("flat", "shape"), [(False, (1, 8, 8)), (True, (64,))])
@pytest.mark.parametrize("shift", [0, 2])
def test_sources_have_the_dtypes_shapes_and_ranges_of_the_docstring(name, flat, shape, shift):
    (batches,) = passes(Digits(flat=flat, shift=shift), name)
    for batch in batches:
        assert list(batch) == ["image", "label"]
        assert (batch["image"].dtype, batch["label"].dtype) == (np.float32, np.int64)
        assert batch["image"].shape == (len(batch["label"]), *shape)
    images, labels = together(batches), together(batches, "label")
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert (labels.min(), labels.max()) == (0, 9)


def test_all_digits_are_there_and_none_is_in_two_streams(digits):
    def rows(images, labels):
        return [(image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True)]

    found = []
    for name in SIZES:
        (batches,) = passes(digits, name)
        found += rows(together(batches), together(batches, "label"))
    data = load_digits()
    assert sorted(found) == sorted(rows((data.images / 16).astype(np.float32), data.target))
    assert len(set(found)) == len(found) == 1797


def test_flat_images_are_the_same_images(digits):
    (images,), (flat,) = passes(digits, "valid"), passes(Digits(flat=True), "valid")
    assert np.array_equal(together(images).reshape(-1, 64), together(flat))


@pytest.mark.parametrize("batch_size", thinned([1, 32, 180, 1437, 5000], [32, 180, 5000]))
@pytest.mark.parametrize("name", SIZES)
def test_num_batches_is_right(name, batch_size):
    dataset = Digits(batch_size=batch_size)
    (batches,) = passes(dataset, name)
    assert len(batches) == dataset.num_batches[name]
    assert all(len(batch["label"]) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]["label"]) <= batch_size


def test_training_passes_are_shuffled_each_differently(digits):
    orders = [together(batches, "label").tolist() for batches in passes(digits, "train", 3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])


@pytest.mark.parametrize("shift", [0, 1])
def test_the_same_seed_gives_the_same_batches(shift):
    first, second, other = (
        [together(batches) for batches in passes(Digits(shift=shift), "train", 2, seed)] for seed in (3, 3, 4)
    )
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_evaluated_streams_are_the_same_in_each_pass(digits):
    for name in ("valid", "test"):
        first, second = (together(batches) for batches in passes(digits, name, 2))
        assert np.array_equal(first, second)


@pytest.mark.parametrize("shift", [1, 3])
def test_training_images_are_moved_by_up_to_so_many_pixels(shift):
    (still,), (moved,) = passes(Digits(), "train"), passes(Digits(shift=shift), "train")
    still, moved = together(still)[:, 0], together(moved)[:, 0]
    offsets = set()
    for before, after in zip(still[:300], moved[:300], strict=True):
        around = np.pad(before, shift)
        places = [(down, right) for down in range(2 * shift + 1) for right in range(2 * shift + 1)]
        fits = {place for place in places if np.array_equal(around[place[0] :, place[1] :][:8, :8], after)}
        assert fits
        offsets |= fits
    assert len(offsets) == (2 * shift + 1) ** 2


def test_images_are_moved_differently_in_each_pass():
    first, second = (
        {image.tobytes() for batch in batches for image in batch["image"]}
        for batches in passes(Digits(batch_size=100, shift=1), "train", 2)
    )
    assert 100 < len(first & second) < 1000


def test_evaluations_see_the_images_as_they_are():
    (still,), (seen,) = passes(Digits(), "train", training=False), passes(Digits(shift=2), "train", training=False)
    assert np.array_equal(together(still), together(seen))
    for name in ("valid", "test"):
        assert np.array_equal(together(passes(Digits(), name)[0]), together(passes(Digits(shift=2), name)[0]))


def test_batches_may_be_changed_without_changing_the_data(digits):
    (before,) = passes(digits, "valid")
    for batch in passes(digits, "valid")[0]:
        batch["image"] += 1
        batch["label"] += 1
    (after,) = passes(digits, "valid")
    assert np.array_equal(together(before), together(after))
    assert np.array_equal(together(before, "label"), together(after, "label"))


def test_stream_info_tells_of_all_streams(digits):
    text = digits.stream_info()
    for name in SIZES:
        assert f"{name} " in text
    assert "(1, 8, 8)" in text
    assert "0 to 9" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: 0 is not a whole number of at least 1"),
        ({"batch_size": 3.5}, "batch_size: 3.5 is not a whole number"),
        ({"batch_size": True}, "batch_size: True is not a whole number"),
        ({"shift": -1}, "shift: -1 is not a whole number of at least 0"),
        ({"shift": "1"}, "shift: '1' is not a whole number"),
        ({"flat": 1}, "flat: 1 is neither true nor false"),
        ({"flat": "no"}, "flat: 'no' is neither true nor false"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        Digits(**arguments)
    assert str(caught.value).startswith(message)


def test_the_yaml_in_its_docstring_trains(train_docstring):
    last = train_docstring(Digits, "image", "label", 64, 10, epochs=2, streams=("valid", "test"))[-1]
    assert all(last[stream]["accuracy"]["mean"] > 0.5 for stream in ("valid", "test"))
