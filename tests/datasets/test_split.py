"""`split`: the rows of one file are divided as scikit-learn does, the division is kept, and changed data are told."""

import io
import itertools
import json
import pickle
import re
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from campaign import thinned
from doubles import stream_of
from PIL import Image
from sklearn.model_selection import GroupShuffleSplit, KFold, StratifiedShuffleSplit, train_test_split

from emrun.base.errors import ArgumentError, StreamError
from emrun.datasets import HuggingFace, ImageFolder, Mixed, Parquet, Table, TarShards, TorchDataset
from emrun.ranks.group import Ranks
from emrun.ranks.shares import rows_in

COUNT = 41
NUMBERS = np.arange(COUNT)
LABELS = np.random.default_rng(0).permutation(np.array([2, 10, 33])[NUMBERS % 11 % 3])
GROUPS = NUMBERS * 7 % 9
DATES = [f"2024-{1 + number * 5 % 12:02d}-{1 + number % 28:02d}" for number in range(COUNT)]
COLUMNS = {"x": NUMBERS / 4, "label": LABELS, "patient": GROUPS, "date": DATES}


def write_csv(path, columns):
    rows = [map(str, row) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(map(",".join, [list(columns), *rows])) + "\n")


def csv(folder, **arguments):
    write_csv(folder / "all.csv", COLUMNS)
    return Table(folder / "all.csv", **{"columns": {"x": "x", "label": "label"}, **arguments})


def npz(folder, **arguments):
    np.savez(folder / "all.npz", **COLUMNS)
    return Table(folder / "all.npz", **arguments)


def parquet(folder, **arguments):
    table = pa.table(COLUMNS)
    for name, begin, end in (("a", 0, 20), ("b", 20, COUNT)):
        pq.write_table(table.slice(begin, end - begin), folder / f"{name}.parquet", row_group_size=6)
    return Parquet(str(folder / "?.parquet"), **arguments)


def hugging_face(folder, **arguments):
    write_csv(folder / "all.csv", COLUMNS)
    return HuggingFace(str(folder / "all.csv"), columns=["x", "label"], cache_dir=str(folder / "cache"), **arguments)


def image_folder(folder, **arguments):
    for number, label in enumerate(LABELS):
        path = folder / "pictures" / f"c{label}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((2, 2), number, np.uint8)).save(path)
    return ImageFolder(folder / "pictures", mode="L", dtype="uint8", **arguments)


def tar_shards(folder, **arguments):
    for name, own in (("a", NUMBERS[:20]), ("b", NUMBERS[20:])):
        with tarfile.open(folder / f"{name}.tar", "w") as shard:
            for number in own.tolist():
                for field, text in (("x.cls", number), ("cls", LABELS[number])):
                    info = tarfile.TarInfo(f"row{number:02d}.{field}")
                    info.size = len(str(text))
                    shard.addfile(info, io.BytesIO(str(text).encode()))
    return TarShards(str(folder / "*.tar"), {"x": "x.cls", "label": "cls"}, **arguments)


class Items:
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"x": float(index)}


def torch_dataset(folder, **arguments):
    return TorchDataset(Items(), **arguments)


def rows_of(dataset, stream, **options):
    """Return the numbers of the rows of a stream, in their order."""
    with stream_of(dataset, stream, training=False, **options) as batches:
        found = []
        for batch in batches:
            if "image" in batch:
                found += [int(name.split("/")[1][:2]) for name in batch["id"]]
            else:
                factor = 4 if isinstance(dataset, Table | Parquet | HuggingFace) else 1
                found += np.round(np.asarray(batch["x"]) * factor).astype(int).tolist()
    return found


ALL = [csv, npz, parquet, hugging_face, image_folder, tar_shards, torch_dataset]


@pytest.mark.parametrize("make", thinned(ALL, [csv, parquet, image_folder, torch_dataset]))
def test_shares_are_those_of_scikit_learn_and_a_resumed_dataset_opens_nothing(make, tmp_path, caplog):
    with caplog.at_level("INFO"):
        dataset = make(tmp_path, batch_size=7, split={"valid": 0.25, "test": 0.2, "seed": 3})
    order = np.arange(COUNT)
    if make is image_folder:  # the files are sorted by class
        order = np.array(rows_of(make(tmp_path), "train"))
    rest, test = train_test_split(order, test_size=0.2, random_state=3)
    train, valid = train_test_split(rest, test_size=int(np.ceil(0.25 * COUNT)), random_state=3)
    for stream, rows in (("train", train), ("valid", valid), ("test", test)):
        assert sorted(rows_of(dataset, stream)) == sorted(rows.tolist())
    assert len(re.findall(r"split of .*train 21 rows.*valid 11 rows.*test 9 rows", caplog.text)) == 1
    assert dataset.num_batches == {"train": 3, "valid": 2, "test": 2}

    kept = json.loads(json.dumps(dataset.preparation))
    again = type(dataset)(**{**dataset_arguments(make, tmp_path), "preparation": kept})
    assert again.num_batches == dataset.num_batches
    assert (
        rows_of(again, "valid") == rows_of(dataset, "valid") == rows_of(again, "valid", workers=2 * (make is parquet))
    )
    assert again.preparation == kept
    with stream_of(dataset, "train") as one, stream_of(pickle.loads(pickle.dumps(again)), "train") as other:
        for first, second in zip(one, other, strict=True):
            assert np.array_equal(
                np.asarray(first["id" if "id" in first else "x"]), second["id" if "id" in second else "x"]
            )


def dataset_arguments(make, folder):
    split = {"valid": 0.25, "test": 0.2, "seed": 3}
    files = {csv: "all.csv", npz: "all.npz", parquet: "?.parquet", hugging_face: "all.csv", tar_shards: "*.tar"}
    found = {"train": str(folder / files.get(make, "pictures")), "batch_size": 7, "split": split}
    if make is torch_dataset:
        found["train"] = Items()
    elif make is hugging_face:
        found |= {"columns": ["x", "label"], "cache_dir": str(folder / "cache")}
    elif make is csv:
        found["columns"] = {"x": "x", "label": "label"}
    elif make is image_folder:
        found |= {"mode": "L", "dtype": "uint8"}
    elif make is tar_shards:
        found["sources"] = {"x": "x.cls", "label": "cls"}
    return found


@pytest.mark.parametrize("make", [csv, npz, parquet, hugging_face, tar_shards])
def test_classes_are_stratified_as_scikit_learn_does(make, tmp_path):
    dataset = make(tmp_path, split={"valid": 0.3, "by": "label"})
    splitter = StratifiedShuffleSplit(1, test_size=0.3, random_state=0)
    _, valid = next(splitter.split(NUMBERS, LABELS))
    assert rows_of(dataset, "valid") == sorted(valid.tolist())
    counts = dataset.preparation["split"]["classes"]
    assert {name: sum(each.values()) for name, each in counts.items()} == {"train": 28, "valid": 13}


@pytest.mark.parametrize("make", [csv, npz, parquet, hugging_face])
def test_a_group_is_in_one_part_and_the_last_rows_are_evaluated(make, tmp_path):
    dataset = make(tmp_path, split={"test": 0.3, "by": None, "group": "patient"})
    _, test = next(GroupShuffleSplit(1, test_size=0.3, random_state=0).split(NUMBERS, groups=GROUPS))
    assert rows_of(dataset, "test") == test.tolist()
    dataset = make(tmp_path, split={"valid": 0.2, "test": 0.1, "time": "date"})
    in_time = np.argsort(np.array(DATES), kind="stable")
    assert set(rows_of(dataset, "test")) == set(in_time[-5:].tolist())
    assert set(rows_of(dataset, "valid")) == set(in_time[-14:-5].tolist())
    if make is not hugging_face:
        dataset = make(tmp_path, columns=None, split={"valid": 0.2, "time": "date"})
        assert list(next(iter(stream_of(dataset, "train")))) == ["x", "label", "patient"]


def test_a_group_of_another_file_is_in_no_part_of_train(tmp_path):
    write_csv(tmp_path / "t.csv", {"x": range(8), "who": list("aabbccdd")})
    write_csv(tmp_path / "v.csv", {"x": range(3), "who": list("eba")})
    with pytest.raises(ArgumentError, match=r"^split\.group: .*v\.csv, Row #3: 'b' of column 'who' is in the rows"):
        Table(tmp_path / "t.csv", test=tmp_path / "v.csv", split={"valid": 0.3, "group": "who"})
    write_csv(tmp_path / "v.csv", {"x": range(3)})
    Table(tmp_path / "t.csv", test=tmp_path / "v.csv", split={"valid": 0.3, "group": "who"})


def test_rows_of_one_time_stay_together(tmp_path):
    write_csv(tmp_path / "t.csv", {"x": range(8), "day": [1, 1, 2, 2, 2, 2, 3, 3]})
    dataset = Table(tmp_path / "t.csv", split={"valid": 0.3, "time": "day"})
    assert sorted(next(iter(dataset_batches(dataset, "valid")))["x"].tolist()) == [2, 3, 4, 5, 6, 7]


def dataset_batches(dataset, stream):
    return list(stream_of(dataset, stream, training=False))


@pytest.mark.parametrize("make", [csv, torch_dataset])
def test_folds_are_those_of_scikit_learn(make, tmp_path):
    for fold, (_, valid) in enumerate(KFold(4, shuffle=True, random_state=5).split(NUMBERS)):
        dataset = make(tmp_path, split={"folds": 4, "fold": fold, "seed": 5})
        assert rows_of(dataset, "valid") == valid.tolist()
    dataset = make(tmp_path, split={"folds": 4, "fold": 1, "test": 0.25})
    _, test = train_test_split(NUMBERS, test_size=0.25, random_state=0)
    assert rows_of(dataset, "test") == sorted(test)
    assert len(rows_of(dataset, "valid")) == 8


def test_a_hashed_row_keeps_its_part_when_rows_are_added_which_is_a_warning(tmp_path, caplog):
    ids = [f"r{number}" for number in range(200)]
    form = {"valid": 0.3, "test": 0.2, "hash": "name"}
    write_csv(tmp_path / "t.csv", {"x": range(150), "name": ids[:150]})
    first = Table(tmp_path / "t.csv", id="name", batch_size=200, split=form)
    before = {name: dataset_batches(first, name)[0]["id"] for name in ("train", "valid", "test")}
    assert {name: len(each) for name, each in before.items()} == {"train": 76, "valid": 47, "test": 27}
    write_csv(tmp_path / "t.csv", {"x": range(200), "name": ids})
    again = Table(tmp_path / "t.csv", id="name", batch_size=200, split=form, preparation=first.preparation)
    for name, own in before.items():
        assert dataset_batches(again, name)[0]["id"][: len(own)] == own
    assert (
        "t.csv has changed since the run began: the rows were train 76, valid 47, test 27, and now are" in caplog.text
    )


def test_a_column_or_patterns_say_the_part(tmp_path):
    parts = ["dev" if number % 5 == 0 else "train" for number in range(COUNT)]
    write_csv(tmp_path / "t.csv", {"x": NUMBERS / 4, "part": parts})
    dataset = Table(tmp_path / "t.csv", split={"column": {"name": "part", "valid": "dev"}})
    assert rows_of(dataset, "valid") == list(range(0, COUNT, 5))
    pictures = image_folder(
        tmp_path, split={"files": {"valid": "*0.png", "test": ["c10/*1.png", "c2/*1.png", "c33/*1.png"]}}
    )
    assert sorted(rows_of(pictures, "valid")) == [0, 10, 20, 30, 40]
    assert sorted(rows_of(pictures, "test")) == [1, 11, 21, 31]
    files = parquet(tmp_path, split={"files": {"valid": "b.*"}})
    assert rows_of(files, "valid") == list(range(20, COUNT))
    shards = tar_shards(tmp_path, split={"files": {"test": str(tmp_path / "b*")}})
    assert rows_of(shards, "train") == list(range(20))


@pytest.mark.parametrize("make", [parquet, tar_shards])
def test_blocks_are_kept(make, tmp_path):
    dataset = make(tmp_path, batch_size=50, split={"valid": 0.3})
    batch = next(iter(stream_of(dataset, "train")))
    groups = [0 if number < 20 else 1 for number in rounded(batch, make)]
    assert len(groups) == 28
    assert sum(one != other for one, other in itertools.pairwise(groups)) == 1 or make is parquet
    assert rounded(batch, make) != sorted(rounded(batch, make))


def rounded(batch, make):
    return np.round(np.asarray(batch["x"]) * (4 if make is parquet else 1)).astype(int).tolist()


@pytest.mark.parametrize("make", [csv, npz, parquet, hugging_face, tar_shards])
def test_changed_data_are_an_error_with_both_counts(make, tmp_path):
    form = {"valid": 0.25, "test": 0.2, "seed": 3}
    kept = make(tmp_path, split=form).preparation
    for path in tmp_path.glob("*.*"):
        path.unlink()
    short = {name: values[:-5] for name, values in COLUMNS.items()}
    if make in (csv, hugging_face):
        write_csv(tmp_path / "all.csv", short)
    elif make is npz:
        np.savez(tmp_path / "all.npz", **short)
    elif make is parquet:
        pq.write_table(pa.table(short), tmp_path / "a.parquet", row_group_size=6)
    else:
        tar_shards(tmp_path)
        (tmp_path / "b.tar").unlink()
    dataset = globals()[kept["class"]](**{**dataset_arguments(make, tmp_path), "preparation": kept})
    message = r"^dataset\.split: .* were train 21, valid 11, test 9, and now are train \d+, valid \d+, test \d+, with"
    with pytest.raises(StreamError, match=message):
        rows_of(dataset, "valid")


def test_ids_count_too_and_another_form_or_class_is_refused(tmp_path):
    form = {"valid": 0.25}
    write_csv(tmp_path / "t.csv", {"x": range(20), "name": [f"r{each}" for each in range(20)]})
    kept = Table(tmp_path / "t.csv", id="name", split=form).preparation
    write_csv(tmp_path / "t.csv", {"x": range(20), "name": [f"r{19 - each}" for each in range(20)]})
    with pytest.raises(
        StreamError, match=r"the rows were train 15, valid 5, and now are train 15, valid 5, with other"
    ):
        rows_of(Table(tmp_path / "t.csv", id="name", split=form, preparation=kept), "train")
    with pytest.raises(
        ArgumentError, match=r"^split: the split of the run is \{'seed': 0, 'valid': 0.25\}; keep it, or"
    ):
        Table(tmp_path / "t.csv", id="name", split={"valid": 0.5}, preparation=kept)
    with pytest.raises(ArgumentError, match=r"^class: the run has learnt from the train rows of Table, which Parquet"):
        Parquet(str(tmp_path / "t.parquet"), split=form, preparation=kept)


def test_ids_of_any_text_are_passed_on(tmp_path):
    (tmp_path / "t.csv").write_text('name,x\n"a,b",1\n007,2\n,3\n')
    (tmp_path / "v.csv").write_text("name,x\nü,1\n")
    dataset = Table(tmp_path / "t.csv", tmp_path / "v.csv", id="name")
    assert dataset_batches(dataset, "train")[0]["id"] == ["a,b", "007", ""]
    assert list(dataset_batches(dataset, "valid")[0]) == ["x", "id"]
    np.savez(tmp_path / "t.npz", x=np.ones(2), name=np.array([5, 7]))
    assert dataset_batches(Table(tmp_path / "t.npz", id="name"), "train")[0]["id"] == ["5", "7"]
    with pytest.raises(ArgumentError, match=r"^id: .*t\.csv has no column 'nam'; did you mean 'name'\?"):
        Table(tmp_path / "t.csv", id="nam")
    with pytest.raises(ArgumentError, match=r"^id: `columns` has a source 'id' too"):
        Table(tmp_path / "t.csv", id="name", columns={"id": "x"})


def test_parts_of_mapped_arrays_are_read_in_place(tmp_path):
    np.save(tmp_path / "x.npy", NUMBERS / 4)
    np.save(tmp_path / "label.npy", LABELS)
    files = {"x": str(tmp_path / "x.npy"), "label": str(tmp_path / "label.npy")}
    dataset = Table(files, memory_map=True, split={"valid": 0.3, "by": "label"})
    _, valid = next(StratifiedShuffleSplit(1, test_size=0.3, random_state=0).split(NUMBERS, LABELS))
    assert rows_of(pickle.loads(pickle.dumps(dataset)), "valid") == sorted(valid.tolist())


def test_categories_are_those_of_the_train_part(tmp_path):
    write_csv(
        tmp_path / "t.csv", {"x": range(6), "city": ["a", "b", "c", "d", "e", "f"], "part": ["train"] * 5 + ["valid"]}
    )
    dataset = Table(tmp_path / "t.csv", categories=["city"], split={"column": "part"})
    assert dataset.classes_names() == {"city": ["a", "b", "c", "d", "e"]}
    again = Table(tmp_path / "t.csv", categories=["city"], split={"column": "part"}, preparation=dataset.preparation)
    (tmp_path / "t.csv").rename(tmp_path / "other.csv")
    assert again.classes_names() == dataset.classes_names()
    (tmp_path / "other.csv").rename(tmp_path / "t.csv")
    assert dataset_batches(again, "valid")[0]["city"].tolist() == [5]


def test_parts_of_a_mixed_dataset(tmp_path):
    parts = {
        name: csv(tmp_path, batch_size=5, split={"valid": 0.25, "seed": seed}) for name, seed in (("a", 0), ("b", 1))
    }
    mixed = Mixed(parts, {"a": 1, "b": 1}, 6)
    assert sum(len(batch["x"]) for batch in dataset_batches(mixed, "valid")) == 22


@pytest.mark.parametrize("make", [csv, parquet, image_folder, tar_shards])
def test_classes_are_drawn_evenly_in_any_process_and_exactly_at_a_resume(make, tmp_path, check_training_stream):
    arguments = {"balance": "label", "batch_size": 6, "split": {"valid": 0.25, "by": "label"}}
    dataset = make(tmp_path, **arguments)
    assert dataset.num_batches["train"] == 5
    labels = [label for batch in stream_of(dataset, "train") for label in np.asarray(batch["label"]).tolist()]
    assert sorted(np.unique(labels, return_counts=True)[1]) == [10, 10, 10]
    if make in (csv, parquet):
        alone = [np.asarray(batch["label"]) for batch in stream_of(dataset, "train")]
        for ranks in (2, 3):
            shares = [list(stream_of(dataset, "train", ranks=Ranks(rank, ranks))) for rank in range(ranks)]
            for whole, *parts in zip(alone, *shares, strict=True):
                own = [np.asarray(each["label"])[: rows_in(each)] for each in parts]
                assert np.array_equal(np.concatenate(own), whole)
        write_once = make(tmp_path, **arguments)
        check_training_stream(lambda: write_once, stops=(3, 7))
    with pytest.raises(ArgumentError, match=r"^balance: .*lable"):
        make(tmp_path, balance="lable")


@pytest.mark.parametrize(
    ("form", "key", "message"),
    [
        (3, "split", "3 is not a mapping such as {valid: 0.2}"),
        ({}, "split", "it has no part; write a share, such as valid: 0.2"),
        ({"vaild": 0.2}, "split.vaild", "did you mean 'valid'"),
        ({"valid": 1}, "split.valid", "1 is not a share above 0 and below 1, such as 0.2"),
        ({"valid": True}, "split.valid", "True is not a share"),
        ({"valid": 0.5, "test": 0.5}, "split.test", "the shares of valid and test leave nothing to train on"),
        ({"valid": 0.2, "by": "label", "group": "patient"}, "split.group", "keep one of them; `by: null` leaves out"),
        ({"valid": 0.2, "by": "lable"}, "split.by", "has no column 'lable'; did you mean 'label'?"),
        ({"valid": 0.2, "by": 3}, "split.by", "3 is not the name of a column"),
        ({"valid": 0.2, "seed": -1}, "split.seed", "-1 is not a whole number"),
        ({"valid": 0.2, "seed": 0.5}, "split.seed", "0.5 is not a whole number"),
        ({"folds": 5}, "split.fold", "None is not the number of a fold, from 0 to 4"),
        ({"folds": 5, "fold": 5}, "split.fold", "5 is not the number of a fold, from 0 to 4"),
        ({"folds": 5, "fold": 0, "valid": 0.1}, "split.valid", "`folds` says which rows are valid; remove one"),
        ({"folds": 1, "fold": 0}, "split.folds", "1 is not a whole number of at least 2"),
        ({"fold": 0, "valid": 0.1}, "split.fold", "has no effect without `folds`"),
        ({"column": {"valid": "dev"}}, "split.column", "is neither a column nor a mapping such as {name: part"),
        ({"column": {"name": "date", "dev": "x"}}, "split.column.dev", "unknown"),
        ({"column": "patient"}, "split.column", "Row #2: column 'patient' has '0', which names no part (train, "),
        ({"files": {"valid": "*"}}, "split.files", "no rows are left for train; there are 41 rows"),
        ({"files": {"train": "*"}}, "split.files.train", "unknown"),
        ({"files": "*"}, "split.files", "'*' is not a mapping such as {valid: '*0.jpg'}"),
        ({"valid": 0.01, "by": "label"}, "split.by", "in valid; write larger shares, or leave out `by`"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_an_error_of_its_key(form, key, message, tmp_path):
    with pytest.raises(ArgumentError) as told:
        csv(tmp_path, split=form)
    assert told.value.argument == key
    assert message in told.value.message


def test_bad_columns_are_errors_with_the_row(tmp_path):
    def table(form, **columns):
        write_csv(tmp_path / "t.csv", {"x": range(4), **columns})
        return Table(tmp_path / "t.csv", columns={"x": "x"}, split=form)

    with pytest.raises(ArgumentError, match=r"^split\.group: .*t\.csv, Row #4: column 'g' is empty; write a value, or"):
        table({"valid": 0.5, "group": "g"}, g=["a", "b", "", "c"])
    with pytest.raises(ArgumentError, match=r"^split\.time: .*Row #3: column 'd': '31/1/2024' is neither a number nor"):
        table({"valid": 0.5, "time": "d"}, d=["2024-01-01", "31/1/2024", "2024-01-01", "2024-01-01"])
    with pytest.raises(
        ArgumentError, match=r"^split\.by: the class 'b' of column 'c' has 1 row, the first in .*Row #5"
    ):
        table({"valid": 0.5, "by": "c"}, c=["a", "a", "a", "b"])
    table({"valid": 0.5}, c=["a", "a", "a", "b"])  # as the message says
    with pytest.raises(
        ArgumentError, match=r"^split\.group: .*t\.csv: no rows are left for train; there are 4 rows; write"
    ):
        table({"valid": 0.5, "group": "g"}, g=["a"] * 4)
    with pytest.raises(ArgumentError, match=r"^split\.column: .*Row #5: column 'p' has 'dev', .* valid: dev}`$"):
        table({"column": "p"}, p=["train", "valid", "train", "dev"])
    table({"column": {"name": "p", "valid": "dev"}}, p=["train", "dev", "train", "dev"])
    with pytest.raises(
        ArgumentError, match=r"^split\.valid: the rows of 'valid' have files of their own, `valid`; keep one"
    ):
        Table(tmp_path / "t.csv", tmp_path / "t.csv", columns={"x": "x"}, split={"valid": 0.5})
    with pytest.raises(ArgumentError, match=r"^split\.by: the items of Items have no column 'label'; divide them by"):
        TorchDataset(Items(), split={"valid": 0.2, "by": "label"})
    with pytest.raises(ArgumentError, match=r"^split: only items of a map-style dataset are divided, and the indices"):
        TorchDataset(Items(), split={"valid": 0.2}, sampler=[0, 1])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("more", [{"split": {"valid": 0.2}}, {"split": {"valid": 0.2, "by": "y"}}, {"balance": "y"}])
def test_a_file_without_rows_is_named_before_it_is_divided(more, ending, tmp_path):
    file = tmp_path / f"none.{ending}"
    if ending == "csv":
        file.write_text("x,y\n")
    else:
        pq.write_table(pa.table({"x": pa.array([], pa.float64()), "y": pa.array([], pa.string())}), file)
    arguments = {"fill": {"x": {"by": "median"}}, "categories": ["y"], "normalize": {"x": "standard"}}
    for kind in [Table] if ending == "csv" else [Table, Parquet]:
        with pytest.raises(ArgumentError, match=rf"^train: .*none\.{ending}: contains no examples$"):
            kind(file, **arguments, **more)


def test_a_class_of_images_is_in_each_part(tmp_path):
    with pytest.raises(ArgumentError, match=r"none of them would be in valid; write larger shares, or write by: label"):
        image_folder(tmp_path, split={"files": {"valid": ["c33/*1.png"]}})
    dataset = image_folder(tmp_path, split={"valid": 0.2, "by": "label"})
    assert {batch["label"].max() for batch in dataset_batches(dataset, "valid")} == {2}
