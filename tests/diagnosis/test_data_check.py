"""`emrun check CONFIG --data`: what is planted is found with the right ids, and nothing else."""

import contextlib
import json
from itertools import product

import pytest
from campaign import thinned
from click.testing import CliRunner

from emrun.cli import emrun as commands
from emrun.config.config import load_config
from emrun.diagnosis.data_check import look_at_data

DATA = """\
import os

import numpy as np
import torch


class Data:
    def __init__(self, plant="", kind="numpy"):
        self.plant, self.kind = plant, kind
        rng = np.random.default_rng(1)
        self.rows = {}
        for name, count in (("train", 300), ("valid", 60)):
            x = rng.normal(size=(count, 4)).astype(np.float32)
            y = rng.integers(0, 3, count)
            ids = np.array([f"{name}{index}" for index in range(count)])
            self.rows[name] = {"x": x, "y": y, "w": rng.random(count), "id": ids}
        train, valid = self.rows["train"], self.rows["valid"]
        if plant == "leak":
            valid["x"][[7, 9]], valid["y"][[7, 9]] = train["x"][[100, 50]], train["y"][[100, 50]]
        elif plant == "duplicate":
            train["x"][[20, 200]] = train["x"][10]
            train["y"][[20, 200]] = train["y"][10]
        elif plant == "conflict":
            train["x"][20], train["y"][20] = train["x"][10], (train["y"][10] + 1) % 3
        elif plant == "constant":
            train["w"][:] = valid["w"][:] = 0.5
        elif plant == "not_finite":
            train["x"][33, 2], train["x"][250, 3] = np.nan, np.inf
        elif plant == "label":
            valid["y"][5] = 7
        elif plant == "directory":  # of the process
            os.chdir(os.sep)
        elif plant == "sorted":
            order = np.argsort(train["y"], kind="stable")
            self.rows["train"] = {source: values[order] for source, values in train.items()}

    def _stream(self, ctx):
        rows = self.rows[ctx.stream_name]
        shuffle = bool(ctx.epoch) and self.plant != "sorted"
        for taken in ctx.batches(len(rows["x"]), 32, shuffle=shuffle):
            batch = {source: values[taken] for source, values in rows.items()}
            if self.kind == "torch":
                batch["x"] = torch.from_numpy(batch["x"]).to(torch.float64)
            elif self.kind == "text":  # the width of the array is that of the longest text of the batch
                batch["x"] = np.array([str(row.tolist()) for row in batch["x"]])
            elif self.kind == "list":
                batch["x"] = [list(map(float, row)) for row in batch["x"]]
            elif self.kind == "mapping":
                batch["x"] = {"a": batch["x"][:, :2], "b": batch["x"][:, 2:]}
            elif self.kind == "nested":
                batch["x"] = torch.nested.nested_tensor(list(map(torch.from_numpy, batch["x"])), layout=torch.jagged)
            yield batch

    def train_stream(self, ctx):
        return self._stream(ctx)

    def valid_stream(self, ctx):
        return self._stream(ctx)
"""
CONFIG = """\
seed: 1
dataset: {class: planted.Data}
model:
  module: {class: torch.nn.Linear, in_features: 4, out_features: 3}
  inputs: [x]
  outputs: [logits]
  loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, y]}
  optimizer: {class: SGD, lr: 0.1}
main_loop: {extra_streams: [valid], on_unused_sources: ignore}
hooks: [StopAfter: {epochs: 1}]
"""
PLANTED = {
    "leak": ("leak", 2, [["valid7", "train100"], ["valid9", "train50"]]),
    "duplicate": ("duplicate", 2, [["train10", "train20", "train200"]]),
    "constant": ("constant", 300, []),
    "not_finite": ("not_finite", 2, [["train33"], ["train250"]]),
    "label": ("label_in_one_stream", 1, []),
    "sorted": ("sorted", 300, []),
}


@contextlib.contextmanager
def no_bar(stream, batches):
    yield lambda: None


@pytest.fixture
def looked(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(DATA)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def look(*overrides):
        return look_at_data(load_config("config.yaml", [f"code_directory={tmp_path}", *overrides]), no_bar)

    return look


@pytest.mark.parametrize("kind", ["numpy", "torch", "list", "mapping", "nested"])
def test_nothing_is_found_where_nothing_is_wrong(looked, kind):
    found = looked(f"dataset.kind={kind}")
    assert found["findings"] == []
    assert found["streams"]["train"]["examples"] == 300
    assert found["streams"]["train"]["batches"] == 10
    assert list(found["streams"]["train"]["labels"]) == ["y"]
    assert sum(found["streams"]["valid"]["labels"]["y"].values()) == 60


@pytest.mark.parametrize(
    ("kind", "plant"),
    thinned(product(["numpy", "mapping"], PLANTED), [*product(["numpy"], PLANTED), ("mapping", "not_finite")]),
)
def test_what_is_planted_is_found(looked, plant, kind):
    kind_, count, examples = PLANTED[plant]
    findings = looked(f"dataset.plant={plant}", f"dataset.kind={kind}")["findings"]
    assert {each["kind"] for each in findings} == {kind_}
    assert (findings[0]["count"], findings[0]["examples"]) == (count, examples)
    assert len(findings) == (2 if plant == "constant" else 1)


def test_the_same_inputs_with_another_label_are_a_conflict(looked):
    first, second = looked("dataset.plant=conflict")["findings"]
    assert (first["kind"], first["examples"]) == ("duplicate", [["train10", "train20"]])
    assert (second["kind"], second["count"], second["examples"]) == (
        "conflict",
        2,
        [["train train10", "train train20"]],
    )


def test_lists_and_tensors_are_compared_by_their_values(looked):
    for kind in ("torch", "text", "list", "nested"):
        findings = looked("dataset.plant=leak", f"dataset.kind={kind}")["findings"]
        assert [each["examples"] for each in findings] == [PLANTED["leak"][2]], kind
    for kind in ("torch", "list", "nested"):
        findings = looked("dataset.plant=not_finite", f"dataset.kind={kind}")["findings"]
        assert [each["examples"] for each in findings] == [PLANTED["not_finite"][2]], kind


def test_without_inputs_in_the_config_all_sources_but_the_id_are_compared(looked):
    assert looked("~model", "dataset.plant=leak")["findings"] == []  # the labels and w differ
    assert [each["kind"] for each in looked("~model", "dataset.plant=sorted")["findings"]] == ["sorted"]


def test_workers_find_the_same(looked):
    expected = looked("dataset.plant=duplicate")
    assert looked("dataset.plant=duplicate", "main_loop.workers=2") == expected


def test_the_command_prints_what_is_found_and_fails(looked, emrun_here, tmp_path):
    done = emrun_here("check", "config.yaml", "--data", "dataset.plant=leak")
    assert done.returncode == 1, done.stderr
    assert (
        "found: stream 'valid': 2 of 60 examples are also in stream 'train': valid7 (train train100), "
        "valid9 (train train50)\n"
    ) in done.stdout
    assert "nothing is wrong" not in done.stdout
    fine = emrun_here("check", "config.yaml", "--data", "dataset.plant=directory")
    assert fine.returncode == 0
    assert "nothing is wrong; tried a short epoch with all hooks, saving and loading, and read all data" in fine.stdout
    command = ["check", "config.yaml", "--data", "--json", "dataset.plant=duplicate"]
    as_json = CliRunner().invoke(commands, command, standalone_mode=False)  # in this process
    assert as_json.return_value == 1
    found = json.loads(as_json.stdout)["data"]
    assert found["findings"][0]["message"] == (
        "stream 'train': 2 examples occurred before in the stream: train10 (train20, train200)"
    )
    assert list((tmp_path).glob("log*")) == []


@pytest.mark.campaign
def test_the_progress_is_shown_on_a_terminal(looked, emrun_on_terminal):
    status, _, text = emrun_on_terminal("check", "config.yaml", "--data")
    assert status == 0
    assert "train: " in text
    assert "batches" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--data"], "--data needs a CONFIG"), (["config.yaml", "--data", "--static"], "--static imports nothing")],
)
def test_wrong_usage(looked, emrun_here, arguments, message):
    done = emrun_here("check", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_an_endless_stream_is_read_for_one_epoch(looked, tmp_path):
    text = "import itertools\nclass Endless:\n    def train_stream(self):\n"
    text += "        return ({'x': [float(i)], 'y': [i % 3]} for i in itertools.count())\n"
    (tmp_path / "endless.py").write_text(text)
    found = looked("dataset.class=endless.Endless", "main_loop.fixed_epoch_size=50")
    assert found["streams"]["train"] == {
        "batches": 50, "examples": 50, "whole": False, "labels": {"y": {"0": 17, "1": 17, "2": 16}}
    }  # fmt: skip


def test_sources_of_different_lengths_are_an_error(looked, tmp_path):
    (tmp_path / "odd.py").write_text(
        "class Odd:\n    def train_stream(self):\n        yield {'x': [1.0], 'y': [1, 2]}\n"
    )
    with pytest.raises(Exception, match=r"stream 'train', batch 0: the sources have different lengths \(x 1, y 2\)"):
        looked("dataset.class=odd.Odd")
