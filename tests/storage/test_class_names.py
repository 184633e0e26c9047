"""The names of classes lie in the run: a dataset with other numbers is refused by `eval`, `predict` and `resume`."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from emrun.base.errors import StateError
from emrun.datasets import ImageFolder
from emrun.storage.class_names import CLASSES, check_classes, record_classes
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
        lambda: resume_training(run, ["hooks.StopAfter.epochs=2"], fork=tmp_path / "fork"),
    ):
        with pytest.raises(StateError, match=r"other classes than when the run began, .* new ant; missing nothing;"):
            call()
    assert [path.name for path in (run / "eval").iterdir()] == ["train-1"]
    (run / CLASSES).write_text("3")
    with pytest.raises(StateError, match=r"classes.json cannot be read"):
        evaluate(run, "train")
    (run / CLASSES).unlink()  # as the message says
    evaluate(run, "train")


def test_another_order_is_refused_and_names_of_another_form_are_not_looked_at(pictures, tmp_path):
    dataset = ImageFolder(str(pictures))
    record_classes(dataset, tmp_path)
    check_classes(dataset, tmp_path)
    dataset.classes.reverse()
    with pytest.raises(StateError, match="or in another order"):
        check_classes(dataset, tmp_path)
    for names in (None, [], 3, {"label": None}):
        dataset.classes = names
        check_classes(dataset, tmp_path)
