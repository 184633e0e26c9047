"""Streams that use again what they have yielded, and what happens with each when it is read ahead.

`COPIED`: the values are copied, so that nothing happens. `TOLD`: an error is raised. `LEGAL`: the stream does not write
into what it uses again, so an error must not be raised.
"""

import array
import collections
import types

import numpy as np
import torch

COUNT = 24
COPIED, TOLD, LEGAL = {}, {}, {}


def kind(table):
    def add(function):
        table[function.__name__] = function
        return function

    return add


class Wrapped:
    """An object that arrays can be made of."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __array__(self, dtype=None, copy=None):
        return self.values


class Exposed:
    """An object that says where its memory is."""

    def __init__(self, values):
        self.values = values
        self.__array_interface__ = values.__array_interface__

    def __len__(self):
        return len(self.values)


Pair = collections.namedtuple("Pair", "one other")
FIELDS = np.dtype([("a", "f4"), ("b", "i8")])


# Containers


@kind(COPIED)
def one_dict():
    batch = {}
    for index in range(COUNT):
        batch["x"] = np.full(4, index)
        yield batch


@kind(COPIED)
def one_ordered_dict():
    batch = collections.OrderedDict()
    for index in range(COUNT):
        batch["x"] = np.full(4, index)
        yield batch


@kind(COPIED)
def one_user_dict():
    batch = collections.UserDict()
    for index in range(COUNT):
        batch["x"] = np.full(4, index)
        yield batch


@kind(COPIED)
def one_default_dict():
    batch = collections.defaultdict(list)
    for index in range(COUNT):
        batch["x"] = [index] * 4
        yield batch


@kind(COPIED)
def a_view_of_one_dict():
    batch = {}
    for index in range(COUNT):
        batch["x"] = np.full(4, index)
        yield types.MappingProxyType(batch)


@kind(COPIED)
def one_dict_cleared():
    batch = {}
    for index in range(COUNT):
        batch.clear()
        batch.update(x=[index] * 4)
        yield batch


@kind(COPIED)
def two_dicts_in_turn():
    batches = {}, {}
    for index in range(COUNT):
        batches[index % 2]["x"] = [index] * 4
        yield batches[index % 2]


@kind(COPIED)
def one_list():
    values = [0] * 4
    for index in range(COUNT):
        values[:] = [index] * 4
        yield {"x": values}


@kind(COPIED)
def one_long_list():
    values = [0] * 400
    for index in range(COUNT):
        values[:] = [index] * 400
        yield {"x": values}


@kind(COPIED)
def one_list_of_texts():
    values = [""] * 4
    for index in range(COUNT):
        values[:] = [f"{index}"] * 4
        yield {"x": values}


@kind(COPIED)
def one_list_that_grows():
    values = []
    for index in range(COUNT):
        values.append(index)
        yield {"x": values}


@kind(COPIED)
def one_list_of_lists():
    values = [[0] * 3 for _ in range(4)]
    for index in range(COUNT):
        for row in values:
            row[:] = [index] * 3
        yield {"x": values}


@kind(COPIED)
def a_new_list_of_the_same_lists():
    values = [[0] * 3 for _ in range(4)]
    for index in range(COUNT):
        values[1][2] = index
        yield {"x": list(values)}


@kind(COPIED)
def a_tuple_of_lists():
    rows = [0], [0]
    for index in range(COUNT):
        rows[0][0] = index
        yield {"x": rows}


@kind(COPIED)
def a_named_tuple_of_lists():
    pair = Pair([0], [1])
    for index in range(COUNT):
        pair.one[0] = index
        yield {"x": pair}


@kind(COPIED)
def a_nested_dict():
    inner = {}
    for index in range(COUNT):
        inner["a"] = index
        yield {"x": [inner] * 4}


@kind(COPIED)
def a_dict_in_a_dict_in_a_dict():
    inner = {}
    for index in range(COUNT):
        inner["a"] = [index]
        yield {"x": [{"b": {"c": inner}}]}


@kind(COPIED)
def a_list_in_an_ordered_dict():
    values = [0]
    for index in range(COUNT):
        values[0] = index
        yield collections.OrderedDict(x=[{"a": values}])


@kind(COPIED)
def a_bytearray():
    values = bytearray(4)
    for index in range(COUNT):
        values[:] = bytes([index] * 4)
        yield {"x": values}


@kind(COPIED)
def a_bytearray_that_grows():
    values = bytearray()
    for index in range(COUNT):
        values.append(index)
        yield {"x": values}


@kind(COPIED)
def an_array_of_the_standard_library():
    values = array.array("d", [0] * 4)
    for index in range(COUNT):
        values[2] = index
        yield {"x": values}


@kind(COPIED)
def a_list_of_bytearrays():
    values = [bytearray(3) for _ in range(4)]
    for index in range(COUNT):
        values[0][0] = index
        yield {"x": values}


@kind(COPIED)
def a_deque():
    values = collections.deque(maxlen=4)
    for index in range(COUNT):
        values.append(index)
        yield {"x": values}


@kind(COPIED)
def a_deque_of_lists():
    values = collections.deque([[0], [1]])
    for index in range(COUNT):
        values[0][0] = index
        yield {"x": values}


@kind(COPIED)
def a_set_in_a_list():
    values = set()
    for index in range(COUNT):
        values.add(index)
        yield {"x": [values]}


@kind(COPIED)
def an_array_of_objects():
    values = np.empty(4, object)
    for index in range(COUNT):
        values[:] = [f"{index}"] * 4
        yield {"x": values}


# Arrays


def refilled(values, given=lambda values, index: values, fill=None):
    """Yield batches of one array that is filled again."""
    for index in range(COUNT):
        if fill is None:
            values[...] = index
        else:
            fill(values, index)
        yield {"x": given(values, index)}


@kind(TOLD)
def one_array():
    return refilled(np.zeros(4))


@kind(TOLD)
def one_large_array():
    return refilled(np.zeros((64, 1000)))


@kind(TOLD)
def one_number_of_a_large_array():
    def fill(values, index):
        values[17, 23] = index

    return refilled(np.zeros((64, 1000)), fill=fill)


@kind(TOLD)
def an_array_that_is_counted_up():
    def fill(values, index):
        values += 1

    return refilled(np.zeros(4, np.int32), fill=fill)


@kind(TOLD)
def an_array_that_is_shuffled():
    rng = np.random.default_rng(0)
    return refilled(np.arange(50), fill=lambda values, index: rng.shuffle(values))


@kind(TOLD)
def a_buffer_sliced_to_varying_lengths():
    return refilled(np.zeros(30), lambda values, index: values[: 3 + index])


@kind(TOLD)
def a_buffer_sliced_to_lengths_in_turn():
    return refilled(np.zeros(30), lambda values, index: values[: 7 - index % 5])


@kind(TOLD)
def a_buffer_sliced_from_varying_places():
    return refilled(np.zeros(40), lambda values, index: values[index : index + 10])


@kind(TOLD)
def views_into_one_block_that_is_refilled():
    return refilled(np.zeros((3, 4)), lambda values, index: values[index % 3])


@kind(TOLD)
def rows_of_a_block_in_turn():
    def fill(values, index):
        values[index % 3] = index

    return refilled(np.zeros((3, 4)), lambda values, index: values[index % 3], fill)


@kind(TOLD)
def halves_of_a_block_that_is_loaded_anew():
    def fill(values, index):
        if index % 2 == 0:
            values[...] = index

    return refilled(np.zeros((8, 4)), lambda values, index: values[index % 2 * 4 : index % 2 * 4 + 4], fill)


@kind(TOLD)
def a_transposed_view():
    return refilled(np.zeros((5, 4)), lambda values, index: values.T)


@kind(TOLD)
def every_second_entry():
    return refilled(np.zeros((8, 4)), lambda values, index: values[::2])


@kind(TOLD)
def a_reversed_view():
    return refilled(np.zeros(8), lambda values, index: values[::-1])


@kind(TOLD)
def another_shape_each_time():
    return refilled(np.zeros(24), lambda values, index: values.reshape([(2, 12), (4, 6), (8, 3)][index % 3]))


@kind(TOLD)
def another_type_each_time():
    return refilled(np.zeros(8), lambda values, index: values.view([np.int64, np.uint8, np.float32][index % 3]))


@kind(TOLD)
def an_array_that_is_constant_for_eight_batches():
    def fill(values, index):
        values[...] = max(0, index - 8)

    return refilled(np.zeros(4), fill=fill)


@kind(TOLD)
def an_array_that_is_constant_for_twenty_batches():
    def fill(values, index):
        values[...] = index >= 20

    return refilled(np.zeros(4), fill=fill)


def in_turn(arrays, first=0):
    for index in range(COUNT):
        values = arrays[index % len(arrays)]
        values[...] = index
        yield {"x": values}


@kind(TOLD)
def two_arrays_in_turn():
    return in_turn([np.zeros(4) for _ in range(2)])


@kind(TOLD)
def five_arrays_in_turn():
    return in_turn([np.zeros(4) for _ in range(5)])


@kind(TOLD)
def eight_large_arrays_in_turn():
    return in_turn([np.zeros((10, 1000)) for _ in range(8)])


@kind(TOLD)
def an_array_after_new_ones():
    values = np.zeros(4)
    for index in range(COUNT):
        values[...] = index
        yield {"x": values if index > 12 else values.copy()}


@kind(TOLD)
def an_array_every_third_time():
    values = np.zeros(4)
    for index in range(COUNT):
        values[...] = index
        yield {"x": values if index % 3 == 0 else values.copy()}


@kind(TOLD)
def an_array_under_two_names():
    values = np.zeros(4)
    for index in range(COUNT):
        values[...] = index
        yield {"x" if index % 2 else "y": values}


@kind(TOLD)
def a_list_of_arrays():
    rows = [np.zeros(3) for _ in range(4)]
    for index in range(COUNT):
        for row in rows:
            row[...] = index
        yield {"x": list(rows)}


@kind(TOLD)
def one_list_of_arrays():
    rows = [np.zeros(3) for _ in range(4)]
    for index in range(COUNT):
        rows[2][1] = index
        yield {"x": rows}


@kind(TOLD)
def a_tuple_of_views():
    block = np.zeros((4, 3))
    for index in range(COUNT):
        block[...] = index
        yield {"x": tuple(block)}


@kind(TOLD)
def an_array_in_nested_dicts():
    values = np.zeros(3)
    for index in range(COUNT):
        values[...] = index
        yield {"x": [{"a": {"b": values}}]}


@kind(TOLD)
def an_array_in_one_dict():
    values, batch = np.zeros(3), {}
    for index in range(COUNT):
        values[...] = index
        batch["x"] = values
        yield batch


@kind(TOLD)
def an_array_in_an_ordered_dict():
    values = np.zeros(3)
    for index in range(COUNT):
        values[...] = index
        yield collections.OrderedDict(x=values)


@kind(TOLD)
def a_structured_array():
    def fill(values, index):
        values["b"] = index

    return refilled(np.zeros(4, FIELDS), fill=fill)


@kind(TOLD)
def a_field_of_a_structured_array():
    def fill(values, index):
        values["b"] = index

    return refilled(np.zeros(4, FIELDS), lambda values, index: values["b"], fill)


@kind(TOLD)
def a_record_array():
    return refilled(np.zeros(4).view(np.recarray))


@kind(TOLD)
def a_masked_array():
    return refilled(
        np.ma.masked_array(np.zeros(4), mask=[0, 1, 0, 1]), fill=lambda values, index: values.data.fill(index)
    )


@kind(TOLD)
def the_mask_of_a_masked_array():
    def fill(values, index):
        values.mask[...] = [index % 2, 0, 1, 1]

    return refilled(np.ma.masked_array(np.zeros(4), mask=[0, 1, 0, 1]), fill=fill)


@kind(TOLD)
def an_array_of_texts():
    return refilled(np.zeros(4, "U8"))


@kind(TOLD)
def an_array_of_times():
    return refilled(np.zeros(4, "datetime64[s]"), fill=lambda values, index: values.fill(np.datetime64(index, "s")))


@kind(TOLD)
def an_array_over_a_bytearray():
    buffer = bytearray(16)

    def given(values, index):
        return np.frombuffer(buffer, np.uint8, 4 + index % 3)

    return refilled(np.frombuffer(buffer, np.uint8), given)


@kind(TOLD)
def a_memoryview():
    values = np.zeros(4)
    return refilled(values, lambda _, index: memoryview(values))


@kind(TOLD)
def an_object_with_an_array():
    values = np.zeros(4)
    wrapped = Wrapped(values)
    return refilled(values, lambda _, index: wrapped)


@kind(TOLD)
def an_object_that_exposes_its_memory():
    values = np.zeros(4)
    exposed = Exposed(values)
    return refilled(values, lambda _, index: exposed)


# Tensors


@kind(TOLD)
def one_tensor():
    return refilled(torch.zeros(4))


@kind(TOLD)
def one_large_tensor():
    return refilled(torch.zeros(64, 1000))


@kind(TOLD)
def a_tensor_sliced_to_varying_lengths():
    return refilled(torch.zeros(30), lambda values, index: values[: 3 + index])


@kind(TOLD)
def tensors_that_share_storage():
    def fill(values, index):
        values[index % 3] = index

    return refilled(torch.zeros(3, 4), lambda values, index: values[index % 3], fill)


@kind(TOLD)
def five_tensors_in_turn():
    return in_turn([torch.zeros(4) for _ in range(5)])


@kind(TOLD)
def a_tensor_of_bfloat16():
    return refilled(torch.zeros(4, dtype=torch.bfloat16))


@kind(TOLD)
def a_sparse_tensor():
    return refilled(torch.ones(4).to_sparse(), fill=lambda values, index: values.mul_(2))


@kind(TOLD)
def a_detached_tensor():
    return refilled(torch.zeros(4), lambda values, index: values.detach())


@kind(TOLD)
def an_array_of_a_tensor():
    return refilled(torch.zeros(4), lambda values, index: values.numpy())


@kind(TOLD)
def a_tensor_of_an_array():
    return refilled(np.zeros(4), lambda values, index: torch.from_numpy(values))


@kind(TOLD)
def a_tensor_of_varying_parts_of_an_array():
    return refilled(np.zeros(30), lambda values, index: torch.from_numpy(values[: 3 + index]))


@kind(TOLD)
def a_list_of_tensors():
    rows = [torch.zeros(3) for _ in range(4)]
    for index in range(COUNT):
        rows[3].fill_(index)
        yield {"x": rows}


# What is used again and stays as it was


def beside_new_ones(constant):
    for index in range(COUNT):
        part = constant(index) if callable(constant) else constant
        yield {"x": np.full(4, index), "constant": part}


@kind(LEGAL)
def a_constant_array():
    return beside_new_ones(np.ones(4))


@kind(LEGAL)
def a_large_constant_array():
    return beside_new_ones(np.arange(4 * 10**5).reshape(4, -1))


@kind(LEGAL)
def a_constant_that_cannot_be_written():
    return beside_new_ones(np.broadcast_to(np.ones(1), (4, 1000)))


@kind(LEGAL)
def a_constant_tensor():
    return beside_new_ones(torch.ones(4))


@kind(LEGAL)
def an_expanded_tensor():
    return beside_new_ones(torch.ones(1).expand(4))


@kind(LEGAL)
def a_parameter():
    return beside_new_ones(torch.ones(4, requires_grad=True).detach())


@kind(LEGAL)
def constants_with_nan():
    return beside_new_ones(np.array([np.nan, 1, np.inf, 0]))


@kind(LEGAL)
def constants_in_turn():
    constants = [np.full(4, value) for value in range(3)]
    return beside_new_ones(lambda index: constants[index % 3])


@kind(LEGAL)
def one_constant_after_another():
    constants = [np.full(4, value) for value in range(6)]
    return beside_new_ones(lambda index: constants[index // 4])


@kind(LEGAL)
def slices_of_the_data():
    data = np.arange(4 * COUNT)
    return beside_new_ones(lambda index: data[index * 4 : index * 4 + 4])


@kind(LEGAL)
def slices_of_large_data():
    data = np.arange(4000 * COUNT, dtype=float).reshape(4 * COUNT, -1)
    return beside_new_ones(lambda index: data[index * 4 : index * 4 + 4])


@kind(LEGAL)
def sliding_windows():
    data = np.arange(4 + COUNT)
    return beside_new_ones(lambda index: data[index : index + 4])


@kind(LEGAL)
def sliding_windows_of_a_tensor():
    data = torch.arange(4 + COUNT)
    return beside_new_ones(lambda index: data[index : index + 4])


@kind(LEGAL)
def parts_of_an_array_over_bytes():
    data = b"".join(bytes([value] * 4) for value in range(COUNT))
    return beside_new_ones(lambda index: np.frombuffer(data, np.uint8, 4, 4 * index))


@kind(LEGAL)
def one_column_written_once_it_is_the_turn():
    block = np.zeros((COUNT, 4))
    for index in range(COUNT):
        block[index] = index
        yield {"x": block[index]}


@kind(LEGAL)
def an_empty_array():
    return beside_new_ones([np.zeros(0)] * 4)


@kind(LEGAL)
def the_same_list_of_constants():
    constants = [np.full(3, value) for value in range(4)]
    return beside_new_ones(constants)


KINDS = {**COPIED, **TOLD, **LEGAL}


class Data:
    """What a config names.

    Args:
        kind: one of `KINDS`.
    """

    def __init__(self, kind: str):
        self.train_stream = KINDS[kind]
