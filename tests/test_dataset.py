"""The contract of datasets."""

import functools

import numpy as np
import pytest
import torch

from emrun import AbstractDataset
from emrun.base.errors import HookError, StreamError
from emrun.dataset import classes_of, open_stream, stream_function, stream_lengths, stream_names, takes_context
from emrun.stream_context import StreamContext


class Reviews(AbstractDataset):
    log_stream = "no stream, but an attribute"

    def train_stream(self, ctx):
        for rows in ctx.batches(5, 2, shuffle=True):
            yield {
                "vector": np.full((len(rows), 3), 0.5, dtype=np.float32),
                "label": rows,
                "text": [f"review {row}" for row in rows],
            }

    def valid_stream(self):
        yield {"tokens": [[1], [2, 3]], "length": torch.tensor([1, 2])}
        yield {"tokens": [[4]], "length": torch.tensor([1])}

    def empty_stream(self):
        return []

    def _hidden_stream(self):
        raise AssertionError("a name that begins with an underscore is no stream")

    @property
    def event_stream(self):
        raise AssertionError("a property is no stream")


def test_the_streams_are_the_methods_of_that_name():
    assert stream_names(Reviews()) == ["empty", "train", "valid"]


def test_a_dataset_needs_no_base():
    class Plain:
        def test_stream(self):
            return [{"x": [1]}]

    assert stream_names(Plain()) == ["test"]
    assert open_stream(Plain(), "test", StreamContext("test", seed=0)) == [{"x": [1]}]


def test_nothing_is_known_of_the_number_of_batches_by_default():
    assert AbstractDataset().num_batches == {}


class Named:
    def __init__(self, names):
        self.classes_names = names


def test_classes_have_names_as_a_method_or_an_attribute_for_all_labels_or_for_each():
    assert classes_of(Named(["cat", "dog"]), "label") == ["cat", "dog"]
    assert classes_of(Named(lambda: {"label": ("cat", "dog")}), "label") == ["cat", "dog"]
    nameless = [AbstractDataset(), object(), Named({"other": ["a"]}), Named([]), Named(None)]
    assert [classes_of(each, "label") for each in nameless] == [None] * len(nameless)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("cat", "'cat' is not a list of names"),
        ({"label": [1, 2]}, r"\[1, 2\] is not a list of names"),
        (["cat", ""], "is not a list of names"),
        (["cat", "cat"], "has the name 'cat' twice"),
    ],
)
def test_names_of_classes_that_are_not_different_names_are_an_error(names, message):
    with pytest.raises(HookError, match=f"classes_names of dataset Named.*{message}"):
        classes_of(Named(names), "label")


def test_a_stream_that_is_not_there_is_an_error_with_what_is_there_and_what_may_be_meant():
    with pytest.raises(AttributeError) as raised:
        stream_function(Reviews(), "vaild")
    assert str(raised.value) == (
        "dataset Reviews has no method 'vaild_stream'; did you mean 'valid'? (its streams: empty, train, valid)"
    )


def test_an_attribute_that_cannot_be_called_is_not_a_stream():
    with pytest.raises(AttributeError, match="has no method 'log_stream'"):
        stream_function(Reviews(), "log")


def test_a_stream_function_may_be_set_on_the_object():
    dataset = Reviews()
    dataset.test_stream = lambda: [{"x": [1]}]
    assert stream_function(dataset, "test")() == [{"x": [1]}]


class Functions:
    def none(self):
        pass

    def one(self, ctx):
        pass

    def only_by_position(self, ctx, /):
        pass

    def default(self, shuffle=True):
        pass

    def any(self, *args, **kwargs):
        pass

    def keyword(self, *, shuffle=True):
        pass

    @staticmethod
    def static(ctx):
        pass

    def __call__(self, ctx):
        pass


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (Functions().none, False),
        (Functions().one, True),
        (Functions().only_by_position, True),
        (Functions().default, False),
        (Functions().any, False),
        (Functions().keyword, False),
        (Functions().static, True),
        (Functions(), True),
        (functools.partial(Functions().one, None), False),
        (functools.partial(Functions.one, None), True),
        (lambda: (), False),
        (lambda ctx: (), True),
        (dict, False),
        (iter, False),
    ],
)
def test_a_function_takes_the_context_when_it_has_a_parameter_without_a_default(function, takes):
    assert takes_context(function) is takes


def test_opening_a_stream_hands_it_the_context_if_it_takes_one():
    ctx = StreamContext("train", seed=0)
    assert sum(len(batch["label"]) for batch in open_stream(Reviews(), "train", ctx)) == 5
    assert len(list(open_stream(Reviews(), "valid", ctx))) == 2


def table(dataset, **options):
    """Return (stream, source) -> the cells of the row."""
    lines = dataset.stream_info(**options).splitlines()
    edges = [len(part) for part in lines[1].split("  ")]
    rows = {}
    for line in lines[2:]:
        cells, begin = [], 0
        for width in edges:
            cells.append(line[begin : begin + width].strip())
            begin += width + 2
        rows[cells[0], cells[1]] = cells[2:]
    assert lines[0].split() == ["stream", "source", "dtype", "shape", "range"]
    return rows


def test_the_stream_info_tells_dtype_shape_and_range_of_every_source():
    assert table(Reviews()) == {
        ("empty", "no batches"): ["", "", ""],
        ("train", "vector"): ["float32", "(3,)", "0.5 to 0.5"],
        ("train", "label"): ["int64", "()", "0 to 4"],
        ("train", "text"): ["<U8", "()", ""],
        ("valid", "tokens"): ["int64, list", "ragged", "4 to 4"],
        ("valid", "length"): ["torch.int64", "()", "1 to 2"],
    }


def test_the_stream_info_knows_all_kinds_of_tensors():
    class Tensors(AbstractDataset):
        def train_stream(self):
            yield {
                "half": torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16),
                "learned": torch.tensor([1.5], requires_grad=True),
                "flag": torch.tensor([True]),
                "many": [torch.zeros(2), torch.ones(3)],
                "nested": torch.nested.nested_tensor([[0.5], [1.0, 2.0]], layout=torch.jagged),
                "tokens": {"ids": torch.tensor([[3, 4]]), "mask": [[True, False]]},
            }

    assert table(Tensors()) == {
        ("train", "half"): ["torch.bfloat16", "(2,)", "0.5 to 2"],
        ("train", "learned"): ["torch.float32", "()", "1.5 to 1.5"],
        ("train", "flag"): ["torch.bool", "()", "1 to 1"],
        ("train", "many"): ["torch.float32", "ragged", "0 to 1"],
        ("train", "nested"): ["torch.float32", "ragged", "0.5 to 2"],
        ("train", "tokens.ids"): ["torch.int64", "(2,)", "3 to 4"],
        ("train", "tokens.mask"): ["bool", "(2,)", "0 to 1"],
    }


def test_shapes_that_differ_between_batches_are_ragged():
    class Growing(AbstractDataset):
        def train_stream(self):
            yield {"x": np.zeros((2, 3))}
            yield {"x": np.ones((2, 4))}

    assert table(Growing()) == {("train", "x"): ["float64", "ragged", "0 to 1"]}


def test_the_stream_info_looks_at_so_many_batches_only():
    class Endless(AbstractDataset):
        made = 0

        def train_stream(self):
            while True:
                self.made += 1
                yield {"x": [self.made]}

    dataset = Endless()
    assert table(dataset, max_batches=5) == {("train", "x"): ["int64", "()", "1 to 5"]}
    assert dataset.made <= 6


def test_a_number_of_batches_is_no_method():
    class Counted:
        def num_batches(self):
            return {"train": 3}

    with pytest.raises(StreamError, match="num_batches of dataset Counted is a method; write @property above it"):
        stream_lengths(Counted())
