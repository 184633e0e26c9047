"""Text: files as tokens with classes or for language models, batches of similar lengths, and what is refused."""

import csv
import importlib.util
import json
import pickle
import random
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doubles import stream_of
from sklearn.model_selection import StratifiedShuffleSplit
from words import WORDS, save_tokenizer

from emrun import create_training
from emrun.base.errors import ArgumentError
from emrun.datasets import Text
from emrun.ranks.group import Ranks
from emrun.ranks.shares import rows_in
from emrun.stream_context import StreamContext
from emrun.streams.pass_lengths import asked_length

if importlib.util.find_spec("transformers") is None:  # not imported here: that takes seconds
    pytest.skip("transformers is not installed", allow_module_level=True)

COUNT = 60
RANDOM = random.Random(0)
ROWS = [
    {
        "text": " ".join(RANDOM.choices(WORDS, k=RANDOM.randint(1, 30))),
        "kind": RANDOM.choice(["10", "9", "x"]),
        "name": f"row {number}",
    }
    for number in range(COUNT)
]
CUT = '{"text": "w1", "kind": "x"}\n{"text": "w1", "ki'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write the rows in each format, and go there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([list(ROWS[0]), *(row.values() for row in ROWS)])
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    return tmp_path


@pytest.fixture
def texts(project, tokenizer):
    def make(train="rows.jsonl", **arguments):
        return Text(train, **{"tokenizer": tokenizer, "label": "kind", "batch_size": 8, **arguments})

    return make


def predicted(dataset, name):
    """Return the batches of a prediction."""
    return list(getattr(dataset, f"{name}_stream")(StreamContext(name, seed=0, in_order=True)))


def read(dataset, name="train", training=False, **options):
    with stream_of(dataset, name, training=training, **options) as stream:
        return list(stream)


@pytest.mark.parametrize("path", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_each_format_gives_the_tokens_and_classes_of_the_rows(texts, path, tokenizer):
    from transformers import AutoTokenizer

    dataset = texts(path, id="name", length=20)
    batches = read(dataset)
    assert len(batches) == dataset.num_batches["train"] == 8
    assert dataset.classes_names() == {"label": ["9", "10", "x"]}
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    for batch, own in zip(batches, grouped(ROWS, 8), strict=True):
        expected = theirs([row["text"] for row in own], padding=True, truncation=True, max_length=20)
        assert np.array_equal(batch["input_ids"], expected["input_ids"])
        assert np.array_equal(batch["attention_mask"], expected["attention_mask"])
        assert batch["label"].tolist() == [["9", "10", "x"].index(row["kind"]) for row in own]
        assert batch["id"] == [row["name"] for row in own]


def grouped(rows, size):
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


@pytest.mark.parametrize(
    "arguments",
    [{"batch_size": None, "batch_tokens": 90}, {"balance": "kind", "buckets": True}],
)
def test_the_train_stream_keeps_the_rules(texts, arguments, check_training_stream):
    check_training_stream(lambda: texts(**arguments))


def test_batches_of_similar_lengths_have_less_padding_and_all_rows_and_a_fixed_number(texts):
    plain, sorted_ = (
        [batch["attention_mask"] for batch in read(texts(buckets=buckets), training=True)] for buckets in (False, True)
    )
    assert sum(each.sum() for each in plain) == sum(each.sum() for each in sorted_)
    assert sum(each.size for each in sorted_) < 0.8 * sum(each.size for each in plain)

    by_tokens = texts(batch_size=None, batch_tokens=100, id="name")
    orders = []
    assert asked_length(by_tokens.train_stream, "train", 0, None) == by_tokens.num_batches["train"]
    with stream_of(by_tokens, "train") as stream:
        for _ in range(4):
            batches = list(stream)
            assert all(batch["input_ids"].size <= 100 for batch in batches)
            assert len(batches) == by_tokens.num_batches["train"]
            orders.append([name for batch in batches for name in batch["id"]])
            assert sorted(orders[-1]) == sorted(row["name"] for row in ROWS)
    assert len({tuple(order) for order in orders}) == 4
    evaluated = read(by_tokens)
    assert [name for batch in evaluated for name in batch["id"]] == [row["name"] for row in ROWS]
    assert all(batch["input_ids"].size <= 100 for batch in evaluated)


@pytest.mark.parametrize("arguments", [{"buckets": True}, {"batch_size": None, "batch_tokens": 100}])
def test_two_ranks_share_the_batches_of_one(texts, arguments):
    dataset = texts(**arguments, id="name")
    for training in (True, False):
        whole = [batch["id"] for batch in read(dataset, training=training)]
        shares = [read(dataset, training=training, ranks=Ranks(rank, 2)) for rank in range(2)]
        assert whole == [
            [*one["id"][: rows_in(one)], *other["id"][: rows_in(other)]] for one, other in zip(*shares, strict=True)
        ]


def test_a_split_is_kept_and_a_run_predicts_a_file_without_classes(texts, project, tokenizer):
    split = {"valid": 0.25, "by": "kind"}
    dataset = texts(split=split, id="name")
    kinds = [row["kind"] for row in ROWS]
    rows = next(StratifiedShuffleSplit(1, test_size=0.25, random_state=0).split(kinds, kinds))
    for stream, own in zip(("train", "valid"), rows, strict=True):
        names = [name for batch in read(dataset, stream) for name in batch["id"]]
        assert sorted(names) == sorted(ROWS[row]["name"] for row in own)
    counts = dataset.class_counts("label")
    assert counts == [sum(kinds[row] == name for row in rows[0]) for name in ("9", "10", "x")]

    kept = json.loads(json.dumps(dataset.preparation))
    (project / "new.jsonl").write_text('{"text": "w1 w2", "name": "a"}\n')
    (project / "rows.jsonl").rename(project / "gone.jsonl")
    again = texts(split=split, id="name", test="new.jsonl", preparation=kept)
    assert texts(split=split, preparation=kept).num_batches == dataset.num_batches
    (batch,) = predicted(pickle.loads(pickle.dumps(again)), "test")
    assert (list(batch), batch["id"]) == (["input_ids", "attention_mask", "id"], ["a"])

    (project / "new.jsonl").write_text('{"text": "w1 w2", "name": "a", "kind": "y"}\n')
    with pytest.raises(Exception, match=r"'new.jsonl', line 1: the run has no class 'y' \(it has 9, 10, x\)"):
        read(texts(split=split, id="name", test="new.jsonl", preparation=kept), "test")
    other = save_tokenizer(project / "other", words=WORDS[::-1])
    with pytest.raises(Exception, match="is not the tokenizer that the run began with"):
        read(texts(split=split, id="name", test="new.jsonl", tokenizer=other, preparation=kept), "test")


def test_the_classes_of_all_files_have_numbers(texts, project):
    (project / "valid.jsonl").write_text('{"text": "w1", "kind": "a"}\n{"text": "w1", "kind": "x"}\n')
    dataset = texts(valid="valid.jsonl")
    assert dataset.classes_names() == {"label": ["9", "10", "a", "x"]}
    assert read(dataset, "valid")[0]["label"].tolist() == [2, 3]


def test_windows_follow_the_texts_with_their_ends(texts, tokenizer, project):
    plain = save_tokenizer(project / "plain", ends=False)
    whole = np.concatenate([[*map(WORDS.index, row["text"].split()), -4] for row in ROWS]) + 8  # `<end>` is the 4th
    batches = read(texts(label=None, train_on="all", window=16, tokenizer=plain))
    tokens = np.concatenate([batch["input_ids"] for batch in batches])
    assert np.array_equal(tokens.ravel(), whole[: len(whole) // 16 * 16])
    labels = np.concatenate([batch["labels"] for batch in batches])
    assert (labels[:, 0] == -100).all() and np.array_equal(labels[:, 1:], tokens[:, 1:])

    (first, *_) = read(texts(label=None, train_on="all", tokenizer=plain, length=10))
    assert ((first["input_ids"] == 4).sum(axis=1) == [len(row["text"].split()) < 10 for row in ROWS[:8]]).all()
    assert np.array_equal(first["labels"] == -100, (np.arange(10) == 0) | (first["attention_mask"] == 0))


def test_what_is_cut_or_empty_is_counted_in_the_log(texts, project, caplog):
    (project / "valid.jsonl").write_text('{"text": "", "kind": "x"}\n{"text": "w1 w2 w3", "kind": "x"}\n')
    plain = save_tokenizer(project / "plain", ends=False)
    with caplog.at_level("INFO"):
        dataset = texts(valid="valid.jsonl", length=2, tokenizer=plain)
    assert "valid: 2 rows, 2 tokens; 1 had more than 2 tokens and are cut; 1 have no trained token" in caplog.text
    assert dataset.num_batches["valid"] == 1
    assert [len(batch["label"]) for batch in read(dataset, "valid")] == [1]
    assert [len(batch["label"]) for batch in predicted(dataset, "valid")] == [2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", CUT, r"train: 'a.jsonl', line 2: Unterminated string .*; is the line cut\?"),
        ("a.json", '[{"text": "w1", "kind": 1},\n{"text": ', r"train: 'a.json', line 2: .*is the line cut\?"),
        ("a.jsonl", '{"text": "w1", "kind": 1}\n[1]', r"train: 'a.jsonl', line 2 is a list, not an object"),
        ("a.csv", "text,kind\nw1,x\nw2\n", r"'a.csv', line 3: 1 cells, but the header has 2; is the line cut\?"),
        ("a.csv", 'text,kind\nw1,x\n"w2,x\n', r"'a.csv', line 3: unexpected end of data; is the line cut\?"),
        ("a.csv", "text,text\nw1,x\n", "has two columns 'text'"),
        ("a.csv", "text,kind\n\"w1\nw2\",x\nw3,\n", r"label: 'a.csv', line 4: column 'kind' is empty"),
        ("a.csv", b"text,kind\nw\xff,x\n", "byte 11 of 'a.csv' is not UTF-8 text"),
        ("a.parquet", "PAR1", "'a.parquet' is not a complete Parquet file"),
        ("a.jsonl", '{"text": null, "kind": 1}', "text: 'a.jsonl', line 1: column 'text' is missing"),
        ("a.jsonl", '{"text": [1], "kind": 1}', "line 1: column 'text' is a list, not a text"),
        ("a.jsonl", '{"text": "w1", "kind": null}', "label: 'a.jsonl', line 1: column 'kind' is empty"),
        ("a.jsonl", '{"texts": "w1", "kind": 1}', "'a.jsonl' has no column 'text'; did you mean 'texts'"),
        ("a.jsonl", "", "train: 'a.jsonl': contains no examples"),
        ("a.txt", "w1", "'a.txt' is not a .csv, .jsonl or .parquet file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error_with_file_and_line(texts, project, name, content, message):
    (project / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ArgumentError, match=message):
        texts(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label": None}, "label: name the column with the classes"),
        ({"train_on": "all"}, "label: name the column"),
        ({"train_on": "some"}, "train_on: 'some' is not one of all"),
        ({"window": 8}, "window: only `train_on: all` has windows"),
        ({"label": None, "train_on": "all", "window": 8, "id": "name"}, "id: windows of tokens have no id"),
        ({"label": None, "train_on": "all", "window": 9999}, "tokens are too few for a window of 9999"),
        ({"batch_tokens": 50}, "batch_tokens: .*remove one of them"),
        ({"batch_tokens": 10, "batch_size": None}, r"batch_tokens: 'rows.jsonl', line \d+ has 32 tokens; set as many"),
        ({"length": 2}, "length: 2 tokens leave none for the text"),
        ({"buckets": 1}, "buckets: 1 is neither true nor false"),
        ({"tokenizer": {"nam": "x"}}, "tokenizer: .* is neither a name or directory nor {name: NAME, ...} nor {learn"),
        ({"tokenizer": {"name": 3}}, "tokenizer: .* is neither a name or directory nor"),
        ({"tokenizer": {"name": "plain", "learn": 300}}, "tokenizer: .* is neither a name or directory nor"),
        ({"tokenizer": 3}, "tokenizer: 3 is neither a name or directory nor"),
        ({"tokenizer": {"learn": 3}}, "tokenizer.learn: 3 "),
        ({"tokenizer": "plane"}, "tokenizer: 'plane' cannot be loaded: .*did you mean 'plain'"),
        ({"tokenizer": "nobody/nothing"}, "tokenizer: 'nobody/nothing' cannot be loaded: .*download: true}"),
        ({"tokenizer": "."}, "tokenizer: '.' cannot be loaded"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(texts, project, arguments, message):
    (project / "plain").mkdir()
    with pytest.raises(ArgumentError, match=message):
        texts(**arguments)


def test_a_tokenizer_without_padding_is_an_error_whose_advice_works(texts, project):
    bare = save_tokenizer(project / "bare", pad=None)
    with pytest.raises(ArgumentError, match=r'has no padding token; write {name: .*, padding: "<end>"}') as caught:
        texts(tokenizer=bare)
    name, padding = re.search(r"{name: (.*), padding: \"(.*)\"}", str(caught.value)).groups()
    batch = read(texts(tokenizer={"name": name, "padding": padding}))[0]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 4).all()


def test_a_tokenizer_is_learnt_from_the_train_rows_and_kept_by_the_run(texts, project):
    (project / "valid.jsonl").write_text('{"text": "strange strange strange", "kind": "x"}\n' * 9)
    form = {"learn": 300}
    dataset = texts(tokenizer=form, valid="valid.jsonl", length=40)
    assert dataset.data_numbers == {"embeddings.input_ids": 300}
    raw = dataset.tokenizer.raw
    assert not [each for each in raw.get_vocab() if "str" in each]
    assert raw.decode(read(dataset, "valid")[0]["input_ids"][0]) == "strange strange strange"
    assert texts(tokenizer=form).tokenizer.learnt == dataset.tokenizer.learnt
    # the run has it, and not the rows
    kept = json.loads(json.dumps(dataset.preparation))
    (project / "rows.jsonl").rename(project / "gone.jsonl")
    again = texts(tokenizer=form, valid="valid.jsonl", length=40, preparation=kept)
    for one, other in zip(read(dataset, "valid"), read(pickle.loads(pickle.dumps(again)), "valid"), strict=True):
        assert np.array_equal(one["input_ids"], other["input_ids"])
    del kept["learnt"]["tokens"]
    with pytest.raises(Exception, match="the run began with another tokenizer"):
        read(texts(tokenizer=form, valid="valid.jsonl", preparation=kept), "valid")


def test_the_length_that_texts_are_cut_to_is_not_another_tokenizer(texts):
    kept = texts(length=20, split={"valid": 0.2}).preparation
    assert read(texts(length=20, split={"valid": 0.2}, preparation=kept), "valid")


def test_new_texts_have_words_and_their_classes_are_not_needed(texts, project, caplog):
    dataset = texts(preparation=texts().preparation)
    (project / "new.csv").write_text("text,kind\nw1,odd\nw2,x\n")
    with caplog.at_level("WARNING"):
        (batch,) = dataset.new_stream(project / "new.csv", StreamContext("new", seed=0, in_order=True))
    assert "label" not in batch
    assert "classes of column 'kind' that the run does not have are ignored, in 1 row, such as 'odd'" in caplog.text
    (project / "other.csv").write_text('text\nw1\n" "\n')
    with pytest.raises(Exception, match=r"other.csv', line 3: column 'text' is empty"):
        dataset.new_stream(project / "other.csv", StreamContext("new", seed=0, in_order=True))


def test_a_model_with_too_few_classes_is_told_which_there_are_and_what_to_write(texts, tokenizer):
    own = {"class": "TextNet", "tokens": 60, "classes": 2, "width": 4}
    config = {
        "dataset": {"class": "Text", "train": "rows.jsonl", "label": "kind", "tokenizer": tokenizer},
        "model": {
            "module": own,
            "inputs": ["input_ids", "attention_mask"],
            "outputs": ["logits"],
            "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "label"]},
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "main_loop": {"report": False},
        "hooks": [{"StopAfter": {"iterations": 1}}],
    }
    with pytest.raises(IndexError) as caught:
        create_training(config, output_dir="run").main_loop.run_training()
    notes = "\n".join(caught.value.__notes__)
    assert "the data have 3 classes (9, 10, x); write ${data:classes.label} as the number of classes" in notes
    own["classes"] = "${data:classes.label}"
    create_training(config, output_dir="other").main_loop.run_training()


def test_tokens_that_the_model_does_not_have_are_an_error_with_the_line(texts):
    dataset = texts()
    dataset.check_vocabulary(58)
    with pytest.raises(ArgumentError, match=r"tokenizer: 'rows.jsonl', line \d+: the token 'w49' has the number 57"):
        dataset.check_vocabulary(57)
