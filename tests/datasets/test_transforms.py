"""Transforms of pictures."""

import os
import random
import tarfile

import numpy as np
import pytest
import torch
from campaign import thinned
from PIL import Image

from emrun.base.errors import ArgumentError, MissingExtra, StreamError, fitting_torchvision
from emrun.config.import_finder import locate
from emrun.datasets._transforms import DRAWING, OwnDraws, Transforms, array_of, transforms_of
from emrun.datasets.image_folder import ImageFolder
from emrun.datasets.pictures import Pictures
from emrun.datasets.tar_shards import TarShards
from emrun.ranks.group import Ranks
from emrun.stream_context import StreamContext

READERS = [("loop", "1"), ("thread", "4"), ("worker", "1"), ("worker", "4")]
AUGMENT = [
    {"ColorJitter": {"brightness": 0.3, "hue": 0.1}},
    {"RandomApply": {"transforms": [{"RandomRotation": {"degrees": 30}}], "p": 0.5}},
    "GaussianNoise",
    "AugMix",
    {"RandomChoice": {"transforms": ["RandomHorizontalFlip", "RandomErasing"]}},
]


@pytest.fixture
def pictures(tmp_path):
    """Return a folder with twelve images of two classes."""
    random = np.random.default_rng(1)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(6):
            pixels = random.integers(0, 255, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    return tmp_path


def by_hand(folder, ctx):
    """Return the images, transformed one by one under the seed of each."""
    from torchvision.transforms import v2

    steps = v2.Compose(
        [
            v2.ColorJitter(brightness=0.3, hue=0.1),
            v2.RandomApply([v2.RandomRotation(30)], p=0.5),
            v2.GaussianNoise(),
            v2.AugMix(),
            v2.RandomChoice([v2.RandomHorizontalFlip(), v2.RandomErasing()]),
        ]
    )
    found = []
    for row, file in enumerate(sorted(folder.rglob("*.png"))):
        torch.manual_seed(ctx.seed_for(row) % 2**63)
        pixels = np.asarray(Image.open(file)).transpose(2, 0, 1)
        found.append(steps(torch.from_numpy(pixels.copy())).numpy())
    return np.stack(found)


def made(dataset, ctx):
    """Return the batches of a training pass as one: source -> values in the order of the examples."""
    batches = list(dataset.train_stream(ctx))
    order = np.argsort(np.concatenate([batch["position"] for batch in batches]))
    assert len(order) == 12
    return {name: np.concatenate([batch[name] for batch in batches])[order] for name in batches[0]}


@pytest.mark.parametrize(("read_by", "threads"), thinned(READERS, [("thread", "4")]))
def test_the_bytes_are_those_of_the_transforms_called_by_hand_for_every_reader(pictures, monkeypatch, read_by, threads):
    monkeypatch.setitem(os.environ, "EMRUN_THREADS", threads)
    dataset = ImageFolder(pictures, augment=AUGMENT, batch_size=5, dtype="uint8")
    ctx = StreamContext("train", seed=3, epoch=2, read_by=read_by)
    np.testing.assert_array_equal(made(dataset, ctx)["image"], by_hand(pictures, ctx))


def test_the_bytes_are_the_same_in_workers_on_ranks_and_after_a_resume(pictures, check_training_stream, passes, bits):
    def make():
        return ImageFolder(pictures, augment=["RandomErasing", {"RandomCrop": {"size": 10}}], batch_size=3)

    check_training_stream(make, stops=(2,))
    straight = passes(make(), "train")[0]
    assert bits(passes(make(), "train", workers=2)[0]) == bits(straight)
    whole = made(make(), StreamContext("train", seed=3, epoch=1))["image"]
    for rank in (0, 1):
        for batch in make().train_stream(StreamContext("train", seed=3, epoch=1, ranks=Ranks(rank, 2))):
            np.testing.assert_array_equal(batch["image"], whole[batch["position"]])


def masked(kind, folder):
    """Return a function that makes a dataset of twelve pictures with masks, in files or in shards."""
    images = {"augment": [{"RandomRotation": {"degrees": 30}}, {"ColorJitter": {"brightness": 0.3}}], "batch_size": 5}
    images["dtype"] = "uint8"
    if kind == "Pictures":
        return lambda: Pictures(f"{folder}/images/*.png", f"{folder}/masks/*.png", **images)
    sources = {"image": "png", "mask": {"field": "seg.png", "as": "mask"}}
    return lambda: TarShards(f"{folder}/*.tar", sources, **images)


@pytest.fixture
def masks(tmp_path):
    """Return a folder with twelve pictures and masks of three classes, and shards of the same."""
    random = np.random.default_rng(1)
    with tarfile.open(tmp_path / "0.tar", "w") as shard:
        for source in ("images", "masks"):
            (tmp_path / source).mkdir()
        for number in range(12):
            for source, name, high, shape in (("images", "png", 255, (12, 16, 3)), ("masks", "seg.png", 3, (12, 16))):
                file = tmp_path / source / f"{number:02}.png"
                Image.fromarray(random.integers(0, high, shape, dtype=np.uint8)).save(file)
                shard.add(file, f"{number:02}.{name}")
    return tmp_path


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["Pictures", "TarShards"])
def test_pictures_and_masks_are_turned_together_for_every_reader(masks, monkeypatch, kind, check_training_stream):
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    make = masked(kind, masks)
    steps = v2.Compose([v2.RandomRotation(30, fill={tv_tensors.Mask: 255, "others": 0}), v2.ColorJitter(0.3)])
    expected = []
    for row in range(12):
        pixels, mask = (np.asarray(Image.open(masks / each / f"{row:02}.png")) for each in ("images", "masks"))
        values = {
            "image": tv_tensors.Image(pixels.transpose(2, 0, 1).copy()),
            "mask": tv_tensors.Mask(mask.copy()),
        }
        torch.manual_seed(StreamContext("train", seed=3, epoch=2).seed_for(row) % 2**63)
        expected.append(steps(values))
    for read_by, threads in READERS:
        monkeypatch.setitem(os.environ, "EMRUN_THREADS", threads)
        found = made(make(), StreamContext("train", seed=3, epoch=2, read_by=read_by))
        for row, values in enumerate(expected):
            np.testing.assert_array_equal(found["image"][row], values["image"].numpy())
            np.testing.assert_array_equal(found["mask"][row], values["mask"].numpy())
    for rank in (0, 1):
        for batch in make().train_stream(StreamContext("train", seed=3, epoch=2, ranks=Ranks(rank, 2))):
            np.testing.assert_array_equal(batch["mask"], found["mask"][batch["position"]])
    check_training_stream(make, stops=(2,))


def test_evaluations_have_the_transforms_but_not_the_augmentation(pictures):
    dataset = ImageFolder(pictures, transform=[{"CenterCrop": {"size": 8}}], augment=["RandomErasing", "GaussianNoise"])
    (batch,) = dataset.train_stream(StreamContext("train", seed=3))
    plain = np.stack([np.asarray(Image.open(file)) for file in sorted(pictures.rglob("*.png"))])
    expected = plain[:, 2:10, 4:12].transpose(0, 3, 1, 2) / np.float32(255)
    np.testing.assert_array_equal(batch["image"], expected)


def test_transforms_may_give_images_of_different_sizes_one_size(pictures):
    Image.new("RGB", (20, 30)).save(pictures / "cat" / "other.png")
    dataset = ImageFolder(pictures, transform=[{"Resize": {"size": [8, 9]}}])
    (batch,) = dataset.train_stream(StreamContext("train", seed=3))
    assert batch["image"].shape == (13, 3, 8, 9)


def test_floats_stay_what_they_are(pictures):
    steps = [{"ToDtype": {"dtype": "float32", "scale": True}}, {"Normalize": {"mean": [0.5] * 3, "std": [0.5] * 3}}]
    dataset = ImageFolder(pictures, transform=steps)
    (batch,) = dataset.train_stream(StreamContext("train", seed=3))
    (plain,) = ImageFolder(pictures).train_stream(StreamContext("train", seed=3))
    assert batch["image"].dtype == np.float32
    np.testing.assert_allclose(batch["image"], plain["image"] * 2 - 1, atol=1e-6)


def test_pixels_that_a_transform_makes_up_have_no_class():
    from torchvision import tv_tensors

    _, training = transforms_of(None, [{"RandomRotation": {"degrees": [40, 50]}}], ignore=255)
    values = {"image": tv_tensors.Image(torch.ones(3, 9, 9)), "mask": tv_tensors.Mask(torch.full((9, 9), 3))}
    found = training.apply(values, StreamContext("train", seed=3, epoch=1), 0)
    assert set(found["mask"].unique().tolist()) == {3, 255}
    np.testing.assert_array_equal(found["mask"] == 255, found["image"][0] == 0)


def of_numpy(image):
    return image + np.random.randint(2)


def of_python(image):
    return image + random.randrange(2)


def seeds_torch(image):
    torch.manual_seed(torch.initial_seed() + 1)
    return image


OWN = np.random.default_rng(3)


def of_own(image):
    return image + int(OWN.integers(100))


def rarely_of_numpy(image):
    return of_numpy(image) if torch.rand(1) < 0.4 else image


def in_place(image):
    image += 1
    return image


def drops_out(image):
    return torch.nn.functional.dropout(image.float())


def to_array(image):
    return image.numpy()


def to_picture(image):
    return Image.fromarray(image[0].numpy())


def to_batch(image):
    return image[None]


def to_whole_numbers(image):
    return image.long()


def of_some_size(image):
    return image[:, : 5 + int(torch.randint(7, ()))]


def broken(image):
    raise KeyError("colour")


FAULTS = {
    of_numpy: "augment[1] (of_numpy) changes the global random numbers of numpy, which all threads share; set",
    of_python: "augment[1] (of_python) changes the global random numbers of python",
    seeds_torch: "augment[1] (seeds_torch) changes the global random numbers of torch",
    rarely_of_numpy: "augment[1] (rarely_of_numpy) changes the global random numbers of numpy",
    of_own: "augment[1] (of_own) gives another result for the same seed: it draws from a generator of its own",
    in_place: "augment[1] (in_place) changes its input; let it change a copy",
    drops_out: "torch's dropout draws random numbers, and takes no generator; set main_loop.workers: 1 or more",
    to_array: "augment[1] (to_array) returned ndarray for 'image', not a tensor",
    to_picture: "augment[1] (to_picture) returned Image for 'image', not a tensor",
    to_batch: "the transforms returned an image of shape 1 x 3 x 12 x 16 and dtype uint8, not uint8 or float of shape",
    to_whole_numbers: "the transforms returned an image of shape 3 x 12 x 16 and dtype int64",
    of_some_size: "the transforms made 'image' of shape",
    broken: "augment[1] (broken) raised KeyError: 'colour'",
}
IN_WORKERS = (of_numpy, of_python, rarely_of_numpy, drops_out)


@pytest.mark.parametrize("policy", ["error", "ignore"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_transform_that_is_wrong_is_an_error_with_the_file(pictures, fault, policy):
    dataset = ImageFolder(pictures, augment=["RandomHorizontalFlip", fault], on_bad_example=policy)
    with pytest.raises(StreamError) as found:
        list(dataset.train_stream(StreamContext("train", seed=3, epoch=1, read_by="thread")))
    text = "\n".join([str(found.value), *getattr(found.value, "__notes__", ())])
    assert FAULTS[fault] in text
    assert f"{pictures}/" in text


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_in_a_worker_a_transform_may_draw_from_all_global_generators(pictures, fault):
    read = [ImageFolder(pictures, augment=[fault], dtype="float32", batch_size=size) for size in (5, 7)]
    contexts = [StreamContext("train", seed=3, epoch=1, workers=1) for _ in read]
    if fault not in (*IN_WORKERS, seeds_torch):
        with pytest.raises(StreamError):
            made(read[0], contexts[0])
        return
    one, two = map(made, read, contexts)
    np.testing.assert_array_equal(one["image"], two["image"])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("ColorJitter", "augment: 'ColorJitter' is not a list, such as [ColorJitter: {brightness: 0.3}]"),
        ([3], "augment[0]: 3 is neither a callable nor a transform of torchvision, such as {ColorJitter: {brightness"),
        (
            ["ColourJitter"],
            "augment[0]: torchvision.transforms.v2 has no transform 'ColourJitter'; did you mean 'Col",
        ),
        (["functional"], "augment[0]: torchvision.transforms.v2 has no transform 'functional'"),
        (
            [{"ColorJitter": {"brightnes": 0.3}}],
            "augment[0].ColorJitter.brightnes: unknown key 'brightnes'; did you mean 'brightness'?",
        ),
        ([{"RandomRotation": {"degrees": -1}}], "augment[0].RandomRotation: If degrees is a single number"),
        (["MixUp"], "augment[0]: MixUp mixes the examples of a batch, and transforms get one; use the hook Mixup"),
        ([{"Resize": {"size": 8, "interpolation": "best"}}], "augment[0].Resize: 'best' is not a valid Interpolation"),
        (
            [{"RandomApply": {"transforms": ["Nothing"]}}],
            "augment[0].RandomApply.transforms[0]: torchvision.transforms.v2 has no transform 'Nothing'",
        ),
    ],
)
def test_wrong_entries_are_refused_at_once(pictures, entries, message):
    with pytest.raises(ArgumentError) as found:
        ImageFolder(pictures, augment=entries)
    assert str(found.value).startswith(message)


def test_floats_need_the_dtype():
    with pytest.raises(
        StreamError, match="returned floats, but the dataset has `dtype: uint8`; write `dtype: float32`"
    ):
        array_of(torch.zeros(3, 2, 2), "uint8")


def test_every_function_of_torch_that_takes_a_generator_is_known():
    """Those that have a name of their own in Python; others are called by these."""
    drawing = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any(each.name == "generator" for each in schema.arguments)
    }
    found = {name for name in drawing if callable(getattr(torch, name, getattr(torch.Tensor, name, None)))}
    assert {name for name in found if "rrelu" not in name and "dropout" not in name} <= DRAWING


def test_a_mode_gives_the_numbers_of_a_seed_and_leaves_the_global_generator_alone():
    draws = [
        lambda: torch.rand(2),
        lambda: torch.empty(2).uniform_(2, 3),
        lambda: torch.randn_like(torch.ones(2)),
        lambda: torch.randperm(5),
        lambda: torch.multinomial(torch.ones(5), 2),
        lambda: torch.distributions.Beta(torch.ones(1), torch.ones(1)).sample(),
        lambda: torch.normal(0.0, 1.0, (2,)),
        lambda: torch.nn.init.normal_(torch.empty(2, 2)),
    ]
    for draw in draws:
        before = torch.get_rng_state()
        with OwnDraws(torch.Generator().manual_seed(7)):
            found = draw()
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(7)
        assert torch.equal(draw(), found)


def test_a_torchvision_that_does_not_fit_is_told(tmp_path, monkeypatch):
    (tmp_path / "of_vision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = (
        r"of_vision.Thing needs torchvision, which was compiled for another build of torch than 2.*\(operator torch"
    )
    with pytest.raises(MissingExtra, match=message + r".*: pip install --force-reinstall torch torchvision"):
        locate("of_vision.Thing")
    with pytest.raises(RuntimeError, match="another one"), fitting_torchvision("this"):
        raise RuntimeError("another one")


def test_no_transforms_need_no_torchvision():
    assert [bool(each) for each in transforms_of(None, [])] == [False, False]
    assert not Transforms([])


def test_an_object_that_fills_masks_with_a_class_is_refused():
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    bad, good = v2.RandomRotation(30), v2.RandomRotation(30, fill={tv_tensors.Mask: 255, "others": 0})
    transforms_of([good, of_numpy], [v2.ColorJitter(0.1)], ignore=255)
    transforms_of([bad], None)
    for each in (bad, v2.Compose([good, v2.RandomApply([bad])])):
        with pytest.raises(ArgumentError, match="fills masks with class 0, not with the number of `ignore`, 255"):
            transforms_of(None, [each], ignore=255)
