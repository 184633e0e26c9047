"""`fill` by a statistic and `normalize`: what scikit-learn gives for the train rows, kept with the run."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doubles import stream_of
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

from emrun.base.errors import ArgumentError, StreamError
from emrun.datasets import Parquet, Table

COUNT = 60
RANDOM = np.random.default_rng(1)
AREA = np.where(np.arange(COUNT) % 7 == 3, np.nan, RANDOM.normal(1e6, 30, COUNT).round(3))
ROOMS = RANDOM.integers(1, 9, COUNT)
CITY = [None if each % 9 == 4 else ("Rome", "Bonn", "Oslo")[each * each % 3] for each in range(COUNT)]
PRICE = RANDOM.lognormal(3, 2, COUNT)
FORM = {"valid": 0.3, "seed": 2}
TRAIN, VALID = (np.sort(each) for each in train_test_split(np.arange(COUNT), test_size=0.3, random_state=2))
SCALERS = {"standard": StandardScaler, "minmax": MinMaxScaler, "robust": RobustScaler}


def csv(folder, **arguments):
    cells = [AREA, ROOMS, CITY, PRICE]
    rows = [
        ",".join("" if each is None or each != each else str(each) for each in row) for row in zip(*cells, strict=True)
    ]
    (folder / "t.csv").write_text("\n".join(["area,rooms,city,price", *rows]) + "\n")
    return Table(folder / "t.csv", **arguments)


def parquet(folder, **arguments):
    area = pa.array(AREA, from_pandas=True)
    table = pa.table({"area": area, "rooms": ROOMS, "city": CITY, "price": PRICE})
    pq.write_table(table, folder / "t.parquet", row_group_size=7)
    return Parquet(str(folder / "t.parquet"), **arguments)


def whole(dataset, stream):
    batches = list(stream_of(dataset, stream, training=False))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize("make", [csv, parquet])
@pytest.mark.parametrize("by", ["standard", "minmax", "robust"])
def test_gaps_and_scales_are_those_of_scikit_learn(make, by, tmp_path):
    fill = {"area": {"by": "median"}, "city": {"by": "most_frequent"}}
    arguments = {
        "fill": fill,
        "categories": ["city"],
        "normalize": {"area": by, "rooms": by, "price": "log"},
        "split": FORM,
        "batch_size": 7,
    }
    dataset = make(tmp_path, **arguments)
    imputer = SimpleImputer(strategy="median").fit(AREA[TRAIN, None])
    area = imputer.transform(AREA[:, None])
    columns = {"area": area, "rooms": ROOMS[:, None]}
    often = SimpleImputer(strategy="most_frequent", missing_values=None)
    cities = often.fit(np.array(CITY, object)[TRAIN, None]).transform(np.array(CITY, object)[:, None])[:, 0]
    kept = json.loads(json.dumps(dataset.preparation))
    assert kept["learnt"]["fill"]["area"] == {"by": "median", "value": imputer.statistics_[0]}
    again = type(dataset)(str(tmp_path / f"t.{make.__name__}"), **arguments, preparation=kept)
    for one in (dataset, again):
        for stream, rows in (("valid", VALID), ("train", TRAIN)):
            found = whole(one, stream)
            for name, values in columns.items():
                expected = SCALERS[by]().fit(values[TRAIN].astype(float)).transform(values)[rows, 0]
                np.testing.assert_allclose(found[name], expected, atol=1e-6)
            np.testing.assert_allclose(found["price"], np.log(PRICE[rows]), atol=1e-6)
            assert [one.classes_names()["city"][number] for number in found["city"]] == cities[rows].tolist()
    if make is csv:
        assert {values.dtype for name, values in found.items() if name != "city"} == {np.dtype(np.float32)}


@pytest.mark.parametrize("mapped", [True, False])
def test_sources_of_several_columns_and_arrays(mapped, tmp_path):
    values = RANDOM.normal(5, 3, (COUNT, 3))
    values[4, 1] = np.nan
    np.save(tmp_path / "x.npy", values)
    files = {"x": str(tmp_path / "x.npy")}
    dataset = Table(files, normalize={"x": "standard"}, memory_map=mapped, split=FORM)
    expected = StandardScaler().fit(values[TRAIN]).transform(values)
    np.testing.assert_allclose(whole(dataset, "valid")["x"], expected[VALID], rtol=1e-12)
    np.testing.assert_allclose(whole(dataset, "train")["x"], expected[TRAIN], rtol=1e-12)
    csv(tmp_path, columns={"price": "price"})
    pair = {"pair": ["rooms", "price"]}
    dataset = Table(tmp_path / "t.csv", columns=pair, normalize={"pair": "robust"})
    both = np.stack([ROOMS, PRICE], axis=1)
    np.testing.assert_allclose(whole(dataset, "train")["pair"], RobustScaler().fit_transform(both), atol=1e-6)
    lists = pa.table({"x": list(both.tolist())})
    pq.write_table(lists, tmp_path / "l.parquet", row_group_size=7)
    dataset = Parquet(str(tmp_path / "l.parquet"), normalize={"x": "minmax"}, batch_size=10)
    np.testing.assert_allclose(whole(dataset, "train")["x"], MinMaxScaler().fit_transform(both), atol=1e-12)


def test_a_file_of_its_own_gets_the_statistics_of_train(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,1\n,2\n3,6\nnan,7\n")
    (tmp_path / "v.csv").write_text("a,b\n,4\n10,4\n")
    arguments = {"fill": {"a": {"by": "median"}}, "normalize": {"b": "standard"}}
    dataset = Table(tmp_path / "t.csv", tmp_path / "v.csv", **arguments)
    assert whole(dataset, "train")["a"].tolist() == [1, 2, 3, 2]
    assert whole(dataset, "valid")["a"].tolist() == [2, 10]
    assert whole(dataset, "valid")["b"].tolist() == [0, 0]
    kept = dataset.preparation
    (tmp_path / "t.csv").unlink()
    again = Table("gone.csv", tmp_path / "v.csv", **arguments, preparation=kept)
    assert whole(again, "valid")["a"].tolist() == [2, 10]
    with pytest.raises(ArgumentError, match=r"^fill: the statistics of the run are {'a': 'median'}; keep them, or"):
        Table("gone.csv", tmp_path / "v.csv", normalize={"b": "standard"}, preparation=kept)


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"fill": {"a": {"by": "mean"}}}, "fill.a.by", "'mean' is not one of median, most_frequent"),
        ({"fill": {"a": {"buy": "median"}}}, "fill.a.buy", "did you mean 'by'"),
        ({"fill": {"t": {"by": "median"}}, "categories": ["t"]}, "fill.t", "no numbers, so no median; write by: most"),
        ({"fill": {"e": {"by": "median"}}}, "fill.e", "column 'e' has no values in the train rows; write a value"),
        ({"normalize": {"a": "std"}}, "normalize.a", "'std' is not one of standard, minmax, robust, log"),
        ({"normalize": {"aa": "minmax"}}, "normalize.aa", "'aa' is not a source; did you mean 'a'?"),
        ({"normalize": {"c": "standard"}}, "normalize", "column 'c' has the value 7 only in the train rows; leave the"),
        ({"normalize": {"q": "robust"}}, "normalize", "column 'q' has no robust scale for its values"),
        ({"normalize": {"z": "log"}}, "normalize.z", "0.0 has no logarithm; write another form in `normalize`, or"),
        ({"normalize": {"t": "standard"}, "categories": ["t"]}, "normalize.t", "categories are numbers"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_what_has_no_statistics_is_an_error(kind, arguments, argument, message, tmp_path):
    columns = {"a": [1, 2, 3, 4, 5], "c": [7] * 5, "q": [1, 1, 1, 1, 9], "z": [1, 2, 0, 4, 5], "t": list("abbca")}
    columns |= {"e": [None] * 5} if "e" in arguments.get("fill", ()) else {}
    if kind == "csv":
        rows = [
            ",".join("" if each is None else str(each) for each in row) for row in zip(*columns.values(), strict=True)
        ]
        (tmp_path / "t.csv").write_text("\n".join([",".join(columns), *rows]) + "\n")
        make = Table
        arguments = {
            "columns": {name: name for name in columns if name != "t" or "categories" in arguments},
            **arguments,
        }
    else:
        pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2)
        make = Parquet
    with pytest.raises((ArgumentError, StreamError)) as told:
        whole(make(str(tmp_path / f"t.{kind}"), **arguments), "train")
    if kind == "parquet" and argument == "normalize.z":
        assert "row group 1, row 0: column 'z': 0.0 has no logarithm" in str(told.value)
        return
    assert told.value.argument == argument
    assert message in told.value.message
    if argument == "normalize.z":
        assert "t.csv, Row #4: " in told.value.message
