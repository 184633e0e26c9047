"""Each dataset gives the same batches in the same order in a thread and in any number of processes."""

import importlib
import io
import itertools
import json
import sys
import tarfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from campaign import thinned
from doubles import wrapped
from PIL import Image
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from words import WORDS, Words

from emrun.datasets import (
    Chats,
    Digits,
    HuggingFace,
    ImageFolder,
    Majority,
    Mixed,
    Parquet,
    Pictures,
    Table,
    TarShards,
    Text,
    TokenWindows,
    TorchDataset,
)
from emrun.datasets._tokens import Tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]
COUNT = 23


def numbers(*shape):
    return np.arange(COUNT * np.prod(shape, dtype=int), dtype=np.float32).reshape(COUNT, *shape)


def png(number):
    file = io.BytesIO()
    Image.fromarray(np.full((24, 24, 3), number, np.uint8)).save(file, "PNG")
    return file.getvalue()


def table(folder):
    np.savez(folder / "all.npz", x=numbers(40), y=np.arange(COUNT))
    return Table(folder / "all.npz", batch_size=3)


def mapped_table(folder):
    np.save(folder / "x.npy", numbers(400))
    return Table({"x": folder / "x.npy"}, batch_size=3, memory_map=True)


def csv_table(folder):
    (folder / "all.csv").write_text("a,b\n" + "".join(f"{each},{each / 2}\n" for each in range(COUNT)))
    return Table(folder / "all.csv", batch_size=3)


def pictures(folder):
    for source, high in (("images", 255), ("masks", 3)):
        (folder / source).mkdir()
        for number in range(COUNT):
            pixels = np.full((24, 24), number * 7 % high, np.uint8)
            Image.fromarray(pixels).save(folder / source / f"{number:02}.png")
    return Pictures(f"{folder}/images/*.png", f"{folder}/masks/*.png", mode="L", flip=True, batch_size=3)


def image_folder(folder):
    for number in range(COUNT):
        path = folder / "pictures" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return ImageFolder(folder / "pictures", batch_size=3, flip=True)


def parquet(folder):
    columns = {"x": list(numbers(2).tolist()), "y": range(COUNT), "text": [f"row {each}" for each in range(COUNT)]}
    for name in ("a", "b"):
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=5)
    return Parquet(str(folder / "*.parquet"), batch_size=4)


def hugging_face(folder):
    pq.write_table(
        pa.table({"x": range(COUNT), "text": [f"row {each}" for each in range(COUNT)]}), folder / "x.parquet"
    )
    return HuggingFace(str(folder / "x.parquet"), batch_size=3, cache_dir=str(folder / "cache"))


def tar_shards(folder):
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(7):
                for name, content in ((f"{number}.png", png(number)), (f"{number}.cls", str(shard).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return TarShards(str(folder / "*.tar"), {"image": "png", "label": "cls"}, batch_size=3)


def token_windows(folder):
    (folder / "a.txt").write_text("".join(chr(97 + each * each % 26) for each in range(200)))
    return TokenWindows(str(folder / "*.txt"), window=9, batch_size=3, cache_dir=str(folder / "cache"))


def with_words(build):
    """Build a dataset whose tokenizer needs no library."""
    with patch.object(Tokenizer, "_loaded", lambda self: Words()):
        return build()


def text(folder):
    rows = [{"text": " ".join(WORDS[: 1 + each * 7 % 11]), "label": each % 3} for each in range(COUNT)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return with_words(lambda: Text(str(folder / "a.jsonl"), tokenizer="words", label="label", batch_tokens=24))


def chats(folder):
    rows = [
        {
            "messages": [
                {"role": "user", "content": WORDS[each]},
                {"role": "assistant", "content": " ".join(WORDS[:each])},
            ]
        }
        for each in range(1, COUNT)
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return with_words(lambda: Chats(str(folder / "a.jsonl"), tokenizer="words", pack=30, batch_size=2))


def points():
    return TensorDataset(torch.from_numpy(numbers(1000)), torch.arange(COUNT))


def mixed(folder):
    return Mixed({"table": table(folder), "more": mapped_table(folder)}, {"table": 1, "more": 2}, batches_per_epoch=9)


TURNED = """
import numpy as np
import torch

class Turned(torch.utils.data.IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from (torch.full((2000,), float(each)) for each in np.roll(np.arange(23), self.epoch))
"""


def iterable(folder):
    """Return one whose order depends on the number of the pass."""
    (folder / "turned.py").write_text(TURNED)
    return TorchDataset(importlib.import_module("turned").Turned(), sources=["x"], batch_size=3)


KINDS = {
    "chats": chats,
    "digits": lambda folder: Digits(batch_size=200, shift=1),
    "hugging_face": hugging_face,
    "image_folder": image_folder,
    "majority": lambda folder: Majority(n=60),
    "mixed": mixed,
    "parquet": parquet,
    "pictures": pictures,
    "table": table,
    "table of csv": csv_table,
    "table mapped": mapped_table,
    "tar_shards": tar_shards,
    "text": text,
    "token_windows": token_windows,
    "torch_dataset": lambda folder: TorchDataset(points(), sources=["x", "y"], batch_size=3),
    "torch_dataset iterable": iterable,
    "torch_dataset loader": lambda folder: TorchDataset(
        StatefulDataLoader(points(), batch_size=3, shuffle=True), sources=["x", "y"]
    ),
}
WITHOUT_STREAMS = {"downloadable_dataset"}  # a base
METHODS = ["fork", *(pytest.param(method, marks=pytest.mark.campaign) for method in ("forkserver", "spawn"))]


@pytest.fixture(params=KINDS)
def dataset(request, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "turned", raising=False)
    return KINDS[request.param](tmp_path)


@pytest.fixture
def read(bits):
    """Return what is read of a stream, batch by batch, and the stream's state."""

    def read_batches(dataset, workers=0, buffer=0, method="fork", stop=None, state=None):
        stream = wrapped(
            dataset.train_stream,
            buffer,
            name="train",
            seed=3,
            workers=workers,
            start_method=method,
            timeout=100 if buffer or workers else None,
        )
        torch.manual_seed(5)
        if state is not None:
            stream.load_state_dict(state)
            assert stream.restore()
        with stream:
            found = bits(itertools.islice((batch for _ in range(2) for batch in stream), stop))
            left = stream.state_dict() if stop else None
        stream.close()
        return found, left

    return read_batches


def test_every_dataset_is_tested_here():
    files = {path.stem for path in (Path(__file__).parent.parent.parent / "datasets").glob("[!_]*.py")}
    assert {kind.split()[0] for kind in KINDS} | WITHOUT_STREAMS == files


WITH_WORKERS = [(2, 1, method) for method in ("fork", "forkserver", "spawn")]


@pytest.mark.campaign
@pytest.mark.parametrize(("workers", "buffer", "method"), [(0, 4, None), *WITH_WORKERS])
def test_batches_and_their_order_are_those_of_one_process(dataset, read, workers, buffer, method):
    """In `make test`, the tests of each dataset read with a thread, and the resume below with workers."""
    expected = read(dataset)[0]
    assert len(expected) > 6
    assert read(dataset, workers, buffer, method)[0] == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("before", "after", "stop"), thinned([(0, 2, 1), (2, 0, 4)], [(2, 0, 4)]))
def test_a_resume_in_the_middle_of_a_pass_is_exact_with_another_number_of_workers(
    dataset, read, before, after, stop, method
):
    expected = read(dataset)[0]
    head, state = read(dataset, before, stop=stop, method=method)
    rest, _ = read(dataset, after, state=state, method=method)
    assert head + rest[: len(expected) - stop] == expected
