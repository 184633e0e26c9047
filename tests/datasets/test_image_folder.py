"""ImageFolder: images as arrays, classes as labels, flips, and files that are not images."""

import errno
import os
import shutil
import sys

import numpy as np
import pytest
from campaign import thinned
from doubles import stream_of, together
from PIL import Image

from emrun.base.errors import ArgumentError, MissingExtra, StreamError
from emrun.datasets import ImageFolder

CLASSES = ["ant", "bee", "cat"]


def pixels(number, height=6, width=5, channels=3):
    return np.random.default_rng(number).integers(0, 256, (height, width, channels), np.uint8)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split, count in (("train", 4), ("valid", 2)):
        for label, name in enumerate(CLASSES):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.fromarray(pixels(10 * label + index)).save(folder / f"{index}.png")
    return tmp_path


def make(**arguments):
    return ImageFolder(**{"train": "train", "valid": "valid", "batch_size": 2, **arguments})


def expected(count):
    return np.stack(
        [
            (pixels(10 * label + index).transpose(2, 0, 1) / np.float32(255)).astype(np.float32)
            for label in range(3)
            for index in range(count)
        ]
    )


TO_BYTES = {"mode": "L", "flip": True, "dtype": "uint8"}
CROPPED = {"size": 3, "crop": "random"}


@pytest.mark.parametrize("arguments", thinned([{}, {"flip": True}, CROPPED, TO_BYTES], [CROPPED, TO_BYTES]), ids=str)
def test_a_training_stream_is_the_same_however_it_is_read(root, arguments, check_training_stream):
    check_training_stream(lambda: make(**arguments))


@pytest.mark.parametrize("flip", [False, True])
def test_evaluations_are_in_the_order_of_the_names_and_never_flipped(root, passes, flip):
    for name, count in (("train", 4), ("valid", 2)):
        for batches in passes(make(flip=flip), name, 2, training=False):
            images, labels = together(batches), together(batches, "label")
            assert np.array_equal(images, expected(count))
            assert (images.dtype, labels.dtype) == (np.float32, np.int64)
            assert labels.tolist() == [label for label in range(3) for _ in range(count)]


@pytest.mark.parametrize("arguments", [{}, {"size": 4, "flip": True}, {"mode": "L"}], ids=str)
def test_bytes_are_the_floats_before_they_are_divided(root, passes, arguments):
    floats, pixels = (passes(make(**arguments, dtype=dtype), "train")[0] for dtype in ("float32", "uint8"))
    for one, two in zip(floats, pixels, strict=True):
        assert two["image"].dtype == np.uint8
        assert (two["image"] / np.float32(255)).tobytes() == one["image"].tobytes()
        assert two["id"] == one["id"]


@pytest.mark.parametrize("threads", ["1", "2", "7"])
def test_batches_are_the_same_for_any_number_of_threads(root, passes, bits, monkeypatch, threads):
    found = []
    for count in ("1", threads):
        monkeypatch.setenv("EMRUN_THREADS", count)
        found.append(bits(passes(make(batch_size=5, flip=True, size=4), "train")[0]))
    assert found[0] == found[1]


def test_classes_are_the_sorted_folders_of_train(root):
    dataset = make()
    assert (dataset.classes, dataset.num_classes) == (CLASSES, 3)
    assert dataset.classes_names() == CLASSES
    assert dataset.num_batches == {"train": 6, "valid": 3}


def test_half_of_the_training_images_are_flipped_differently_in_each_pass(root, passes):
    def flipped(number):
        batches = passes(make(flip=True), "train", number)[-1]
        images = {image.tobytes() for image in together(batches)}
        straight = {image.tobytes() for image in expected(4)}
        mirrored = {np.ascontiguousarray(image[..., ::-1]).tobytes() for image in expected(4)}
        assert images <= straight | mirrored
        return frozenset(images & mirrored)

    found = [flipped(number) for number in (1, 2, 3, 4)]
    assert len(set(found)) > 2
    assert 12 <= sum(map(len, found)) <= 36


def test_whether_a_picture_is_flipped_does_not_depend_on_the_batch_size(root, passes):
    one, two = (
        {image.tobytes() for image in together(passes(make(flip=True, batch_size=size), "train")[0])} for size in (1, 5)
    )
    assert one == two


@pytest.mark.parametrize(("size", "shape"), [(4, (4, 4)), ([3, 7], (3, 7))])
@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_pictures_are_resized_and_converted(root, passes, size, shape, mode, channels):
    Image.fromarray(pixels(0, 9, 20)).save(root / "train" / "ant" / "0.png")
    for batch in passes(make(size=size, mode=mode), "train")[0]:
        assert batch["image"].shape == (2, channels, *shape)
        assert batch["image"].min() >= 0
        assert batch["image"].max() <= 1


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_pictures_of_many_modes_are_read(root, passes, mode):
    kind = "tif" if mode == "CMYK" else "png"
    Image.fromarray(pixels(0)).convert(mode).save(root / "valid" / "ant" / f"0.{kind}")
    if kind == "tif":
        (root / "valid" / "ant" / "0.png").unlink()
    assert together(passes(make(), "valid")[0]).shape == (6, 3, 6, 5)


def test_a_picture_in_lab_is_read_as_grey_too(root, passes):
    Image.frombytes("LAB", (5, 6), pixels(0).tobytes()).save(root / "valid" / "ant" / "0.tif")
    (root / "valid" / "ant" / "0.png").unlink()
    colours, grey = (together(passes(make(mode=mode), "valid")[0])[0] for mode in ("RGB", "L"))
    weights = np.array([0.299, 0.587, 0.114], np.float32)  # of Pillow's conversion from RGB
    np.testing.assert_allclose(grey[0], np.tensordot(weights, colours, 1), atol=1 / 255)


def test_what_is_called_a_picture_is_never_given_to_another_program(root, passes, monkeypatch):
    Image.fromarray(pixels(0)).save(root / "valid" / "ant" / "0.eps")
    (root / "valid" / "ant" / "0.eps").rename(root / "valid" / "ant" / "0.png")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    with pytest.raises(StreamError, match=r"cannot read valid/ant/0.png \(row 0\): cannot identify image file"):
        passes(make(), "valid")


@pytest.mark.parametrize("ending", ["bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp"])
def test_each_ending_can_be_read(root, passes, ending):
    Image.fromarray(pixels(0)).convert("L").save(root / "valid" / "ant" / f"more.{ending}")
    assert together(passes(make(), "valid")[0]).shape == (7, 3, 6, 5)


def test_a_folder_that_cannot_be_read_is_an_error(root, monkeypatch):
    (root / "valid" / "bee" / "more").mkdir()
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("more"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ArgumentError, match=r"^valid: folder valid/bee/more cannot be read: Permission denied$"):
        make()


def test_grey_with_a_transparent_colour_is_read_without_a_warning(root, passes):
    picture = Image.fromarray(pixels(0)).convert("P")
    picture.save(root / "valid" / "ant" / "0.png", transparency=bytes(range(256)))
    assert together(passes(make(), "valid")[0]).shape == (6, 3, 6, 5)


def test_images_in_subfolders_belong_to_the_class_and_other_files_are_ignored(root, passes):
    below = root / "train" / "bee" / "more" / "still"
    below.mkdir(parents=True)
    Image.fromarray(pixels(99)).save(below / "x.JPG", "JPEG")
    (root / "train" / "bee" / "notes.txt").write_text("buzz")
    (root / "train" / "bee" / "._0.png").write_text("of another system")
    (root / "train" / ".cache").mkdir()
    assert together(passes(make(), "train", training=False)[0], "label").tolist() == [0] * 4 + [1] * 5 + [2] * 4


def test_pictures_of_another_size_are_an_error_that_names_both(root, passes):
    Image.fromarray(pixels(0, 7, 8)).save(root / "train" / "bee" / "1.png")
    for policy in ("error", "warn"):
        with pytest.raises(StreamError) as caught:
            passes(make(on_bad_example=policy), "train")
        assert str(caught.value) == (
            "train/bee/1.png has 7 x 8 pixels (height x width), but the first image of train has 6 x 5; set `size`"
        )


def spoil(path, how):
    content = path.read_bytes()
    if how == "sixteen bits":
        Image.fromarray(np.full((6, 5), 40_000, np.uint16)).save(path)
    elif how == "noise":
        Image.fromarray(pixels(0, 60, 50)).save(path)
        found = bytearray(path.read_bytes())
        found[len(found) // 2] ^= 255
        path.write_bytes(bytes(found))
    else:
        path.write_bytes({"empty": b"", "cut": content[:-60], "text": b"no picture"}[how])


BAD = ["empty", "cut", "text", "sixteen bits", "noise"]


@pytest.mark.parametrize("how", BAD)
def test_a_bad_picture_is_an_error_that_names_its_file(root, passes, how):
    spoil(root / "train" / "bee" / "1.png", how)
    with pytest.raises(StreamError, match=r"cannot read train/bee/1.png \(row 5\): .*on_bad_example: warn"):
        passes(make(), "train")


@pytest.mark.parametrize("how", thinned(BAD, ["cut"]))
def test_bad_pictures_can_be_left_out(root, how, check_training_stream):
    for path in ("bee/0.png", "bee/1.png", "cat/2.png"):
        spoil(root / "train" / path, how)
    stream = stream_of(make(on_bad_example="warn"), training=False)
    batches, left_out = list(stream), stream.left_out
    assert [len(batch["label"]) for batch in batches] == [2, 2, 0, 2, 2, 1]
    assert together(batches, "label").tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert np.array_equal(together(batches), expected(4)[[0, 1, 2, 3, 6, 7, 8, 9, 11]])
    assert list(left_out) == ["bee/0.png", "bee/1.png", "cat/2.png"]
    assert all(left_out.values())
    check_training_stream(lambda: make(on_bad_example="warn"))


@pytest.mark.parametrize("count", [10, 12])
def test_ten_or_all_pictures_of_a_batch_may_be_bad(root, passes, monkeypatch, count):
    monkeypatch.setenv("EMRUN_THREADS", "3")
    for path in sorted((root / "train").rglob("*.png"))[:count]:
        spoil(path, "text")
    with pytest.raises(StreamError, match=r"cannot read train/ant/0.png \(row 0\): "):
        passes(make(size=4, batch_size=12), "train", training=False)
    dataset = make(size=4, batch_size=12, on_bad_example="warn")
    stream = stream_of(dataset, training=False)
    (batch,) = stream
    assert batch["image"].shape == (12 - count, 3, 4, 4)
    assert batch["position"].tolist() == list(range(count, 12))
    assert list(stream.left_out)[:3] == [f"ant/{number}.png" for number in range(3)]
    assert len(stream.left_out) == count


def test_every_picture_keeps_its_own_label_where_others_are_left_out(root, passes):
    for path in ("ant/1.png", "bee/0.png", "cat/2.png"):
        spoil(root / "train" / path, "text")
    labels = {image.tobytes(): index // 4 for index, image in enumerate(expected(4))}
    (batches,) = passes(make(on_bad_example="warn", batch_size=6), "train")
    assert sum(len(batch["label"]) for batch in batches) == 9
    for batch in batches:
        assert batch["label"].tolist() == [labels[image.tobytes()] for image in batch["image"]]


def test_the_first_picture_that_can_be_read_gives_the_size(root, passes):
    spoil(root / "train" / "ant" / "0.png", "text")
    with pytest.raises(ArgumentError, match=r"^train: train/ant/0.png: cannot identify"):
        make()
    assert together(passes(make(on_bad_example="warn"), "valid")[0]).shape == (6, 3, 6, 5)
    for path in (root / "train").rglob("*.png"):
        spoil(path, "text")
    with pytest.raises(ArgumentError, match=r"^train: no image in train can be read$"):
        make(on_bad_example="warn")


def test_a_file_that_is_gone_in_a_later_pass_is_an_error_even_where_bad_ones_are_left_out(root, passes):
    dataset = make(on_bad_example="warn")
    passes(dataset, "train")
    (root / "train" / "bee" / "1.png").unlink()
    with pytest.raises(StreamError, match=r"cannot read train/bee/1.png \(row 5\): .*No such file"):
        passes(dataset, "train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "trian"}, "train: there is no folder trian (the current directory is "),
        ({"train": "train/ant"}, "train: train/ant has no folders; put the images of each class into a folder"),
        ({"valid": "less"}, "valid: less must have the classes of train; missing: cat; not in train: nothing"),
        ({"valid": "more"}, "valid: more must have the classes of train; missing: nothing; not in train: dog"),
        ({"test": "empty"}, "test: empty/bee has no images (.bmp, "),
        ({"size": 0}, "size: 0 is not a whole number of at least 1"),
        ({"size": [8]}, "size: [8] is neither a number of pixels nor [height, width]"),
        ({"size": "8x8"}, "size: '8x8' is neither a number of pixels nor [height, width]"),
        ({"size": [8, 2.5]}, "size: 2.5 is not a whole number"),
        ({"mode": "BGR"}, "mode: 'BGR' is not one of RGB, L"),
        ({"flip": 1}, "flip: 1 is neither true nor false"),
        ({"on_bad_example": "skip"}, "on_bad_example: 'skip' is not one of error, warn, ignore"),
        ({"batch_size": 0}, "batch_size: 0 is not a whole number of at least 1"),
    ],
)
def test_wrong_folders_and_arguments_are_refused_at_once(root, arguments, message):
    for name in ("less", "more", "empty"):
        shutil.copytree("valid", name)
    shutil.rmtree("less/cat")
    shutil.copytree("more/cat", "more/dog")
    shutil.rmtree("empty/bee")
    (root / "empty" / "bee").mkdir()
    with pytest.raises(ArgumentError) as caught:
        make(**arguments)
    assert str(caught.value).startswith(message)


def test_without_pillow_the_error_has_the_command_that_installs_it(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"ImageFolder needs Pillow, .* pip install 'emrun\[data\]'"):
        make(size=4)


def test_the_yaml_in_its_docstring_trains(tmp_path, monkeypatch, train_docstring):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "valid"):
        for name, level in (("dark", 40), ("light", 180)):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for index in range(20):
                Image.fromarray(pixels(index) // 4 + np.uint8(level)).save(folder / f"{index}.png")
    last = train_docstring(ImageFolder, "image", "label", 64, 2, epochs=6, lr=0.1)[-1]
    assert last["valid"]["accuracy"]["mean"] > 0.9


def test_the_folder_may_lie_in_the_home_directory(root, monkeypatch):
    monkeypatch.setenv("HOME", str(root.resolve().parent))
    assert make(train=f"~/{root.resolve().name}/train").classes == make().classes
