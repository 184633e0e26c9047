"""TarShards: its sources and order, examples that are left out, and shards that are damaged or malicious."""

import io
import itertools
import json
import sys
import tarfile
import zlib

import numpy as np
import pytest
from campaign import thinned
from doubles import stream_of
from PIL import Image

from emrun.base.errors import ArgumentError, MissingExtra, StreamError
from emrun.datasets import TarShards


def png(value, size=(4, 4), mode="RGB", extension="PNG"):
    file = io.BytesIO()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16), np.uint8))
    (noise if value is None else Image.new(mode, size, value)).save(file, extension)
    return file.getvalue()


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def write(path, members):
    """Write a shard of pairs (name or TarInfo, content)."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return str(path)


def examples(numbers):
    for number in numbers:
        yield f"some/dir.x/{number:03d}.png", png((number, 0, 255))
        yield f"some/dir.x/{number:03d}.cls", str(number).encode()


def labels(batches):
    return [int(each) for batch in batches for each in batch["label"]]


def only_batch(path, **arguments):
    (batch,) = stream_of(TarShards(path, **arguments), training=False)
    return batch


SOURCES = {"image": "png", "label": "cls"}
MASKS = {"image": "png", "mask": {"field": "seg.png", "as": "mask"}}


def pairs(path, *masks):
    """Write a shard of pictures, each with a mask: classes, of which the picture has the number times 60."""
    members = []
    for number, mask in enumerate(masks):
        found = np.random.default_rng(number).integers(0, 3, (12, 10), np.uint8) if mask is None else mask
        for field, values in (("png", found * 60), ("seg.png", found)):
            file = io.BytesIO()
            Image.fromarray(values).save(file, "PNG")
            members.append((f"{number}.{field}", file.getvalue()))
    return write(path, members)


@pytest.fixture
def shards(tmp_path):
    """Write shards of 10, 7 and 12 examples."""
    write(tmp_path / "train-0.tar", examples(range(10)))
    write(tmp_path / "train-1.tar", examples(range(10, 17)))
    write(tmp_path / "train-2.tar", examples(range(17, 29)))
    return tmp_path


@pytest.fixture
def dataset(shards):
    return TarShards(str(shards / "train-*.tar"), SOURCES, valid=str(shards / "train-1.tar"), batch_size=4)


def test_every_example_is_read_once_in_a_pass(dataset):
    batches = list(stream_of(dataset))
    assert len(batches) == dataset.num_batches["train"] == 8
    assert sorted(labels(batches)) == list(range(29))
    for batch in batches:
        assert list(batch) == ["image", "label", "id", "position"]
        assert (batch["image"].dtype, batch["label"].dtype) == (np.float32, np.int64)
        assert batch["image"].shape == (len(batch["label"]), 3, 4, 4)
        for image, label in zip(batch["image"], batch["label"], strict=True):
            assert np.array_equal(image[:, 0, 0], np.array([label, 0, 255], np.float32) / np.float32(255))


def test_evaluations_are_in_the_order_of_the_shards(dataset):
    assert labels(stream_of(dataset, training=False)) == list(range(29))
    assert labels(stream_of(dataset, "valid")) == list(range(10, 17))
    assert not callable(dataset.test_stream)


def test_training_passes_go_shard_by_shard_each_in_another_order(dataset):
    stream, same = stream_of(dataset), stream_of(dataset)
    passes = [labels(stream) for _ in range(3)]
    assert passes == [labels(same) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    shards = [(number >= 10) + (number >= 17) for number in passes[0]]
    assert sum(before != after for before, after in itertools.pairwise(shards)) == 2
    assert passes[0] != labels(stream_of(dataset, seed=1))


def test_training_passes_are_the_same_however_they_are_read(shards, check_training_stream):
    check_training_stream(lambda: TarShards(str(shards / "train-*.tar"), SOURCES, batch_size=4))


def test_headers_are_read_once_and_content_where_it_lies(shards, monkeypatch):
    dataset = TarShards(str(shards / "train-*.tar"), SOURCES)
    monkeypatch.setattr(tarfile.TarFile, "next", None)
    assert len(labels(stream_of(dataset))) == 29


def test_nothing_is_unpacked(shards, dataset):
    before = sorted(shards.rglob("*"))
    labels(stream_of(dataset))
    assert sorted(shards.rglob("*")) == before


def test_each_kind_of_field_has_its_type(tmp_path):
    members = []
    for number in range(3):
        members += [
            (f"{number}.jpg", png((200, 100, 0), extension="JPEG")),
            (f"{number}.seg.PNG", png(number * 51, mode="L")),
            (f"{number}.cls", b" 7\n"),
            (f"{number}.json", json.dumps({"n": number}).encode()),
            (f"{number}.npy", npy(np.full((2, 3), number, np.int16))),
            (f"{number}.txt", "schön".encode()),
        ]
    fields = ["jpg", "seg.png", "cls", "json", "npy", "txt"]
    batch = only_batch(path := write(tmp_path / "a.tar", members), sources={field: field for field in fields})
    assert (batch["jpg"].shape, batch["jpg"].dtype) == ((3, 3, 4, 4), np.float32)
    in_bytes = only_batch(path, sources={"jpg": "jpg"}, dtype="uint8")["jpg"]
    assert (in_bytes / np.float32(255)).tobytes() == batch["jpg"].tobytes()
    assert abs(batch["jpg"][0, :, 0, 0] * 255 - [200, 100, 0]).max() < 3
    assert batch["seg.png"][:, :, 0, 0].tolist() == [[0] * 3, [np.float32(0.2)] * 3, [np.float32(0.4)] * 3]
    assert batch["cls"].tolist() == [7, 7, 7]
    assert batch["json"] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert (batch["npy"].shape, batch["npy"].dtype) == ((3, 2, 3), np.int16)
    assert batch["npy"][:, 0, 0].tolist() == [0, 1, 2]
    assert batch["txt"] == ["schön"] * 3


@pytest.mark.parametrize(
    ("array", "shape"), [(np.arange(6).reshape(2, 3).T, (3, 2)), (np.float32(1.5), ()), (np.empty((0, 2)), (0, 2))]
)
def test_arrays_come_back_as_they_were_written(tmp_path, array, shape):
    batch = only_batch(write(tmp_path / "a.tar", [("0.npy", npy(array))]), sources={"x": "npy"})
    assert batch["x"].shape == (1, *shape)
    assert np.array_equal(batch["x"][0], array)


def test_arrays_of_different_shapes_are_a_list(tmp_path):
    path = write(tmp_path / "a.tar", [("0.npy", npy(np.arange(2))), ("1.npy", npy(np.arange(3)))])
    assert [each.tolist() for each in only_batch(path, sources={"x": "npy"})["x"]] == [[0, 1], [0, 1, 2]]


def test_arrays_of_a_list_may_be_changed(tmp_path):
    path = write(tmp_path / "a.tar", [("0.npy", npy(np.arange(2))), ("1.npy", npy(np.arange(3)))])
    for each in only_batch(path, sources={"x": "npy"})["x"]:
        each += 1
        assert each[0] == 1


def test_arrays_of_different_types_keep_them_in_a_list(tmp_path):
    path = write(tmp_path / "a.tar", [("0.npy", npy(np.array([2**60 + 1]))), ("1.npy", npy(np.array([0.5])))])
    found = only_batch(path, sources={"x": "npy"})["x"]
    assert [each.dtype for each in found] == [np.int64, np.float64]
    assert found[0][0] == 2**60 + 1


@pytest.mark.parametrize(
    ("arguments", "shape"), [({"size": 2}, (3, 2, 2)), ({"size": [3, 5]}, (3, 3, 5)), ({"mode": "L"}, (1, 6, 4))]
)
def test_images_are_resized_and_made_grey_on_demand(tmp_path, arguments, shape):
    path = write(tmp_path / "a.tar", [("0.png", png((10, 10, 10), size=(4, 6)))])
    batch = only_batch(path, sources={"image": "png"}, **arguments)
    assert batch["image"].shape == (1, *shape)
    assert np.allclose(batch["image"], 10 / 255)


def test_images_of_different_sizes_need_a_size(tmp_path):
    path = write(tmp_path / "a.tar", [("0.png", png(0)), ("1.png", png(0, size=(5, 4)))])
    with pytest.raises(StreamError, match=r"'image' has images of shapes \(3, 4, 4\), \(3, 4, 5\); set 'size'"):
        only_batch(path, sources={"image": "png"})
    assert only_batch(path, sources={"image": "png"}, size=4)["image"].shape == (2, 3, 4, 4)


def test_links_devices_and_hidden_files_are_passed_over(tmp_path):
    link, device, hard = tarfile.TarInfo("0.txt"), tarfile.TarInfo("1.txt"), tarfile.TarInfo("3.txt")
    sparse = tarfile.TarInfo("4.txt")  # with holes, so that its content is not what lies in the archive
    sparse.pax_headers = {"GNU.sparse.map": "3,4", "GNU.sparse.size": "9"}
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard.type, hard.linkname = tarfile.LNKTYPE, "2.txt"
    device.type = tarfile.CHRTYPE
    members = [(link, b""), (device, b""), ("2.txt", b"two"), (hard, b""), ("._2.txt", b"mac"), (".hidden", b"")]
    path = write(tmp_path / "a.tar", [*members, (sparse, b"four"), ("README", b""), ("notes/all.md", b"")])
    assert only_batch(path, sources={"text": "txt"})["text"] == ["two"]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read_in_each_format(tmp_path, format):
    name = "a" * 90 + "/" + "b" * 90 + ".txt"
    with tarfile.open(tmp_path / "a.tar", "w", format=format) as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    assert only_batch(str(tmp_path / "a.tar"), sources={"text": "txt"})["text"] == ["x"]


BAD = {
    "an image cut off": ("png", png(None)[:200], "truncated|broken"),
    "no image": ("png", b"hello", "cannot identify image"),
    "another format": ("png", png(0, extension="JPEG"), "cannot identify image"),
    "no number": ("cls", b"cat", "invalid literal"),
    "no json": ("json", b"{", "Expecting property name"),
    "deep json": ("json", b"[" * 100_000, "recursion"),
    "no utf-8": ("txt", b"\xff\xfe", "can't decode byte"),
    "no array": ("npy", b"abc", "EOF"),
    "an array cut off": ("npy", npy(np.arange(9))[:-1], "EOF"),
    "an array that claims to be huge": (
        "npy",
        npy(np.arange(9)).replace(b"(9,), }" + b" " * 9, b"(9%s,), }" % (b"0" * 9)),
        "claims|EOF",
    ),
    "pickled objects": ("npy", npy(np.array([print]), allow_pickle=True), "Object arrays cannot be loaded"),
    "too many bytes": ("txt", b"x" * 200_001, "has 200001 bytes, but max_bytes is 200000"),
    "sixteen bits": ("png", png(700, mode="I;16"), "more than 8 bits"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_example_that_cannot_be_decoded_is_an_error_or_left_out(tmp_path, case):
    extension, content, reason = BAD[case]
    good = {"png": png(0), "cls": b"1", "json": b"{}", "txt": b"", "npy": npy(np.arange(3))}[extension]
    path = write(
        tmp_path / "a.tar", [(f"0.{extension}", good), (f"d/1.{extension}", content), (f"2.{extension}", good)]
    )
    arguments = {"sources": {"x": extension}, "max_bytes": 200_000}
    named = r"example 'd/1' of shard '.*a\.tar' \(row 1\)"
    with pytest.raises(StreamError, match=rf"{named}: field '{extension}'.*({reason})"):
        only_batch(path, **arguments)
    dataset = TarShards(path, **arguments, on_bad_example="warn")
    stream = stream_of(dataset, training=False)
    (batch,) = stream
    assert len(batch["x"]) == 2
    assert list(stream.left_out) == ["d/1"]


def test_an_image_that_claims_to_be_huge_is_not_decoded(tmp_path):
    header = bytearray(png(0))
    header[16:24] = (9000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    path = write(tmp_path / "a.tar", [("0.png", bytes(header))])
    with pytest.raises(StreamError, match=r"cannot read example '0'.*an image of 9000 x 9000 pixels is too large"):
        only_batch(path, sources={"x": "png"})


def test_an_example_without_a_field_is_refused_at_once_or_left_out(tmp_path):
    path = write(tmp_path / "a.tar", [("0.png", png(0)), ("0.cls", b"0"), ("1.png", png(0)), ("2.cls", b"2")])
    with pytest.raises(ArgumentError, match=r"^train: shard '.*a.tar': example '1' at offset 2048 has no field cls"):
        TarShards(path, SOURCES)
    dataset = TarShards(path, SOURCES, on_bad_example="warn")
    stream = stream_of(dataset)
    assert labels(stream) == [0]
    assert stream.left_out == {"1": "it has no field 'cls'", "2": "it has no field 'png'"}


def test_a_batch_of_bad_examples_only_is_empty(tmp_path):
    path = write(tmp_path / "a.tar", [("0.cls", b"no"), ("1.cls", b"1")])
    dataset = TarShards(path, {"label": "cls"}, batch_size=1, on_bad_example="warn")
    assert [batch["label"].tolist() for batch in stream_of(dataset, training=False)] == [[], [1]]


def test_a_field_twice_in_an_example_is_refused(tmp_path):
    path = write(tmp_path / "a.tar", [("0.cls", b"1"), ("0.cls", b"2")])
    with pytest.raises(ArgumentError, match=r"two files '0\.cls', the second at offset 1024"):
        TarShards(path, {"label": "cls"})


CUTS = [*range(1, 10 * 2048, 700), 2048, 2560, 3072, 4096, 10 * 2048]


@pytest.mark.parametrize("cut", thinned(CUTS, [*CUTS[:30:6], *CUTS[-5:]]))
def test_a_truncated_shard_is_refused_or_its_complete_examples_are_used(shards, caplog, cut):
    path = shards / "train-0.tar"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ArgumentError, match=rf"^train: shard '.*train-0\.tar': .*at offset \d+ of {cut}: "):
        TarShards(str(path), SOURCES)
    whole = cut // 2048 + (cut % 2048 > 1024 + 512)  # the last file needs no padding
    if whole:
        dataset = TarShards(str(path), SOURCES, on_bad_example="warn")
        assert labels(stream_of(dataset, training=False)) == list(range(whole))
        assert f"its {whole} complete examples are used" in caplog.text
    else:
        with pytest.raises(ArgumentError, match="truncated"):
            TarShards(str(path), SOURCES, on_bad_example="warn")


@pytest.mark.parametrize("missing", [1, 24, 500, 999])
def test_a_text_that_is_cut_off_is_not_taken_for_a_shorter_one(tmp_path, missing):
    path = tmp_path / "a.tar"
    write(path, [("0.txt", b"first"), ("1.txt", b"x" * 1000)])
    path.write_bytes(path.read_bytes()[: 3 * 512 + 1000 - missing])
    with pytest.raises(ArgumentError, match=r"'1\.txt' is truncated"):
        TarShards(str(path), {"text": "txt"})
    dataset = TarShards(str(path), {"text": "txt"}, on_bad_example="warn")
    assert [batch["text"] for batch in stream_of(dataset, training=False)] == [["first"]]


def test_folders_that_match_a_pattern_are_not_shards(shards):
    (shards / "train-9.tar").mkdir()
    dataset = TarShards(str(shards / "train-*.tar"), SOURCES)
    assert labels(stream_of(dataset, training=False)) == list(range(29))


def test_a_damaged_header_is_not_taken_for_the_end(shards):
    path = shards / "train-0.tar"
    content = bytearray(path.read_bytes())
    content[4096:4200] = b"\xff" * 104
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"at offset 4096 of \d+: neither a file nor the end"):
        TarShards(str(path), SOURCES)


@pytest.mark.parametrize("size", [-(2**40), 2**40])
def test_impossible_sizes_are_refused(tmp_path, size):
    member = tarfile.TarInfo("0.cls")
    member.size = size
    (tmp_path / "a.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with pytest.raises(ArgumentError, match="damaged or truncated at offset 0 of"):
        TarShards(str(tmp_path / "a.tar"), {"label": "cls"})


def test_headers_that_run_in_a_circle_end(tmp_path):
    member = tarfile.TarInfo("0.cls")
    member.pax_headers = {"size": "-1024"}
    (tmp_path / "a.tar").write_bytes(member.tobuf(tarfile.PAX_FORMAT) + bytes(10240))
    with pytest.raises(ArgumentError, match="damaged or truncated"):
        TarShards(str(tmp_path / "a.tar"), {"label": "cls"})


@pytest.mark.parametrize("kind", ["XHDTYPE", "XGLTYPE", "SOLARIS_XHDTYPE", "GNUTYPE_LONGNAME", "GNUTYPE_LONGLINK"])
def test_names_and_attributes_of_many_megabytes_are_not_read(tmp_path, kind):
    member = tarfile.TarInfo("name")
    member.type, member.size = getattr(tarfile, kind), 2**24
    (tmp_path / "a.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(2**24 + 10240))
    with pytest.raises(ArgumentError, match="impossible size"):
        TarShards(str(tmp_path / "a.tar"), {"label": "cls"})


def test_a_compressed_shard_is_refused_with_advice(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz"):
        pass
    with pytest.raises(ArgumentError, match=r"it is compressed.*gunzip"):
        TarShards(str(tmp_path / "a.tar.gz"), SOURCES)


def test_a_shard_that_was_changed_or_removed_is_an_error_even_when_examples_are_skipped(shards):
    dataset = TarShards(str(shards / "train-*.tar"), SOURCES, on_bad_example="warn")
    write(shards / "train-1.tar", examples(range(3)))
    with pytest.raises(StreamError, match=r"train-1\.tar' has changed since the dataset was built"):
        labels(stream_of(dataset))
    (shards / "train-1.tar").unlink()
    with pytest.raises(StreamError, match=r"train-1\.tar.*No such file"):
        labels(stream_of(dataset))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "no.tar"}, "train: there is no file 'no.tar'"),
        ({"train": "no-*.tar"}, "train: there is no file 'no-*.tar'"),
        ({"train": "empty.tar"}, "train: contains no examples"),
        ({"train": "nothing.tar"}, "train: shard 'nothing.tar': damaged or truncated at offset 0 of 0: neither"),
        ({"sources": {}}, "sources: {} is not a mapping"),
        ({"sources": ["png"]}, "sources: ['png'] is not a mapping"),
        ({"sources": {"x": "gif"}}, "sources: the field 'gif' of 'x' does not end in one of jpg, jpeg, png"),
        ({"sources": {"x": 3}}, "sources: the field 3 of 'x' does not end"),
        ({"size": 0}, "size: 0 is not a whole number of at least 1"),
        ({"size": [1, 2, 3]}, "size: [1, 2, 3] is neither a number of pixels nor [height, width]"),
        ({"mode": "P"}, "mode: 'P' is not one of RGB, L"),
        ({"max_bytes": 0}, "max_bytes: 0 is not a whole number of at least 1"),
        ({"on_bad_example": "skip"}, "on_bad_example: 'skip' is not one of error, warn, ignore"),
        ({"batch_size": 0}, "batch_size: 0 is not a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(shards, monkeypatch, arguments, message):
    monkeypatch.chdir(shards)
    write(shards / "empty.tar", [])
    (shards / "nothing.tar").touch()
    with pytest.raises(ArgumentError) as caught:
        TarShards(**{"train": "train-0.tar", "sources": SOURCES, **arguments})
    assert str(caught.value).startswith(message)


def test_without_pillow_the_message_has_the_command(shards, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"TarShards needs Pillow.*pip install 'emrun\[data\]'"):
        TarShards(str(shards / "train-0.tar"), SOURCES)
    assert labels(stream_of(TarShards(str(shards / "train-0.tar"), {"label": "cls"}), training=False)) == [*range(10)]


def test_a_negative_size_in_an_extended_header_is_refused(tmp_path):
    member = tarfile.TarInfo("0.cls")
    member.pax_headers = {"size": "-1"}
    content = member.tobuf(tarfile.PAX_FORMAT) + bytes(1024)
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(
        ArgumentError, match=r"a\.tar': damaged or truncated at offset 0 of \d+: '0.cls' has a size of -1"
    ):
        TarShards(str(tmp_path / "a.tar"), {"label": "cls"})


@pytest.mark.parametrize("arguments", [{}, {"size": 5}, {"size": 6, "crop": "random"}], ids=str)
@pytest.mark.parametrize("order", [1, -1])
def test_masks_stay_the_numbers_of_classes_and_are_cropped_as_their_pictures(tmp_path, arguments, order):
    path = pairs(tmp_path / "one.tar", *[None] * 4)
    filters = {"interpolation": "nearest"} if arguments else {}
    sources = dict([*MASKS.items()][::order])
    dataset = TarShards(path, sources, mode="L", dtype="uint8", batch_size=2, **arguments, **filters)
    for batch in stream_of(dataset):
        assert batch["mask"].dtype == np.int64
        assert np.array_equal(batch["image"][:, 0], batch["mask"] * 60)


def test_a_mask_of_another_size_is_a_bad_example(tmp_path):
    members = [("0.png", png((1, 2, 3))), ("0.seg.png", png(1, (4, 5), "L"))]
    path = write(tmp_path / "one.tar", [*members, ("1.png", png((1, 2, 3))), ("1.seg.png", png(1, mode="L"))])
    with pytest.raises(StreamError, match=r"'0' of shard .* field 'seg.png': the mask has 5 x 4 pixels .* has 4 x 4"):
        only_batch(path, sources=MASKS, size=2)
    assert only_batch(path, sources=MASKS, size=2, on_bad_example="warn")["id"] == ["1"]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"field": "seg.jpg", "as": "mask"}, "sources.mask: {.*} is not a mask such as {field: seg.png, as: mask}"),
        ({"field": "cls", "as": "mask"}, "sources.mask: {.*} is not a mask such as"),
        ({"field": "seg.png", "as": "picture"}, "sources.mask: {.*} is not a mask such as"),
        ({"field": "seg.png"}, "sources.mask: {.*} is not a mask such as"),
        ({"as": "mask"}, "sources.mask: {.*} is not a mask such as"),
        ({"field": "seg.png", "as": "mask", "ignore": 0}, "sources.mask: {.*} is not a mask such as"),
    ],
)
def test_a_mask_has_one_form(tmp_path, form, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        TarShards(pairs(tmp_path / "one.tar", None), {"image": "png", "mask": form})
