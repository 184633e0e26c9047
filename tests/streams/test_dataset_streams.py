"""The streams of a dataset by name: one wrapper each, and which extra streams are due."""

import pytest

from emrun.base.errors import ArgumentError
from emrun.streams.dataset_streams import DatasetStreams
from emrun.streams.reading import Reading


class Data:
    """A train stream of three batches a pass, and two streams of one batch."""

    def train_stream(self):
        return [{"x": [0]}, {"x": [1]}, {"x": [2]}]

    def valid_stream(self):
        return [{"x": [10]}]

    def test_stream(self):
        return [{"x": [20]}]


def streams_of(*extra, **arguments):
    return DatasetStreams(Data(), "train", extra, **arguments)


def values(wrapper):
    return [batch["x"][0] for batch in wrapper]


def names(wrappers):
    return [wrapper.name for wrapper in wrappers]


@pytest.mark.parametrize("entry", [{"test": "5 iterations"}, {"test": 0}, {"test": "1.5 epochs"}, 3, {}])
def test_invalid_extra_streams_are_refused(entry):
    with pytest.raises(ArgumentError, match="extra_streams"):
        streams_of(entry)


def test_extra_streams_are_a_list():
    with pytest.raises(ArgumentError, match="'valid' is not a list of streams"):
        DatasetStreams(Data(), "train", "valid")


@pytest.mark.parametrize(
    "extra", [["train", "train"], ["train", "train_eval"], ["train_eval", "train"], ["valid", {"valid": 2}]]
)
def test_a_stream_is_listed_once(extra):
    with pytest.raises(ArgumentError, match="is listed twice"):
        streams_of(*extra)


def test_the_train_stream_is_evaluated_under_a_name_of_its_own_from_the_same_function():
    streams = streams_of("train", {"valid": 2})
    assert names(streams.due(1)) == ["train_eval"]
    assert streams.source_of("train_eval") == "train"
    assert streams_of("valid").source_of("train_eval") == "train_eval"


def test_streams_with_an_interval_are_due_in_the_epochs_that_it_divides():
    streams = streams_of("valid", {"test": "2 epochs"})
    assert [names(streams.due(epoch)) for epoch in range(3)] == [["valid", "test"], ["valid"], ["valid", "test"]]


def test_a_missing_stream_names_the_method():
    with pytest.raises(AttributeError, match=r"'vlaid_stream'; did you mean 'valid'\?"):
        streams_of().get("vlaid", train=False)


def test_a_stream_has_one_wrapper_to_be_trained_on_and_one_to_be_evaluated():
    streams = streams_of()
    trained, evaluated = streams.get("train", train=True), streams.get("train", train=False)
    assert trained is streams.get("train", train=True) is not evaluated
    assert (trained.training, evaluated.training) == (True, False)
    assert streams.trained == {"train": trained}


def test_only_epochs_of_the_train_stream_are_cut():
    streams = streams_of(fixed_epoch_size=2)
    assert values(streams.get("train", train=True)) == [0, 1]
    assert values(streams.get("train", train=True)) == [2, 0]
    assert values(streams.get("valid", train=True)) == [10]


def test_an_iterable_is_wrapped_under_the_name_for_those_without_and_not_kept():
    streams = streams_of()
    wrapper = streams.resolve([{"x": [7]}], "unnamed", train=True)
    assert (wrapper.name, values(wrapper)) == ("unnamed", [7])
    assert streams.resolve(wrapper, "other", train=True) is wrapper
    assert not streams.trained


def test_streams_of_a_dataset_are_read_as_far_ahead_as_the_dataset_says():
    class Data:
        read_ahead = 3

        def train_stream(self):
            yield {"x": [1]}

    assert DatasetStreams(Data(), "train").reading.ahead == 3
    assert DatasetStreams(Data(), "train", reading=Reading(0)).reading.ahead == 0
    timed = DatasetStreams(Data(), "train", reading=Reading(timeout=5.0))
    assert list(timed.resolve([{"x": [2]}], "others", train=False)) == [{"x": [2]}]  # not read ahead
