"""Trying out a config does not change the process; tests/cli/test_check.py tests the rest with the command."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from campaign import thinned
from projects import linear_with

from emrun import create_training
from emrun.base.errors import StateError
from emrun.config.config import load_config
from emrun.diagnosis.model_facts import StepMemory
from emrun.diagnosis.tryout import try_out
from emrun.hooks.save_every import SaveEvery
from emrun.training.create import train

ROOT = Path(__file__).parents[2]


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_no_random_state_changes_and_no_file_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(ROOT / "sample_configs" / "minimal.yaml", ["deterministic=true"])
    before = states()
    found = try_out(config)
    assert states() == before
    assert list(Path().iterdir()) == []
    assert not torch.are_deterministic_algorithms_enabled()
    assert found["streams"]["test"]["runs"] == "not used in training"


def test_a_mistake_that_is_found_leaves_no_temporary_file(tmp_path, monkeypatch):
    (tmp_path / "forgetful_model.py").write_text(
        "import torch\n"
        "class Forgetful(torch.nn.Linear):\n"
        "    steps = 0\n"
        "    def forward(self, x, y):\n"
        "        self.steps += self.training\n"
        "        return {'loss': super().forward(x)[:, 0] - y + self.steps}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    config = {
        "dataset": {"class": "Majority"},
        "model": {
            "module": {"class": "forgetful_model.Forgetful", "in_features": 11, "out_features": 1},
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "hooks": [{"StopAfter": {"epochs": 1}}],
    }
    with pytest.raises(StateError, match="a checkpoint does not restore the model exactly"):
        try_out(load_config(config))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_same_config_gives_the_same_contract(tmp_path):
    config = load_config(ROOT / "sample_configs" / "majority.yaml")
    one, other = try_out(config), try_out(config)
    for found in (one, other):
        del found["seconds_per_epoch"], found["memory"]
        del found["forecast"]["training"], found["forecast"]["record"]  # the record has times
    assert one == other


def test_shared_parameters_count_once(tmp_path, monkeypatch):
    (tmp_path / "tied_model.py").write_text(
        "import torch\n"
        "class Tied(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(11, 11), torch.nn.Linear(11, 11, bias=False)\n"
        "        self.b.weight = self.a.weight\n"
        "        self.a.bias.requires_grad = False\n"
        "    def forward(self, x, y):\n"
        "        return {'loss': self.b(self.a(x)).mean(1) - y}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    optimizer = {"class": "SGD", "lr": 0.1}
    config = {
        "dataset": {"class": "Majority"},
        "model": {"module": {"class": "tied_model.Tied"}, "optimizer": optimizer},
        "hooks": [{"StopAfter": {"epochs": 1}}],
    }
    (row,) = try_out(load_config(config))["parameters"]
    assert (row["module"], row["count"], row["trained"]) == ("a", 132, 121)


def test_the_groups_of_each_optimizer_are_there_with_their_rates_and_parameters():
    config = {
        "dataset": {"class": "Majority"},
        "model": {
            "module": {"class": "torch.nn.Linear", "in_features": 11, "out_features": 1},
            "inputs": ["x"],
            "outputs": ["loss"],
            "optimizer": {
                "weights": {"class": "AdamW", "lr": 0.5, "match": "weight"},
                "others": {"class": "Rprop", "lr": 0.1, "match": "bias"},
            },
            "scheduler": {"class": "Constant", "warmup": "5 updates"},
        },
        "main_loop": {"on_unused_sources": "ignore"},
        "hooks": [{"StopAfter": {"epochs": 1}}],
    }
    found = try_out(load_config(config))
    assert {"optimizer weights", "optimizer others"} <= set(found["memory"])
    first, second = found["parameter_groups"]
    assert (first["optimizer"], first["class"], first["group"]) == ("weights", "AdamW", 0)
    assert (first["lr"], first["weight_decay"], first["parameters"], first["count"]) == (0.5, 0.01, ["weight"], 11)
    assert (second["lr"], second["weight_decay"], second["parameters"]) == (0.1, None, ["bias"])


class Wide(torch.nn.Module):
    """Makes tensors of known sizes in a step: two at a time."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        for _ in range(3):
            held = torch.ones(1000, 1000)  # 4 MB; the one before ends when this one is made
        return {"loss": (x.float().mean(1) * self.weight + 0 * held[0, 0])}


def test_the_forecast_says_how_each_value_is_known(tmp_path):
    config = {
        "dataset": {"class": "Majority", "n": 100, "batch_size": 10},
        "model": {"module": {"class": f"{__name__}.Wide"}, "inputs": ["x"], "optimizer": {"class": "SGD", "lr": 0.1}},
        "hooks": [{"StopAfter": {"epochs": 7}}, {"StopAfter": {"iterations": 100_000}}],
    }
    found = try_out(load_config(config))
    forecast, seconds = found["forecast"], found["seconds_per_epoch"]
    assert {what: each["how"] for what, each in forecast.items()} == {
        "training": "estimated", "tensors of a step": "measured", "checkpoint": "measured",
        "kept checkpoints": "at most 1 of this size", "record": "estimated from the rows of the short epoch",
    }  # fmt: skip
    assert forecast["training"]["seconds"] == pytest.approx(7 * sum(seconds.values()))
    assert 8_000_000 <= forecast["tensors of a step"]["bytes"] < 8_100_000
    assert forecast["kept checkpoints"]["bytes"] == forecast["checkpoint"]["bytes"]
    train(create_training(config, output_dir=tmp_path / "run"))
    record = sum((tmp_path / "run" / name).stat().st_size for name in ("metrics.jsonl", "steps.jsonl", "rows.jsonl"))
    assert forecast["record"]["bytes"] == pytest.approx(record, rel=0.2)
    latest = (tmp_path / "run" / "checkpoints" / "latest").resolve()
    size = sum(each.stat().st_size for each in latest.iterdir())
    assert forecast["checkpoint"]["bytes"] == pytest.approx(size, rel=0.05)


def test_the_checkpoints_that_are_kept_are_counted():
    saving = [
        {"SaveEvery": {"n_epochs": 3}},  # of epochs 0, 3 and 6
        {"SaveEvery": {"every": "15 updates", "model_name": "some"}},  # 3 in 56 updates
        {"SaveEvery": {"every": "2 iterations", "keep": 5}},
        {"SaveBest": {"variable": "loss"}},
    ]
    config = {
        "dataset": {"class": "Majority", "n": 100, "batch_size": 10},
        "model": {"module": {"class": f"{__name__}.Sparse"}, "inputs": ["x"], "optimizer": {"class": "SparseAdam"}},
        "main_loop": {"extra_streams": ["valid"]},
        "hooks": ["ComputeStats", *saving, {"StopAfter": {"epochs": 7}}],
    }
    forecast = try_out(load_config(config))["forecast"]
    size = forecast["checkpoint"]["bytes"]
    kept = 3 + 3 + 5 + 1 + 1  # and `latest`
    assert forecast["kept checkpoints"] == {"bytes": kept * size, "how": f"at most {kept} of this size"}


@pytest.mark.parametrize("unit", thinned(["epochs", "passes", "updates", "iterations"], ["epochs", "updates"]))
def test_a_run_of_the_zeroth_epoch_alone_can_be_checked(unit):
    forecast = try_out(load_config(linear_with(["ComputeStats", {"StopAfter": {unit: 0}}])))["forecast"]
    assert forecast["checkpoint"]["bytes"] > 0
    assert "record" not in forecast  # no step is recorded


def test_without_a_limit_only_what_a_hook_keeps_is_known():
    assert SaveEvery(n_epochs=3).most_kept({}) is None
    assert SaveEvery(every="5 minutes").most_kept({"epochs": 7}) is None
    assert SaveEvery(keep=2).most_kept({}) == 2
    assert SaveEvery(n_epochs=3, keep=5).most_kept({"epochs": 7.5}) == 3


@pytest.mark.campaign  # the test before the last one has sparse gradients too
def test_sparse_gradients_do_not_disturb_the_forecast():
    config = {
        "dataset": {"class": "Majority", "n": 100, "batch_size": 10},
        "model": {
            "module": {"class": f"{__name__}.Sparse"}, "inputs": ["x"], "optimizer": {"class": "SparseAdam"},
        },
        "hooks": [{"StopAfter": {"minutes": 7}}],
    }  # fmt: skip
    forecast = try_out(load_config(config))["forecast"]
    assert forecast["tensors of a step"]["bytes"] > 1000 * 100 * 4
    assert "training" not in forecast  # it ends at a time


class Sparse(torch.nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 100, sparse=True)

    def forward(self, x):
        return {"loss": self.embedding(x.long().abs() % 1000).mean((1, 2))}


@pytest.mark.parametrize("backend", thinned(["eager", "aot_eager"], ["eager"]))  # the other takes seconds to import
def test_a_compiled_function_of_a_module_is_measured_as_it_is_run(backend):
    linear = torch.compile(torch.nn.Linear(4, 4), backend=backend, fullgraph=True)
    with StepMemory() as found:
        linear(torch.ones(2, 4)).sum().backward()
    assert 100 < found.peak < 1000


class Named:
    """Examples of classes with names, in other ways."""

    num_batches = {"train": 2}  # noqa: RUF012 - as a dataset may have it

    def __init__(self, names: object = ("a", "b", "c"), unnamed: int = 0):
        self.names = list(names) if isinstance(names, tuple) else names
        self.unnamed_classes = unnamed

    def classes_names(self):
        return self.names

    def train_stream(self):
        for _ in range(2):
            numbers = np.arange(6) % 3
            yield {
                "x": np.ones((6, 4), np.float32),
                "label": numbers,
                "turn": numbers,
                "y": np.ones((6, 1), np.float32),
            }


class Soft(Named):
    """Floats as targets: probabilities, or pictures."""

    num_batches = {"train": 2}  # noqa: RUF012 - as a dataset may have it

    def __init__(self, total: float = 1.0):
        super().__init__([])
        self.total = total

    def train_stream(self):
        for batch in super().train_stream():
            yield {"x": batch["x"], "target": np.full((6, 3), self.total / 3, np.float32)}


class Own(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x, target):
        logits = super().forward(x)
        return {"logits": logits, "loss": torch.nn.functional.cross_entropy(logits, target=target, reduction="none")}


def own_loss(logits, target):
    return 0.5 * torch.nn.functional.cross_entropy(logits, target)


@pytest.mark.parametrize(
    ("total", "way"),
    thinned([(1.0, "loss"), (2.0, "loss"), (2.0, "forward"), (2.0, "class")], [(1.0, "loss"), (2.0, "forward")]),
)
def test_floats_that_are_no_probabilities_as_targets_of_a_cross_entropy_are_a_warning(total, way):
    linear = {"class": "torch.nn.Linear", "in_features": 4, "out_features": 3}
    loss = {"class": ENTROPY} if way == "class" else {"import": f"{__name__}.own_loss"}
    named = {"inputs": ["x"], "outputs": ["logits"], "loss": {**loss, "inputs": ["logits", "target"]}}
    model = {"module": {"class": f"{__name__}.Own"}} if way == "forward" else {"module": linear, **named}
    config = {
        "seed": 3,
        "dataset": {"class": f"{__name__}.Soft", "total": total},
        "model": {**model, "optimizer": {"class": "SGD", "lr": 0.1}},
        "hooks": [{"StopAfter": {"epochs": 1}}],
    }
    found = [note for note in try_out(load_config(config))["notes"] if "probabilities" in note]
    assert [note[:60] for note in found] == ["a cross entropy has a target of floats of shape (6, 3), whic"] * (
        total == 2
    )


ENTROPY = "torch.nn.CrossEntropyLoss"
ON_LABEL = {"class": ENTROPY, "inputs": ["logits", "label"]}
ON_TURN = {"class": ENTROPY, "inputs": ["logits", "turn"]}


NAMED = [  # a dataset, a loss, the number of outputs, and the beginning of a warning
    ({}, ON_LABEL, 3, ""),
    ({}, ON_LABEL, 10, "loss: 'logits' has 10 classes, but the dataset has 3 names of classes of 'label' (a, b, c)"),
    ({}, {"import": "torch.nn.functional.cross_entropy", "inputs": ["logits", "label"]}, 4, "loss: 'logits' has 4"),
    ({}, {"one": ON_LABEL, "two": ON_TURN}, 4, "loss.one: 'logits' has 4 classes"),
    ({"names": {"label": ["a", "b", "c"]}}, ON_TURN, 4, ""),
    ({"names": {"turn": ["a", "b", "c", "d"]}}, ON_TURN, 3, "loss: 'logits' has 3 classes, but the dataset has 4"),
    ({"names": {"turn": ["a", "b", "c"]}, "unnamed": 1}, ON_TURN, 4, ""),
    ({}, {"class": "torch.nn.MSELoss", "inputs": ["logits", "y"]}, 1, ""),
]


@pytest.mark.parametrize(("dataset", "loss", "outputs", "expected"), thinned(NAMED, [NAMED[0], NAMED[3], NAMED[5]]))
def test_logits_of_another_number_of_classes_than_there_are_names_are_a_warning(dataset, loss, outputs, expected):
    config = {
        "seed": 3,
        "dataset": {"class": f"{__name__}.Named", **dataset},
        "model": {
            "module": {"class": "torch.nn.Linear", "in_features": 4, "out_features": outputs},
            "inputs": ["x"],
            "outputs": ["logits"],
            "loss": loss,
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "main_loop": {"on_unused_sources": "ignore"},
        "hooks": [{"StopAfter": {"epochs": 1}}],
    }
    found = [note for note in try_out(load_config(config))["notes"] if "names" in note]
    assert len(found) == bool(expected)
    assert "".join(found).startswith(f"model.{expected}" if expected else "")
