"""States in plain types and tensors, random states, checksums of batches."""

import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch

from emrun.base.encoding import decode, digest, encode, encode_all, random_state, set_random_state
from emrun.base.errors import StateError
from emrun.storage.checkpoints.state_file import load_state, save_state


class Best(NamedTuple):
    """A named tuple, whose class cannot be found without an import."""

    epoch: int


@dataclass(frozen=True)
class Point:
    """A dataclass."""

    x: int = 0


class Level(IntEnum):
    """An enumeration of numbers."""

    low = 1


class Words(dict):
    """A mapping of a class of its own."""


class Numbers(list):
    """A list of a class of its own."""


@pytest.mark.parametrize(
    "value",
    [
        *(np.array([object()]), np.array([b"a"]), np.bytes_(b"a"), np.datetime64("2026-01-01"), np.longdouble(1)),
        *(object(), lambda: 0, torch.float32, Level, bytearray(b"a"), range(3), random.Random(1)),
        *(Best(1), Point(), Level.low, Words(a=1), Numbers([1]), MappingProxyType({"a": 1}), UserDict(a=1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_with_its_key(value):
    with pytest.raises(StateError, match=r"state\.a\[1\]\.b is \w+( of \S+)?, which cannot be saved"):
        encode({"a": [0, {"b": value}]}, "state")


class Measured(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(
    "tensor",
    [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 1, torch.ones(2).as_subclass(Measured)],
)
def test_tensors_of_other_kinds_become_plain_ones_without_gradients(tmp_path, tensor, copied):
    save_state(encode({"a": tensor}, "state", copied=copied), tmp_path)
    found = load_state(tmp_path)["a"]
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert found.tolist() == [1, 1]


def test_a_key_that_cannot_be_saved_is_refused():
    with pytest.raises(StateError, match=r"state.a: key Point\(x=0\) is Point, which cannot be saved"):
        encode({"a": {Point(): 0}}, "state")


def test_a_key_that_torch_cannot_read_back_is_refused():
    with pytest.raises(StateError, match=r"state.a: a key is huge, which cannot be saved; use a string"):
        encode({"a": {2**3000: 0}}, "state")


KEYS = [
    *({1: "a", "1": "b"}, {(1, 2): 3, "(1, 2)": 4}, {None: 1, "None": 2}, {True: 1, "True": 2}, {1.5: 1, "1.5": 2}),
    *({(None, True): 1}, {"a": {2: {"2": 1, 2: 3}}}, Counter({1: 2, "1": 3}), defaultdict(int, {1: 2, "1": 3})),
    *(OrderedDict([("1", 3), (1, 2)]), {b"a": 1}, {np.int64(1): 2}, {int: 1}, {"": 1}, {float("inf"): 1}),
]


@pytest.mark.parametrize("value", KEYS, ids=str)
def test_the_keys_of_mappings_come_back_as_they_were(tmp_path, value):
    assert repr(came_back(value, tmp_path)) == repr(value)


@pytest.mark.parametrize("value", [np.timedelta64(1, "s"), np.array([1], "M8[s]"), np.longdouble(1), np.bytes_(b"a")])
def test_a_value_of_numpy_that_torch_does_not_have_is_refused(value):
    with pytest.raises(StateError, match=r"state.a is .*, which cannot be saved"):
        encode({"a": value}, "state")


def test_what_makes_the_entries_of_a_defaultdict_is_one_of_pythons_types():
    with pytest.raises(StateError, match=r"state.a is function, which cannot be saved"):
        encode({"a": defaultdict(lambda: 0)}, "state")


COLLECTIONS = [
    *(Counter("abca"), OrderedDict(b=1, a=2), defaultdict(int, a=1), defaultdict(list, {(1, 2): [3]}), defaultdict()),
    *(defaultdict(Counter, a=Counter("aa")), deque([1, 2], 3), deque(), {1, 2}, {"b", "a"}, set(), frozenset([1, "a"])),
    *({(1, "a"): {2}, None: 1}, {Path("b"): 0}, {1.5: "a"}, torch.Size([1, 2]), 1 + 2j, Path("/a/b"), Path("c.txt")),
    *(date(2026, 1, 2), datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 2, tzinfo=UTC), time(3, 4)),
    *(timedelta(1, 2, 3), timezone(timedelta(hours=1)), np.float64(0.5), np.int8(1), np.bool_(True), np.str_("c")),
    *(np.uint64(2**64 - 1), np.float16(0.5), np.complex64(1j), [{"a": deque([Counter(b=2)])}], ((1,), [2], {"a": ()})),
]


@pytest.mark.parametrize("value", COLLECTIONS, ids=lambda value: type(value).__name__)
def test_the_collections_of_python_come_back_as_they_were(tmp_path, value):
    found = came_back(value, tmp_path)
    assert type(found) is type(value)
    assert repr(found) == repr(value) if not isinstance(value, set | frozenset) else found == value


def test_a_defaultdict_that_came_back_makes_entries_and_a_deque_is_as_long_as_before(tmp_path):
    counts, last = came_back(defaultdict(int), tmp_path), came_back(deque([1, 2, 3], 3), tmp_path)
    counts["new"] += 1
    last.append(4)
    assert (counts, list(last), last.maxlen) == ({"new": 1}, [2, 3, 4], 3)


def test_the_order_of_an_ordered_mapping_is_kept(tmp_path):
    assert [*came_back(OrderedDict(b=1, a=2), tmp_path)] == ["b", "a"]


def test_a_set_is_saved_in_the_same_order_whatever_the_hashes():
    assert encode({"b", "a"}, "state")["arguments"] == [["a", "b"]]


def test_a_batch_may_have_other_mappings_and_sequences_which_become_plain():
    found, left_out = encode_all({"a": Best(1), "b": Words(c=Numbers([1])), "d": MappingProxyType({"a": 1})})
    assert (found, left_out) == ({"a": (1,), "b": {"c": [1]}, "d": {"a": 1}}, {})
    assert [type(each) for each in (found["a"], found["b"], found["b"]["c"])] == [tuple, dict, list]


def test_random_states_come_back_through_a_file(tmp_path):
    def draw():
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item(), random.gauss(0, 1)

    random.gauss(0, 1), np.random.randn()  # each keeps a second number for later
    save_state(encode(random_state(), "random"), tmp_path)
    expected = draw()
    set_random_state(load_state(tmp_path))
    assert draw() == expected


def test_the_digest_tells_batches_apart():
    base = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": [1, 2]}
    others = [
        {"x": base["x"].copy(), "y": [1, 3]},
        {"x": base["x"].astype(np.float64), "y": [1, 2]},
        {"x": base["x"].reshape(3, 2), "y": [1, 2]},
        {"x": base["x"] + 1, "y": [1, 2]},
        {"z": base["x"], "y": [1, 2]},
        {"x": torch.from_numpy(base["x"] + 1), "y": [1, 2]},
        {"x": base["x"], "y": ["1", "2"]},
        {"x": base["x"], "y": [[1], [2]]},
    ]
    digests = [digest(batch) for batch in (base, *others)]
    assert len(set(digests)) == len(digests)
    assert digest({"y": [1, 2], "x": base["x"][:, ::1]}) == digests[0]
    assert digest({"x": np.asfortranarray(base["x"]), "y": [1, 2]}) == digests[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_the_digest_takes_tensors_of_any_type(dtype):
    assert digest({"x": torch.ones(2).to(dtype)}) != digest({"x": torch.zeros(2).to(dtype)})


def test_mappings_and_nested_tensors_of_a_batch_are_saved_whole(tmp_path):
    values = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    batch = {"tokens": {"ids": np.arange(4).reshape(2, 2), "inner": {"values": values}}, "list": [values]}
    encoded, left_out = encode_all({**batch, "point": Point()})
    assert left_out == {"point": "source 'point' is Point, which cannot be saved; use plain types, tensors and arrays "
                                 "of numbers"}  # fmt: skip
    save_state(encoded, tmp_path)
    found = decode(load_state(tmp_path))
    assert digest(found) == digest(batch)
    assert found["tokens"]["inner"]["values"].layout is torch.jagged


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15 says so at each load
def test_sparse_tensors_such_as_the_momentum_of_an_embedding_are_saved(tmp_path):
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)
    embedding(torch.tensor([1, 3, 1])).sum().backward()
    optimizer.step()
    save_state(encode(optimizer.state_dict(), "optimizer"), tmp_path)
    found = load_state(tmp_path)["state"][0]["momentum_buffer"]
    expected = optimizer.state[embedding.weight]["momentum_buffer"]
    assert found.is_sparse
    assert torch.equal(found.to_dense(), expected.to_dense())


def test_nested_tensors_with_other_values_or_lengths_have_other_checksums():
    def nested(*entries):
        return torch.nested.nested_tensor([torch.tensor(each) for each in entries], layout=torch.jagged)

    found = {digest(nested(*each)) for each in ([[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0]], [[1.0], [2.0, 4.0]])}
    assert len(found) == 3
    assert digest(nested([1.0], [2.0, 3.0])) in found


ARRAYS = [
    *(np.arange(4).reshape(2, 2).astype(dtype) for dtype in ("bool", "uint8", "uint64", "float16", "complex128")),
    *(np.array(1.5), np.zeros((0, 3), np.int32), np.asfortranarray(np.arange(6.0).reshape(2, 3))[:, ::-1]),
]


def came_back(value, tmp_path):
    encoded = encode({"a": [value]}, "state")
    save_state(encode(encoded, "state", copied=True), tmp_path)  # as the state of a model is encoded twice
    return decode(load_state(tmp_path))["a"][0]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_come_back_through_a_file(tmp_path, array):
    found = came_back(array, tmp_path)
    assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)
    found += found  # its own memory, which may be changed


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0)])
def test_texts_come_back_in_their_shape(tmp_path, shape):
    found = came_back(np.full(shape, "a", "U4"), tmp_path)
    assert (found.shape, found.dtype) == (shape, "U4")


def test_an_array_in_a_file_becomes_one_in_memory_and_the_state_is_a_copy(tmp_path):
    mapped = np.memmap(tmp_path / "mapped", np.int64, "w+", shape=(3,))
    assert type(came_back(mapped, tmp_path)) is np.ndarray
    array = np.zeros(2)
    encoded = encode(array, "state")
    array += 1
    assert decode(encoded).tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_generators_of_numpy_continue_and_spawn_as_before(tmp_path, kind):
    generator = np.random.Generator(getattr(np.random, kind)(np.random.SeedSequence([3, 2**70], spawn_key=(1,))))
    generator.spawn(2), generator.integers(9, size=5, dtype=np.int32)  # leaves half of a number for later
    found = came_back(generator, tmp_path)
    assert type(found) is np.random.Generator
    for one, other in ((generator, found), (generator.spawn(1)[0], found.spawn(1)[0])):
        expected = one.integers(99, size=9, dtype=np.int32)
        np.testing.assert_array_equal(other.integers(99, size=9, dtype=np.int32), expected)


def test_a_generator_of_torch_continues(tmp_path):
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    found = came_back(generator, tmp_path)
    assert found.initial_seed() == 5
    assert torch.equal(torch.randn(20, generator=found), torch.randn(20, generator=generator))


@pytest.mark.parametrize(
    "forged",
    [
        {"emrun.kind": "array"},
        {"emrun.kind": "array", "values": ["a"], "dtype": "float"},
        {"emrun.kind": "deque", "arguments": [[], -1]},
        {"emrun.kind": "set", "arguments": [1]},
        {"emrun.kind": "Counter", "items": [1]},
        {"emrun.kind": "PosixPath", "arguments": [1]},
        {"emrun.kind": "type", "name": "eval"},
        {"emrun.kind": "torch", "device": "/tmp", "state": torch.zeros(3)},
        {"emrun.kind": "numpy", "seed": [1, (), 0], "state": {"bit_generator": "seed"}},
        {"emrun.kind": "numpy", "seed": [1], "state": {"bit_generator": "PCG64"}},
    ],
)
def test_a_forged_state_is_an_error(forged):
    with pytest.raises((KeyError, AttributeError, RuntimeError, ValueError, TypeError)):
        decode({"a": [forged]})
