"""Parquet: its sources and order, how little of the files it reads at a time, and what it refuses."""

import sys
import weakref

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doubles import stream_of

from emrun.base.errors import ArgumentError, MissingExtra, StreamError
from emrun.datasets import Parquet
from emrun.stream_context import StreamContext

FIRST = {"id": range(50), "x": np.linspace(0, 1, 50, dtype=np.float32), "text": [f"row {i}" for i in range(50)]}


def write(path, columns, rows_per_group=10):
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return path


def ids(batches):
    return [int(each) for batch in batches for each in batch["id"]]


@pytest.fixture
def files(tmp_path):
    """Write two files of 50 and 23 rows, in row groups of 10."""
    write(tmp_path / "part-a.parquet", FIRST)
    second = {"id": range(50, 73), "x": np.zeros(23, np.float32), "text": ["more"] * 23}
    write(tmp_path / "part-b.parquet", second)
    return tmp_path


@pytest.fixture
def dataset(files):
    pattern = str(files / "part-*.parquet")
    return Parquet(pattern, valid=str(files / "part-b.parquet"), batch_size=8)


@pytest.fixture
def groups_read(monkeypatch):
    """Return the list of the row groups that are read from now on."""
    read, original = [], pq.ParquetFile.read_row_group

    def note(self, number, **arguments):
        read.append((self.metadata.num_rows, number))
        return original(self, number, **arguments)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", note)
    return read


@pytest.mark.parametrize("batch_size", [1, 7, 10, 20])
def test_lists_have_their_shapes_wherever_row_groups_end_and_batches_may_be_changed(tmp_path, batch_size):
    lists = [[float(row)] * (2 if row < 10 else 3) for row in range(20)]
    path = write(tmp_path / "lists.parquet", {"x": lists, "none": pa.array([[]] * 20, pa.list_(pa.int32()))})
    dataset = Parquet(str(path), valid=str(path), batch_size=batch_size)
    for _ in range(2):
        batches = list(stream_of(dataset, "valid"))
        assert [[*row] for batch in batches for row in batch["x"]] == lists
        assert all(batch["none"].shape == (len(batch["x"]), 0) for batch in batches)
        for batch in batches:
            for row in batch["x"]:
                row[:] = -1


def test_every_row_is_read_once_in_a_pass(dataset):
    batches = list(stream_of(dataset))
    assert len(batches) == dataset.num_batches["train"] == 10
    assert sorted(ids(batches)) == list(range(73))
    for batch in batches:
        assert (batch["id"].dtype, batch["x"].dtype, type(batch["text"])) == (np.int64, np.float32, list)
        for row, x, text in zip(batch["id"], batch["x"], batch["text"], strict=True):
            assert (x, text) == ((FIRST["x"][row], FIRST["text"][row]) if row < 50 else (0, "more"))


def test_evaluations_are_in_the_order_of_the_files(dataset):
    assert ids(stream_of(dataset, training=False)) == list(range(73))
    assert ids(stream_of(dataset, "valid")) == list(range(50, 73))
    assert not callable(dataset.test_stream)


def test_training_passes_are_shuffled_and_the_same_however_they_are_read(files, check_training_stream):
    check_training_stream(lambda: Parquet(str(files / "part-*.parquet"), batch_size=8))


@pytest.mark.parametrize("batch_size", [1, 8, 33, 100])
@pytest.mark.parametrize("training", [True, False])
def test_each_row_group_is_read_once_in_a_pass(files, groups_read, batch_size, training):
    dataset = Parquet(str(files / "part-*.parquet"), batch_size=batch_size)
    assert sorted(ids(stream_of(dataset, training=training))) == list(range(73))
    assert sorted(groups_read) == [(23, 0), (23, 1), (23, 2), (50, 0), (50, 1), (50, 2), (50, 3), (50, 4)]


def test_no_more_than_two_row_groups_stay_in_memory(dataset):
    for _ in stream_of(dataset):
        kept = dataset._parts["train"]._kept
        assert 1 <= len(kept) <= 2
        assert all(group.table.num_rows <= 10 for group in kept.values())


@pytest.mark.parametrize("batch_size", [8, 33])
def test_no_more_than_one_other_row_group_is_in_memory_while_one_is_read(files, monkeypatch, batch_size):
    part = Parquet(str(files / "part-*.parquet"), batch_size=batch_size)._parts["train"]
    seen, read_group = [], part._read_group

    def note(*arguments):
        assert sum(each() is not None for each in seen) <= 1
        group = read_group(*arguments)
        seen.append(weakref.ref(group))
        return group

    monkeypatch.setattr(part, "_read_group", note)
    for rows in StreamContext("train", seed=0, epoch=1).batches(len(part), batch_size, True, blocks=part.blocks):
        part.read(rows, StreamContext("train", seed=0))
    assert len(seen) == 8


def test_a_resumed_pass_reads_only_the_row_groups_that_are_left(dataset, groups_read):
    stream = stream_of(dataset)
    stream.seek(stream.position._replace(batch=8))
    assert len(ids(stream)) == 73 - 64
    assert 1 <= len(groups_read) <= 2


def test_only_the_chosen_columns_are_read_in_their_order(files):
    dataset = Parquet(str(files / "part-a.parquet"), columns=["x", "id"])
    assert list(next(iter(stream_of(dataset)))) == ["x", "id"]


@pytest.mark.parametrize(
    ("column", "dtype", "shape"),
    [
        (pa.array([True, False, True]), np.bool_, (3,)),
        (pa.array([1, 2, 3], pa.uint8()), np.uint8, (3,)),
        (pa.array(np.array([1, 2, 3], np.float16)), np.float16, (3,)),
        (pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)), np.float32, (3, 2)),
        (pa.array([[1, 2]] * 3, pa.list_(pa.int64())), np.int64, (3, 2)),
        (pa.array([[[1, 2], [3, 4], [5, 6]]] * 3, pa.list_(pa.list_(pa.int32(), 2), 3)), np.int32, (3, 3, 2)),
        (pa.array([[]] * 3, pa.list_(pa.int64())), np.int64, (3, 0)),
    ],
    ids=str,
)
def test_numbers_and_lists_of_numbers_are_arrays_that_may_be_changed(tmp_path, column, dtype, shape):
    dataset = Parquet(str(write(tmp_path / "a.parquet", {"x": column})))
    for _ in range(2):
        (batch,) = stream_of(dataset, training=False)
        assert (batch["x"].dtype, batch["x"].shape) == (dtype, shape)
        assert batch["x"].tolist() == column.to_pylist()
        batch["x"][:] = 0


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", ""]),
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.array([b"1", b"\xff", b""]),
        pa.array([["a"], [], ["b", "c"]]),
    ],
    ids=lambda column: str(column.type),
)
def test_texts_and_bytes_are_lists(tmp_path, column):
    dataset = Parquet(str(write(tmp_path / "a.parquet", {"x": column})))
    (batch,) = stream_of(dataset, training=False)
    assert batch["x"] == column.to_pylist()


def test_lists_of_different_lengths_are_a_list_of_arrays(tmp_path):
    dataset = Parquet(str(write(tmp_path / "a.parquet", {"x": [[1, 2], [], [3]]})))
    (batch,) = stream_of(dataset, training=False)
    assert [each.tolist() for each in batch["x"]] == [[1, 2], [], [3]]
    assert all(each.dtype == np.int64 for each in batch["x"])


@pytest.mark.parametrize(
    "column", [[1, None, 3], ["a", None, "b"], [[1], None, [2]], [[1], [None], [2]], [None, None, None]]
)
def test_a_null_is_an_error_with_column_file_and_row_group(tmp_path, column):
    write(tmp_path / "a.parquet", {"id": range(13), "x": [column[0] or column[2]] * 10 + column})
    with pytest.raises((ArgumentError, StreamError), match=r"a\.parquet', row group 1: column 'x' has (a|\d) null"):
        list(stream_of(Parquet(str(tmp_path / "a.parquet"), batch_size=5)))
    assert len(ids(stream_of(Parquet(str(tmp_path / "a.parquet"), columns=["id"])))) == 13


def test_a_null_is_found_at_the_start_if_the_footer_counts_it(tmp_path):
    path = write(tmp_path / "a.parquet", {"id": range(3), "x": [1, None, None], "l": [[1], [], [2]]})
    with pytest.raises(ArgumentError, match=r"^train: '.*a\.parquet', row group 0: column 'x' has 2 nulls; fill it"):
        Parquet(str(path))
    assert len(ids(stream_of(Parquet(str(path), columns=["id", "l"])))) == 3


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": ["a"]}, r"^valid: .*b\.parquet: .*Field x has incompatible types: int64 vs string$"),
        ({"x": [b"a"]}, "x has incompatible types: int64 vs binary$"),
        ({"x": [[0.5]]}, "x has incompatible types: int64 vs list<.*double>$"),
        ({"x": [True]}, "x has incompatible types: int64 vs bool$"),
        ({"x": []}, r"^valid: .*b\.parquet: contains no examples"),
    ],
)
def test_a_split_with_another_type_or_without_examples_is_refused(tmp_path, other, message):
    write(tmp_path / "a.parquet", {"x": [1, 2], "y": [0, 1]})
    write(tmp_path / "b.parquet", other)
    with pytest.raises(ArgumentError, match=message):
        Parquet(str(tmp_path / "a.parquet"), valid=str(tmp_path / "b.parquet"))


INTS = pa.array([1, 2])
OF_PARTS = {
    "int64 and double": (INTS, pa.array([0.75, 2.0]), np.float64),
    "int64 and float": (INTS, pa.array([0.75, 2.0], pa.float32()), np.float64),
    "int32 and double": (INTS.cast(pa.int32()), pa.array([0.75, 2.0]), np.float64),
    "lists": (pa.array([[1], [2]]), pa.array([[0.75], [2.0]]), np.float64),
    "lists of a fixed size": (pa.array([[1], [2]], pa.list_(pa.int64(), 1)), pa.array([[0.75], [2.0]]), np.float64),
    "int64 and int32": (INTS, INTS.cast(pa.int32()), np.int64),
    "uint8 and float": (INTS.cast(pa.uint8()), pa.array([0.75, 2.0], pa.float32()), np.float32),
    "whole numbers": (INTS, INTS, np.int64),
    "bytes": (INTS.cast(pa.uint8()), INTS.cast(pa.uint8()), np.uint8),
}


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("kind", OF_PARTS)
def test_a_column_has_the_type_that_holds_the_numbers_of_all_files(tmp_path, kind, is_turned):
    one, other, dtype = OF_PARTS[kind]
    arrays = dict(zip("ba" if is_turned else "ab", (one, other), strict=True))
    paths = {name: str(write(tmp_path / f"{name}.parquet", {"x": arrays[name]})) for name in "ab"}
    values = {name: np.array(each.to_pylist()) for name, each in arrays.items()}
    two = Parquet(paths["a"], valid=paths["b"])
    for name, stream in (("a", "train"), ("b", "valid")):
        (batch,) = stream_of(two, stream, training=False)
        assert batch["x"].dtype == dtype
        assert np.array_equal(batch["x"], values[name])
    for size in (1, 4):
        batches = list(stream_of(Parquet(str(tmp_path / "*.parquet"), batch_size=size), training=False))
        assert {batch["x"].dtype for batch in batches} == {np.dtype(dtype)}
        assert np.array_equal(
            np.concatenate([batch["x"] for batch in batches]), np.concatenate([values["a"], values["b"]])
        )


def test_texts_of_several_types_of_arrow_are_one_source(tmp_path):
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
    for number, kind in enumerate(kinds):
        write(tmp_path / f"{number}.parquet", {"x": pa.array(["a", "b"], kind)})
    batches = stream_of(Parquet(str(tmp_path / "*.parquet"), batch_size=4), training=False)
    assert [each for batch in batches for each in batch["x"]] == ["a", "b"] * 3


@pytest.mark.parametrize("value", [0, 0.5])
def test_a_column_without_any_value_has_the_type_of_the_other_files(tmp_path, value):
    one = write(tmp_path / "a.parquet", {"x": [1, 2]})
    other = write(tmp_path / "b.parquet", {"x": [None, None]})
    for train, valid in ((one, other), (other, one)):
        dataset = Parquet(str(train), valid=str(valid), fill={"x": value})
        found = {name: next(iter(stream_of(dataset, name, training=False)))["x"] for name in ("train", "valid")}
        assert {each.dtype for each in found.values()} == {np.dtype(type(value))}
    assert found["train"].tolist() == [value] * 2


def test_a_whole_number_that_would_be_another_float_is_refused(tmp_path):
    one = write(tmp_path / "a.parquet", {"x": [2**53 + 1]})
    other = write(tmp_path / "b.parquet", {"x": [0.5]})
    with pytest.raises(StreamError, match=r"a\.parquet', row group 0 cannot be read: .*9007"):
        next(iter(stream_of(Parquet(str(one), valid=str(other)))))
    with pytest.raises(ArgumentError, match=r"fill.x: column 'x' is int64: .*9007199254740993"):
        next(iter(stream_of(Parquet(str(one), fill={"x": 0.5}))))


def test_two_columns_of_one_name_are_refused_with_the_file(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ArgumentError, match=r"^train: '.*a\.parquet': 2 columns are named 'x'$"):
        Parquet(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("size", [0, 5, 300, -1])
def test_a_truncated_file_is_refused_by_its_name(files, size):
    whole = (files / "part-b.parquet").read_bytes()
    (files / "part-b.parquet").write_bytes(whole[:size])
    with pytest.raises(ArgumentError, match=r"^train: '.*part-b\.parquet' is not a complete Parquet file"):
        Parquet(str(files / "part-*.parquet"))


def test_damage_inside_a_row_group_is_an_error_with_its_place(tmp_path):
    path = write(tmp_path / "a.parquet", {"id": range(20)})
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    with pytest.raises(StreamError, match=r"a\.parquet', row group 0 cannot be read"):
        list(stream_of(Parquet(str(path)), training=False))


def test_a_file_that_was_changed_or_removed_is_an_error(files, dataset):
    write(files / "part-b.parquet", {"id": range(9), "x": np.zeros(9, np.float32), "text": ["new"] * 9})
    with pytest.raises(StreamError, match=r"part-b\.parquet', row group \d has changed since"):
        list(stream_of(dataset))
    (files / "part-b.parquet").unlink()
    with pytest.raises(StreamError, match=r"part-b\.parquet', row group \d can no longer be read: No such file"):
        list(stream_of(dataset))


def test_files_of_other_columns_are_refused(files):
    write(files / "part-c.parquet", {"id": range(3), "x": ["a"] * 3, "text": ["a"] * 3})
    with pytest.raises(ArgumentError, match=r"^train: .*part-c\.parquet: .*x has incompatible types: float vs string$"):
        Parquet(str(files / "part-*.parquet"))
    write(files / "part-c.parquet", {"id": range(3), "z": [1, 2, 3]})
    with pytest.raises(ArgumentError, match=r"^train: '.*part-c\.parquet' has no column 'x'"):
        Parquet(str(files / "part-*.parquet"))


def test_columns_that_cannot_be_sources_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", {"id": [1], "when": pa.array([0], pa.timestamp("ms")), "what": [{"a": 1}]})
    with pytest.raises(ArgumentError, match=r"cannot be sources: 'when' \(timestamp\[ms\]\), 'what' \(struct"):
        Parquet(str(path))
    assert list(next(iter(stream_of(Parquet(str(path), columns=["id"]))))) == ["id"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "missing.parquet"}, "train: there is no file 'missing.parquet'"),
        ({"train": "missing-*.parquet"}, "train: there is no file 'missing-*.parquet'"),
        ({"train": "."}, "train: '.' is a directory; write for example '*'"),
        ({"train": []}, "train: [] is neither a path nor a list of paths"),
        ({"train": 3}, "train: 3 is neither a path nor a list of paths"),
        ({"train": ["part-a.parquet", "no"]}, "train: there is no file 'no'"),
        ({"valid": "no"}, "valid: there is no file 'no'"),
        ({"columns": ["Id"]}, "columns: 'part-a.parquet' has no column 'Id'; did you mean 'id'? (it has id, x, text)"),
        ({"columns": []}, "columns: [] is empty"),
        ({"columns": ["x", "x"]}, "columns: ['x', 'x'] is empty, or names a column twice"),
        ({"columns": "x"}, "columns: 'x' is not a list of names"),
        ({"batch_size": 0}, "batch_size: 0 is not a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(files, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    with pytest.raises(ArgumentError) as caught:
        Parquet(**{"train": "part-a.parquet", **arguments})
    assert str(caught.value).startswith(message)


def test_files_without_rows_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", {"id": pa.array([], pa.int64())})
    with pytest.raises(ArgumentError, match=r"^train: .*a\.parquet: contains no examples$"):
        Parquet(str(path))


def test_without_pyarrow_the_message_has_the_command(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match=r"Parquet needs pyarrow.*pip install 'emrun\[data\]'"):
        Parquet(str(files / "part-a.parquet"))
