"""Examples that cannot be read are left out: the same ones on any number of workers and ranks, and after a kill."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from doubles import SGD
from in_ranks import in_ranks
from PIL import Image
from torch import nn

from emrun import MainLoop, TorchModel, create_training, resume_training
from emrun.base.errors import ConfigError, StreamError
from emrun.datasets import ImageFolder, TorchDataset
from emrun.hook import AbstractHook
from emrun.hooks import ComputeStats, StopAfter
from emrun.ranks.group import join
from emrun.training.create import train

LOOP = {"extra_streams": ["valid"], "on_bad_example": "warn", "report": False}
COUNT, BAD = 300, (3, 4, 299)  # no more than one in a hundred may be bad
NAMES = {f"{number % 2}/{number:03}.png" for number in BAD}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    place, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name in "01":
        (place / name).mkdir()
    for number in range(COUNT):
        path = place / f"{number % 2}" / f"{number:03}.png"
        Image.fromarray(rng.integers(0, 255, (4, 4), np.uint8)).save(path)
        if number in BAD:
            path.write_bytes(path.read_bytes()[:60])
    Image.init()  # imports the readers of all formats, which each process would do when it meets a bad file
    return place


class Killed(AbstractHook):
    """Kills the process after a number of iterations."""

    reads = ()

    def register_mainloop(self, main_loop):
        self.main_loop = main_loop

    def after_batch(self, stream_name, batch_data):
        if self.main_loop.training and self.main_loop.iterations_done == 9:
            os.kill(os.getpid(), signal.SIGKILL)


def config_of(pictures, workers=0, **loop):
    layers = [{"class": "torch.nn.Flatten"}, {"class": "torch.nn.Linear", "in_features": 16, "out_features": 2}]
    return {
        "seed": 1,
        "dataset": {
            "class": "ImageFolder", "train": str(pictures), "valid": str(pictures), "mode": "L", "batch_size": 30,
            "flip": True,
        },
        "model": {
            "module": {"class": "torch.nn.Sequential", "args": layers},
            "inputs": {"input": "image"},
            "outputs": ["logits"],
            "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "label"]},
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "main_loop": {**LOOP, "workers": workers, **loop},
        "hooks": [
            {"ComputeStats": {"variables": {"loss": ["mean", "count"]}}},
            {"SaveEvery": {"every": "7 iterations", "keep": 1}},
            {"StopAfter": {"epochs": 1}},
        ],
    }  # fmt: skip


def left_out(directory):
    """Return stream, epoch and names of each row, without the streams of the zeroth epoch."""
    rows = [json.loads(line) for line in (directory / "rows.jsonl").read_text().splitlines()]
    return [(row["stream"], row["epoch"], row["left_out"]) for row in rows if "left_out" in row]


def result(directory):
    epochs = [json.loads(line)["streams"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return epochs, left_out(directory), (directory / "checkpoints/latest/model.safetensors").read_bytes()


def test_three_of_three_hundred_are_left_out_and_after_a_kill_in_a_worker_too(pictures, tmp_path, caplog):
    train(create_training(config_of(pictures), output_dir=tmp_path / "0"))
    epochs, rows, _ = whole = result(tmp_path / "0")
    assert [epoch[name]["loss"]["count"] for epoch in epochs for name in ("train", "valid")] == [297] * 4
    assert [row[:2] for row in rows] == [(name, epoch) for epoch in range(2) for name in ("train", "valid")]
    assert all({*names} == NAMES and all(names.values()) for _, _, names in rows)
    assert "stream 'train': left out 3 bad examples" in caplog.messages
    (told,) = {
        tuple(each.names) for each in caplog.records if each.getMessage().startswith("stream 'valid': left out 3 ")
    }
    assert [each.partition(": ")[0] for each in told] == list(rows[1][2])
    child = os.fork()
    if not child:
        config = config_of(pictures, workers=1)
        config["hooks"].append({f"{__name__}.Killed": None})
        train(create_training(config, output_dir=tmp_path / "2"))
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(left_out(tmp_path / "2")) == 2
    train(resume_training(tmp_path / "2", ["~hooks.3"]))
    assert result(tmp_path / "2") == whole


@pytest.mark.campaign
def test_the_same_are_left_out_in_workers_and_without_a_warning(pictures, tmp_path):
    train(create_training(config_of(pictures), output_dir=tmp_path / "0"))
    train(create_training(config_of(pictures, on_bad_example="ignore", workers=2), output_dir=tmp_path / "1"))
    assert result(tmp_path / "1") == result(tmp_path / "0")


class Gray(nn.Module):
    """One layer on small images."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 2).double()

    def forward(self, image, label):
        return {"loss": nn.functional.cross_entropy(self.layer(image.flatten(1)), label)}


class Noted(AbstractHook):
    reads = ()

    def after_epoch(self, epoch_id, epoch_data):
        self.last = epoch_data["train"]["loss"]


def of_images(pictures, policy="warn"):
    join()
    torch.manual_seed(0)
    data = ImageFolder(pictures, batch_size=40, mode="L", on_bad_example=policy)
    model, noted = TorchModel(Gray(), optimizer=SGD), Noted()
    hooks = [ComputeStats({"loss": ["mean", "count"]}), noted, StopAfter(epochs=1)]
    loop = MainLoop(model, data, hooks, seed=1, on_bad_example=policy)
    told = []
    loop.rows.add_left_out = lambda epoch, iteration, stream, left_out: told.append(left_out)
    loop.run_training()
    return getattr(noted, "last", None), model.module.layer.weight.tolist(), told


def test_two_ranks_leave_out_what_one_process_does(pictures):
    ((loss, weights, told),) = in_ranks(1, of_images, pictures)
    (its_loss, its_weights, its), (_, _, none) = in_ranks(2, of_images, pictures)
    assert loss["count"] == its_loss["count"] == 297
    assert its_loss["mean"] == pytest.approx(loss["mean"], abs=1e-9)
    assert np.allclose(its_weights, weights, rtol=0, atol=1e-9)
    assert list(map(set, told)) == list(map(set, its)) == [NAMES] * 2
    assert not none


def test_more_than_one_in_a_hundred_is_an_error_that_names_some(pictures, tmp_path):
    for number in (*BAD, 5, 10, 11):
        place = tmp_path / "train" / f"{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:03}.png").symlink_to(pictures / f"{number % 2}/{number:03}.png")
    config = config_of(tmp_path / "train", on_empty_batch="warn")
    training = create_training(config, output_dir=tmp_path / "run")
    with pytest.raises(StreamError, match=r"3 of its 6 examples .* at most 1 % of a pass: 0/004.png, .*; 0/004.png: ."):
        train(training)


class Items(torch.utils.data.Dataset):
    """Numbers, of which some cannot be read."""

    def __init__(self, together=False):
        if together:
            self.__getitems__ = lambda rows: [self[row] for row in rows]

    def __len__(self):
        return 400

    def __getitem__(self, row):
        if row in (8, 9, 399):
            raise ValueError(f"no {row}")
        return torch.tensor([float(row)])


class Square(nn.Module):
    """One weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return {"loss": (x * self.weight).square().mean(1)}


@pytest.mark.parametrize("together", [False, True])
def test_items_of_a_torch_dataset_are_left_out(together, caplog):
    data = TorchDataset(Items(together), sources=["x"], batch_size=2, on_bad_example="warn")
    hooks = [ComputeStats({"loss": ["count"]})]
    loop = MainLoop(TorchModel(Square(), optimizer=SGD), data, hooks, on_bad_example="warn")
    assert loop.run_evaluation("train")["train"]["loss"]["count"] == 397
    assert "stream 'train': left out 9: no 9" in caplog.messages
    assert caplog.messages[-1] == "stream 'train': left out 3 bad examples"


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"class": "Majority"}, "main_loop.on_bad_example: has no effect: Majority has no parameter 'on_bad_example'"),
        (
            {"class": "ImageFolder", "on_bad_example": "warn"},
            "'on_bad_example' is supplied by emrun from main_loop.on_b",
        ),
        ({"class": "TorchDataset", "train": {"class": "torch.utils.data.ChainDataset", "datasets": []}}, "map-style"),
    ],
)
def test_where_it_has_no_effect_it_is_an_error(dataset, message, pictures, tmp_path):
    with pytest.raises(ConfigError) as caught:
        create_training({**config_of(pictures), "dataset": dataset}, output_dir=tmp_path / "run")
    assert message in str(caught.value)
