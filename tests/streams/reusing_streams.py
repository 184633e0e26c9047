"""Streams that use again what they have yielded: read ahead, each gives the batches that it gives when it is not."""

import array
import collections
import copy
import types

import numpy as np
import torch

COUNT = 24
KINDS = {}
Pair = collections.namedtuple("Pair", "one other")
FIELDS = np.dtype([("a", "f4"), ("b", "i8")])


def refilled(name, values, given=lambda values, index: values, fill=None):
    """Add a stream that fills one object again for each batch, and yields what `given` makes of it."""

    def write(values, index):
        values[...] = index

    def stream():
        own = copy.deepcopy(values)
        for index in range(COUNT):
            (fill or write)(own, index)
            yield {"x": given(own, index)}

    KINDS[name] = stream


def kind(function):
    KINDS[function.__name__] = function
    return function


# Containers

for mapping in ({}, collections.OrderedDict(), collections.UserDict(), collections.defaultdict(list)):

    def one_mapping(batch=mapping):
        for index in range(COUNT):
            batch["x"] = [index] * 4
            yield batch

    KINDS[f"one_{type(mapping).__name__}"] = one_mapping


@kind
def a_view_of_one_dict():
    batch = {}
    for index in range(COUNT):
        batch["x"] = np.full(4, index)
        yield types.MappingProxyType(batch)


@kind
def one_dict_cleared():
    batch = {}
    for index in range(COUNT):
        batch.clear()
        batch.update(x=[index] * 4)
        yield batch


def whole(values, index):
    values[:] = [index] * 4


def last(values, index):
    values[-1] = index


def added(values, index):
    values.append(index)


refilled("one_list", [0] * 4, fill=whole)
refilled("one_long_list", [0] * 400, fill=last)
refilled("one_list_that_grows", [], fill=added)
refilled("lists_in_a_list", [0] * 4, lambda values, _: [values, [values]], whole)
refilled("a_tuple_of_lists", [0] * 4, lambda values, _: (values, values), whole)
refilled("a_named_tuple_of_lists", [0] * 4, lambda values, _: Pair(values, 1), whole)
refilled("dicts_in_a_dict", [0] * 4, lambda values, _: {"a": {"b": collections.OrderedDict(c=values)}}, whole)
refilled("a_bytearray", bytearray(4), fill=last)
refilled("an_array_of_the_standard_library", array.array("d", [0.0] * 4), fill=last)
refilled("a_deque", collections.deque([0] * 4), fill=last)
refilled("a_deque_of_lists", [0] * 4, lambda values, _: collections.deque([values]), whole)
refilled("a_set_in_a_list", set(), lambda values, _: [values], lambda values, index: values.add(index))
refilled("an_array_of_objects", np.empty(4, object), fill=lambda values, index: whole(values, f"{index}"))

# Arrays

refilled("one_array", np.zeros(4))
refilled("one_number_of_a_large_array", np.zeros((64, 1000)), fill=lambda values, index: last(values[3], index))
refilled("an_array_that_is_shuffled", np.arange(50), fill=lambda values, _: np.random.default_rng(0).shuffle(values))
refilled("a_buffer_sliced_to_varying_lengths", np.zeros(30), lambda values, index: values[: 3 + index])
refilled("rows_of_a_block_in_turn", np.zeros((3, 4)), lambda values, index: values[index % 3])
refilled("a_transposed_and_reversed_view", np.zeros((3, 4)), lambda values, _: values.T[::-1, ::2])
refilled("a_list_of_arrays", np.zeros(4), lambda values, _: [values, (values, {"a": values})])
refilled("a_structured_array", np.zeros(4, FIELDS), fill=lambda values, index: values["b"].fill(index))
refilled("a_record_array", np.zeros(4, FIELDS).view(np.recarray), lambda values, _: values.b)
refilled("a_masked_array", np.ma.array(np.zeros(4), mask=[1, 0, 0, 0]), fill=last)
refilled("an_array_over_a_bytearray", np.frombuffer(bytearray(8), np.uint8))
refilled("a_memoryview", np.zeros(4), lambda values, _: memoryview(values))

# Tensors

refilled("one_tensor", torch.zeros(4))
refilled("one_large_tensor", torch.zeros(64, 1000))
refilled("a_tensor_sliced_to_varying_lengths", torch.zeros(30), lambda values, index: values[: 3 + index])
refilled("an_expanded_tensor", torch.zeros(4), lambda values, _: values.expand(3, 4))
refilled("a_tensor_of_bfloat16", torch.zeros(4, dtype=torch.bfloat16))
refilled("a_sparse_tensor", torch.ones(4).to_sparse(), fill=lambda values, _: values.mul_(2))
refilled("a_detached_tensor", torch.zeros(4), lambda values, _: values.detach())
refilled("an_array_of_a_tensor", torch.zeros(4), lambda values, _: values.numpy())
refilled("a_list_of_tensors", torch.zeros(4), lambda values, _: [values, values])


class Data:
    """What a config names.

    Args:
        kind: one of `KINDS`.
    """

    def __init__(self, kind: str):
        self.train_stream = KINDS[kind]
