"""The names of classes lie in the run: a dataset with other numbers is refused by `eval`, `predict` and `resume`."""

import errno
import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from emrun.base.errors import ReadTimeout, StateError
from emrun.datasets import ImageFolder
from emrun.storage.class_names import CLASSES, check_classes, record_classes, warn_of_other_classes
from emrun.training.create import create_training, train
from emrun.training.evaluate import evaluate
from emrun.training.predict import predict
from emrun.training.resume import resume_training


@pytest.fixture
def pictures(tmp_path):
    for number, name in enumerate(("bee", "cat")):
        (tmp_path / "train" / name).mkdir(parents=True)
        for index in range(4):
            Image.fromarray(np.full((2, 2), 100 * number, np.uint8)).save(tmp_path / "train" / name / f"{index}.png")
    return tmp_path / "train"


def config(pictures):
    linear = {"class": "torch.nn.Linear", "in_features": 4, "out_features": 3}
    return {
        "dataset": {"class": "ImageFolder", "train": str(pictures), "mode": "L"},
        "model": {
            "module": {"class": "torch.nn.Sequential", "args": [{"class": "torch.nn.Flatten"}, linear]},
            "inputs": ["image"],
            "outputs": ["logits"],
            "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "label"]},
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "main_loop": {"report": False},
        "hooks": [{"StopAfter": {"epochs": 1}}],
    }


def test_a_class_that_is_added_is_refused_wherever_its_labels_are_read(pictures, tmp_path):
    training = create_training(config(pictures), output_root=tmp_path / "log")
    train(training)
    run = training.output_dir
    assert json.loads((run / CLASSES).read_text()) == {"": ["bee", "cat"]}
    evaluate(run, "train")
    shutil.copytree(pictures / "bee", pictures / "ant")
    for call in (
        lambda: evaluate(run, "train"),
        lambda: predict(run, "train", tmp_path / "p.csv"),
        lambda: resume_training(run, ["hooks.StopAfter.epochs=2"]),
    ):
        with pytest.raises(StateError, match=r"other classes than when the run began, .*classes\.json has those of"):
            call()
    assert [path.name for path in (run / "eval").iterdir()] == ["train-1"]
    (run / CLASSES).write_text("3")
    with pytest.raises(StateError, match=r"classes.json cannot be read"):
        evaluate(run, "train")
    (run / CLASSES).unlink()  # as the message says
    evaluate(run, "train")


@pytest.mark.parametrize("text", ["3", '{"": 5}', '{"": ["bee", 1]}', "[" * 100_000, "{"])
def test_a_file_with_other_content_is_an_error(pictures, tmp_path, text):
    (tmp_path / CLASSES).write_text(text)
    for call in (check_classes, record_classes):
        with pytest.raises(StateError, match=r"classes.json cannot be read: "):
            call(ImageFolder(str(pictures)), tmp_path)


def test_a_file_that_cannot_be_read_in_time_is_not_taken_for_damaged(pictures, tmp_path, monkeypatch):
    dataset = ImageFolder(str(pictures))
    record_classes(dataset, tmp_path)
    opened = os.open

    def timing_out(path, *arguments, **keywords):
        if path == CLASSES:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", timing_out)
    for call in (check_classes, warn_of_other_classes):
        with pytest.raises(ReadTimeout, match=r"classes.json: timed out, .* try again"):
            call(dataset, tmp_path)


def test_another_order_is_refused_and_names_of_another_form_are_not_looked_at(pictures, tmp_path):
    dataset = ImageFolder(str(pictures))
    record_classes(dataset, tmp_path)
    check_classes(dataset, tmp_path)
    dataset.classes.reverse()
    with pytest.raises(StateError, match="the dataset has other classes than when the run began"):
        check_classes(dataset, tmp_path)
    for names in (None, [], 3, {"label": None}):
        dataset.classes = names
        check_classes(dataset, tmp_path)


def test_the_names_travel_with_the_weights_and_a_run_that_begins_with_others_is_told(pictures, tmp_path, caplog):
    training = create_training(config(pictures), output_dir=tmp_path / "run")
    train(training)
    shutil.copytree(tmp_path / "run" / "checkpoints" / "latest", tmp_path / "alone")
    assert json.loads((tmp_path / "alone" / CLASSES).read_text()) == {"": ["bee", "cat"]}
    begun = config(pictures)
    begun["model"]["init_from"] = [{"path": str(tmp_path / "alone")}]
    create_training(begun, output_dir=tmp_path / "same")
    assert "other classes" not in caplog.text
    (pictures / "bee").rename(pictures / "dog")
    for number, path in enumerate(("alone", "alone/model.safetensors", "run")):
        begun["model"]["init_from"] = str(tmp_path / path)
        caplog.clear()
        create_training(begun, output_dir=tmp_path / f"other-{number}")
        (told,) = [each for each in caplog.messages if "other classes" in each]
        assert told.startswith(f"{tmp_path / path}: the weights are of other classes than the data, ")
        assert told.endswith(
            "mean something else; see " + str(tmp_path / path.removesuffix("/model.safetensors") / CLASSES)
        )
    shutil.copytree(pictures / "cat", pictures / "emu")  # another number of classes: a last layer does not fit anyway
    caplog.clear()
    create_training(begun, output_dir=tmp_path / "more")
    assert "other classes" not in caplog.text


@pytest.mark.campaign  # code/test_first_batches.py has what is compared
def test_a_resume_says_which_sources_have_changed(pictures, tmp_path, caplog):
    shutil.copytree(pictures, tmp_path / "valid")
    content = config(pictures)
    content["dataset"]["valid"] = str(tmp_path / "valid")
    content["main_loop"]["extra_streams"] = ["valid"]
    train(create_training(content, output_dir=tmp_path / "run"))
    (tmp_path / "valid" / "bee" / "0.png").write_bytes((tmp_path / "valid" / "cat" / "0.png").read_bytes())
    train(resume_training(tmp_path / "run", ["hooks.StopAfter.epochs=2"]))
    told = [each for each in caplog.messages if "other data" in each]
    assert told == [
        "stream 'valid' has other data than when the run began: 'image' in the first batch of an evaluation"
    ]
