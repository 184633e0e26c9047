"""TokenWindows: its windows and their order, tokenizers, and tokens that are kept in files."""

import errno
import functools
import os
import pickle

import numpy as np
import pytest

from emrun.base.errors import ArgumentError, StorageError, StreamError
from emrun.datasets import TokenWindows

TEXT = "".join(chr(97 + i * i % 26) for i in range(90)) + "ä€"  # 90 bytes, then 2 and 3


class Words:
    """One token for each letter from a, the second 1."""

    def __init__(self, size=26, shift=0):
        self.shift = shift
        self.encoded = 0
        if size:
            self.vocab_size = size

    def encode(self, text):
        self.encoded += 1
        return [(ord(letter) - 97 + self.shift) for letter in text if letter.isascii()]


class WithIds(Words):
    def encode(self, text):
        return type("Encoding", (), {"ids": Words.encode(self, text)})()


class Broken:
    def __init__(self, found):
        self.found = found

    def encode(self, text):
        return self.found


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"line\r\nline\n" * 5)
    return tmp_path


@pytest.fixture
def ordered(passes):
    """Return the tokens and targets of a stream's evaluation, in one array each."""

    def read(dataset, name="train"):
        (batches,) = passes(dataset, name, training=False)
        return [np.concatenate([batch[source] for batch in batches]) for source in ("tokens", "targets")]

    return read


def streams(files, **arguments):
    return TokenWindows(str(files / "*.txt"), **{"window": 7, "batch_size": 4, **arguments})


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("separator", [None, 0, 256, 70_000])
def test_the_windows_are_the_bytes_of_all_files_and_what_follows_them(files, ordered, cache, separator):
    content = [*(files / "a.txt").read_bytes(), *([] if separator is None else [separator])]
    content += [*(files / "b.txt").read_bytes(), *([] if separator is None else [separator])]
    dataset = streams(files, separator=separator, cache_dir=str(files / "cache") if cache else None)
    tokens, targets = ordered(dataset)
    n = (len(content) - 1) // 7
    assert (tokens.dtype, targets.dtype) == (np.int64, np.int64)
    assert tokens.shape == targets.shape == (n, 7)
    assert tokens.ravel().tolist() == content[: n * 7]
    assert targets.ravel().tolist() == content[1 : n * 7 + 1]
    assert dataset.num_batches["train"] == -(-n // 4)
    assert dataset.vocabulary_size == max(256, (separator or 0) + 1)


@pytest.mark.parametrize("cache", [False, True])
def test_the_train_stream_keeps_the_rules(files, check_training_stream, cache):
    cache_dir = str(files / "cache") if cache else None
    check_training_stream(lambda: streams(files, cache_dir=cache_dir))


def test_every_window_is_in_a_pass_once(files, passes, ordered):
    (batches,) = passes(streams(files), "train")
    found = sorted(tuple(row) for batch in batches for row in batch["tokens"].tolist())
    assert found == sorted(tuple(row) for row in ordered(streams(files))[0].tolist())


def test_evaluations_are_in_the_order_of_the_text(files, ordered):
    dataset = streams(files, valid=str(files / "b.txt"))
    assert bytes(ordered(dataset, "valid")[0].ravel().tolist()) == (b"line\r\nline\n" * 5)[:49]
    assert not callable(dataset.test_stream)


@pytest.mark.parametrize("kind", [Words, WithIds])
@pytest.mark.parametrize("size", [26, 0])
def test_a_tokenizer_makes_the_tokens(files, ordered, kind, size):
    dataset = TokenWindows(str(files / "a.txt"), window=5, tokenizer=kind(size))
    tokens, _ = ordered(dataset)
    assert tokens.ravel().tolist() == [i * i % 26 for i in range(85)]
    assert dataset.vocabulary_size == (size or None)


def test_a_tokenizer_gets_the_text_as_it_is(files, ordered):
    tokens, _ = ordered(TokenWindows(str(files / "b.txt"), window=11, tokenizer=Words(0, shift=97)))
    assert bytes(tokens[0].tolist()) == b"line\r\nline\n"


def test_batches_may_be_changed_without_changing_the_data(files, passes, ordered):
    for cache_dir in (None, str(files / "cache")):
        dataset = streams(files, cache_dir=cache_dir)
        before = ordered(dataset)[0]
        for batch in passes(dataset, "train")[0]:
            batch["tokens"] += 1
            batch["targets"] += 1
        assert np.array_equal(before, ordered(dataset)[0])


def test_tokens_in_a_cache_are_made_once_for_all_windows(files, ordered):
    first, second = Words(), Words()
    first.helper = second.helper = lambda text: text  # cannot be pickled
    make = functools.partial(TokenWindows, str(files / "a.txt"), cache_dir=str(files / "cache"))
    before = ordered(make(window=5, tokenizer=first))
    assert np.array_equal(before, ordered(make(window=5, tokenizer=second)))
    make(window=9, tokenizer=second)
    assert (first.encoded, second.encoded) == (2, 2)  # each time the beginning
    (cached,) = (files / "cache").iterdir()
    assert np.load(cached).dtype == np.uint8
    assert len(np.load(cached)) == 90


@pytest.mark.parametrize("change", ["content", "time", "separator", "tokenizer", "vocabulary", "files"])
def test_another_file_separator_or_tokenizer_has_tokens_of_its_own(files, ordered, change):
    arguments = {"train": str(files / "a.txt"), "window": 5, "cache_dir": str(files / "cache"), "tokenizer": Words()}
    before = ordered(TokenWindows(**arguments))[0]
    if change == "content":
        (files / "a.txt").write_text("b" * 200)
    elif change == "time":
        os.utime(files / "a.txt", ns=(1, 1))
    elif change == "separator":
        arguments["separator"] = 25
    elif change == "tokenizer":
        arguments["tokenizer"] = Words(26 + 1, shift=1)
    elif change == "vocabulary":
        arguments["tokenizer"] = Words(26 + 1)
    else:
        arguments["train"] = [str(files / "a.txt"), str(files / "a.txt")]
    after = ordered(TokenWindows(**arguments))[0]
    assert len(list((files / "cache").iterdir())) == 2
    assert np.array_equal(before, after[: len(before)]) == (change not in ("content", "tokenizer"))


def test_a_cache_file_without_tokens_is_written_again(files, ordered):
    cache = str(files / "cache")
    before = ordered(streams(files, cache_dir=cache))[0]
    (cached,) = (files / "cache").iterdir()
    np.save(cached, np.zeros((50, 2), np.uint8))
    assert np.array_equal(before, ordered(streams(files, cache_dir=cache))[0])


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", None], ids=["empty", "a beginning", "cut off"])
def test_a_damaged_cache_is_made_again(files, ordered, caplog, content):
    cache = str(files / "cache")
    before = ordered(streams(files, cache_dir=cache))[0]
    (cached,) = (files / "cache").iterdir()
    cached.write_bytes(cached.read_bytes()[:-1] if content is None else content)
    assert np.array_equal(before, ordered(streams(files, cache_dir=cache))[0])
    assert "is damaged" in caplog.text
    assert list((files / "cache").iterdir()) == [cached]


def test_a_cache_that_may_not_be_read_is_reported_and_not_changed(files, monkeypatch):
    cache = str(files / "cache")
    streams(files, cache_dir=cache)
    (cached,) = (files / "cache").iterdir()

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(StorageError, match=r"cannot read .*npy: Permission denied; let this user read it, or use"):
        streams(files, cache_dir=cache)
    assert list((files / "cache").iterdir()) == [cached]


def test_tokens_in_a_cache_can_be_read_by_others_as_the_umask_says(files):
    streams(files, cache_dir=str(files / "cache"))
    (cached,) = (files / "cache").iterdir()
    assert cached.stat().st_mode == (files / "a.txt").stat().st_mode


def test_added_tokens_belong_to_the_vocabulary(files):
    class Added(Words):
        def __len__(self):
            return 30

    assert TokenWindows(str(files / "a.txt"), window=5, tokenizer=Added(26)).vocabulary_size == 30
    assert TokenWindows(str(files / "a.txt"), window=5, tokenizer=Added(32)).vocabulary_size == 32


def test_what_fails_while_tokens_are_made_leaves_nothing_in_the_cache(files):
    (files / "b.txt").write_bytes(b"ab\xff")  # behind a.txt
    with pytest.raises(ArgumentError, match="can't decode byte"):
        streams(files, cache_dir=str(files / "cache"), tokenizer=Words())
    assert list((files / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_reported(files):
    with pytest.raises(StorageError, match=r"cannot write .*a\.txt.*tokens-"):
        streams(files, cache_dir=str(files / "a.txt"))


def test_a_cache_that_is_removed_meanwhile_is_reported(files, passes):
    dataset = pickle.loads(pickle.dumps(streams(files, cache_dir=str(files / "cache"))))
    next((files / "cache").iterdir()).unlink()
    with pytest.raises(StreamError, match="the tokens cannot be read"):
        passes(dataset, "train")


def test_a_pickled_dataset_takes_no_tokens_along_when_they_are_in_a_file(files, passes):
    (files / "a.txt").write_text("x" * 100_000)
    dataset = streams(files, cache_dir=str(files / "cache"))
    passes(dataset, "train")
    assert len(pickle.dumps(dataset)) < 10_000 < len(pickle.dumps(streams(files)))


def test_a_dataset_that_was_read_is_pickled_as_before(files, passes):
    (files / "a.txt").write_text("x" * 5_000)
    dataset = streams(files)
    before = len(pickle.dumps(dataset))
    first = passes(dataset, "train")
    assert len(pickle.dumps(dataset)) == before  # a view of the windows would be pickled as another copy of the tokens
    assert str(passes(pickle.loads(pickle.dumps(dataset)), "train")) == str(first)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([1.5], "float64 of shape (1,)"),
        (["a"], "of shape (1,)"),
        ([[1, 2]], "int64 of shape (1, 2)"),
        (None, "object of shape ()"),
        ([-1, 3], "its tokens must be from 0 to 2147483647, not from -1 to 3"),
        ([2**31], "its tokens must be from 0 to 2147483647, not from 2147483648 to 2147483648"),
    ],
)
def test_a_result_that_is_not_tokens_is_refused_with_the_file(files, found, message):
    with pytest.raises(ArgumentError) as caught:
        streams(files, tokenizer=Broken(found))
    assert str(caught.value).startswith("train: ")
    assert "a.txt': " in str(caught.value)
    assert message in str(caught.value)


def test_tokens_beyond_the_vocabulary_are_refused(files):
    with pytest.raises(ArgumentError, match=r"a\.txt': its tokens must be from 0 to 9, not from 0 to 25"):
        TokenWindows(str(files / "a.txt"), tokenizer=Words(10))


def test_a_file_that_is_not_text_is_refused_when_there_is_a_tokenizer(files):
    (files / "b.txt").write_bytes(b"ab\xff")
    with pytest.raises(ArgumentError, match=r"b\.txt': 'utf-8' codec can't decode byte 0xff in position 2"):
        streams(files, tokenizer=Words())


def test_a_file_that_changes_while_it_is_read_is_an_error(files):
    class Changing(Words):
        def encode(self, text):
            (files / "a.txt").write_text("more" * 50)
            return [1, 2, 3]

    with pytest.raises(ArgumentError, match=r"a\.txt' has changed while it was read"):
        streams(files, tokenizer=Changing())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "no.txt"}, "train: there is no file 'no.txt'"),
        ({"valid": "no-*"}, "valid: there is no file 'no-*'"),
        ({"window": 0}, "window: 0 is not a whole number of at least 1"),
        ({"window": 95}, "train: 95 tokens are too few; a window and its targets need 96"),
        ({"separator": -1}, "separator: -1 is not a whole number of at least 0"),
        ({"separator": 2**63}, "separator: 9223372036854775808 is not a token: tokens are below 2**63"),
        ({"separator": "end"}, "separator: 'end' is not a whole number"),
        ({"tokenizer": "gpt"}, "tokenizer: 'gpt' is not an object with a method 'encode(text)'"),
        ({"tokenizer": 3}, "tokenizer: 3 is not an object"),
        ({"batch_size": 0}, "batch_size: 0 is not a whole number of at least 1"),
        ({"train": "empty.txt"}, "train: 0 tokens are too few"),
        ({"train": "empty.txt", "cache_dir": "c"}, "train: 0 tokens are too few"),
    ],
)
def test_wrong_arguments_are_refused_at_once(files, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    (files / "empty.txt").touch()
    with pytest.raises(ArgumentError) as caught:
        TokenWindows(**{"train": "a.txt", "window": 5, **arguments})
    assert str(caught.value).startswith(message)


def test_files_and_the_cache_may_lie_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text(TEXT)
    data = TokenWindows("~/*.txt", window=4, cache_dir="~/cache")
    assert len(TokenWindows(["~/a.txt"], window=4).num_batches) == len(data.num_batches)
    assert list((tmp_path / "cache").iterdir())
