"""SaveConfusionMatrix: a readable picture and a CSV file for each epoch, the same after a resume."""

import csv
import io
import sys

import numpy as np
import pytest
from campaign import thinned
from PIL import Image
from sklearn.metrics import confusion_matrix

from emrun import AbstractHook, MainLoop, create_training
from emrun.base.errors import ArgumentError, ConfigError, HookError, MissingExtra, StorageError, StreamError
from emrun.hooks import SaveConfusionMatrix, StopAfter
from emrun.hooks.save_confusion_matrix import draw_matrix
from emrun.shown import Picture
from emrun.training.evaluate import evaluate


class Letters:
    """Evaluates on labels with predictions in `guesses`."""

    def __init__(self, labels, guesses, names=None):
        self.labels, self.guesses = np.asarray(labels), np.asarray(guesses)
        self.classes_names = names

    def valid_stream(self):
        for rows in (slice(0, 3), slice(3, None)):
            yield {"x": self.guesses[rows], "labels": self.labels[rows]}

    train_stream = valid_stream


@pytest.fixture
def saved(scripted, tmp_path):
    """Return the rows of the CSV file and the picture for these labels and predictions."""

    def run(labels, guesses, names=None, **arguments):
        hook = SaveConfusionMatrix(dataset=Letters(labels, guesses, names), output_dir=tmp_path, **arguments)
        model = scripted(lambda batch: {"predictions": batch["x"]})
        MainLoop(model, hook.dataset, [hook]).run_evaluation("valid")
        with (tmp_path / "confusion_matrix_epoch_0_valid.csv").open(newline="") as file:
            rows = list(csv.reader(file))
        with Image.open(tmp_path / "confusion_matrix_epoch_0_valid.png") as image:
            return rows, np.asarray(image)

    return run


def numbers(rows):
    return [[int(cell) for cell in row[1:]] for row in rows[1:]]


LABELS, GUESSES = [0, 1, 2, 2, 1, 0, 2], [0, 2, 2, 1, 1, 0, 2]


@pytest.fixture
def undrawn(monkeypatch):
    """Write a small picture without a figure, which takes longest, where it is not the subject."""
    names_drawn = []

    def draw(matrix, names, title, **options):
        names_drawn.append(names)
        return np.zeros((2, 2, 3), np.uint8)

    monkeypatch.setattr("emrun.hooks.save_confusion_matrix.draw_matrix", draw)
    return names_drawn


@pytest.mark.usefixtures("undrawn")
def test_a_row_is_a_true_class_and_a_column_a_predicted_one(saved):
    rows, _ = saved(LABELS, GUESSES, ["ant", 'b "quoted", one', "ünïcode\n"])
    assert rows[0] == ["true class", "ant", 'b "quoted", one', "ünïcode\n"]
    assert [row[0] for row in rows[1:]] == rows[0][1:]
    assert numbers(rows) == confusion_matrix(LABELS, GUESSES).tolist()


@pytest.mark.usefixtures("undrawn")
def test_without_names_the_classes_have_numbers(saved):
    rows, picture = saved([*LABELS, 4], [*GUESSES, 4])
    assert rows[0] == ["true class", "0", "1", "2", "3", "4"]
    assert numbers(rows) == confusion_matrix([*LABELS, 4], [*GUESSES, 4], labels=range(5)).tolist()
    assert (picture.dtype, picture.shape[2]) == (np.uint8, 3)


def test_names_of_the_argument_come_before_those_of_the_dataset(saved, undrawn):
    rows, _ = saved(LABELS, GUESSES, ["a", "b", "c"], classes_names=["x", "y", "\udcffz"])
    assert rows[0] == ["true class", "x", "y", "\\udcffz"]  # such as the name of a folder that is not in UTF-8
    saved(LABELS, GUESSES, ["a", "b", "c"])
    assert [list(names) for names in undrawn] == [["x", "y", "\\udcffz"], ["a", "b", "c"]]


@pytest.mark.usefixtures("undrawn")
def test_the_picture_is_shown_in_trackers(scripted, tmp_path):
    dataset, seen = Letters(LABELS, GUESSES), {}

    class Look(AbstractHook):
        def after_epoch_profile(self):
            seen.update(self.main_loop.shown)

    hooks = [SaveConfusionMatrix(dataset=dataset, output_dir=tmp_path), Look()]
    MainLoop(scripted(lambda batch: {"predictions": batch["x"]}), dataset, hooks).run_evaluation("valid")
    content = (tmp_path / "confusion_matrix_epoch_0_valid.png").read_bytes()
    assert seen == {"valid/confusion_matrix": Picture(content)}


@pytest.mark.campaign
def test_the_arguments_of_the_picture(saved):
    plain = saved(LABELS, GUESSES)[1]
    for arguments in ({"normalize": False}, {"cmap": "Greens"}):
        other = saved(LABELS, GUESSES, **arguments)[1]
        assert other.shape == plain.shape
        assert not np.array_equal(other, plain)
    assert saved(LABELS, GUESSES, figsize=[10, 15])[1].shape == (1500, 1000, 3)


def drawn(matrix, names, normalize=True):
    return draw_matrix(np.asarray(matrix), names, "valid, epoch 1", normalize=normalize, cmap="Blues", size=None)


@pytest.mark.parametrize("classes", thinned([1, 2, 10, 30, 100, 1000], [1, 10]))
def test_any_number_of_classes_fits_on_a_picture(classes):
    picture = drawn(np.eye(classes, dtype=int) * 7, [f"name of class {number}" for number in range(classes)])
    assert max(picture.shape) < 1800
    for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
        assert (edge == 255).all()  # nothing is cut off


def test_a_stream_of_which_nothing_counts_is_warned_of(scripted, numbers, tmp_path, caplog):
    hook = SaveConfusionMatrix("x", "y", mask_name="mask", output_dir=tmp_path)
    model = scripted(lambda batch: {"y": batch["x"], "mask": [0, 0]})
    MainLoop(model, numbers, [hook]).run_evaluation("valid")
    assert caplog.messages == ["SaveConfusionMatrix: nothing counts in stream 'valid', by mask"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", thinned(["w" * 300, "$x_{", "猫", "", "a\nb"], ["w" * 300]))
def test_any_name_fits_on_a_picture(name):
    picture = drawn([[3, 1], [0, 2]], [name, "b"])
    for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
        assert (edge == 255).all()


@pytest.mark.campaign
def test_numbers_that_are_large_or_all_0():
    assert drawn([[10**9, 12_345], [999_500, 0]], ["a", "b"], normalize=False).shape == drawn([[1, 0]] * 2, "ab").shape
    assert (drawn(np.zeros((2, 2), int), "ab") != 255).any()


@pytest.mark.usefixtures("undrawn")
def test_in_a_run_chosen_epochs_of_a_stream_have_their_files_and_an_evaluation_its_own(train_digits, in_docstring):
    (entry,) = in_docstring(SaveConfusionMatrix)
    entry["SaveConfusionMatrix"].update(streams=["valid"], every=2)
    training = train_digits([entry, {"StopAfter": {"epochs": 3}}], batch_size=200)
    files = sorted(path.name for path in training.output_dir.glob("confusion*"))
    assert files == [f"confusion_matrix_epoch_{epoch}_valid.{kind}" for epoch in (0, 2) for kind in ("csv", "png")]
    with (training.output_dir / files[2]).open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["true class", *map(str, range(10))]
    right = np.trace(numbers(rows)) / np.sum(numbers(rows))
    assert (right > 0.7, np.sum(numbers(rows))) == (True, 180)
    run = training.output_dir
    (run / files[1]).unlink()
    evaluate(run, "valid")
    assert len(list(run.glob("eval/valid-1/confusion_matrix_epoch_0_valid.*"))) == 2
    assert not (run / files[1]).exists()


def test_the_matplotlib_of_the_process_stays_as_it_was(saved, monkeypatch):
    import matplotlib as mpl

    before = {name: mpl.rcParams[name] for name in mpl.rcParams if name != "backend"}
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    saved(LABELS, GUESSES)
    assert {name: mpl.rcParams[name] for name in mpl.rcParams if name != "backend"} == before
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"cmap": "Bleus"}, "cmap", "'Bleus' is not the name of a color map of matplotlib; did you mean 'Blues'?"),
        ({"cmap": 3}, "cmap", "3 is not the name of a color map"),
        ({"figsize": [3]}, "figsize", "[3] is not [width, height] in inches"),
        ({"figsize": [3, 1e6]}, "figsize", "1000000.0 is not a size in inches, at least 1 and below 100"),
        ({"every": "3 updates"}, "every", "'3 updates' is not an interval"),
        ({"classes_names": ["a", "a"]}, "classes_names", "the list has 'a' twice"),
    ],
)
def test_wrong_arguments(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        SaveConfusionMatrix(**arguments)
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_names_of_the_dataset_that_are_not_names_are_an_error():
    with pytest.raises(HookError, match="classes_names of dataset Letters has the name 'a' twice"):
        SaveConfusionMatrix(dataset=Letters([0], [0], ["a", "a"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes_names": ["just_one"]}, r"'predictions' has the value 2, .* from 0 to 0"),
        ({"labels_name": "fake"}, "hook SaveConfusionMatrix reads 'fake'"),
        ({"mask_name": "fake"}, "hook SaveConfusionMatrix reads 'fake'"),
    ],
)
def test_what_does_not_fit_the_batches_is_an_error_at_the_first_one(saved, arguments, message, tmp_path):
    with pytest.raises(StreamError, match=message) as caught:
        saved(LABELS, GUESSES, **arguments)
    assert caught.value.exit_status == 2
    assert not list(tmp_path.iterdir())


def test_more_classes_than_a_matrix_should_have(saved):
    with pytest.raises(StreamError, match=r"'labels' has the value 2000, .* from 0 to 1,999"):
        saved([2000, 0, 0], [0, 0, 0])


def test_a_wrong_config_is_an_error_at_its_line(digits_config, tmp_path):
    own = {"labels_name": "label", "predictions_name": "logits", "streams": ["vaild"]}
    with pytest.raises(
        ConfigError, match=r"hooks\[0\]\.SaveConfusionMatrix: .*stream 'vaild', which .*; did you mean 'valid'"
    ):
        create_training(
            digits_config([{"SaveConfusionMatrix": own}, {"StopAfter": {"epochs": 1}}]), output_root=tmp_path
        )


def test_without_matplotlib_it_is_an_error_before_the_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"SaveConfusionMatrix needs matplotlib.*emrun\[plots\]"):
        SaveConfusionMatrix()


@pytest.mark.usefixtures("undrawn")
def test_a_directory_that_is_gone_is_a_storage_error(scripted, tmp_path):
    class Remove(AbstractHook):
        def after_stream(self):
            (tmp_path / "run").rmdir()

    (tmp_path / "run").mkdir()
    dataset = Letters(LABELS, GUESSES)
    hooks = [Remove(), SaveConfusionMatrix(dataset=dataset, output_dir=tmp_path / "run"), StopAfter(epochs=1)]
    loop = MainLoop(scripted(lambda batch: {"predictions": batch["x"]}), dataset, hooks)
    with pytest.raises(StorageError, match=r"cannot write .*confusion_matrix_epoch_0_train\.png"):
        loop.run_training()


def test_its_picture_is_a_png_file_without_a_program_or_a_time(saved, tmp_path):
    saved(LABELS, GUESSES)
    content = (tmp_path / "confusion_matrix_epoch_0_valid.png").read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        assert (image.format, image.info) == ("PNG", {})
