"""What lies in a folder, a shard or a file is read, or named as left out: no example is missing in silence."""

import io
import os
import re
import struct
import tarfile
import zlib

import numpy as np
import pytest
from doubles import stream_of, together
from PIL import Image
from sklearn.datasets import load_digits

from emrun.base.errors import ArgumentError, StreamError
from emrun.datasets import Digits, ImageFolder, Mixed, Table, TarShards, TokenWindows, TorchDataset
from emrun.stream_context import StreamContext


def encoded(extension="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), 7).save(file, extension)
    return file.getvalue()


def shard(path, *names):
    """Write a tar archive; a name in brackets is a link."""
    with tarfile.open(path, "w") as archive:
        for name in names:
            member = tarfile.TarInfo(name.strip("[]"))
            content = b"1" if name.endswith("cls") else encoded("JPEG" if "jp" in name.lower() else "PNG")
            if name.startswith("["):
                member.type, member.linkname, content = tarfile.SYMTYPE, "elsewhere", b""
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path.read_bytes()


def test_each_name_in_a_folder_is_read_or_counted(tmp_path, caplog):
    train, more = tmp_path / "train", tmp_path / "more"
    for folder in (train / "cat" / ".cache", train / "dog", train / ".git", more):
        folder.mkdir(parents=True)
    read = ["cat/1.png", "cat/2.PNG", "dog/1.png", "../more/linked.png"]
    left_out = ["cat/3.heic", "cat/4", "cat/._1.png", "cat/.cache/5.png", ".git/6.png", "7.png"]
    for name in (*read, *left_out):
        (train / name).write_bytes(encoded())
    (train / "cat" / "linked").symlink_to(more)
    assert len(together(stream_of(ImageFolder(str(train)), training=False))) == len(read)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"train: left out {len(left_out)} names of {train}: ")
    (more / "above").symlink_to(train / "cat")
    with pytest.raises(ArgumentError, match=r"linked/above cannot be read: it is a link to a folder above$"):
        ImageFolder(str(train))


@pytest.mark.parametrize(
    ("sources", "names", "read", "left_out"),
    [
        ({"image": "jpg"}, ["1.jpg", "2.jpeg", "3.JPEG", "4.webp"], 3, "'4 (webp)'"),
        ({"image": "jpeg", "label": "cls"}, ["1.jpg", "1.cls", "2.jpeg", "2.cls", "README.md"], 2, "'README (md)'"),
        ({"image": "png", "label": "cls"}, ["1.png", "1.cls", "1.b.png", "1.b.cls", "1.seg.png"], 1, "'1.b.*'"),
        ({"image": "png"}, ["1.png", "1.b.png", "[2.png]", "._1.png"], 1, "'[2].png', '._1.png', '1.b.*'"),
    ],
)
def test_each_name_in_a_shard_is_read_or_counted(sources, names, read, left_out, tmp_path, caplog):
    shard(tmp_path / "a.tar", *names)
    assert len(together(stream_of(TarShards(str(tmp_path / "a.tar"), sources), training=False))) == read
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith(f" of the shards: {left_out.replace('[2]', '2')}")


def test_a_dot_in_the_names_of_all_examples_is_an_error_or_counted(tmp_path, caplog):
    shard(tmp_path / "a.tar", "0.png", "img.1.png", "img.2.png")
    with pytest.raises(ArgumentError, match=r"'img' .* has no field png .* ends at its first dot, so rename"):
        TarShards(str(tmp_path / "a.tar"), {"image": "png"})
    TarShards(str(tmp_path / "a.tar"), {"image": "png"}, on_bad_example="warn")
    assert caplog.messages == ["train: left out 2 names of the shards: 'img.1.*', 'img.2.*'"]


def test_archives_that_are_joined_are_read_one_after_the_other(tmp_path):
    one, two = shard(tmp_path / "a.tar", "0.png", "1.png"), shard(tmp_path / "b.tar", "1.png", "2.png", "3.png")
    (tmp_path / "c.tar").write_bytes(one + two)
    assert len(together(stream_of(TarShards(str(tmp_path / "c.tar"), {"image": "png"}), training=False))) == 5
    (tmp_path / "c.tar").write_bytes(one + b"something else" * 100)
    with pytest.raises(ArgumentError, match="neither a file nor the end of the archive"):
        TarShards(str(tmp_path / "c.tar"), {"image": "png"})


def test_where_nothing_is_found_the_message_shows_what_is_there(tmp_path):
    shard(tmp_path / "a.tar", "1.webp")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.heic").touch()
    for call, there in [
        (lambda: TarShards(str(tmp_path / "a.tar"), {"x": "png"}), r"the shards have '1 \(webp\)'; sources: png"),
        (lambda: TarShards(str(tmp_path / "*.tgz"), {"x": "png"}), r"has 'a.tar', 'cat/'"),
        (lambda: TarShards(str(tmp_path / "b.tar"), {"x": "png"}), r"has 'a.tar', 'cat/'"),
        (lambda: ImageFolder(str(tmp_path)), r"cat' has '1.heic'"),
        (lambda: ImageFolder(str(tmp_path / "cat")), r"has no folders; .* has '1.heic'"),
    ]:
        with pytest.raises(ArgumentError, match=there):
            call()


def test_files_that_are_left_out_are_named_and_others_keep_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("emrun.streams.stream._MOST_LEFT_OUT", 1)
    names = [b"0", b"1", b"2", b"3", b"4", b"5", b"caf\xe9"]
    bad = {1, 2, 3, 5}
    folder = tmp_path / "data" / "cat"
    folder.mkdir(parents=True)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, name in enumerate(names):
            place = folder / os.fsdecode(name + b".png")
            place.write_bytes(b"bad" if number in bad else encoded())
            archive.add(place, os.fsdecode(name + b".png"))
    for data, path in (
        (
            ImageFolder(str(tmp_path / "data"), str(tmp_path / "data"), on_bad_example="warn", batch_size=3),
            "cat/{}.png",
        ),
        (
            TarShards(
                str(tmp_path / "a.tar"), {"image": "png"}, str(tmp_path / "a.tar"), on_bad_example="warn", batch_size=3
            ),
            "{}",
        ),
    ):
        both = Mixed({"a": data, "b": data}, {"a": 1, "b": 1}, 3)
        streams = [
            stream_of(each, name, training=False)
            for each, name in ((data, "train"), (both, "a_train"), (both, "train"), (both, "valid"))
        ]
        batches, mixed, *_ = found = [list(stream) for stream in streams]
        assert [each for batch in batches for each in batch["id"]] == [path.format(n) for n in ("0", "4", r"caf\xe9")]
        assert together(batches, "position").tolist() == together(mixed, "position").tolist() == [0, 4, 6]
        assert all("position" not in batch for batch in (*found[2], *found[3]))
        names = [path.format(number) for number in sorted(bad)]
        assert list(streams[0].left_out) == list(streams[1].left_out) == names
        assert all("cannot identify image file" in why for why in streams[0].left_out.values())
        assert {each.partition(": ")[2] for each in streams[2].left_out} == {*names}
        assert list(streams[3].left_out) == [f"{part}: {name}" for part in "ab" for name in names]


@pytest.mark.parametrize("count", [33, 34, 36, 37])
def test_each_token_is_read_or_counted(count, tmp_path, caplog):
    (tmp_path / "t.txt").write_bytes(bytes(range(count)))
    caplog.set_level("INFO")
    batches = list(stream_of(TokenWindows(str(tmp_path / "t.txt"), window=4, batch_size=3), training=False))
    read = {*together(batches, "tokens").flat, *together(batches, "targets").flat}
    told = [int(re.fullmatch(r"train: left out the last (\d) tokens?, .*", each)[1]) for each in caplog.messages]
    assert len(read) + sum(told) == count
    assert len(told) == (count % 4 != 1)


@pytest.mark.parametrize("size", [1, 4, 23])
def test_each_example_is_read_once_in_every_pass(size):
    numbers = [{"n": number} for number in range(23)]
    rows = TorchDataset(numbers, numbers[:9], batch_size=size)
    for training in (True, False):
        assert sorted(together(stream_of(rows, training=training), "n").tolist()) == list(range(23))
    mixed = Mixed({"a": rows, "b": rows}, {"a": 1, "b": 2}, 2)
    assert together(stream_of(mixed, "valid"), "n").tolist() == [*range(9), *range(9)]
    assert sorted(together(stream_of(mixed, "b_train", training=True), "n").tolist()) == list(range(23))
    digits = Digits(batch_size=100 * size)
    found = [len(together(stream_of(digits, name))) for name in ("train", "valid", "test")]
    assert found == [1437, 180, 180]
    assert sum(found) == len(load_digits().target)


def of_16_bits(form):
    values = np.full((4, 4, 3), 40_000)
    if form == "ppm":
        return b"P6 4 4 65535\n" + values.astype(">u2").tobytes()
    rows = b"".join(b"\0" + row.tobytes() for row in values.astype(">u2"))
    head = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("form", ["png", "ppm"])
def test_colours_of_16_bits_are_refused(form, tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(encoded())
    (tmp_path / "cat" / f"2.{form}").write_bytes(of_16_bits(form))
    with pytest.raises(StreamError, match="more than 8 bits per channel"):
        list(stream_of(ImageFolder(str(tmp_path)), training=False))


def test_a_column_that_is_not_read_may_hold_anything(tmp_path):
    long = "x" * 200_000
    (tmp_path / "t.csv").write_bytes(f"\n\nname,x\nJosé,1\n{long},2\n".encode("latin-1"))
    part = Table(str(tmp_path / "t.csv"), columns={"x": "x"})._parts["train"]
    assert part.read(np.arange(2), StreamContext("train", seed=1))["x"].tolist() == [1, 2]
    with pytest.raises(ArgumentError, match=r"column 'name': .* invalid value 'Jos"):
        Table(str(tmp_path / "t.csv"))
