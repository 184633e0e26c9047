"""Table: what becomes of files, how its streams are read, and what is wrong with a file, at its line."""

import os
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from emrun.base.errors import ArgumentError, MissingExtra, StreamError
from emrun.datasets import Table
from emrun.stream_context import StreamContext

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20, dtype=np.int64) % 3
CSV = "a,b,label\n1,0.5,0\n2,1.5,1\n-3,2,0\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def files():
    np.savez("all.npz", x=X, y=Y)
    np.save("x.npy", X)
    np.save("y.npy", Y)
    lines = [f"{a:g},{b:g},{label}" for (a, b), label in zip(X / 4, Y, strict=True)]
    Path("all.csv").write_text("\n".join(["a,b,y", *lines]))
    return {"npz": "all.npz", "npy": {"x": "x.npy", "y": "y.npy"}, "csv": "all.csv"}


KINDS = {
    "npz": {},
    "npy": {},
    "mapped": {"memory_map": True},
    "csv": {"columns": {"x": ["a", "b"], "y": "y"}},
}


@pytest.fixture(params=KINDS)
def make(request, files):
    path = files["npy" if request.param == "mapped" else request.param]
    return lambda **more: Table(**{"train": path, "valid": path, "batch_size": 3, **KINDS[request.param], **more})


def together(batches, source):
    return np.concatenate([batch[source] for batch in batches])


def test_a_training_stream_is_the_same_however_it_is_read(make, check_training_stream):
    check_training_stream(make)


def test_evaluations_are_in_the_order_of_the_data(make, passes):
    for name in ("train", "valid"):
        for batches in passes(make(), name, 2, training=False):
            x, y = together(batches, "x"), together(batches, "y")
            assert np.array_equal(x * (4 if x.max() < 20 else 1), X)
            assert np.array_equal(y, Y)
            assert (x.dtype, y.dtype) == (np.float32, np.int64)


def test_training_passes_have_every_example_once(make, passes):
    for batches in passes(make(), "train", 2):
        x, expected = together(batches, "x"), together(passes(make(), "valid")[0], "x")
        assert np.array_equal(x[np.argsort(x[:, 0])], expected)


def test_num_batches_is_right(make, passes):
    for size in (1, 3, 20, 50):
        dataset = make(batch_size=size)
        assert dataset.num_batches == {name: len(passes(dataset, name)[0]) for name in ("train", "valid")}


def test_batches_may_be_changed_without_changing_the_data(make, passes):
    dataset = make()
    for batch in passes(dataset, "valid")[0]:
        batch["x"] += 1
    assert together(passes(dataset, "valid")[0], "x")[0, 0] == 0


def test_a_stream_without_a_file_is_none(files):
    dataset = Table(files["npz"])
    assert (dataset.valid_stream, dataset.test_stream) == (None, None)
    assert dataset.num_batches == {"train": 1}


def test_every_column_of_a_csv_file_is_a_source(here, passes):
    (here / "t.csv").write_text(CSV)
    ((batch,),) = passes(Table("t.csv"), "train", training=False)
    assert {name: (values.dtype, values.tolist()) for name, values in batch.items()} == {
        "a": (np.int64, [1, 2, -3]),
        "b": (np.float32, [0.5, 1.5, 2.0]),
        "label": (np.int64, [0, 1, 0]),
    }


def test_columns_choose_and_join(here, passes):
    (here / "t.csv").write_text("name," + CSV.replace("\n", "\nzoë,", 3))
    table = Table("t.csv", columns={"x": ["b", "a"], "one": ["a"], "y": "label"})
    ((batch,),) = passes(table, "train", training=False)
    assert batch["x"].tolist() == [[0.5, 1], [1.5, 2], [2, -3]]
    assert (batch["x"].dtype, batch["one"].shape, batch["y"].dtype) == (np.float32, (3, 1), np.int64)


def test_quotes_blank_lines_a_byte_order_mark_and_windows_ends_are_read(here, passes):
    (here / "t.csv").write_bytes('\ufeff"a, b", c\r\n"1",2\r\n\r\n 3 ,nan\r\n'.encode())
    ((batch,),) = passes(Table("t.csv"), "train", training=False)
    assert batch["a, b"].tolist() == [1, 3]
    assert batch["c"][0] == 2
    assert np.isnan(batch["c"][1])


def test_all_files_decide_which_columns_are_whole(here, passes):
    (here / "train.csv").write_text("x,y\n1.5,1\n")
    (here / "valid.csv").write_text("x,y\n2,1\n")
    ((batch,),) = passes(Table("train.csv", "valid.csv"), "valid")
    assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.int64)
    (here / "valid.csv").write_text("x,y\n2,1\n2,1.5\n")
    table = Table("train.csv", "valid.csv")
    for name in ("train", "valid"):
        ((batch,),) = passes(table, name)
        assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.float32)


@pytest.mark.parametrize("cell", ["1e39", "-1e300"])
@pytest.mark.parametrize("columns", [None, {"x": ["a", "b"]}])
def test_a_number_that_float32_cannot_hold_is_refused_with_its_column(here, cell, columns):
    (here / "t.csv").write_text(f"a,b\n1,2\n{cell},nan\n")
    message = rf"^train: t.csv: column 'a' has {float(cell)}, which float32 cannot hold$".replace("+", r"\+")
    with pytest.raises(ArgumentError, match=message):
        Table("t.csv", columns=columns)


@pytest.mark.parametrize("how", ["npz", "npy", "mapped"])
@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("int64", "float64"), "float64"),
        (("float64", "int64"), "float64"),
        (("int64", "float32"), "float32"),
        (("int32", ">f4"), "float32"),
        (("int64", "int64", "float64"), "float64"),
        (("int64", ">i8"), "int64"),
    ],
)
def test_a_source_has_the_dtype_that_holds_the_numbers_of_all_files(here, dtypes, expected, how):
    parts = dict(zip(("train", "valid", "test"), dtypes, strict=False))
    for name, dtype in parts.items():
        values = np.array([2, 1.5]).astype(dtype)
        np.savez(here / f"{name}.npz", x=values)
        np.save(here / f"{name}.npy", values)
    files = {name: f"{name}.npz" if how == "npz" else {"x": f"{name}.npy"} for name in parts}
    table = Table(**files, memory_map=how == "mapped")
    for name, dtype in parts.items():
        (batch,) = getattr(table, f"{name}_stream")(StreamContext(name, seed=0))
        assert batch["x"].dtype == expected
        assert batch["x"].tolist() == np.array([2, 1.5]).astype(dtype).tolist()


@pytest.mark.parametrize(
    "dtypes", [("int64", "int32"), ("uint8", "float32"), ("bool", "int64"), ("float32", "float64")]
)
def test_sources_of_other_dtypes_are_refused(here, dtypes):
    for name, dtype in zip(("train", "valid"), dtypes, strict=True):
        np.savez(here / f"{name}.npz", x=np.ones(2, dtype))
    with pytest.raises(ArgumentError, match=rf"^valid: source 'x' is {dtypes[1]}; in train it is {dtypes[0]}$"):
        Table("train.npz", "valid.npz")


@pytest.mark.parametrize("cells", [("99999999999999999999", "0.5"), ("0.5", "99999999999999999999")])
def test_a_large_whole_number_among_others_is_float32_wherever_it_stands(here, passes, cells):
    (here / "t.csv").write_text("x\n{}\n{}\n".format(*cells))
    ((batch,),) = passes(Table("t.csv"), "train", training=False)
    assert batch["x"].dtype == np.float32
    assert sorted(batch["x"].tolist()) == [0.5, np.float32(1e20)]


@pytest.mark.parametrize("cell", ["inf", " -Inf", "+infinity"])
def test_infinity_is_a_number_when_the_cell_says_so(here, passes, cell):
    (here / "t.csv").write_text(f"x\n{cell}\n")
    ((batch,),) = passes(Table("t.csv"), "train", training=False)
    assert np.isinf(batch["x"]).all()


def test_a_member_that_is_not_an_array_is_refused_by_name(files):
    with zipfile.ZipFile("all.npz", "a") as archive:
        archive.writestr("notes.txt", "x")
    with pytest.raises(ArgumentError, match=r"^train: all.npz: its member 'notes.txt' is not an array"):
        Table("all.npz")


def test_other_byte_orders_become_that_of_the_machine(files, passes):
    np.save("x.npy", X.astype(">f4"))
    for memory_map in (False, True):
        ((batch,),) = passes(Table(files["npy"], memory_map=memory_map), "train", training=False)
        assert batch["x"].dtype == np.float32
        assert np.array_equal(batch["x"], X)


def test_a_mapped_file_is_not_read_whole_and_pickled_by_its_path(here):
    np.save("x.npy", np.zeros((100_000, 10)))
    table = Table({"x": "x.npy"}, memory_map=True)
    assert len(pickle.dumps(table)) < 5_000


@pytest.mark.parametrize("unpickled", [False, True])
def test_a_mapped_file_that_changed_is_an_error_that_names_it(files, here, passes, unpickled):
    table = Table(files["npy"], memory_map=True)
    if unpickled:
        table = pickle.loads(pickle.dumps(table))
    else:
        passes(table, "train")
    np.save("x.npy", X + 1)
    os.utime("x.npy", ns=(0, 1))
    with pytest.raises(StreamError, match=r"x.npy has changed since it was mapped"):
        passes(table, "train")
    (here / "x.npy").unlink()
    with pytest.raises(StreamError, match=r"x.npy can no longer be read: No such file"):
        passes(table, "train")


def test_a_mapped_file_that_was_cut_is_an_error_and_no_crash(files, passes):
    table = Table(files["npy"], memory_map=True)
    os.truncate("x.npy", 100)
    with pytest.raises(StreamError, match=r"x.npy has changed"):
        passes(table, "train")


def test_a_mapped_file_of_another_size_is_another_one_whatever_its_time(files, passes):
    before = Path("x.npy").stat()
    table = Table(files["npy"], memory_map=True)
    np.save("x.npy", np.concatenate([X + 1, X]))
    os.utime("x.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StreamError, match=r"x.npy has changed"):
        passes(table, "train")


def test_a_mapped_file_is_found_from_another_directory_where_it_is_unpickled(files, here, passes, monkeypatch):
    pickled = pickle.dumps(Table(files["npy"], memory_map=True))
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    (batch,) = passes(pickle.loads(pickled), "train", training=False)[0]
    assert np.array_equal(batch["x"], X)


class Harm:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("harm").absolute(),)


@pytest.mark.parametrize("content", [Harm(), np.array([Harm()], dtype=object)], ids=["pickle", "array"])
@pytest.mark.parametrize("kind", ["npy", "mapped", "npz", "in npz"])
def test_nothing_in_a_file_is_ever_called(here, content, kind):
    name = "x.npz" if "npz" in kind else "x.npy"
    with Path(name).open("wb") as file:
        if kind == "in npz":
            np.savez(file, x=np.array([content], dtype=object))
        elif isinstance(content, Harm):
            pickle.dump(content, file)
        else:
            np.save(file, content)
    with pytest.raises(ArgumentError, match=f"^train: {name} "):
        Table(name if "npz" in kind else {"x": name}, memory_map=kind == "mapped")
    assert not (here / "harm").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "train: t.csv cannot be read: Empty CSV file"),
        ("a,b\n", "train: t.csv: contains no examples"),
        ("a,b\n1,2\n1,two\n", "train: t.csv: column 'b': .* Row #3: .* invalid value 'two'; list the column in"),
        ("a\ntrue\n", "train: t.csv: column 'a': .* invalid value 'true'; list the column in `categories`, or leave"),
        ("a\n2026-01-01\n", "train: t.csv: column 'a': .* invalid value '2026-01-01'"),
        ("a,b\n1.5,2\n,3\n", "train: t.csv: column 'a': Row #3 is empty; fill it by `fill: {a: VALUE}`, or leave"),
        ("a,b\n,2\n,3\n", "train: t.csv: column 'a': Row #2 is empty"),
        ("a,b\n1,2\n3\n", "train: t.csv cannot be read: .* Row #3: Expected 2 columns, got 1: 3"),
        ("a,a\n1,2\n", "train: t.csv: 'a' is the name of several columns, or no name; rename them"),
        (",a\n1,2\n", "train: t.csv: '' is the name of several columns, or no name; rename them"),
        ('a,b\n1,"2\n', "train: t.csv: column 'b': .* Row #2: .* invalid value '2\n'"),
        (b"a,b\n1,\xff\n", "train: t.csv: column 'b': .* Row #2: .* invalid value"),
    ],
)
def test_a_mistake_in_a_csv_file_is_reported_at_its_row(here, text, message):
    (here / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ArgumentError, match=f"^{message}"):
        Table("t.csv")


def test_a_csv_file_needs_pyarrow_and_other_files_do_not(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert Table(files["npz"]).num_batches == {"train": 1}
    with pytest.raises(MissingExtra, match=r"Table needs pyarrow.*pip install 'emrun\[data\]'"):
        Table(files["csv"])


def test_joined_columns_are_float32_whatever_those_of_train_are(here, passes):
    (here / "train.csv").write_text("a,b\n1,2\n")
    (here / "valid.csv").write_text("a,b\n1,2.5\n")
    ((batch,),) = passes(Table("train.csv", "valid.csv", columns={"x": ["a", "b"]}), "valid")
    assert batch["x"].tolist() == [[1, 2.5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "no.npz"}, "train: there is no file no.npz (the current directory is "),
        ({"train": "no.csv"}, "train: there is no file no.csv"),
        ({"train": {"x": "no.npy"}}, "train: there is no file no.npy"),
        ({"train": "x.npy"}, "train: x.npy is neither a .npz, .csv or .parquet file, nor {source: file.npy}"),
        ({"train": "x.txt"}, "train: x.txt is neither a .npz, .csv or .parquet file"),
        ({"train": {"x": "all.npz"}}, "train: source 'x': all.npz is not a .npy file"),
        ({"train": {}}, "train: {}: contains no examples"),
        (
            {"train": {"x": "x.npy", "y": "short.npy"}},
            "train: its sources have different numbers of examples: x 20, y 4",
        ),
        ({"train": {"x": "scalar.npy"}}, "train: source 'x' is float32 of shape (), not an array"),
        ({"train": {"x": "objects.npy"}}, "train: objects.npy cannot be read: "),
        ({"train": {"x": "fields.npy"}}, "train: source 'x' is [('a', '<i8')] of shape (3,), not an array"),
        ({"train": {"x": "cut.npy"}}, "train: cut.npy cannot be read: "),
        ({"train": {"x": "cut.npy"}, "memory_map": True}, "train: cut.npy cannot be read: "),
        ({"train": "cut.npz"}, "train: cut.npz cannot be read: "),
        ({"train": "empty.npz"}, "train: empty.npz cannot be read: "),
        ({"train": "array.npz"}, "train: array.npz has one array without a name"),
        ({"valid": {"x": "x.npy"}}, "valid: its sources are x; those of train are x, y"),
        ({"valid": {"x": "x.npy", "y": "y8.npy"}}, "valid: source 'y' is int8; in train it is int64"),
        ({"memory_map": True}, "memory_map: only .npy files can be mapped; save each source of train (all.npz) as one"),
        ({"memory_map": 1}, "memory_map: 1 is neither true nor false"),
        ({"columns": {"x": "a"}}, "columns: only CSV and Parquet files have it, and train is neither"),
        ({"columns": {"x": 3}}, "columns: source 'x': 3 is neither a column nor a list of columns"),
        ({"train": "all.csv", "columns": {"x": "bb"}}, "columns: all.csv has no column 'bb'; did you mean 'b'?"),
        ({"batch_size": 0}, "batch_size: 0 is not a whole number of at least 1"),
    ],
)
def test_wrong_files_and_arguments_are_refused_at_once(files, here, arguments, message):
    np.save("short.npy", Y[:4])
    np.save("scalar.npy", np.float32(1))
    np.save("objects.npy", np.array([{}, {}]))
    np.save("fields.npy", np.zeros(3, [("a", int)]))
    np.save("y8.npy", Y.astype(np.int8))
    for kind in ("npy", "npz"):
        content = (here / ("x.npy" if kind == "npy" else "all.npz")).read_bytes()
        (here / f"cut.{kind}").write_bytes(content[:-100])
    (here / "empty.npz").write_bytes(b"")
    (here / "array.npz").write_bytes((here / "x.npy").read_bytes())
    with pytest.raises(ArgumentError) as caught:
        Table(**{"train": "all.npz", **arguments})
    assert str(caught.value).startswith(message)


def test_the_yaml_in_its_docstring_trains(here, train_docstring):
    for name in ("train", "valid"):
        rows = "".join(f"{i % 5},{i % 7 / 2},oak,{int(i % 5 > 2)}\n" for i in range(50))
        (here / f"{name}.csv").write_text("height,width,tree,species\n" + rows)
    assert train_docstring(Table, "x", "label", 2, 2, epochs=5)[-1]["valid"]["accuracy"]["mean"] > 0.8


def test_a_wrong_cell_is_reported_at_the_line_of_the_config(here, emrun_here):
    (here / "t.csv").write_text("a,b\n1,x\n")
    (here / "config.yaml").write_text(
        "dataset:\n  class: Table\n  train: t.csv\nmodel:\n  module: {class: torch.nn.Linear, args: [1, 1]}\n"
        "  inputs: [a]\n  outputs: [c]\n  loss: {class: torch.nn.MSELoss, inputs: [c, b]}\n"
        "  optimizer: {class: SGD, lr: 0.1}\n"
    )
    done = emrun_here("train", "config.yaml")
    assert done.returncode == 2
    assert "config.yaml:3:10: dataset.train: t.csv: column 'b': In CSV column #1: Row #2: " in done.stderr
    assert "invalid value 'x'; list the column in `categories`, or leave it out by `columns`" in done.stderr


PARTS = {
    "whole": "x,y\n1,0\n2,1\n",
    "parts": "x,y\n0.75,0\n2,1\n",
    "empty": "x,y\n,0\n,1\n",
    "words": "x,y\n0.75,0\nfoo,1\n",
}


@pytest.mark.parametrize(
    ("files", "more", "x", "y"),
    [
        (("whole", "parts"), {}, np.float32, np.int64),
        (("parts", "whole"), {}, np.float32, np.int64),
        (("whole", "whole", "parts"), {}, np.float32, np.int64),
        (("whole", "parts", "whole"), {}, np.float32, np.int64),
        (("whole", "whole"), {}, np.int64, np.int64),
        (("whole", "empty"), {"fill": {"x": 5}}, np.int64, np.int64),
        (("whole", "empty"), {"fill": {"x": 0.5}}, np.float32, np.int64),
        (("whole", "parts"), {"categories": ["y"]}, np.float32, np.int64),
        (("whole", "parts"), {"columns": {"x": ["x"], "y": "y"}}, np.float32, np.int64),
    ],
)
def test_a_column_has_the_type_that_holds_the_numbers_of_all_files(here, files, more, x, y):
    for name, text in PARTS.items():
        (here / f"{name}.csv").write_text(text)
    parts = dict(zip(("train", "valid", "test"), files, strict=False))
    table = Table(batch_size=2, **{name: f"{each}.csv" for name, each in parts.items()}, **more)
    for name, each in parts.items():
        (batch,) = getattr(table, f"{name}_stream")(StreamContext(name, seed=0))  # a pass that does not shuffle
        assert (batch["x"].dtype, batch["y"].dtype) == (x, y)
        expected = {"whole": [1, 2], "parts": [0.75, 2], "empty": [more.get("fill", {}).get("x")] * 2}[each]
        assert batch["x"].ravel().tolist() == expected


def test_a_word_in_a_column_of_numbers_is_named_with_its_row(here):
    for name, text in PARTS.items():
        (here / f"{name}.csv").write_text(text)
    with pytest.raises(ArgumentError, match=r"valid: words.csv: column 'x': .*Row #3: .* invalid value 'foo'; list"):
        Table("whole.csv", "words.csv")


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        ("1;2", ""),
        ("1;x, y", ""),
        ("1;2\n-12,5;3", ", and decimal points in numbers such as '-12,5' in row 3"),
    ],
)
def test_other_separators_are_told_before_the_rows_are_read(rows, more):
    Path("t.csv").write_text(f"a;b\n{rows}\n")
    with pytest.raises(ArgumentError) as caught:
        Table("t.csv", batch_size=1, columns={"x": "a"})
    assert str(caught.value) == f"train: t.csv: cells are separated by ';'; write commas{more}"
