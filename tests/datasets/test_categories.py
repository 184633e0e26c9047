"""Nulls and categories of `Parquet` and `Table`: values that fill gaps, numbers of categories, which a run keeps."""

import json
import math
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from campaign import thinned
from doubles import stream_of

from emrun import create_training, resume_training
from emrun.base.errors import ArgumentError, ConfigError, StreamError
from emrun.base.preparations import data_numbers
from emrun.datasets import Parquet, Table
from emrun.storage.class_names import CLASSES
from emrun.stream_context import StreamContext
from emrun.training.evaluate import evaluate
from emrun.training.predict import predict

TRAIN = {"age": [30, None, 5, 41, 8], "city": ["Rome", "Bonn", None, "Bonn", "Rome"], "zip": [20, 3, 3, 100, 20]}
VALID = {"age": [None, 2, 1], "city": ["Bonn", "Oslo", "Aden"], "zip": [100, 3, 4]}
ARGUMENTS = {"fill": {"age": math.nan, "city": "?"}, "categories": ["city", "zip"]}


def write(path, columns):
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, row_group_size=2)
    else:
        rows = [["" if cell is None else str(cell) for cell in row] for row in zip(*columns.values(), strict=True)]
        path.write_text("\n".join(map(",".join, [list(columns), *rows])) + "\n")


@pytest.fixture(params=["parquet", "csv"])
def make(request, tmp_path, monkeypatch):
    """Return a function that builds the dataset of files of one kind, with other arguments or columns."""
    monkeypatch.chdir(tmp_path)
    kind = request.param
    dataset = Parquet if kind == "parquet" else Table

    def build(train=TRAIN, valid=VALID, **arguments):
        write(tmp_path / f"train.{kind}", train)
        write(tmp_path / f"valid.{kind}", valid)
        return dataset(f"train.{kind}", f"valid.{kind}", batch_size=4, **{**ARGUMENTS, **arguments})

    build.kind, build.dataset = kind, dataset
    return build


def whole(dataset, stream="train"):
    batches = list(stream_of(dataset, stream, training=False))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def test_gaps_are_filled_and_categories_are_numbers_in_the_order_of_the_train_rows(make, caplog):
    dataset = make()
    train, valid = whole(dataset), whole(dataset, "valid")
    assert dataset.classes_names() == {"city": ["?", "Bonn", "Rome"], "zip": ["3", "20", "100"]}
    np.testing.assert_array_equal(train["age"], [30, math.nan, 5, 41, 8])
    assert train["age"].dtype.kind == valid["age"].dtype.kind == "f"
    assert [train["city"].tolist(), train["zip"].tolist()] == [[2, 1, 0, 1, 2], [1, 0, 0, 2, 1]]
    assert [valid["city"].tolist(), valid["zip"].tolist()] == [[1, 3, 3], [2, 0, 3]]
    assert {train["city"].dtype, valid["city"].dtype} == {np.dtype(np.int64)}
    places = ("'valid.parquet', row group 0, row 1", "'valid.parquet', row group 1, row 0")
    oslo, four = places if make.kind == "parquet" else ("valid.csv, row 1", "valid.csv, row 2")
    whole(dataset, "valid")
    rest = "which no train row has; all such categories get the number 3"
    assert [record.getMessage() for record in caplog.records] == [
        f"stream 'valid': {oslo}: column 'city' has 'Oslo', {rest}",
        f"stream 'valid': {four}: column 'zip' has '4', {rest}",
    ]
    again = pickle.loads(pickle.dumps(dataset))  # as workers that are not forked get it
    assert whole(again, "valid")["city"].tolist() == [1, 3, 3]


def test_the_dtype_of_a_filled_column_depends_on_the_value_alone(make):
    gaps, none = {"age": [None, 2], "id": [1, 2]}, {"age": [1, 2], "id": [1, 2]}
    for train, valid in ((gaps, none), (none, gaps)):
        dataset = make(train, valid, fill={"age": 7}, categories=None)
        assert {whole(dataset, each)["age"].dtype for each in ("train", "valid")} == {np.dtype(np.int64)}
        assert 7 in whole(dataset, "train" if train is gaps else "valid")["age"]
        dataset = make(train, valid, fill={"age": 0.5}, categories=None)
        assert {whole(dataset, each)["age"].dtype.kind for each in ("train", "valid")} == {"f"}


def test_arrays_of_texts_may_be_categories_too(tmp_path):
    np.savez(tmp_path / "t.npz", city=np.array(["b", "a", "b"]), x=np.ones(3))
    dataset = Table(str(tmp_path / "t.npz"), categories=["city"])
    assert whole(dataset)["city"].tolist() == [1, 0, 1]
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    for files, more in (({"x": str(tmp_path / "x.npy")}, {}), ({"x": str(tmp_path / "x.npy")}, {"memory_map": True})):
        with pytest.raises(ArgumentError, match=r"^categories: source 'x' is .*; categories are texts or whole"):
            Table(files, categories=["x"], **more)


def test_texts_of_valid_may_be_longer_than_those_of_train(tmp_path):
    for name, texts in (("train", ["a", "b"]), ("valid", ["abc"])):
        np.savez(tmp_path / f"{name}.npz", word=np.array(texts))
    dataset = Table(str(tmp_path / "train.npz"), str(tmp_path / "valid.npz"))
    assert [whole(dataset)["word"].tolist(), whole(dataset, "valid")["word"].tolist()] == [["a", "b"], ["abc"]]
    np.savez(tmp_path / "valid.npz", word=np.array([b"abc"]))
    with pytest.raises(ArgumentError, match=r"^valid: source 'word' is \|S3; in train it is <U1"):
        Table(str(tmp_path / "train.npz"), str(tmp_path / "valid.npz"))


def test_columns_of_dictionaries_and_of_nothing_but_nulls(tmp_path):
    city = pa.array(["b", None, "a"]).dictionary_encode()
    pq.write_table(pa.table({"city": city, "none": pa.nulls(3), "z": city}), tmp_path / "t.parquet")
    dataset = Parquet(str(tmp_path / "t.parquet"), fill={"city": "c", "none": 2, "z": "d"}, categories=["city"])
    found = whole(dataset)
    assert [found["city"].tolist(), found["none"].tolist()] == [[1, 2, 0], [2, 2, 2]]
    assert found["z"].tolist() == ["b", "d", "a"]


@pytest.mark.parametrize(
    ("arguments", "of_parquet", "of_csv"),
    [
        ({"fill": None}, "train: 'train.parquet', row group 0: column 'age' has a null; fill it by `fill: {age: VALUE",
         "train: train.csv: column 'age': Row #3 is empty; fill it by `fill: {age: VALUE}`"),
        ({"fill": {"age": 1}}, "train: 'train.parquet', row group 1: column 'city' has a null; fill it by `fill: {",
         "train: train.csv: column 'city': Row #4 is empty; fill it by `fill: {city: VALUE}`"),
        ({"fill": {"agee": 1}}, "fill.agee: 'agee' is not a column that is read; did you mean 'age'?",
         "fill.agee: 'agee' is not a column that is read; did you mean 'age'?"),
        ({"fill": {"age": "old", "city": "?"}}, "fill.age: column 'age' is int64: ",
         "fill.age: column 'age' is int64: "),
        ({"categories": ["cty"]}, "categories: 'cty' is not a source of its own; did you mean 'city'?",
         "categories: 'cty' is not a source of its own; did you mean 'city'?"),
        ({"categories": "city"}, "categories: 'city' is not a list", "categories: 'city' is not a list of names"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_columns_is_an_error_at_once(make, arguments, of_parquet, of_csv):
    with pytest.raises(ArgumentError) as caught:
        make(**{"fill": {"age": math.nan, "city": "?"}, **arguments})
    assert str(caught.value).startswith(of_parquet if make.kind == "parquet" else of_csv)


@pytest.mark.parametrize(
    "more",
    [{"fill": {"rooms": {"by": "median"}}}, {"fill": {"rooms": 1}}, {"categories": ["rooms", "size"]}],
)
def test_a_misspelt_column_is_blamed_and_not_what_names_it_rightly(more, tmp_path):
    file = tmp_path / "t.csv"
    write(file, {"size": [1, 2], "rooms": [3, None]})
    with pytest.raises(ArgumentError, match=r"^columns: .*t\.csv has no column 'romms'; did you mean 'rooms'\? "):
        Table(file, columns={"numbers": ["size", "romms"]}, **more)


def test_columns_of_new_data_that_are_mostly_filled_are_told_once_with_the_counts(make, caplog, tmp_path):
    def columns(count, **gaps):
        values = {"a": 3.0, "b": 1.0, "c": 5.0}
        return {
            name: [value if row >= gaps.get(name, 0) else None for row in range(count)]
            for name, value in values.items()
        }

    fill = {"a": {"by": "median"}, "b": {"by": "median"}, "c": 0.5}
    dataset = make(columns(12, a=10, c=9), columns(2, a=2), fill=fill, categories=None)
    assert " are filled with " not in caplog.text  # those of train and valid are the user's own
    for gaps, told in (
        ({"a": 60, "b": 31, "c": 60}, ["a': 60 of 60 rows are filled with 3.0, ", "b': 31 of 60 ", "c': 60 of 60 "]),
        ({"a": 30, "c": 59}, []),
    ):
        caplog.clear()
        path = tmp_path / f"new{len(told)}.{make.kind}"
        write(path, columns(60, **gaps))
        for _ in range(2):
            batches = list(dataset.new_stream(path, StreamContext("new", seed=1, epoch=0)))
            assert set(np.concatenate([batch["a"] for batch in batches])) == {3.0}
        found = sorted(each.getMessage() for each in caplog.records if " are filled with " in each.getMessage())
        assert [text in each for text, each in zip(told, found, strict=True)] == [True] * len(told)
        assert all(path.name in each.split(": column '")[0] for each in found)


def test_numbers_with_fractions_and_parts_of_a_source_are_no_categories(tmp_path):
    pq.write_table(pa.table({"x": [0.5]}), tmp_path / "t.parquet")
    with pytest.raises(ArgumentError, match=r"^categories: column 'x' is double: categories are texts or whole"):
        Parquet(str(tmp_path / "t.parquet"), categories=["x"])
    write(tmp_path / "t.csv", TRAIN)
    with pytest.raises(ArgumentError, match=r"^categories: 'city' is not a source of its own"):
        Table(str(tmp_path / "t.csv"), columns={"x": ["zip", "city"]}, categories=["city"])


def test_a_column_that_is_listed_twice_has_its_own_numbers_and_one_of_two_sources_is_an_error(make, caplog):
    dataset = make(categories=["city", "zip", "city"])
    assert dataset.classes_names()["city"] == ["?", "Bonn", "Rome"]
    assert [whole(dataset)["city"].tolist(), caplog.records] == [[2, 1, 0, 1, 2], []]
    if make.kind == "csv":
        with pytest.raises(ArgumentError, match=r"^categories: 'city' is several sources, .*; keep one$"):
            make(columns={"a": "city", "b": "city", "age": "age"}, categories=["city"])


def test_a_list_cannot_be_filled_and_files_without_empty_cells_neither(tmp_path):
    pq.write_table(pa.table({"x": [[1], None]}), tmp_path / "t.parquet")
    with pytest.raises(ArgumentError, match=r"^fill.x: column 'x' is list<.*>: its lists cannot be filled"):
        Parquet(str(tmp_path / "t.parquet"), fill={"x": 0})
    np.savez(tmp_path / "t.npz", x=np.ones(3))
    with pytest.raises(ArgumentError, match=r"^fill: only CSV and Parquet files have it, and train is neither"):
        Table(str(tmp_path / "t.npz"), fill={"x": 0})


def test_a_null_that_only_reading_finds_has_stream_file_and_row_group(tmp_path):
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1, None]}), tmp_path / "b.parquet", write_statistics=False)
    dataset = Parquet(str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"))
    with pytest.raises(StreamError, match=r"stream 'valid': .*b\.parquet', row group 0: column 'x' has a null; fill"):
        whole(dataset, "valid")
    dataset = Parquet(str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"), fill={"x": 9})
    assert whole(dataset, "valid")["x"].tolist() == [1, 9]


MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self, dataset):
        super().__init__()
        self.city = torch.nn.Embedding(len(dataset.classes_names()["city"]) + 1, 2)
        self.rest = torch.nn.Linear(3, 1)

    def forward(self, age, city, zip):
        age = age.nan_to_num(0.0)[:, None]
        score = self.rest(torch.cat([age, self.city(city)], 1))[:, 0]
        return {"loss": (score - zip) ** 2, "score": score, "code": city}
"""


@pytest.mark.parametrize("make", thinned(["csv", "parquet"], ["parquet"]), indirect=True)
def test_a_run_keeps_the_numbers_of_categories_whatever_the_train_rows_are_later(make, tmp_path, monkeypatch):
    make()
    (tmp_path / "net_of_cities.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    files = {"train": f"train.{make.kind}", "valid": f"valid.{make.kind}"}
    config = {
        "seed": 1,
        "dataset": {"class": make.dataset.__name__, **files, **ARGUMENTS, "batch_size": 3},
        "model": {
            "module": {"class": "net_of_cities.Net"},
            "optimizer": {"class": "SGD", "lr": 1.0e-5},
            "device": "cpu",
        },
        "main_loop": {"extra_streams": ["valid"], "report": False},
        "hooks": [{"ComputeStats": {"variables": ["loss"]}}, {"StopAfter": {"epochs": 1}}],
    }
    create_training(config, output_dir="run").main_loop.run_training()
    names = {"city": ["?", "Bonn", "Rome"], "zip": ["3", "20", "100"]}
    assert json.loads((tmp_path / "run" / CLASSES).read_text()) == names
    assert (tmp_path / "run" / "train.log").read_text().count("which no train row has") == 2  # city and zip
    expected = evaluate("run", "valid", checkpoint_name="latest")
    more = {**TRAIN, "city": ["Aden", "Bonn", "Rome", "Oslo", "Aden"]}  # Aden would be the first, and moves the others
    make(train=more)
    assert evaluate("run", "valid", ["main_loop.workers=1"], checkpoint_name="latest") == expected
    predict("run", "valid", "p.csv", checkpoint_name="latest")
    header, *rows = [line.split(",") for line in (tmp_path / "p.csv").read_text().splitlines()]
    assert [row[header.index("code")] for row in rows] == ["1", "3", "3"]
    resumed = resume_training("run", ["hooks.StopAfter.epochs=2", "main_loop.workers=1"])
    assert resumed.dataset.classes_names() == names
    resumed.main_loop.run_training()
    assert "stream 'train': " in (tmp_path / "run" / "train.log").read_text()
    fresh = create_training(config, output_dir="fresh")
    assert fresh.dataset.classes_names()["city"] == ["Aden", "Bonn", "Oslo", "Rome"]
    assert json.loads((tmp_path / "fresh" / CLASSES).read_text()) == fresh.dataset.classes_names()


@pytest.mark.parametrize("make", thinned(["csv", "parquet"], ["csv"]), indirect=True)
def test_categories_that_a_resume_adds_lie_in_the_run_too(make, tmp_path, monkeypatch):
    make()
    (tmp_path / "sum_of_ages.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n    def forward(self, zip):\n"
        "        return {'loss': super().forward(zip.float()[:, None])[:, 0] ** 2}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = {
        "dataset": {"class": make.dataset.__name__, "train": f"train.{make.kind}", "fill": {"age": 0}},
        "model": {"module": {"class": "sum_of_ages.Net", "args": [1, 1]}, "optimizer": {"class": "SGD", "lr": 0.0}},
        "main_loop": {"on_unused_sources": "ignore"},
        "hooks": ["ComputeStats", {"StopAfter": {"epochs": 1}}],
    }
    config["dataset"] |= (
        {"columns": ["zip", "age"]} if make.kind == "parquet" else {"columns": {"zip": "zip", "age": "age"}}
    )
    config["dataset"]["fill"] = {"age": 0}
    create_training(config, output_dir="run").main_loop.run_training()
    assert not (tmp_path / "run" / CLASSES).exists()
    resume_training("run", ["dataset.categories=[zip]", "hooks.StopAfter.epochs=2"]).main_loop.run_training()
    assert json.loads((tmp_path / "run" / CLASSES).read_text()) == {"zip": ["3", "20", "100"]}


def test_an_error_of_the_columns_is_reported_at_its_line(make, tmp_path):
    make()
    (tmp_path / "c.yaml").write_text(
        f"dataset:\n  class: {make.dataset.__name__}\n  train: train.{make.kind}\n"
        "  fill:\n    age: .nan\n    towm: '?'\n"
        "model:\n  module: {class: torch.nn.Linear, args: [1, 1]}\n  inputs: [age]\n  outputs: [y]\n"
        "  optimizer: {class: SGD, lr: 0.1}\n"
    )
    with pytest.raises(ConfigError, match=r"c.yaml:6:\d+: dataset.fill.towm: 'towm' is not a column that is read"):
        create_training("c.yaml", output_dir="run")


SHOPS = {
    "city": ["Rome", "Bonn", "Rome", "Oslo"],
    "size": [*"abca"],
    "zip": [1, 2, 2, 1],
    "y": ["yes", "no", "yes", "no"],
}
OTHERS = {"city": ["Lima", "Oslo"], "size": ["b", "z"], "zip": [1, 3], "y": ["no", "no"]}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_source_of_several_categories_has_numbers_that_differ_by_column(ending, tmp_path, caplog):
    path = tmp_path / f"t.{ending}"
    write(path, SHOPS)
    new = tmp_path / "new.csv"
    write(new, OTHERS)
    columns = {"x": ["zip"], "of": ["city", "size"], "none": [], "y": "y"}
    dataset = Table(
        str(path), str(new), columns=columns, categories=[["city", "size"], "y"], normalize={"x": "standard"}
    )
    found = whole(dataset)
    assert found["of"].dtype == np.int64
    assert found["of"].tolist() == [[2, 4], [0, 5], [2, 6], [1, 4]]
    assert [found["none"].shape, found["x"].shape, found["y"].tolist()] == [(4, 0), (4, 1), [1, 0, 1, 0]]
    assert whole(dataset, "valid")["of"].tolist() == [
        [3, 5],
        [1, 7],
    ]  # unknown ones have the last number of their column
    assert [each.message.rpartition(" ")[2] for each in caplog.records] == ["3", "7"]
    assert data_numbers(dataset) == {
        "classes.city": 3, "classes.size": 3, "classes.y": 2, "embeddings.city": 4, "embeddings.size": 4,
        "embeddings.y": 3, "embeddings.of": 8, "embeddings.none": 0, "width.x": 1, "width.of": 2,
        "width.none": 0, "width.y": 1,
    }  # fmt: skip


def test_a_source_is_of_categories_or_of_numbers_and_its_columns_are_no_names_of_sources(tmp_path):
    write(tmp_path / "t.csv", SHOPS)
    with pytest.raises(ArgumentError, match=r"^categories: 'city' is not a source of its own"):
        Table(str(tmp_path / "t.csv"), columns={"x": ["zip", "city"]}, categories=["city"])
    with pytest.raises(ArgumentError, match=r"^columns: 'zip' is a source and a column of categories"):
        Table(str(tmp_path / "t.csv"), columns={"x": ["zip", "city"], "zip": "y"}, categories=["city", "zip"])
