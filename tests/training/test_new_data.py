"""Data that a run has not seen: read as the run has read its own, without targets, on a machine without its data."""

import csv
import io
import re
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from campaign import thinned
from click.testing import CliRunner
from PIL import Image

from emrun import create_training, evaluate, predict
from emrun.base.errors import ConfigError, HookError, StreamError, UsageError, exit_status
from emrun.cli import emrun as commands

RNG = np.random.default_rng(0)
CLASSIFIES = {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "label"]}


def linear(width, count, loss=CLASSIFIES, source="x", **more):
    """Return the section of a linear model."""
    layers = [{"class": "torch.nn.Flatten"}, {"class": "torch.nn.Linear", "in_features": width, "out_features": count}]
    return {
        "module": {"class": "torch.nn.Sequential", "args": layers},
        "inputs": [source],
        "outputs": ["logits"],
        "loss": loss,
        "optimizer": {"class": "SGD", "lr": 0.1},
        **more,
    }


def run_of(dataset, model, **more):
    """Train a run in the current directory for an epoch, and return its directory."""
    config = {"seed": 1, "dataset": dataset, "model": model, "hooks": [{"StopAfter": {"epochs": 1}}], **more}
    training = create_training(config, output_dir="run", overrides=["main_loop.report=false"])
    assert training.main_loop.run_training().status == "finished"
    return Path("run")


def moved(run, *data):
    """Move a run, and copy new data, to a place that has nothing else; return the run."""
    Path("far").mkdir()
    for path in map(Path, data):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, Path("far") / path.name)
    shutil.move(run, "far/run")
    return Path("far/run")


def picture(path, colour=None, size=8):
    """Write a picture of one colour with noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.normal(RNG.integers(256) if colour is None else colour, 20, (size, size, 3)).clip(0, 255)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def rows(path):
    with Path(path).open() as file:
        return list(csv.DictReader(file))


def table(path, count, header="name,a,b,city,label", **values):
    """Write a CSV file with so many rows; `values` are those of a column in the first rows."""
    columns = header.split(",")
    lines = [header]
    for row in range(count):
        made = {
            "name": f"r{row}",
            "a": f"{RNG.normal():.3f}",
            "b": f"{RNG.normal():.3f}",
            "city": ["Brno", "Rome"][row % 2],
            "label": ["no", "yes", "maybe"][row % 3],
            "price": f"{100 + row}",
        }
        made |= {name: given[row] for name, given in values.items() if row < len(given)}
        lines.append(",".join(made[name] for name in columns))
    Path(path).write_text("\n".join(lines) + "\n")


TABLE = {
    "class": "Table",
    "train": "t.csv",
    "id": "name",
    "columns": {"x": ["a", "b"], "label": "label"},
    "categories": ["label"],
    "normalize": {"x": "standard"},
    "split": {"valid": 0.2, "by": "label"},
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pictures():
    for number in range(6):
        picture(Path(f"train/cat/{number}.png"), 50)
        picture(Path(f"train/dog/{number}.png"), 200)
        picture(Path(f"new/sub/{number}.png") if number % 2 else Path(f"new/{number}.png"))


OF_PICTURES = [{}, {"split": {"valid": 0.34, "by": "label"}}, {"size": 4}]


@pytest.mark.parametrize("more", thinned(OF_PICTURES, OF_PICTURES[1:2]))
def test_pictures_of_a_folder_without_classes_where_the_train_pictures_are_not(pictures, more):
    width = 48 if more.get("size") else 192
    run = run_of({"class": "ImageFolder", "train": "train", **more}, linear(width, 2, source="image"))
    Path("new/notes.txt").write_text("none")
    predict(run, data="new", file="here.csv", probabilities=True)
    found = rows("here.csv")
    assert list(found[0]) == ["id", "class", "name", "probability.cat", "probability.dog"]
    assert [row["id"] for row in found] == ["0.png", "2.png", "4.png", "sub/1.png", "sub/3.png", "sub/5.png"]
    for row in found:
        shares = [float(row["probability.cat"]), float(row["probability.dog"])]
        assert sum(shares) == pytest.approx(1)
        assert row["name"] == ["cat", "dog"][int(row["class"])] == ["cat", "dog"][shares.index(max(shares))]
    shutil.rmtree("train")
    run = moved(run, "new")
    predict(run, data="far/new/", file="there.csv", probabilities=True)
    assert Path("there.csv").read_bytes() == Path("here.csv").read_bytes()
    one = predict(run, data="far/new/sub/3.png", probabilities=True)
    assert (one["id"].tolist(), one["probability.cat"].shape) == (["sub/3.png"[4:]], (1,))
    assert f"{one['probability.cat'][0]}"[:6] == found[4]["probability.cat"][:6]
    assert list(predict(run, data="far/new")) == ["id", "position", "logits"]
    some = predict(run, data="far/new/*.png")  # a pattern
    assert some["id"].tolist() == ["0.png", "2.png", "4.png"]


def test_what_is_wrong_with_pictures_is_said_with_the_file(pictures):
    run = run_of({"class": "ImageFolder", "train": "train", "batch_size": 2}, linear(192, 2, source="image"))
    Path("empty").mkdir()
    picture(Path("large/0.png"))
    picture(Path("large/1.png"), size=9)
    shutil.copytree("new", "bad")
    Path("bad/sub/5.png").write_bytes(b"no picture")
    Path("notes.txt").write_text("none")
    for data, message in (
        ("empty", r"empty has no images \(\.bmp, .*\)"),
        ("large", r"large/1\.png has 9 x 9 pixels \(.*\), but the first image of train has 8 x 8; set `size`"),
        ("bad", r"cannot read .*bad/sub/5\.png \(row 5\): cannot identify image file"),
        ("notes.txt", r"cannot read .*notes\.txt \(row 0\): cannot identify image file"),
    ):
        with pytest.raises(StreamError, match=message) as raised:
            predict(run, data=data, file="made.csv")
        assert exit_status(raised.value) == 2, data
        assert not [path for path in Path().iterdir() if "made.csv" in path.name]
    assert len(predict(run, data="large", overrides=["dataset.size=8"])["id"]) == 2  # as the message says


@pytest.mark.campaign
def test_transforms_of_the_training_alone_need_no_library_to_evaluate_or_predict(pictures, monkeypatch):
    dataset = {"class": "ImageFolder", "train": "train", "split": {"valid": 0.34, "by": "label"}}
    run = run_of(dataset, linear(192, 2, source="image"))
    expected = predict(run, data="new"), evaluate(run, "valid")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    more = ["dataset.augment=[{ColorJitter: {brightness: 0.3}}]"]
    assert (predict(run, data="new", overrides=more)["logits"] == expected[0]["logits"]).all()
    assert evaluate(run, "valid", more) == expected[1]
    with pytest.raises(ConfigError, match="torchvision"):
        create_training("run/config.yaml", output_dir="again", overrides=more)
    with pytest.raises(ConfigError, match="torchvision"):
        predict(run, data="new", overrides=["dataset.transform=[{Resize: {size: [8, 8]}}]"])


@pytest.mark.parametrize("policy", thinned(["warn", "ignore"], ["warn"]))
def test_any_number_of_bad_new_examples_is_left_out_by_name(pictures, policy, caplog):
    run = run_of({"class": "ImageFolder", "train": "train", "batch_size": 2}, linear(192, 2, source="image"))
    for name in ("0.png", "2.png", "sub/3.png"):
        Path("new", name).write_bytes(Path("new", name).read_bytes()[:60])
    more = [f"main_loop.on_bad_example={policy}"]
    made = predict(run, data="new", file="made.csv", overrides=more)
    assert made.rows == 3
    assert sorted(made.left_out) == ["0.png", "2.png", "sub/3.png"]
    assert [row["id"] for row in rows("made.csv")] == ["4.png", "sub/1.png", "sub/5.png"]
    (told,) = [each for each in caplog.records if each.getMessage().endswith("left out 3 bad examples")]
    assert (told.levelname, [each[:5] for each in told.names]) == ("WARNING", ["0.png", "2.png", "sub/3"])
    words = ["predict", "run", "--data", "new", "-o", "masks.csv", *more]
    assert "without 3 bad examples: 0.png, 2.png, sub/3.png" in CliRunner().invoke(commands, words).output
    for path in Path("new").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(StreamError, match="stream 'new' has no batch for the model"):
        predict(run, data="new", file="other.csv", overrides=more)
    assert not Path("other.csv").exists()


@pytest.mark.campaign
def test_many_columns_are_one_line_that_names_the_masks(pictures):
    run = run_of({"class": "ImageFolder", "train": "train"}, linear(192, 40, source="image"))
    told = CliRunner().invoke(commands, ["predict", "run", "--data", "new", "-o", "made.csv"]).output
    assert "logits.17 and 22 more; for masks of pictures, write -o masks/\n" in told
    assert predict(run, data="new", file="made.csv", overwrite=True).columns[-1] == "logits.39"


@pytest.mark.parametrize("split", thinned([TABLE["split"], None], [TABLE["split"]]))
@pytest.mark.parametrize("normalize", thinned([TABLE["normalize"], None], [TABLE["normalize"]]))
def test_rows_without_the_target_where_the_train_rows_are_not(split, normalize):
    table("t.csv", 30)
    table("new.csv", 5, "b,name,other,a".replace("other,", ""))
    run = run_of({**TABLE, "split": split, "normalize": normalize}, linear(2, 3))
    predict(run, data="new.csv", file="here.csv", probabilities=True)
    found = rows("here.csv")
    assert list(found[0]) == ["id", "class", "name", "probability.maybe", "probability.no", "probability.yes"]
    assert [row["id"] for row in found] == ["r0", "r1", "r2", "r3", "r4"]
    Path("t.csv").unlink()
    run = moved(run, "new.csv")
    predict(run, data="far/new.csv", file="there.csv", probabilities=True)
    assert Path("there.csv").read_bytes() == Path("here.csv").read_bytes()


@pytest.mark.campaign
def test_targets_of_new_rows_do_not_matter(caplog):
    table("t.csv", 30)
    run = run_of(TABLE, linear(2, 3))
    table("new.csv", 6)
    expected = predict(run, data="new.csv")
    assert list(expected) == ["id", "logits"]
    text = Path("new.csv").read_text()
    Path("empty.csv").write_text(re.sub(r",\w+$", ",", text, flags=re.MULTILINE).replace("city,", "city,label"))
    Path("other.csv").write_text(text.replace("maybe", "never"))
    for file in ("empty.csv", "other.csv"):
        found = predict(run, data=file)
        assert (found["logits"] == expected["logits"]).all(), file


def test_categories_that_no_train_row_has_are_counted(caplog):
    table("t.csv", 30)
    columns = {"x": ["a", "b"], "city": "city", "label": "label"}
    embeds = {
        "module": {"class": "torch.nn.Embedding", "num_embeddings": 3, "embedding_dim": 3},
        "inputs": {"input": "city"},
    }
    run = run_of({**TABLE, "columns": columns, "categories": ["label", "city"]}, {**linear(2, 3), **embeds})
    table("new.csv", 9, "name,a,b,city", city=["Rome", "Oslo", "Brno", "Oslo", "Wien"])
    table("lacks.csv", 9, "name,a,b")
    with pytest.raises(StreamError, match=r"lacks\.csv has no column 'city' \(it has name, a, b\)"):
        predict(run, data="lacks.csv")
    predict(run, data="new.csv")
    (told,) = [each.getMessage() for each in caplog.records if "no train row" in each.message]
    assert told.endswith(
        "new.csv, Row #3: column 'city': 3 rows with categories that no train row has ('Oslo' 2, 'Wien' 1), "
        "which get the number 2"
    )


def test_a_column_without_any_value_is_told_by_a_run(caplog):
    table("t.csv", 30, a=["3"] * 20)
    run = run_of({**TABLE, "fill": {"a": {"by": "median"}}}, linear(2, 3))
    table("new.csv", 6, a=[""] * 6)
    predict(run, data="new.csv")
    (told,) = [each.getMessage() for each in caplog.records if " are filled with " in each.getMessage()]
    assert "new.csv: column 'a': 6 of 6 rows are filled with 3.0, the median of the train rows; " in told


def test_what_is_wrong_with_rows_is_said_with_file_and_row():
    table("t.csv", 30)
    run = run_of({**TABLE, "batch_size": 2}, linear(2, 3))
    table("none.csv", 0)
    Path("blank.csv").write_text("")
    table("lacks.csv", 4, "name,b")
    table("less.csv", 4, "name,city")
    table("target.csv", 4, "name,label")
    table("unnamed.csv", 4, "a,b")
    table("gap.csv", 4, a=["1", "2", "", "3"])
    table("word.csv", 4, a=["1", "2", "three", "4"])
    table("mixed.csv", 4)
    text = Path("mixed.csv").read_text()
    Path("semicolons.csv").write_text(text.replace(",", ";"))
    lines = text.splitlines()
    Path("mixed.csv").write_text("\n".join([*lines[:3], lines[3].replace(",", ";"), lines[4]]))
    for file, message in (
        ("none.csv", r"none\.csv contains no examples"),
        ("blank.csv", r"blank\.csv cannot be read: Empty CSV file"),
        ("lacks.csv", r"lacks\.csv has no column 'a'"),
        ("less.csv", r"less\.csv has none of the columns a, b, label"),
        ("target.csv", r"target\.csv has no column 'a' \(it has name, label\)"),
        ("unnamed.csv", r"unnamed\.csv has no column 'name'"),
        ("gap.csv", r"gap\.csv: column 'a': Row #4 is empty; write a value"),
        ("word.csv", r"word\.csv cannot be read: In CSV column #1: Row #4: .* invalid value 'three'"),
        ("mixed.csv", r"mixed\.csv cannot be read: CSV parse error: Row #4: Expected 5 columns, got 1"),
        ("semicolons.csv", r"semicolons\.csv: cells are separated by ';'; write commas"),
    ):
        with pytest.raises(StreamError, match=message) as raised:
            predict(run, data=file, file="made.csv")
        assert exit_status(raised.value) == 2, file
        assert file in f"{raised.value}{raised.value.__notes__}"
        assert not [path for path in Path().iterdir() if "made.csv" in path.name]
    for file, override in (("unnamed.csv", "dataset.id=null"), ("gap.csv", 'dataset.fill={"a": 0}')):  # as they say
        assert len(predict(run, data=file, overrides=[override])["logits"]) == 4


def test_values_have_the_unit_of_the_target():
    table("t.csv", 30, "name,a,b,price")
    dataset = {**TABLE, "columns": {"x": ["a", "b"], "price": ["price"]}, "categories": None, "split": {"valid": 0.2}}
    dataset["normalize"] = {"x": "standard", "price": "standard"}
    loss = {"class": "torch.nn.MSELoss", "inputs": ["logits", "price"]}
    run = run_of(dataset, linear(2, 1, loss, units={"logits": "price"}))
    table("new.csv", 4, "name,a,b")
    found = predict(run, data="new.csv")
    assert list(found) == ["id", "logits"]
    assert predict(run, data="new.csv", file="made.csv").columns == ("id", "logits")  # not logits.0
    assert ((found["logits"] > 90) & (found["logits"] < 140)).all()
    with pytest.raises(HookError, match=r"no loss of the model says how .* \(there is MSELoss\); write softmax"):
        predict(run, data="new.csv", probabilities=True)
    assert exit_status(HookError("")) == 2


@pytest.mark.campaign
@pytest.mark.parametrize("targets", thinned([{}, {"label": "label"}], [{}]))
def test_parquet_files_with_and_without_targets(targets, caplog):
    def write(path, names, count=12, **more):
        columns = {
            "x": [[float(row), row % 5.0] for row in range(count)],
            "city": ["Brno", "Rome"] * (count // 2),
            "label": [row % 3 for row in range(count)],
            "id": [f"r{row}" for row in range(count)],
            **more,
        }
        pa.parquet.write_table(pa.table({name: columns[name] for name in names}), path)

    write("t.parquet", ["x", "city", "label", "id"])
    forms = {"categories": ["city", "label"], "normalize": {"x": "standard"}}
    run = run_of({"class": "Parquet", "train": "t.parquet", **forms}, linear(2, 3))
    Path("new").mkdir()
    write("new/one.parquet", ["id", "city", *targets, "x"], city=["Oslo", "Rome"] * 6)
    found = predict(run, data="new", probabilities=True)
    assert list(found) == ["id", "class", "name", "probability.0", "probability.1", "probability.2"]
    assert found["id"].tolist() == [f"r{row}" for row in range(12)]
    assert "column 'city': 6 rows with categories that no train row has ('Oslo' 6)" in caplog.text
    Path("t.parquet").unlink()
    again = predict(moved(run, "new"), data="far/new/*.parquet", probabilities=True)
    assert all((again[name] == found[name]).all() for name in found)
    write("lacks.parquet", ["city"])
    Path("cut.parquet").write_bytes(Path("new/one.parquet").read_bytes()[:100])
    write("none.parquet", ["x", "city"], 0)
    for file, message in (
        ("lacks.parquet", "forward of Sequential needs x"),
        ("cut.parquet", r"cut\.parquet' is not a complete Parquet file"),
        ("none.parquet", r"none\.parquet: contains no examples"),
    ):
        with pytest.raises(StreamError, match=message) as raised:
            predict(Path("far/run"), data=file)
        assert exit_status(raised.value) == 2


def shard(path, count, fields, start=0):
    with tarfile.open(path, "w") as archive:
        for number in range(start, start + count):
            for field in fields:
                content = str(number % 2).encode()
                if field == "png":
                    file = io.BytesIO()
                    Image.fromarray(RNG.integers(0, 255, (8, 8, 3)).astype(np.uint8)).save(file, "png")
                    content = file.getvalue()
                member = tarfile.TarInfo(f"{number:03}.{field}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def test_shards_without_labels():
    shard("t.tar", 10, ["png", "cls"])
    dataset = {"class": "TarShards", "train": "t.tar", "sources": {"image": "png", "label": "cls"}, "size": 8}
    run = run_of(dataset, linear(192, 2, source="image"))
    Path("new").mkdir()
    shard("new/a.tar", 3, ["png"])
    shard("new/b.tar", 2, ["png"], 3)
    found = predict(run, data="new", probabilities=True)
    assert list(found) == ["id", "class", "probability.0", "probability.1"]
    assert found["id"].tolist() == ["000", "001", "002", "003", "004"]
    Path("t.tar").unlink()
    again = predict(moved(run, "new"), data="far/new", probabilities=True)
    assert all((again[name] == found[name]).all() for name in found)
    shard("other.tar", 2, ["cls"])
    with pytest.raises(StreamError, match=r"forward of Sequential needs image"):
        predict("far/run", data="other.tar")


@pytest.mark.campaign
def test_rows_that_hugging_face_reads():
    pytest.importorskip("datasets")
    Path("t.jsonl").write_text("".join(f'{{"x": [{row}.5, 1.0], "label": {row % 2}}}\n' for row in range(10)))
    Path("new.jsonl").write_text("".join(f'{{"x": [{row}.5, 1.0]}}\n' for row in range(4)))
    dataset = {"class": "HuggingFace", "train": "t.jsonl", "columns": ["x", "label"], "cache_dir": "cache"}
    run = run_of(dataset, linear(2, 2))
    found = predict(run, data="new.jsonl", probabilities=True)
    assert list(found) == ["position", "class", "probability.0", "probability.1"]
    Path("t.jsonl").unlink()
    shutil.rmtree("cache")
    again = predict(moved(run, "new.jsonl"), data="far/new.jsonl", probabilities=True)
    assert all((again[name] == found[name]).all() for name in found)


def test_forecasts_of_rows_whose_future_is_not_known():
    def write(path, count):
        lines = [f"{row},{np.sin(row / 3):.4f}" for row in range(count)]
        Path(path).write_text("\n".join(["time,load", *lines]) + "\n")

    write("t.csv", 60)
    write("new.csv", 9)
    write("short.csv", 7)
    dataset = {
        "class": "Table",
        "train": "t.csv",
        "id": "time",
        "columns": {"x": ["load"]},
        "window": {"past": 8, "future": 2, "order": "time", "future_of": ["load"]},
        "normalize": {"x": "standard"},
        "split": {"valid": 0.3, "time": "time"},
    }
    layers = [
        {"class": "torch.nn.Flatten"},
        {"class": "torch.nn.Linear", "in_features": 8, "out_features": 2},
        {"class": "torch.nn.Unflatten", "dim": 1, "unflattened_size": [2, 1]},
    ]
    loss = {"class": "torch.nn.MSELoss", "inputs": ["logits", "future"]}
    module = {"class": "torch.nn.Sequential", "args": layers}
    run = run_of(dataset, linear(8, 2, loss, module=module, units={"logits": "future"}))
    found = predict(run, data="new.csv")
    assert found["id"].tolist() == ["7", "8"]
    assert found["logits"].shape == (2, 2, 1)
    with pytest.raises(
        StreamError, match=r"short\.csv: new has no 8 rows that follow .* load; add the rows that come before"
    ):
        predict(run, data="short.csv")


OWN = """
import numpy as np


class Data:
    def __init__(self, scale=1, preparation=None):
        self.preparation = preparation or {"mean": 2.0}
        self.opened = preparation is None
        self.scale = scale

    def train_stream(self, ctx):
        for rows in ctx.batches(8, 4):
            yield {"x": np.ones((len(rows), 2), "float32") * self.preparation["mean"], "label": rows % 2}
"""
PLAIN = """
    def new_stream(self, path):
        assert not self.opened
        for line in path.read_text().split():
            yield {"x": [[float(line) * self.scale] * 2], "id": [line]}
"""
WITH_CONTEXT = """
    def new_stream(self, path, ctx):
        values = np.array(path.read_text().split(), "float32")
        for rows in ctx.batches(len(values), 2, shuffle=True):
            yield {"x": values[rows, None] * [[self.scale, self.scale]], "id": [f"{values[row]:.0f}" for row in rows]}
"""


@pytest.mark.parametrize("method", thinned([PLAIN, WITH_CONTEXT], [WITH_CONTEXT]), ids=["plain", "with context"])
def test_a_dataset_of_ones_own(method, tmp_path, monkeypatch):
    (tmp_path / "own_new.py").write_text(OWN + method)
    monkeypatch.syspath_prepend(tmp_path)
    run = run_of({"class": "own_new.Data"}, linear(2, 2), eval={"new": {"dataset": {"scale": 10}}})
    (tmp_path / "values.txt").write_text("1 2 3")
    found = predict(run, data="values.txt")
    assert found["id"].tolist() == ["1", "2", "3"]
    other = predict(run, data="values.txt", overrides=["dataset.scale=1"])
    assert not np.allclose(found["logits"], other["logits"])
    weights = torch.tensor(other["logits"] - found["logits"])
    assert weights.shape == (3, 2)


CANNOT = [
    ("", r"dataset Data has no method new_stream\(path\), .* \(its streams: train\)"),
    (PLAIN.replace("path", "file"), r"no method new_stream\(path\), .* \(its streams: new, train\)"),
]


@pytest.mark.parametrize(("method", "message"), thinned(CANNOT, CANNOT[:1]), ids=["none", "with another parameter"])
def test_a_dataset_that_cannot_read_new_data(method, message, tmp_path, monkeypatch):
    (tmp_path / "own_old.py").write_text(OWN + method)
    monkeypatch.syspath_prepend(tmp_path)
    run = run_of({"class": "own_old.Data"}, linear(2, 2))
    (tmp_path / "values.txt").write_text("1 2 3")
    with pytest.raises(UsageError, match=message):
        predict(run, data="values.txt")
    with pytest.raises(UsageError, match=r"there is no file or folder .*nowhere"):
        predict(run, data="nowhere")


BCE = {"class": "torch.nn.BCEWithLogitsLoss", "inputs": ["logits", "flag"]}
FLAGS = {**TABLE, "columns": {"x": ["a", "b"], "flag": ["a"]}, "categories": None, "split": None}
IMPORT_LOSS = {"import": "torch.nn.functional.cross_entropy", "inputs": ["logits", "label"]}
OWN_LOSS = {"class": "torch.nn.MultiMarginLoss", "inputs": ["logits", "label"]}
LOSSES = [
    (TABLE, 2, IMPORT_LOSS, True, ["class", "name", "probability.no", "probability.yes"]),
    (TABLE, 2, OWN_LOSS, "softmax", ["class", "name", "probability.no", "probability.yes"]),
    (FLAGS, 1, BCE, True, ["class", "probability.0", "probability.1"]),
    ({**FLAGS, "columns": {"x": ["a", "b"], "flag": ["a", "b"]}}, 2, BCE, True, ["probability.0", "probability.1"]),
]


@pytest.mark.parametrize(
    ("dataset", "count", "loss", "probabilities", "columns"),
    thinned(LOSSES, [LOSSES[0], LOSSES[2]]),
    ids=["cross entropy", "as it is told", "a binary loss", "of several labels"],
)
def test_probabilities_follow_the_loss(dataset, count, loss, probabilities, columns):
    table("t.csv", 30, "name,a,b,label", label=["yes", "no"] * 15)
    table("new.csv", 7, "name,a,b")
    run = run_of(dataset, linear(2, count, loss))
    found = predict(run, data="new.csv", probabilities=probabilities, variables=["logits"])
    assert list(found) == ["id", "logits", *columns]
    logits = torch.tensor(found["logits"])
    wide = torch.cat([-logits, logits], 1) / 2 if count == 1 else logits
    expected = wide.sigmoid() if loss is BCE and count > 1 else wide.softmax(1)
    given = np.stack([found[name] for name in columns if "probability" in name], axis=1)
    assert np.allclose(given, expected, atol=1e-6)
    if "class" in columns:
        assert (found["class"] == given.argmax(1)).all()


@pytest.mark.campaign
def test_of_several_losses_a_variable_chooses_one(monkeypatch):
    table("t.csv", 30, "name,a,b,label,city")
    table("new.csv", 4, "name,a,b")
    Path("own_two.py").write_text(
        "import torch\n\nclass Two(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 5)\n\n    def forward(self, x):\n"
        "        return self.layer(x).split([3, 2], dim=1)\n"
    )
    monkeypatch.syspath_prepend(Path.cwd())
    columns = {"x": ["a", "b"], "label": "label", "city": "city"}
    losses = {
        name: {"class": "torch.nn.CrossEntropyLoss", "inputs": [name, source]}
        for name, source in (("of_label", "label"), ("of_city", "city"))
    }
    model = {**linear(2, 5, {f"loss_{name}": each for name, each in losses.items()}), "outputs": [*losses]}
    run = run_of(
        {**TABLE, "columns": columns, "categories": ["label", "city"]}, {**model, "module": {"class": "own_two.Two"}}
    )
    with pytest.raises(HookError, match=r"several outputs, of_label, of_city; choose one by `variables`"):
        predict(run, data="new.csv", probabilities=True)
    found = predict(run, data="new.csv", probabilities=True, variables=["of_city"])
    assert list(found)[2:] == ["class", "name", "probability.Brno", "probability.Rome"]


@pytest.mark.parametrize(
    ("count", "loss"), thinned([(2, "CrossEntropyLoss"), (1, "BCEWithLogitsLoss")], [(2, "CrossEntropyLoss")])
)
def test_masks_are_files_named_as_the_pictures(count, loss, pictures, tmp_path, monkeypatch):
    (tmp_path / "own_masks.py").write_text(
        "from emrun.datasets import ImageFolder\n\n\nclass Masks(ImageFolder):\n    def train_stream(self, ctx):\n"
        "        for batch in super().train_stream(ctx):\n            mask = (batch['image'].mean(1) > 0.5)\n"
        f"            mask = mask.astype('int64') if {count} == 2 else mask[:, None].astype('float32')\n"
        "            yield {**batch, 'mask': mask}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = {
        **linear(0, 0, {"class": f"torch.nn.{loss}", "inputs": ["logits", "mask"]}, source="image"),
        "module": {"class": "torch.nn.Conv2d", "in_channels": 3, "out_channels": count, "kernel_size": 1},
    }
    run = run_of({"class": "own_masks.Masks", "train": "train"}, model)
    picture(Path("new/0.jpg"))
    made = predict(run, data="new", file="masks/")
    assert (made.rows, made.columns) == (7, ("id", "file"))
    found = {row["id"]: row["file"] for row in rows("masks/masks.csv")}
    assert found["0.jpg"] == "0.png"
    assert found["0.png"] == "0.png.png"
    assert found["sub/3.png"] == "sub/3.png"
    assert sorted([*found.values(), "masks.csv"]) == sorted(
        str(path.relative_to("masks")) for path in Path("masks").rglob("*.*")
    )
    logits = predict(run, data="new")["logits"]
    expected = logits[0].argmax(0) if count == 2 else (logits[0, 0] > 0) * 255
    assert (np.asarray(Image.open("masks/0.png")) == expected).all()
    with pytest.raises(UsageError, match=r"masks exists; choose another file, or replace"):
        predict(run, data="new", file="masks/")
    predict(run, data="new/0.jpg", file="masks/", overwrite=True)
    assert sorted(path.name for path in Path("masks").iterdir()) == ["0.png", "masks.csv"]
    Path("masks/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"masks has notes\.txt, which is not a mask; choose another folder"):
        predict(run, data="new", file="masks/", overwrite=True)
    Path("new/9.png").write_bytes(b"none")
    with pytest.raises(StreamError, match=r"9\.png"):
        predict(run, data="new", file="other/", overrides=["dataset.batch_size=2"])
    assert not [path for path in Path().iterdir() if "other" in path.name]


def test_the_command_takes_a_stream_or_data():
    table("t.csv", 30)
    table("new.csv", 3, "name,a,b")
    run_of(TABLE, linear(2, 3))

    def call(*words):
        done = CliRunner().invoke(commands, ["predict", "run", *words, "-o", "p.csv", "-q"], standalone_mode=False)
        status = getattr(done.exception, "exit_code", done.return_value)
        return status, f"{done.output}{done.exception or ''}"

    status, told = call("--data", "new.csv", "dataset.batch_size=1", "--probabilities")
    assert status == 0, told
    assert "p.csv: 3 rows of new.csv: id, class, name, probability.maybe, probability.no, probability.yes" in told
    for words, message in (
        (["valid", "--data", "new.csv"], "valid: with --data there is no STREAM"),
        ([], "Missing argument 'STREAM'; for data that the run has not seen, write --data PATH"),
        (["new", "--overwrite"], "the stream 'new' is that of new data: emrun predict RUN --data PATH"),
        (["--data", ""], "the path is empty"),
        (["./new.csv"], "; for new data, write --data ./new.csv"),
    ):
        status, told = call(*words)
        assert status == 2
        assert message in told
    status, told = call("dataset.batch_size=1", "~hooks", "valid", "--overwrite", "--probabilities", "softmax")
    assert status == 0, told
    assert "p.csv: 6 rows of stream valid: id, class, name" in told


@pytest.mark.campaign
def test_a_mixture_reads_new_data_by_the_dataset_that_is_left(pictures):
    one = {"class": "emrun.datasets.ImageFolder", "train": "train"}
    dataset = {
        "class": "Mixed", "datasets": {"one": one, "two": {**one, "flip": True}}, "weights": {"one": 1, "two": 1},
        "batches_per_epoch": 2,
    }  # fmt: skip
    run = moved(run_of(dataset, linear(192, 2, source="image")), "new")
    shutil.rmtree("train")
    with pytest.raises(StreamError, match="new data could be those of one, two; leave all but one out, as by") as told:
        predict(run, data="far/new")
    assert exit_status(told.value) == 2
    overrides = re.findall(r"'(~[^']+)'", str(told.value))
    assert overrides == ["~dataset.datasets.two", "~dataset.weights.two"]
    found = predict(run, data="far/new", probabilities=True, overrides=overrides)
    assert found["id"].tolist()[0] == "0.png"
    assert "probability.cat" in found


@pytest.mark.campaign
def test_windows_of_new_texts_where_the_train_texts_are_not():
    Path("t.txt").write_text("to be or not to be " * 20)
    Path("new").mkdir()
    Path("new/a.txt").write_text("that is the question " * 3)
    model = {
        "module": {"class": "torch.nn.Embedding", "num_embeddings": 256, "embedding_dim": 256},
        "inputs": ["tokens"],
        "outputs": ["logits"],
        "loss": {"import": "emrun.losses.next_token", "inputs": ["logits", "tokens"]},
        "optimizer": {"class": "SGD", "lr": 0.1},
    }
    dataset = {"class": "TokenWindows", "train": "t.txt", "window": 9, "cache_dir": "tokens"}
    run = run_of(dataset, model)
    run = moved(run, "new")
    Path("t.txt").unlink()
    shutil.rmtree("tokens")
    found = predict(run, data="far/new")
    assert found["logits"].shape == (6, 9, 256)
    assert not Path("tokens").exists()
    Path("short.txt").write_text("short")
    with pytest.raises(StreamError, match="5 tokens are too few; a window and its targets need 10"):
        predict(run, data="short.txt")


@pytest.mark.campaign
def test_a_dataset_without_new_stream_says_how_its_streams_get_new_data(tmp_path, monkeypatch):
    Path("my_torch.py").write_text(
        "import torch\n"
        "class Numbers(torch.utils.data.Dataset):\n"
        "    def __init__(self, n):\n"
        "        self.n = n\n"
        "    def __len__(self):\n"
        "        return self.n\n"
        "    def __getitem__(self, i):\n"
        "        return torch.full((2,), float(i)), i % 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    dataset = {"class": "TorchDataset", "train": {"class": "my_torch.Numbers", "n": 8}, "sources": ["x", "label"]}
    run = run_of(dataset, linear(2, 2))
    Path("new.txt").write_text("")
    with pytest.raises(UsageError, match=r"predict RUN test 'dataset\.test=\.\.\.' \(its streams: train\)"):
        predict(run, data="new.txt")
    given = "dataset.test={class: my_torch.Numbers, n: 3}"
    assert predict(run, "test", overrides=[given])["logits"].shape == (3, 2)


@pytest.mark.campaign
@pytest.mark.parametrize("sizes", thinned([[8], [8, 8, 9]], [[8]]))
def test_new_shards_have_the_size_of_the_train_pictures_if_these_have_one(sizes):
    def write(path, sides):
        with tarfile.open(path, "w") as archive:
            for number, side in enumerate(sides):
                file = io.BytesIO()
                Image.fromarray(RNG.integers(0, 255, (side, side, 3)).astype(np.uint8)).save(file, "png")
                for field, content in (("png", file.getvalue()), ("cls", b"0")):
                    member = tarfile.TarInfo(f"{number:03}.{field}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))

    write("t.tar", sizes * 2)
    dataset = {"class": "TarShards", "train": "t.tar", "sources": {"image": "png", "label": "cls"}, "batch_size": 1}
    model = linear(3, 2, source="image")
    model["module"]["args"].insert(0, {"class": "torch.nn.AdaptiveAvgPool2d", "output_size": 1})
    run = run_of(dataset, model)
    write("new.tar", [8, 9])
    if len(sizes) > 1:
        assert len(predict(run, data="new.tar")["id"]) == 2
        return
    with pytest.raises(
        StreamError, match=r"9 x 9 pixels \(height x width\), but the first image of train has 8 x 8; set"
    ):
        predict(run, data="new.tar")
    assert len(predict(run, data="new.tar", overrides=["dataset.size=8"])["id"]) == 2
