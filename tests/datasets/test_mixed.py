"""Mixed: which dataset each batch comes from, how each dataset continues, and that a resume is exact."""

import itertools

import numpy as np
import pytest
from campaign import thinned

from emrun.base.errors import ArgumentError, StreamError
from emrun.datasets import Majority, Mixed
from emrun.stream_context import StreamContext
from emrun.streams.stream import StreamWrapper


class Numbers:
    """Counts: batches of one number, `first` and what follows, in the order of the pass."""

    def __init__(self, first, count, told=None):
        self.first, self.count = first, count
        self.num_batches = {"train": count if told is None else told, "valid": 2}
        self.read = 0

    def train_stream(self, ctx):
        for rows in ctx.batches(self.count, 1, shuffle=ctx.epoch > 0):
            self.read += 1
            yield {"x": self.first + rows}

    def valid_stream(self, ctx):
        for rows in ctx.batches(2, 1):
            yield {"x": self.first + rows}


class Untold(Numbers):
    """Does not tell how many batches it has, and draws their order itself."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        del self.num_batches

    def train_stream(self, ctx):
        for number in ctx.rng.permutation(self.count):
            self.read += 1
            yield {"x": np.array([self.first + number])}


def make(kinds=(Numbers, Numbers), weights=(1, 2), batches=7, **more):
    datasets = {f"d{index}": kind(100 * index, 5 + 3 * index) for index, kind in enumerate(kinds)}
    return Mixed(datasets, dict(zip(datasets, weights, strict=True)), batches, **more)


def numbers(batches):
    return [int(batch["x"][0]) for batch in batches]


KINDS = {"told": (Numbers, Numbers), "untold": (Untold, Untold), "both": (Numbers, Untold)}


@pytest.mark.parametrize(
    ("kind", "batches"),
    thinned(itertools.product(KINDS, (3, 7, 40)), [("told", 3), ("told", 40), ("untold", 7), ("both", 40)]),
)
def test_a_training_stream_is_the_same_however_it_is_read(kind, batches, check_training_stream):
    check_training_stream(lambda: make(KINDS[kind], batches=batches))


def test_a_mixture_can_be_mixed(check_training_stream):
    inner = {"a": 1, "b": 1}
    check_training_stream(
        lambda: Mixed({"a": make(), "b": make((Untold, Numbers))}, inner, batches_per_epoch=5),
    )


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_each_dataset_continues_through_its_own_passes(kinds, passes):
    found = numbers(itertools.chain.from_iterable(passes(make(kinds), "train", 12)))
    for first, count in ((0, 5), (100, 8)):
        own = [number for number in found if number // 100 == first // 100]
        whole = [own[start : start + count] for start in range(0, len(own) - count + 1, count)]
        assert len(whole) >= 3
        assert all(sorted(each) == list(range(first, first + count)) for each in whole)
        assert len({tuple(each) for each in whole}) > 1


def test_weights_say_how_often(passes):
    (batches,) = passes(make((Numbers,) * 3, (1, 2.5, 0.5), batches=1500), "train")
    shares = np.bincount([number // 100 for number in numbers(batches)]) / 1500
    assert np.allclose(shares, [0.25, 0.625, 0.125], atol=0.03)


def test_only_the_relation_of_weights_counts(passes, bits):
    one, other = (passes(make(weights=weights, batches=100), "train") for weights in ((1, 2), (10, 20)))
    assert bits(one[0]) == bits(other[0])


def test_each_pass_and_each_seed_mixes_in_another_order(passes):
    mixed = [passes(make(batches=40), "train", 2, seed=seed) for seed in (0, 1)]
    chosen = [tuple(number // 100 for number in numbers(batches)) for found in mixed for batches in found]
    assert len(set(chosen)) == 4


def test_the_same_data_under_two_names_is_shuffled_differently(passes):
    (batches,) = passes(Mixed({"a": Numbers(0, 8), "b": Numbers(100, 8)}, {"a": 1, "b": 1}, 60), "train")
    first = [[n % 100 for n in numbers(batches) if n // 100 == which][:8] for which in (0, 1)]
    assert first[0] != first[1]


def test_a_resume_skips_what_was_read(passes):
    before = StreamWrapper(make().train_stream, name="train")
    for _ in range(20):
        list(before)
    dataset = make()
    after = StreamWrapper(dataset.train_stream, name="train")
    after.load_state_dict(before.state_dict())
    assert after.restore()
    assert sum(child.read for child in dataset._datasets.values()) == 1


def test_a_dataset_is_not_opened_again_for_each_pass(passes):
    dataset = make((Untold, Untold))
    passes(dataset, "train", 30)
    assert sum(child.read for child in dataset._datasets.values()) == 30 * 7


def test_a_pass_that_was_left_is_found_again(passes):
    dataset = make()
    straight = numbers(itertools.chain.from_iterable(passes(make(), "train", 3)))
    list(itertools.islice(dataset.train_stream(_context(1)), 3))
    stream = StreamWrapper(dataset.train_stream, name="train")
    assert numbers(batch for _ in range(3) for batch in stream) == straight


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_a_second_run_with_the_same_datasets_starts_again(kinds, passes, bits):
    dataset = make(kinds)
    first, second = (bits(itertools.chain.from_iterable(passes(dataset, "train", 3))) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_a_later_pass_that_was_left_is_found_again(kinds, passes):
    dataset = make(kinds)
    straight = [numbers(batches) for batches in passes(make(kinds), "train", 3)]
    assert numbers(dataset.train_stream(_context(1))) == straight[0]
    assert numbers(itertools.islice(dataset.train_stream(_context(2)), 3)) == straight[1][:3]
    assert [numbers(dataset.train_stream(_context(number))) for number in (2, 3)] == straight[1:]


@pytest.mark.parametrize("kind", [Numbers, Untold])
def test_an_evaluation_of_as_many_batches_as_a_pass_changes_nothing(kind):
    straight, evaluated = (Mixed({"only": kind(0, 8)}, {"only": 1}, 3) for _ in range(2))
    assert numbers(straight.train_stream(_context(1))) == numbers(evaluated.train_stream(_context(1)))
    list(evaluated.train_stream(_context(0)))
    assert numbers(straight.train_stream(_context(2))) == numbers(evaluated.train_stream(_context(2)))


def _context(epoch):
    return StreamContext("train", seed=0, epoch=epoch)


def test_evaluations_have_each_dataset_in_its_order(passes):
    dataset = make(batches=30)
    first, second = passes(dataset, "train", 2, training=False)
    assert numbers(first) == numbers(second)
    own = [number for number in numbers(first) if number < 100]
    assert own == [index % 5 for index in range(len(own))]
    for batches in passes(dataset, "valid", 2):
        assert numbers(batches) == [0, 1, 100, 101]


def test_an_evaluation_between_passes_changes_nothing(passes, bits):
    dataset = make()
    found = []
    stream = StreamWrapper(dataset.train_stream, name="train")
    for _ in range(4):
        found += list(stream)
        passes(dataset, "train", training=False)
    assert bits(found) == bits(itertools.chain.from_iterable(passes(make(), "train", 4)))


def test_each_dataset_has_its_own_streams(passes):
    assert numbers(passes(make(), "d1_valid")[0]) == [100, 101]
    assert len(passes(make(), "d1_train")[0]) == 8


def test_num_batches_has_the_streams_whose_length_is_known():
    assert make().num_batches == {
        "train": 7,
        "valid": 4,
        "d0_train": 5,
        "d0_valid": 2,
        "d1_train": 8,
        "d1_valid": 2,
    }
    assert make((Numbers, Untold)).num_batches == {"train": 7, "d0_train": 5, "d0_valid": 2}


def test_a_stream_that_no_dataset_has_is_none():
    assert make().test_stream is None


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Numbers(0, 0), "dataset 'a': its stream 'train' has 0 batches"),
        (Untold(0, 0), "dataset 'a': its stream 'train' has 0 batches"),
        (Numbers(0, 5, told=6), "dataset 'a': its stream 'train' has 5 batches in pass 1, but num_batches says 6"),
        (Numbers(0, 5, told=4), "dataset 'a': its stream 'train' has 5 batches in pass 1, but num_batches says 4"),
    ],
)
def test_a_dataset_that_is_empty_or_tells_a_wrong_number_is_an_error(passes, dataset, message):
    with pytest.raises(StreamError) as caught:
        passes(Mixed({"a": dataset}, {"a": 1}, 20), "train")
    assert str(caught.value) == message


class Evaluated:
    def valid_stream(self):
        return []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"datasets": {}}, "datasets: {} is not a mapping with one entry per dataset"),
        ({"datasets": [Numbers(0, 5)]}, "datasets: ["),
        ({"datasets": {"a b": Numbers(0, 5)}}, "datasets: 'a b' is not a name; use letters, digits and underscores"),
        ({"datasets": {"a": Evaluated()}}, "datasets: a: Evaluated has no stream 'train' (its streams: valid)"),
        ({"datasets": {"a": {"x": 1}}}, "datasets: a: dict has no stream 'train' (its streams: nothing)"),
        ({"weights": {}}, "weights: {} is not a mapping with one entry per dataset"),
        ({"weights": {"b": 1}}, "weights: are those of b; the datasets are a"),
        ({"weights": {"a": 1, "aa": 1}}, "weights: are those of a, aa; the datasets are a"),
        ({"weights": {"a": 0}}, "weights: 0 is not a positive number, as the weight of a"),
        ({"weights": {"a": -0.5}}, "weights: -0.5 is not a positive number, as the weight of a"),
        ({"weights": {"a": float("nan")}}, "weights: nan is not a positive number, as the weight of a"),
        ({"weights": {"a": float("inf")}}, "weights: inf is not a positive number, as the weight of a"),
        ({"weights": {"a": True}}, "weights: True is not a positive number, as the weight of a"),
        ({"batches_per_epoch": 0}, "batches_per_epoch: 0 is not a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        Mixed(**{"datasets": {"a": Numbers(0, 5)}, "weights": {"a": 1}, "batches_per_epoch": 3, **arguments})
    assert str(caught.value).startswith(message)


def test_the_yaml_in_its_docstring_trains(train_docstring):
    names = ("valid", "hard_valid")
    epochs = train_docstring(Mixed, "x", "y", 11, 1, epochs=3, streams=names, buffer=3)
    for name in names:
        assert epochs[-1][name]["loss"]["mean"] < 0.7 * epochs[0][name]["loss"]["mean"]


def test_streams_keep_their_sources(passes):
    ((batch,),) = passes(Mixed({"a": Majority()}, {"a": 1}, 1), "train")
    assert list(batch) == ["x", "y"]


def test_a_label_that_is_another_class_in_another_dataset_is_refused():
    def named(*classes):
        return lambda *arguments: type("Named", (Numbers,), {"classes_names": classes})(*arguments)

    with pytest.raises(ArgumentError, match="datasets: label 1 is the class 'dog' in 'd0', but 'fox' in 'd1'; give"):
        make((named("cat", "dog"), named("cat", "fox")))
    with pytest.raises(ArgumentError, match="label 0 is the class 'a' in 'd0', but 'b' in 'd2'"):
        make((named("a"), Numbers, named("b")), (1, 1, 1))
    assert make((named("cat", "dog"), named("cat", "dog", "fox"))).classes_names() == []


def test_classes_have_the_names_that_all_datasets_give_them():
    class Named(Numbers):
        classes_names = ("cat", "dog")

    assert make((Named, Named)).classes_names() == ("cat", "dog")
    assert make((Named, Numbers)).classes_names() == []
    assert make().classes_names() is None


def test_a_mixture_is_read_as_far_ahead_as_the_part_that_says_most():
    first, second = Numbers(0, 5), Numbers(0, 5)
    second.read_ahead = 3
    mixed = Mixed({"a": first, "b": second, "c": Numbers(0, 5)}, {"a": 1, "b": 1, "c": 1}, 3)
    assert (mixed.read_ahead, Mixed({"a": first}, {"a": 1}, 3).read_ahead) == (3, 0)
