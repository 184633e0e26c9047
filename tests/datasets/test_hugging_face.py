"""HuggingFace: local files and saved folders as streams, without the network."""

import itertools
import json
import os
import shutil
import socket
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from campaign import thinned

from emrun.base.errors import ArgumentError, MissingExtra, StreamError
from emrun.config.import_finder import locate
from emrun.datasets import HuggingFace

library = locate("datasets")  # Hugging Face's, not the folder of this repository
COLUMNS = {
    "id": list(range(23)),
    "x": [number / 4 for number in range(23)],
    "text": [f"row {number}" for number in range(23)],
    "pair": [[number, -number] for number in range(23)],
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail every attempt to open a connection."""

    def refuse(self, address):
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write the rows in each format."""
    place = tmp_path_factory.mktemp("written")
    rows = [dict(zip(COLUMNS, values, strict=True)) for values in zip(*COLUMNS.values(), strict=True)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "rows.json").write_text(json.dumps(rows))
    (place / "rows.csv").write_text("id,x,text\n" + "".join(f"{r['id']},{r['x']},{r['text']}\n" for r in rows))
    pq.write_table(pa.table(COLUMNS), place / "rows.parquet")
    whole = library.Dataset.from_dict(COLUMNS)
    whole.save_to_disk(str(place / "saved"))
    splits = {"train": whole, "validation": whole.select(range(5)), "test": whole.select(range(3))}
    library.DatasetDict(splits).save_to_disk(str(place / "splits"))
    (place / "rows.arrow").write_bytes(next((place / "saved").glob("*.arrow")).read_bytes())
    return place


@pytest.fixture
def project(written, tmp_path, monkeypatch):
    """Go to a copy of the rows in each format."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


def rows_of(path, **arguments):
    return HuggingFace(path, **{"batch_size": 4, "cache_dir": "cache", **arguments})


@pytest.mark.parametrize("path", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.arrow", "saved"])
def test_each_format_gives_the_same_rows(project, passes, path, capfd):
    dataset = rows_of(path)
    for training in (True, False):
        (batches,) = passes(dataset, "train", training=training)
        assert len(batches) == dataset.num_batches["train"] == 6
        ids = [int(row) for batch in batches for row in batch["id"]]
        assert sorted(ids) == COLUMNS["id"]
        assert (ids == COLUMNS["id"]) != training
        for batch in batches:
            assert (batch["id"].dtype, batch["x"].dtype, type(batch["text"])) == (np.int64, np.float64, list)
            assert batch["text"] == [f"row {row}" for row in batch["id"]]
            assert np.array_equal(batch["x"] * 4, batch["id"])
            if "pair" in batch:
                assert np.array_equal(batch["pair"], np.stack([batch["id"], -batch["id"]], axis=1))
    assert capfd.readouterr().err == ""


def test_the_train_stream_keeps_the_rules(project, check_training_stream):
    check_training_stream(lambda: rows_of("rows.parquet", columns=["id", "x"]))
    check_training_stream(lambda: rows_of("saved", columns=["id", "pair"]))


def test_a_saved_folder_with_splits_gives_the_streams(project):
    dataset = rows_of("splits")
    assert dict(dataset.num_batches) == {"train": 6, "valid": 2, "test": 1}
    dataset = rows_of("splits", valid="saved")
    assert dict(dataset.num_batches) == {"train": 6, "valid": 6, "test": 1}
    assert dict(rows_of("rows.csv", test="splits").num_batches) == {"train": 6, "test": 1}


def test_files_of_a_pattern_are_put_together(project, passes):
    (project / "more.csv").write_text("id,x,text\n100,1.0,more\n")
    (batches,) = passes(rows_of("*.csv"), "train", training=False)
    assert [int(row) for batch in batches for row in batch["id"]] == [100, *range(23)]


@pytest.mark.parametrize(
    ("folder", "name"),
    thinned(
        itertools.product(
            ("data [1]", "a*b", "q?x", "[!a]"), ("rows.csv", "rows.jsonl", "rows.parquet", "rows.arrow", "saved")
        ),
        [("data [1]", "rows.csv"), ("a*b", "rows.parquet"), ("[!a]", "saved")],
    ),
)
def test_a_path_with_the_characters_of_patterns_is_taken_by_its_name(project, passes, folder, name):
    (project / folder).mkdir()
    (project / name).rename(project / folder / name)
    (batches,) = passes(rows_of(f"{folder}/{name}"), "train", training=False)
    assert [int(row) for batch in batches for row in batch["id"]] == COLUMNS["id"]


@pytest.mark.parametrize("name", ["*.csv", "rows[2].csv"])
def test_files_in_such_a_folder_may_be_a_pattern_or_have_brackets_too(project, name):
    (project / "data [1]").mkdir()
    (project / "rows.csv").rename(project / "data [1]" / "rows[2].csv")
    assert rows_of(f"data [1]/{name}").num_batches["train"] == 6


def test_changed_files_are_read_anew(project):
    assert rows_of("rows.csv").num_batches["train"] == 6
    (project / "rows.csv").write_text("id\n1\n")
    os.utime(project / "rows.csv", ns=(1, 1))
    assert rows_of("rows.csv").num_batches["train"] == 1


def test_only_the_chosen_columns_are_sources(project, passes):
    assert list(passes(rows_of("saved", columns=["text", "id"]), "train")[0][0]) == ["text", "id"]


def test_batches_may_be_changed_without_changing_the_data(project, passes):
    dataset = rows_of("saved")
    for batch in passes(dataset, "train")[0]:
        batch["x"] += 1
    (batches,) = passes(dataset, "train", training=False)
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == COLUMNS["x"]


def test_a_null_is_an_error_with_column_and_row(project, passes):
    (project / "a.jsonl").write_text('{"x": 1}\n' * 6 + '{"x": null}\n')
    with pytest.raises(StreamError, match=r"column 'x' has a null in row 6 \(the first row is 0\)"):
        passes(rows_of("a.jsonl"), "train")


@pytest.mark.parametrize("path", ["saved", "rows.jsonl"])
def test_files_that_change_under_the_map_are_an_error(project, passes, path):
    dataset = rows_of(path)
    (mapped,) = (file for file in project.glob("saved/*.arrow" if path == "saved" else "cache/**/*.arrow"))
    passes(dataset, "train")
    os.utime(mapped, ns=(1, 1))
    with pytest.raises(StreamError, match=rf"stream 'train': .*{mapped.name}' has changed since the dataset was built"):
        passes(dataset, "train")
    mapped.unlink()
    with pytest.raises(StreamError, match=rf"stream 'train': .*{mapped.name}' can no longer be read: No such file"):
        passes(dataset, "train")


def test_settings_of_the_library_are_left_as_they_were(project):
    names = ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"]
    before = [getattr(library.config, name) for name in names], library.is_progress_bar_enabled()
    rows_of("rows.csv")
    assert before == ([getattr(library.config, name) for name in names], library.is_progress_bar_enabled())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"x": 1}\n{"x":'),
        ("a.json", b"{"),
        ("a.csv", b"a,b\n1,2\n3,4,5\n"),
        ("a.csv", b""),
        ("a.jsonl", b""),
        ("a.parquet", b"PAR1"),
        ("a.arrow", b""),
    ],
)
def test_damaged_files_are_refused_by_name(project, name, content):
    (project / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=rf"^train: {name} cannot be read: "):
        rows_of(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "no.csv"}, "train: there is no file 'no.csv'"),
        ({"train": "https://example.com/a.csv"}, "train: there is no file 'https:/example.com/a.csv'"),
        ({"train": "hf://datasets/a/b.csv"}, "train: there is no file"),
        ({"train": "imdb"}, "train: there is no file 'imdb'"),
        ({"train": "cache"}, "train: 'cache' is not a folder that save_to_disk wrote"),
        ({"train": "a.txt"}, "train: a.txt: all files must end in the same of .csv, .json"),
        ({"train": ["rows.csv", "rows.json"]}, "train: csv, json: all files must end in the same of"),
        ({"train": "a::b.csv"}, "train: the library would read "),
        ({"train": 3}, "train: 3 is neither a path nor a list of paths"),
        ({"valid": "no"}, "valid: there is no file 'no'"),
        ({"valid": "only"}, "valid: 'only' has no split 'valid' (it has train)"),
        ({"columns": ["ix"]}, "columns: 'train' has no column 'ix'; did you mean 'x'? (it has id, x, text)"),
        ({"columns": "x"}, "columns: 'x' is not a list of names"),
        ({"train": "when.parquet"}, "columns: 'train' has columns that cannot be sources: 'when' (timestamp[ms])"),
        ({"batch_size": 0}, "batch_size: 0 is not a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(project, arguments, message):
    (project / "cache").mkdir()
    (project / "a.txt").touch()
    (project / "a::b.csv").write_text("a\n1\n")
    pq.write_table(pa.table({"when": pa.array([0], pa.timestamp("ms"))}), project / "when.parquet")
    library.DatasetDict({"train": library.Dataset.from_dict({"x": [1]})}).save_to_disk("only")
    with pytest.raises(ArgumentError) as caught:
        rows_of(**{"path": arguments.pop("train", "rows.csv"), **arguments})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("found", [None, np])
def test_without_the_library_the_message_has_the_command(project, monkeypatch, found):
    monkeypatch.setitem(sys.modules, "datasets", found)  # absent, or some other module of that name
    with pytest.raises(MissingExtra, match=r"HuggingFace needs datasets.*pip install 'emrun\[data\]'"):
        rows_of("rows.csv")


def test_columns_with_labels_name_their_classes(project):
    features = library.Features({"id": library.Value("int64"), "kind": library.ClassLabel(names=["cat", "dog"])})
    library.Dataset.from_dict({"id": [0, 1], "kind": [1, 0]}, features=features).save_to_disk("labelled")
    assert rows_of("labelled").classes_names() == {"kind": ["cat", "dog"]}
    assert rows_of("labelled", columns=["id"]).classes_names() == rows_of("rows.csv").classes_names() == {}


def labelled(names, labels):
    features = library.Features({"label": library.ClassLabel(names=names)})
    return library.Dataset.from_dict({"label": labels}, features=features)


def test_classes_have_the_numbers_of_train_in_all_streams(tmp_path, passes):
    splits = {"train": labelled(["bird", "cat", "dog"], [0, 1, 2]), "valid": labelled(["dog", "cat"], [1, 0, -1])}
    library.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    dataset = HuggingFace(str(tmp_path / "saved"))
    (batches,) = passes(dataset, "valid")
    assert [batch["label"].tolist() for batch in batches] == [[1, 2, -1]]
    labelled(["cat", "emu"], [0]).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(
        ArgumentError, match=r"^valid: .*other: column 'label' has classes that train .*: emu \(it has b"
    ):
        HuggingFace(str(tmp_path / "saved"), valid=str(tmp_path / "other"))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_column_has_the_type_that_holds_the_numbers_of_all_streams(tmp_path, passes, ending, is_turned):
    paths = {}
    for name, values in (("whole", [1, 2]), ("parts", [0.75, 2])):
        paths[name] = str(tmp_path / f"{name}.{ending}")
        data = library.Dataset.from_dict({"x": values})
        {"jsonl": data.to_json, "csv": data.to_csv, "parquet": data.to_parquet}[ending](paths[name])
    streams = [*reversed(paths)] if is_turned else [*paths]
    dataset = HuggingFace(paths[streams[0]], valid=paths[streams[1]], cache_dir=str(tmp_path / "cache"))
    for name, stream in zip(streams, ("train", "valid"), strict=True):
        ((batch,),) = passes(dataset, stream, training=False)
        assert (batch["x"].dtype, batch["x"].tolist()) == (np.float64, {"whole": [1, 2], "parts": [0.75, 2]}[name])


def test_a_split_with_another_type_and_a_dataset_without_rows_are_refused(project):
    (project / "more.jsonl").write_text('{"id": "one"}\n')
    with pytest.raises(ArgumentError, match=r"^valid: .*: .*Field id has incompatible types: int64 vs string$"):
        rows_of("rows.jsonl", valid="more.jsonl")
    library.Dataset.from_dict({"id": []}).save_to_disk(str(project / "empty"))
    with pytest.raises(ArgumentError, match=r"^train: 'empty': contains no examples$"):
        rows_of("empty")
