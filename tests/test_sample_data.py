"""The samples imdb_gru and mnist: what their files may be wrong about, and what they read."""

import gzip
import io
import runpy
import shutil

import numpy as np
import pytest
from samples import SAMPLES, own_modules

from emrun import create_dataset, create_training
from emrun.base.errors import ConfigError
from emrun.stream_context import StreamContext


@pytest.fixture
def sample(request, tmp_path, monkeypatch):
    """Return a copy of a sample with its data, in which this process is."""
    place = shutil.copytree(SAMPLES / request.param, tmp_path / "project", ignore=shutil.ignore_patterns("data"))
    monkeypatch.chdir(place)
    own_modules(place, monkeypatch)
    runpy.run_path("prepare.py", run_name="__main__")
    return place


def refused(message):
    """Check that nothing is built or written, and that the one message has the place in the config."""
    with pytest.raises(ConfigError, match=message) as error:
        create_training("config.yaml", output_dir="run")
    assert str(error.value).startswith("config.yaml:")
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("sample", ["mnist"], indirect=True)
def test_idx_files_that_are_cut_or_others_are_one_message_and_nothing_is_written(sample):
    path = sample / "data/train-images-idx3-ubyte.gz"
    packed, plain = path.read_bytes(), gzip.decompress(path.read_bytes())
    for content, message in (
        (plain[:-1], r"train-images-idx3-ubyte.gz has 89599 values, but the shape \[1400, 8, 8\]"),
        (plain[:9], r"has 0 values, but the shape \[1400, 0, 0\]"),
        (packed[:1000], "train-images-idx3-ubyte.gz: cannot be unpacked"),
        (
            b"\x00\x00\x08\x01" + plain[4:],
            "begins with 00 00 08 01, not with 00 00 08 03, as an IDX file of 3",
        ),
        (b"", "begins with nothing"),
    ):
        path.write_bytes(content)
        refused(message)
    path.unlink()
    refused(r"data has neither train-images-idx3-ubyte nor train-images-idx3-ubyte\.gz")
    path.with_suffix("").write_bytes(plain[:4] + b"\x00\x00\x00\x01" + plain[8:80])
    refused("1 images of train, but 1400 labels")
    assert not (sample / "run").exists()


@pytest.mark.parametrize("sample", ["mnist"], indirect=True)
def test_idx_files_have_the_digits_plain_or_gzipped(sample):
    found = next(iter(create_dataset("config.yaml").test_stream(StreamContext("test", seed=0))))
    for path in list(sample.glob("data/*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    plain = next(iter(create_dataset("config.yaml").test_stream(StreamContext("test", seed=0))))
    assert (found["image"].shape, found["image"].dtype, found["label"].dtype) == ((32, 1, 8, 8), "uint8", "int64")
    assert all(np.array_equal(found[name], plain[name]) for name in found)


@pytest.mark.parametrize("sample", ["imdb_gru"], indirect=True)
def test_reviews_are_tokens_padded_to_the_longest_of_a_batch_and_others_are_refused(sample, monkeypatch):
    dataset = create_dataset("config.yaml")
    batch = next(iter(dataset.valid_stream(StreamContext("valid", seed=0))))
    assert batch["tokens"].shape == (32, batch["length"].max())
    pairs = zip(batch["tokens"], batch["length"], strict=True)
    assert all((row[size:] == 0).all() and row[:size].all() for row, size in pairs)
    monkeypatch.setattr("sys.stdin", io.StringIO("The plot isn't unheard-of!\n\n"))
    first, empty = dataset.predict_stream()
    words = {number: word for word, number in dataset.numbers.items()}
    assert [words.get(number) for number in first["tokens"][0]] == ["the", "plot", "is", "n't", None, None, "!"]
    assert (empty["tokens"].tolist(), empty["length"].tolist()) == ([[1]], [1])
    (sample / "data/test/neg/7.txt").write_bytes(b"caf\xe9")
    refused(r"data/test/neg/7.txt: byte 3 is not UTF-8 \(unexpected end of data\)")
    shutil.rmtree(sample / "data/train/pos")
    refused("there are no texts in data/train/pos/")
    assert not (sample / "run").exists()
