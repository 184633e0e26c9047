"""The part of an image that is used: random ones, the centre, decoded at a lower resolution, turned as noted."""

import functools
import io
import math

import numpy as np
import pytest
from PIL import Image

from emrun.base.errors import ArgumentError
from emrun.datasets import ImageFolder, TarShards
from emrun.datasets._images import Crop, Images
from emrun.datasets._picture_batches import Encoded

JPEG = ["JPEG"]


def photo(width, height):
    """Return a smooth picture, whose three channels differ."""
    noise = np.random.default_rng(3).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def stored(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92, **options)
    return file


def images(size=32, crop=None, interpolation="bilinear", orient=False):
    return Images("RGB", "uint8", size, crop, interpolation, orient)


def read(images, file, formats, rng=None):
    with Encoded(file, formats).opened() as image:
        return images.read(image, rng)


@functools.cache
def boxes(count, width, height, **options):
    crop = Crop(True, **options)
    return np.array([crop.box(width, height, (8, 8), np.random.default_rng(seed)) for seed in range(count)])


def shares_and_ratios(found, width, height):
    wide, high = found[:, 2] - found[:, 0], found[:, 3] - found[:, 1]
    return wide * high / (width * height), wide / high


def test_random_parts_lie_in_the_image_and_have_the_areas_and_ratios():
    found = boxes(2000, 500, 400)
    assert (found[:, :2] >= 0).all()
    assert (found[:, 2:] <= [500, 400]).all()
    shares, ratios = shares_and_ratios(found, 500, 400)
    assert 0.078 < shares.min() < 0.09
    assert 0.98 < shares.max() <= 1
    assert (ratios > 0.74).all()
    assert (ratios < 1.35).all()
    assert abs(np.log(ratios).mean()) < 0.05
    assert abs(np.quantile(shares, 0.25) - 0.3) < 0.03  # uniform, but large parts fit less often
    places = found[shares < 0.3, 0] / (500 - (found[:, 2] - found[:, 0])[shares < 0.3])
    assert abs(places.mean() - 0.5) < 0.05


def test_random_parts_are_distributed_as_those_of_torchvision():
    transforms = pytest.importorskip("torchvision.transforms")
    torch = pytest.importorskip("torch")
    picture = torch.zeros(3, 400, 500)
    theirs = [transforms.RandomResizedCrop.get_params(picture, (0.08, 1), (3 / 4, 4 / 3)) for _ in range(2000)]
    theirs = np.array([(left, top, left + wide, top + high) for top, left, high, wide in theirs])
    for one, two in zip(*(shares_and_ratios(each, 500, 400) for each in (theirs, boxes(2000, 500, 400))), strict=True):
        quantiles = np.linspace(0.05, 0.95, 10)
        assert abs(np.quantile(one, quantiles) - np.quantile(two, quantiles)).max() < 0.06


@pytest.mark.parametrize(("width", "height"), [(1, 5000), (5000, 1), (1, 1), (30, 4000)])
@pytest.mark.parametrize("rng", [None, np.random.default_rng(0)], ids=["centre", "random"])
def test_an_image_of_any_shape_has_a_part(width, height, rng):
    left, top, right, bottom = Crop(True).box(width, height, (24, 24), rng)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    if rng is not None and width > 1 and height > 1:
        assert 0.74 < (right - left) / (bottom - top) < 1.35
    found = read(images(24, "random"), stored(Image.new("RGB", (width, height), (9, 99, 200))), JPEG, rng)
    assert found.shape == (24, 24, 3)
    assert abs(found - [9.0, 99, 200]).max() < 5


@pytest.mark.parametrize("side", [0.875, 1.0, 0.5])
@pytest.mark.parametrize("size", [(32, 32), (20, 40)])
def test_the_centre_is_that_of_the_whole_image_resized(size, side):
    file = stored(photo(160, 120))
    found = read(images([*size], {"kind": "centre", "side": side}), file, JPEG, np.random.default_rng(0))
    each = side * min(160 / size[1], 120 / size[0])
    whole = max(size[1], int(160 / each)), max(size[0], int(120 / each))
    left, top = round((whole[0] - size[1]) / 2), round((whole[1] - size[0]) / 2)
    expected = Image.open(file).resize(whole, Image.Resampling.BILINEAR)
    expected = np.asarray(expected.crop((left, top, left + size[1], top + size[0])))
    assert found.shape == (*size, 3)
    assert abs(found.astype(int) - expected).max() <= 1


def test_the_centre_is_that_of_torchvision():
    transforms = pytest.importorskip("torchvision.transforms")
    file = stored(photo(500, 375))
    theirs = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])(Image.open(file))
    off = abs(np.asarray(theirs).astype(int) - read(images(224, "centre"), file, JPEG))
    assert off.max() <= 4
    assert off.mean() <= 1


@pytest.mark.parametrize(
    ("crop", "drafted"),
    [
        pytest.param("centre", [(200, 150)], id="centre"),
        pytest.param({"kind": "centre", "side": 0.4}, [(400, 300)], id="less", marks=pytest.mark.campaign),
        pytest.param(None, [], id="no crop", marks=pytest.mark.campaign),
    ],
)
def test_a_large_jpeg_is_decoded_at_a_lower_resolution_with_nearly_the_same_pixels(monkeypatch, crop, drafted):
    file, found = stored(photo(800, 600)), []
    expected = read(images(32, crop), io.BytesIO(png_of(file)), ["PNG"])
    kind = type(Image.open(file))
    draft = kind.draft
    monkeypatch.setattr(kind, "draft", lambda self, *args: draft(self, *args) and found.append(self.size))
    off = abs(read(images(32, crop), file, JPEG).astype(int) - expected)
    assert found == drafted  # the part still has three times 32 pixels
    assert off.max() <= 4
    assert off.mean() <= 1


def png_of(file):
    found = io.BytesIO()
    Image.open(file).save(found, "PNG")
    return found.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("crop", [None, "centre"])
def test_an_image_is_turned_as_the_camera_noted(orientation, crop):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    file = stored(photo(90, 60), exif=exif.tobytes())
    upright = io.BytesIO()
    ImageOps.exif_transpose(Image.open(file)).save(upright, "PNG")
    expected = read(images([12, 16], crop), upright, ["PNG"])
    assert np.array_equal(read(images([12, 16], crop, orient=True), file, JPEG), expected)
    assert np.array_equal(read(images([12, 16], crop), file, JPEG), expected) is (orientation == 1)


def test_the_interpolation_can_be_chosen(tmp_path):
    file = stored(photo(50, 40))
    expected = np.asarray(Image.open(file).resize((9, 9), Image.Resampling.LANCZOS))
    assert np.array_equal(read(images(9, interpolation="lanczos"), file, JPEG), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"crop": "center"}, "crop: 'center' is not one of random, centre"),
        ({"crop": "random", "size": None}, "crop: needs `size`"),
        ({"crop": {"areas": [0.5, 1]}}, "crop: unknown key 'areas'; did you mean 'area'?"),
        ({"crop": {"kind": "centre", "area": [0.5, 1]}}, "crop: unknown key 'area'"),
        ({"crop": {"area": [0, 1]}}, "crop: area: [0, 1] is not [low, high] above 0 and at most 1"),
        ({"crop": {"area": [0.5, 1.5]}}, "crop: area: [0.5, 1.5] is not [low, high] above 0 and at most 1"),
        ({"crop": {"area": 0.5}}, "crop: area: 0.5 is not [low, high]"),
        ({"crop": {"ratio": [2, 1]}}, "crop: ratio: [2, 1] is not [low, high] above 0"),
        ({"crop": {"ratio": [math.inf, math.inf]}}, "is not [low, high] above 0"),
        ({"crop": {"ratio": [0.5, math.inf]}}, "crop: ratio: [0.5, inf] is not [low, high] above 0"),
        ({"crop": {"side": True}}, "crop: side: True is not a number above 0 and at most 1"),
        ({"crop": {"side": "half"}}, "crop: side: 'half' is not a number"),
        ({"interpolation": "cubic"}, "interpolation: 'cubic' is not one of nearest, box, bilinear"),
        ({"interpolation": "box", "size": None}, "interpolation: needs `size`"),
        ({"orient": 1}, "orient: 1 is neither true nor false"),
    ],
)
def test_a_wrong_crop_is_refused(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        images(**arguments)
    assert message in str(caught.value)


@pytest.fixture
def folder(tmp_path):
    for number in range(6):
        place = tmp_path / "train" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (24, 30, 3), np.uint8)
        Image.fromarray(noise).save(place / f"{number}.png")
    return tmp_path / "train"


def test_training_passes_draw_parts_and_evaluations_use_the_centre(folder, passes):
    def batches(crop, **options):
        return passes(ImageFolder(folder, size=8, crop=crop, batch_size=6), "train", 2, **options)

    def by_id(batch):
        return dict(zip(batch["id"], map(bytes, batch["image"]), strict=True))

    (first,), (second,) = batches("random")
    assert all(one != two for one, two in zip(sorted(by_id(first).items()), sorted(by_id(second).items()), strict=True))
    assert by_id(batches("random", training=False)[0][0]) == by_id(batches("centre")[0][0])


@pytest.mark.parametrize(("threads", "batch_size"), [("2", 6), ("7", 6), ("1", 2)])
def test_random_parts_depend_neither_on_threads_nor_on_the_batch(folder, passes, monkeypatch, threads, batch_size):
    def found():
        dataset = ImageFolder(folder, size=8, crop="random", flip=True, dtype="uint8", batch_size=batch_size)
        return {name: image.tobytes() for each in passes(dataset, "train")[0] for name, image in pairs(each)}

    def pairs(batch):
        return zip(batch["id"], batch["image"], strict=True)

    monkeypatch.setenv("EMRUN_THREADS", threads)
    several = found()
    monkeypatch.setenv("EMRUN_THREADS", "1")
    batch_size = 6
    assert several == found()


def test_images_of_an_example_get_the_same_part(folder, tmp_path, passes):
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, path in enumerate(sorted(folder.rglob("*.png"))):
            archive.add(path, f"{number}.png")
            archive.add(path, f"{number}.mask.png")
    dataset = TarShards(str(tmp_path / "a.tar"), {"image": "png", "mask": "mask.png"}, size=8, crop="random")
    for (batch,) in passes(dataset, "train", 2):
        assert batch["image"].tobytes() == batch["mask"].tobytes()
