"""Pictures: pairs by name, masks that stay masks, and pairs that are none."""

import re
import sys
import tarfile

import numpy as np
import pytest
from campaign import thinned
from doubles import stream_of, together
from PIL import Image

from emrun import create_training
from emrun.base.errors import ArgumentError, ConfigError, MissingExtra, StreamError
from emrun.config.config import load_config
from emrun.datasets import Pictures, TarShards
from emrun.diagnosis.tryout import try_out

STEP = 60  # what a pixel of class 1 has in the picture


def classes(number, height=12, width=10):
    return np.random.default_rng(number).integers(0, 3, (height, width), np.uint8)


def save(number, image, mask, values=None, **options):
    values = classes(number) if values is None else values
    for path, pixels in ((image, values * STEP), (mask, values)):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, **options)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for index in range(9):
        save(index, tmp_path / f"images/{index}.png", tmp_path / f"masks/{index}.png")
    return tmp_path


def opened(path):
    with Image.open(path) as image:
        return np.asarray(image)


def make(**arguments):
    given = {"image": "images/*.png", "mask": "masks/*.png", "mode": "L", "dtype": "uint8", "batch_size": 2}
    return Pictures(**given | arguments)


def test_masks_are_the_numbers_that_are_stored(root, passes):
    (batches,) = passes(make(), "train", training=False)
    masks = together(batches, "mask")
    assert (masks.dtype, masks.shape) == (np.int64, (9, 12, 10))
    assert np.array_equal(masks, np.stack([classes(index) for index in range(9)]))
    assert np.array_equal(together(batches)[:, 0], masks * STEP)
    assert [name for batch in batches for name in batch["id"]] == [f"{index}.png" for index in range(9)]
    assert together(batches, "position").tolist() == list(range(9))


SHAPES = [
    {"size": 5},
    {"size": [9, 7], "flip": True},
    {"size": 6, "crop": "random", "flip": True},
    {"size": 6, "crop": "centre"},
]


@pytest.mark.parametrize("arguments", SHAPES, ids=str)
def test_a_mask_is_cropped_resized_and_mirrored_as_its_picture(root, passes, arguments):
    found = passes(make(**arguments, interpolation="nearest"), "train", 2)
    for batch in [batch for batches in found for batch in batches]:
        assert np.array_equal(batch["image"][:, 0], batch["mask"] * STEP)
    blurred = passes(make(**arguments), "train", 2)
    for one, two in zip(found[1], blurred[1], strict=True):
        assert np.array_equal(one["mask"], two["mask"])  # whatever the filter of pictures


def test_a_training_stream_is_the_same_however_it_is_read(root, check_training_stream):
    check_training_stream(lambda: make(size=6, crop="random", flip=True), stops=(3, 7))


def test_batches_are_the_same_for_any_number_of_threads_and_workers(root, passes, bits, monkeypatch):
    found = []
    for threads, workers in (("1", 0), ("4", 0), ("1", 2)):
        monkeypatch.setenv("EMRUN_THREADS", threads)
        found.append(bits(passes(make(size=6, crop="random", flip=True), "train", workers=workers)[0]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("image", "mask", "names"),
    [
        ("images/*.png", "masks/*_mask.png", ["{}.png", "{}_mask.png"]),
        ("images/*_left.png", "masks/*_ids.png", ["{}_left.png", "{}_ids.png"]),
        ("images/*/*_left.png", "masks/*/*_ids.png", ["a/{}_left.png", "a/{}_ids.png"]),
        ("images/**/*.png", "masks/**/*.png", ["a/b/{}.png", "a/b/{}.png"]),
        ("images", "masks", ["a/{}.png", "a/{}.bmp"]),
        ("images/*", "masks/*", ["{}.PNG", "{}.gif"]),
        ("images/*.p?g", "masks/*.t*", ["{}.png", "{}.tiff"]),
        ("images/x.png", "masks/y.png", ["x.png", "y.png"]),
        ("images/im[0-9].png", "masks/m[0-9].png", ["im{}.png", "m{}.png"]),
    ],
)
def test_a_name_is_what_the_wildcards_stand_for(tmp_path, monkeypatch, passes, image, mask, names):
    monkeypatch.chdir(tmp_path)
    for index in range(3):
        save(
            index,
            *(tmp_path / folder / name.format(index) for folder, name in zip(("images", "masks"), names, strict=True)),
        )
    (tmp_path / "images" / ".hidden.png").write_text("")
    (batches,) = passes(make(image=image, mask=mask), "train", training=False)
    assert np.array_equal(together(batches)[:, 0], together(batches, "mask") * STEP)
    assert batches[0]["id"][0] == names[0].format(0)


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16", "I"])
@pytest.mark.parametrize("size", [None, 5])
def test_masks_of_many_modes_keep_their_numbers(root, passes, mode, size):
    values = (classes(0) if mode != "1" else classes(0) > 0).astype(
        {"I;16": np.uint16, "I": np.int32}.get(mode, np.uint8)
    )
    values[values == 2] = {"I;16": 700, "I": 70_000}.get(mode, 2)
    picture = Image.fromarray(values * 255).convert("1") if mode == "1" else Image.fromarray(values)
    if mode == "P":
        picture.putpalette(bytes(range(255, -1, -1)) * 3)
    picture.save(root / "masks" / f"0.{'tiff' if mode == 'I' else 'png'}", **({"bits": 2} if mode == "P" else {}))
    if mode == "I":
        (root / "masks" / "0.png").unlink()
    found = passes(make(mask="masks/*", size=size), "train", training=False)[0][0]["mask"][0]
    expected = values if size is None else np.asarray(Image.fromarray(values.astype(np.int32)).resize((5, 5), 0))
    assert np.array_equal(found, expected)


def test_values_of_masks_stand_for_classes(root, passes):
    for index in range(9):
        stored = np.array([7, 0, 200, 255], np.uint8)[classes(index) % 4]
        Image.fromarray(stored).save(root / "masks" / f"{index}.png")
    (batches,) = passes(make(values=[7, 0, 200]), "train", training=False)
    expected = np.stack([np.array([0, 1, 2, 255])[classes(index) % 4] for index in range(9)])
    assert np.array_equal(together(batches, "mask"), expected)
    with pytest.raises(StreamError, match=r"a pixel has 200, which is not one of values: \[7, 0\]"):
        passes(make(values=[7, 0]), "train", training=False)
    for wrong in ([0, 0], 255, [-1, 2]):
        with pytest.raises(ArgumentError, match=r"^values: "):
            make(size=6, values=wrong)


def test_pictures_and_masks_are_turned_upright_alike(root, passes):
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = Image.fromarray(classes(0) * STEP)
    upright.transpose(Image.Transpose.ROTATE_90).save(root / "images" / "0.png", exif=exif.tobytes())
    batch = passes(make(orient=True), "train", training=False)[0][0]
    assert np.array_equal(batch["image"][:, 0], batch["mask"] * STEP)
    with pytest.raises(
        ArgumentError, match=r"the mask has 12 x 10 pixels .*, but its picture has 10 x 12; set orient: true"
    ):
        make(size=6)


def test_streams_have_their_own_files_and_may_have_no_masks(root, passes):
    dataset = make(valid={"image": "images/[0-3].png", "mask": "masks/[0-3].png"}, test={"image": "images/7.png"})
    assert dataset.num_batches == {"train": 5, "valid": 2, "test": 1}
    assert np.array_equal(together(passes(dataset, "valid")[0], "mask")[2], classes(2))
    (batch,) = passes(dataset, "test")[0]
    assert list(batch) == ["image", "id", "position"]
    assert list(passes(make(mask=None), "train")[0][0]) == ["image", "id", "position"]


def test_pictures_are_divided_and_balanced_by_their_folders(tmp_path, monkeypatch, passes):
    monkeypatch.chdir(tmp_path)
    for index in range(12):
        folder = "rome" if index < 2 else f"town{index % 3}"
        save(index, tmp_path / "images" / folder / f"{index}.png", tmp_path / "masks" / folder / f"{index}.png")
    files = {"image": "images/*/*.png", "mask": "masks/*/*.png"}
    divided = make(**files, split={"valid": 0.25, "group": "folder"})
    parts = {
        name: {each.split("/")[0] for batch in passes(divided, name)[0] for each in batch["id"]}
        for name in ("train", "valid")
    }
    assert parts["train"] | parts["valid"] == {"rome", "town0", "town1", "town2"}
    assert not parts["train"] & parts["valid"]
    drawn = [each for batch in passes(make(**files, balance="folder"), "train")[0] for each in batch["id"]]
    assert sum(each.startswith("rome") for each in drawn) == 3
    by_file = make(**files, split={"files": {"valid": "rome/*"}})
    assert by_file.lengths() == {"train": 10, "valid": 2}
    again = make(**files, split={"files": {"valid": "rome/*"}}, preparation=by_file.preparation)
    assert again.lengths() == by_file.lengths()
    with pytest.raises(ArgumentError, match="pictures have no column 'label'; the columns are folder and id"):
        make(**files, split={"valid": 0.2, "by": "label"})


def test_a_run_does_not_need_its_files_to_read_others(root, passes):
    kept = make(split={"valid": 0.3}).preparation
    (root / "masks" / "8.png").unlink()
    dataset = make(split={"valid": 0.3}, preparation=kept, test={"image": "images/8.png"})
    assert passes(dataset, "test")[0][0]["image"].shape == (1, 1, 12, 10)


def wrong_pairs(root, how):
    mask = root / "masks" / "4.png"
    if how == "no mask":
        mask.unlink()
    elif how == "no picture":
        (root / "images" / "4.png").unlink()
    elif how == "size":
        Image.fromarray(classes(4)[1:]).save(mask)
    elif how == "class":
        Image.fromarray(classes(4) + np.uint8(1)).save(mask)
    elif how == "colors":
        Image.fromarray(np.zeros((12, 10, 3), np.uint8)).save(mask)
    elif how == "jpeg":
        Image.fromarray(classes(4)).save(mask, "JPEG")
    elif how == "text":
        mask.write_text("no picture")


BEFORE = {
    "no mask": r"^mask: 1 image without mask: 'images/4.png' \(masks has '0.png', .*on_bad_example: warn leaves out",
    "no picture": r"^mask: 1 mask without image: 'masks/4.png' \(images has '0.png'",
    "size": r"^mask: images/4.png: masks/4.png: the mask has 11 x 10 pixels .*, but its picture has 12 x 10$",
    "text": r"^mask: images/4.png: masks/4.png: cannot identify image file",
}
READING = {
    "class": r"images/4.png \(row 4\): masks/4.png: a pixel has class 3; the classes are 0 to 2, and 255",
    "colors": r"images/4.png \(row 4\): masks/4.png: a PNG of mode RGB is not a mask, .*; save them as a PNG",
    "jpeg": r"images/4.png \(row 4\): masks/4.png: a JPEG of mode L is not a mask",
}


@pytest.mark.parametrize("how", [*BEFORE, *READING])
def test_a_pair_that_does_not_fit_is_one_error_with_its_file_or_left_out(root, passes, how):
    wrong_pairs(root, how)
    arguments = {"classes": ["a", "b", "c"], "size": 6}
    with pytest.raises((ArgumentError, StreamError), match=(BEFORE | READING)[how]) as caught:
        dataset = make(**arguments)
        assert how in READING
        passes(dataset, "train")
    assert isinstance(caught.value, StreamError) is (how in READING)
    stream = stream_of(make(**arguments, on_bad_example="warn"), training=False)
    names = [name for batch in stream for name in batch["id"]]
    assert names == [f"{index}.png" for index in (0, 1, 2, 3, 5, 6, 7, 8)]
    assert list(stream.left_out) == ([] if how.startswith("no ") else ["4.png"])


def test_ignored_pixels_are_no_class_too_many(root, passes):
    values = classes(0)
    values[:2] = 255
    Image.fromarray(values).save(root / "masks" / "0.png")
    found = together(passes(make(classes=["a", "b", "c"]), "train", training=False)[0], "mask")
    assert np.array_equal(found[0], values)
    with pytest.raises(StreamError, match="class 255; the classes are 0 to 2, and 9 for none"):
        passes(make(classes=["a", "b", "c"], ignore=9), "train")


@pytest.mark.parametrize(("other", "warns"), [(255, True), (1, False), (2, False)])
def test_masks_of_0_and_255_whose_class_would_be_ignored_are_a_warning(root, caplog, other, warns):
    for index in range(9):
        Image.fromarray(np.where(classes(index) > 0, other, 0).astype(np.uint8)).save(root / "masks" / f"{index}.png")
    make(size=6)
    said = "mask: the first masks have no class but 0, and 255, which is ignored; if it is a class, write values: [0,"
    assert any(said in record.getMessage() for record in caplog.records) is warns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": "pictures/*.png"}, "image: there is no file 'pictures/*.png'"),
        (
            {"image": ["images/*.png"]},
            "image: ['images/*.png'] is neither a pattern such as 'images/*.jpg' nor a folder",
        ),
        ({"image": "*.txt"}, "image: '*.txt' has no pictures, but 'notes.txt'"),
        ({"mask": "nothing"}, "mask: there is no file 'nothing'"),
        ({"mask": "twice/*"}, "mask: twice/0.bmp and twice/0.png have one name, '0'; write another pattern"),
        ({"valid": "images"}, "valid: 'images' is not a mapping such as {image: images/*.jpg}"),
        ({"valid": {"masks": "x"}}, "valid.masks: unknown key 'masks'; did you mean 'mask'?"),
        ({"valid": {"mask": "masks"}}, "valid.image: None is neither a pattern"),
        ({"valid": {"image": "images/1.png", "mask": "masks/[2-4].png"}}, "valid.mask: 1 image without mask"),
        ({"ignore": -1}, "ignore: -1 is not a whole number of at least 0"),
        ({"classes": "abc"}, "classes: 'abc' is not a list of names"),
        ({"flip": 1}, "flip: 1 is neither true nor false"),
    ],
)
def test_wrong_files_and_arguments_are_refused_at_once(root, arguments, message):
    (root / "notes.txt").write_text("")
    for ending in ("bmp", "png"):
        save(0, root / f"twice/0.{ending}", root / f"twice/0.{ending}")
    with pytest.raises(ArgumentError) as caught:
        make(**arguments)
    assert str(caught.value).startswith(message)


def test_without_pillow_the_error_has_the_command_that_installs_it(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"Pictures needs Pillow, .* pip install 'emrun\[data\]'"):
        make(size=4)


def config(dataset, loss=None, **more):
    """Return a config that classifies pixels of grey pictures."""
    layer = {"class": "torch.nn.Conv2d", "in_channels": 1, "out_channels": 3, "kernel_size": 1}
    return {
        "seed": 1,
        "dataset": {"mode": "L", "size": 6, "batch_size": 4, **dataset},
        "model": {
            "module": layer,
            "inputs": ["image"],
            "outputs": ["logits"],
            "loss": loss or {"class": "torch.nn.CrossEntropyLoss", "ignore_index": 255, "inputs": ["logits", "mask"]},
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "main_loop": {"report": False},
        "hooks": [{"StopAfter": {"epochs": 1}}],
        **more,
    }


FILES = {"class": "Pictures", "image": "images/**/*.png", "mask": "masks/**/*.png"}


@pytest.mark.parametrize(
    ("more", "variable"), [({}, "mask"), ({"crop": "centre"}, "logits")], ids=["resized", "cropped"]
)
def test_saved_masks_have_the_names_and_where_only_size_was_used_the_sizes_of_the_files(root, more, variable):
    save(20, root / "images/town/x.png", root / "masks/town/x.png", classes(20, 7, 31))
    hooks = [{"SaveMasks": {"mask_variable": variable, "streams": ["train_eval"]}}, {"StopAfter": {"epochs": 1}}]
    given = config(FILES | more, main_loop={"report": False, "extra_streams": ["train"]}, hooks=hooks)
    training = create_training(given, output_dir="run")
    assert training.main_loop.run_training().status == "finished"
    place = root / "run" / "masks" / "train_eval"
    assert {str(path.relative_to(place)) for path in place.rglob("*.png")} == {
        *(f"{index}.png" for index in range(9)),
        "town/x.png",
    }
    found = {name: opened(place / f"{name}.png") for name in ("0", "town/x")}
    assert [each.shape[::-1] for each in found.values()] == ([(6, 6)] * 2 if more else [(10, 12), (31, 7)])
    if variable == "mask" and not more:
        small = Image.fromarray(classes(20, 7, 31)).resize((6, 6), Image.Resampling.NEAREST)
        assert np.array_equal(found["town/x"], small.resize((31, 7), Image.Resampling.NEAREST))


def shard(path):
    with tarfile.open(path, "w") as archive:
        for index in range(9):
            archive.add(f"images/{index}.png", f"{index}.png")
            archive.add(f"masks/{index}.png", f"{index}.seg.png")


def test_the_size_of_a_picture_in_a_shard_is_known_unless_more_than_size_has_changed_it(root):
    save(0, root / "images/0.png", root / "masks/0.png", classes(0, 7, 31))
    shard("all.tar")
    sources = {"mask": {"field": "seg.png", "as": "mask"}, "image": "png"}
    sizes = [
        TarShards("all.tar", sources, **arguments).stored_size("train_eval", 0)
        for arguments in ({"size": 5}, {"size": 5, "crop": "centre"}, {}, {"size": 5, "transform": ["RandomErasing"]})
    ]
    assert sizes == [(7, 31), None, None, None]


LOSSES = {
    "one": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "mask"]},
    "function": {"import": "torch.nn.functional.cross_entropy", "inputs": ["logits", "mask"]},
    "several": {
        "seg": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "mask"], "scale": 0.5},
        "size": {"class": "torch.nn.MSELoss", "inputs": ["logits", "logits"]},
    },
    "of logarithms": {"class": "torch.nn.NLLLoss", "inputs": ["logits", "mask"]},
}


@pytest.mark.parametrize(
    ("form", "dtype"),
    thinned([*((form, "float32") for form in LOSSES), ("one", "uint8")], [("one", "uint8"), ("several", "float32")]),
)
def test_a_picture_is_not_taken_for_classes_and_what_is_said_works(root, form, dtype):
    shard("all.tar")
    wrong = config(
        {"class": "TarShards", "train": "all.tar", "sources": {"image": "png", "mask": "seg.png"}}, LOSSES[form]
    )
    wrong["dataset"]["dtype"] = dtype
    wrong["model"]["inputs"] = {"input": {"source": "image", **({"scale": 255} if dtype == "uint8" else {})}}
    with pytest.raises(ConfigError) as caught:
        create_training(wrong, output_dir="run")
    key = "model.loss.seg.inputs" if form == "several" else "model.loss.inputs"
    what = f"{key}: 'mask' is a picture, whose values the loss would take for probabilities of classes; "
    assert what in str(caught.value)
    advice = re.search(r"write sources: {(mask: {.*})}", str(caught.value))[1]
    assert advice == "mask: {field: seg.png, as: mask}"
    wrong["dataset"]["sources"]["mask"] = {"field": "seg.png", "as": "mask"}
    if form == "one":
        assert create_training(wrong, output_dir="run").main_loop.run_training().status == "finished"


def test_check_refuses_it_too_and_in_a_mixture(root):
    shard("all.tar")
    wrong = {"class": "TarShards", "train": "all.tar", "sources": {"image": "png", "mask": "png"}, "mode": "L"}
    (root / "one.yaml").write_text(str(config(wrong)))
    with pytest.raises(ConfigError, match=r"one.yaml:1:\d+: model.loss.inputs: .*mask: {field: png, as: mask}"):
        try_out(load_config(root / "one.yaml"))
    more = {"class": "emrun.datasets.TarShards", "size": 4}
    mixture = {"class": "Mixed", "datasets": {"a": wrong | more}, "weights": {"a": 1}, "batches_per_epoch": 2}
    given = config({})
    given["dataset"] = mixture
    with pytest.raises(ConfigError, match=r"model.loss.inputs: 'mask' is a picture"):
        create_training(given, output_dir="run")


@pytest.mark.parametrize(
    ("loss", "source"),
    [("MSELoss", "image"), ("BCEWithLogitsLoss", "image"), ("CrossEntropyLoss", "mask")],
)
def test_losses_of_pictures_and_of_classes_train(root, loss, source):
    given = config(FILES, {"class": f"torch.nn.{loss}", "inputs": ["logits", source]})
    given["model"]["module"]["out_channels"] = 1 if source == "image" else 3
    given["main_loop"]["on_unused_sources"] = "ignore"
    assert create_training(given, output_dir="run").main_loop.run_training().status == "finished"


def test_a_picture_of_files_is_no_target_of_classes_either(root):
    loss = {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "image"]}
    with pytest.raises(ConfigError, match=r"model.loss.inputs: 'image' is a picture, .*; read 'mask' instead"):
        create_training(config(FILES, loss), output_dir="run")


TURNED = [{"RandomRotation": {"degrees": 45, "interpolation": "nearest"}}, {"ColorJitter": {"hue": 0.1}}]


@pytest.mark.parametrize("kind", thinned(["files", "shards"], ["shards"]))
def test_pictures_and_masks_are_turned_together_and_filled_with_what_is_ignored(root, passes, bits, kind, monkeypatch):
    shard("all.tar")
    given = {
        "augment": TURNED[:1],
        "mode": "L",
        "dtype": "uint8",
        "batch_size": 2,
        "size": 12,
        "interpolation": "nearest",
    }
    sources = {"image": "png", "mask": {"field": "seg.png", "as": "mask"}}

    def build():
        return make(**given, flip=True) if kind == "files" else TarShards("all.tar", sources, **given)

    found = []
    for threads, workers in (("1", 0), ("4", 0), ("1", 1)):
        monkeypatch.setenv("EMRUN_THREADS", threads)
        found.append(passes(build(), "train", workers=workers)[0])
    masks, images = together(found[0], "mask"), together(found[0])[:, 0]
    assert masks.dtype == np.int64
    assert set(np.unique(masks)) == {0, 1, 2, 255}
    assert np.array_equal(images[masks != 255], masks[masks != 255] * STEP)
    assert not images[masks == 255].any()
    assert bits(found[0]) == bits(found[1]) == bits(found[2])
    evaluated = passes(build(), "train", training=False)[0]
    assert np.array_equal(together(evaluated)[:, 0], together(evaluated, "mask") * STEP)


def spoilt(values):
    return {**values, "mask": values["mask"].float()}


def smaller(values):
    return {**values, "image": values["image"][:, 1:]}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (spoilt, "the transforms returned a mask of shape 12 x 10 and dtype float32, not whole numbers"),
        (smaller, "the transforms returned 'mask' of 12 x 10 pixels, but a picture of 11 x 10; let them"),
    ],
)
def test_what_transforms_return_must_be_a_mask_of_the_size_of_the_picture(root, passes, step, message):
    with pytest.raises(StreamError, match=message):
        passes(make(transform=[step]), "train")
