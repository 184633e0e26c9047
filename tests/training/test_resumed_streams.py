"""Streams that a resume continues, and those that it cannot repeat, of which it warns."""

import itertools
import json

import pytest
from campaign import thinned
from training.resuming import DATA, FEW_HOOKS, config_of, ended, result, stopped, straight
from training.tiny import trace

from emrun import create_training, resume_training
from emrun.base.errors import DataChanged
from emrun.config.config import read_config
from emrun.training.create import train

IN_PASS_1, GOES_ON = "hooks.StopAfter.iterations=3", "hooks.StopAfter.iterations=99"
"""Ends a run in its first pass, and takes that back."""


def test_a_stream_that_cannot_be_repeated_logs_a_warning(project, caplog):
    (project / "wild_data.py").write_text(
        DATA + "\nimport random\n_rng = random.SystemRandom()\n\n\nclass Wild(Data):\n"
        "    def plain(self):\n        for _ in range(5):\n            yield self._batch([0] * 4, _rng.random())\n"
    )
    config = {**config_of("plain", FEW_HOOKS), "dataset": {"class": "wild_data.Wild", "kind": "plain"}}
    ended(project, config, IN_PASS_1)
    train(resume_training(project / "run", [GOES_ON]))
    assert "this resume is not exact: stream 'train'" in caplog.text


def test_a_changed_value_is_named_as_the_cause(project, caplog):
    ended(project, config_of(hooks=FEW_HOOKS), IN_PASS_1)
    seed = int(read_config(project / "run")["seed"])
    train(resume_training(project / "run", [f"seed={seed + 1}", "~hooks.StopAfter.iterations"]))
    what = "stream 'train' gives other values of 'x', 'y' than before, as this resume changes seed: "
    assert f"this resume is not exact: {what}{seed} -> {seed + 1}" in caplog.messages


MEMORY = '''

class Memory(Data):
    """The same object for every pass; its random numbers continue from pass to pass."""

    def stateful(self):
        if not hasattr(self, "stream"):
            self.stream = Endless(self)
        return self.stream

    def plain(self):
        if not hasattr(self, "rng"):
            self.rng = np.random.default_rng(7)
        for _ in range(5):
            yield self._batch(self.rng.integers(0, 20, size=4))


class Endless(Stateful):
    def __iter__(self):
        self.index %= 5
        return super().__iter__()
'''


@pytest.mark.parametrize("epochs", thinned([1, 2], [1]))
def test_a_stream_with_a_state_continues_after_a_pass(project, epochs):
    (project / "memory_data.py").write_text(DATA + MEMORY)
    config = {**config_of("stateful", FEW_HOOKS), "dataset": {"class": "memory_data.Memory", "kind": "stateful"}}
    directory = stopped(project, config, epochs)
    train(resume_training(directory, ["hooks.StopAfter.epochs=3"]))
    assert result(directory) == straight(project, config, "hooks.StopAfter.epochs=3")


@pytest.mark.campaign
def test_a_stream_with_a_hidden_state_logs_a_warning_after_a_pass(project, caplog):
    (project / "memory_data.py").write_text(DATA + MEMORY)
    config = {**config_of("plain", FEW_HOOKS), "dataset": {"class": "memory_data.Memory", "kind": "plain"}}
    directory = stopped(project, config)
    train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    assert "this resume is not exact: stream 'train'" in caplog.text


@pytest.mark.parametrize(("buffer", "told"), thinned([(0, False), (2, True)], [(2, True)]))
def test_global_random_numbers_in_a_reader_thread_log_a_warning(project, caplog, buffer, told):
    (project / "global_data.py").write_text(
        DATA + "\n\nclass Global(Data):\n    def plain(self):\n        for _ in range(5):\n"
        "            yield self._batch(np.random.randint(0, 20, size=4))\n"
    )
    config = {
        **config_of("plain", FEW_HOOKS, buffer=buffer),
        "dataset": {"class": "global_data.Global", "kind": "plain"},
    }
    ended(project, config, IN_PASS_1)
    train(resume_training(project / "run", [GOES_ON]))
    assert ("this resume is not exact: stream 'train'" in caplog.text) == told


GROWN = """
import numpy as np
import torch
from pathlib import Path
from emrun.datasets.torch_dataset import TorchDataset


def batch_of(rows, noise=0):
    x = np.sin(np.outer(1 + np.asarray(rows) + noise, [1, 2, 3])).astype(np.float32)
    return {"x": x, "y": (x.sum(axis=1) > 0).astype(np.int64)}


class Grown:
    def __init__(self, kind, batch_size=4):
        self.n, self.valid_n = map(int, Path("n.txt").read_text().split())
        self.batch_size = batch_size
        if kind == "told":
            self.num_batches = {"train": -(-self.n // batch_size)}
        self.train_stream = getattr(self, "plain" if kind == "told" else kind)

    def context(self, ctx):
        for rows in ctx.batches(self.n, self.batch_size, shuffle=True):
            yield batch_of(rows)

    def two(self, ctx):
        for n in (8, self.n - 8):
            for rows in ctx.batches(n, self.batch_size):
                yield batch_of(rows, n)

    def plain(self):
        for first in range(0, self.n, self.batch_size):
            yield batch_of(range(first, min(self.n, first + self.batch_size)))

    def valid_stream(self, ctx):
        for rows in ctx.batches(self.valid_n, 4):
            yield batch_of(rows)


class OfTorch(TorchDataset):
    def __init__(self):
        n, valid_n = map(int, Path("n.txt").read_text().split())
        super().__init__([{key: each[0] for key, each in batch_of([row]).items()} for row in range(n)],
                         batch_size=4,
                         valid=[{key: each[0] for key, each in batch_of([row]).items()} for row in range(valid_n)])
"""


def epochs_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def grown(project, monkeypatch, kind, n=20, valid_n=12, **main_loop):
    monkeypatch.chdir(project)
    (project / "grown_data.py").write_text(GROWN)
    (project / "n.txt").write_text(f"{n} {valid_n}")
    dataset = {"class": "grown_data.Grown", "kind": kind}
    dataset = {"class": "grown_data.OfTorch"} if kind == "torch" else dataset
    hooks = [{"ComputeStats": {"variables": ["loss"]}}, {"StopAfter": {"epochs": 2}}]
    return {**config_of(**main_loop), "dataset": dataset, "hooks": hooks}


ACCEPT = "main_loop.on_changed_data=warn"
IN_PASS = [
    ("context", {}, 4, "has 1 batches, and had 3 or more before"),
    ("context", {}, 8, "has 2 batches, and had 3 or more before"),
    ("context", {}, 18, "has 18 examples, and had 20 examples before"),
    ("context", {}, 23, "has 23 examples, and had 20 examples before"),
    ("context", {}, 40, "has 40 examples, and had 20 examples before"),
    ("context", {"workers": 2}, 4, "has 1 batches, and had 3 or more before"),
    ("context", {"workers": 2}, 23, "has 23 examples, and had 20 examples before"),
    ("context", {"buffer": 2}, 23, "has 23 examples, and had 20 examples before"),
    ("context", {"fixed_epoch_size": 7}, 23, "has 23 examples, and had 20 examples before"),
    ("two", {}, 30, "has 30 examples, and had 20 examples before"),
    ("plain", {}, 8, "has 2 batches, and had 3 or more before"),
    ("told", {}, 40, "has 10 batches, and had 5 batches before"),
    ("torch", {}, 23, "has 23 examples, and had 20 examples before"),
    ("torch", {}, 4, "has 1 batches, and had 3 or more before"),
]
FEW_IN_PASS = [
    ("context", {"buffer": 2}, 23, "has 23 examples, and had 20 examples before"),
]


@pytest.mark.parametrize(("kind", "main_loop", "n", "message"), thinned(IN_PASS, FEW_IN_PASS))
def test_other_data_in_the_middle_of_a_pass_are_refused_with_the_key_that_takes_them(
    project, monkeypatch, caplog, kind, main_loop, n, message
):
    config = grown(project, monkeypatch, kind, **main_loop)
    ended(project, config, IN_PASS_1)
    done = epochs_of(project / "run")
    (project / "n.txt").write_text(f"{n} 12")
    for _ in range(2):
        with pytest.raises(DataChanged) as raised:
            train(resume_training(project / "run", ["hooks.StopAfter.iterations=9"]))
        ending = f"resume; go back to the data of before, or resume with {ACCEPT} to train on with those of now"
        assert str(raised.value) == f"stream 'train' {message} the {ending}"
        assert (raised.value.exit_status, raised.value.fix) == (2, f"override {ACCEPT}")
    assert epochs_of(project / "run")[:1] == done[:1]
    caplog.clear()
    train(resume_training(project / "run", [ACCEPT]))
    assert f"this resume is not exact: stream 'train' {message} the resume" in caplog.messages
    assert trace(project / "run")["iterations_done"] == (9 if n > 8 else 3 + -(-n // 4))  # or after two epochs
    caplog.clear()
    train(resume_training(project / "run", ["hooks.StopAfter.iterations=11"]))  # from now on, these are the data
    assert "not exact" not in caplog.text


@pytest.mark.parametrize(
    ("n", "kind"),
    thinned(itertools.product([8, 40], ["context", "plain", "told", "torch"]), [(8, "torch")]),
)
def test_other_data_between_two_passes_are_refused_with_the_key_that_takes_them(project, monkeypatch, kind, n):
    directory = stopped(project, grown(project, monkeypatch, kind))
    (project / "n.txt").write_text(f"{n} 12")
    with pytest.raises(DataChanged, match=rf"stream 'train' has .*, and had .*; go back .* or resume with {ACCEPT} "):
        train(resume_training(directory, ["hooks.StopAfter.epochs=2"]))
    train(resume_training(directory, [ACCEPT]))
    assert trace(directory)["iterations_done"] == 5 + n // 4


@pytest.mark.parametrize("kind", thinned(["context", "plain", "told", "torch"], ["context"]))
def test_the_data_that_were_put_back_resume_exactly(project, monkeypatch, kind, caplog):
    config = {**grown(project, monkeypatch, kind), "hooks": FEW_HOOKS}
    expected = straight(project, config)
    ended(project, config, IN_PASS_1)
    (project / "n.txt").write_text("8 12")
    with pytest.raises(DataChanged):
        train(resume_training(project / "run", ["hooks.StopAfter.iterations=99"]))
    (project / "n.txt").write_text("20 12")
    caplog.clear()
    train(resume_training(project / "run"))
    assert "not exact" not in caplog.text
    assert result(project / "run") == expected


@pytest.mark.parametrize("ways", thinned([[], ["main_loop.extra_streams=[train, valid]"]], [[]]))
def test_other_data_of_an_evaluation_are_refused_before_its_statistics_count(project, monkeypatch, ways, caplog):
    config = grown(project, monkeypatch, "context")
    ended(project, config, IN_PASS_1, *ways)
    (project / "n.txt").write_text("20 16")
    with pytest.raises(DataChanged, match="stream 'valid' has 16 examples, and had 12 examples before the resume; go"):
        train(resume_training(project / "run", ["hooks.StopAfter.iterations=9"]))
    assert [line["epoch"] for line in epochs_of(project / "run")] == [0]
    train(resume_training(project / "run", [ACCEPT]))
    assert "this resume is not exact: stream 'valid' has 16 examples, and had 12 examples before" in caplog.text
    assert [line["epoch"] for line in epochs_of(project / "run")] == [0, 1, 2]


@pytest.mark.campaign
def test_longer_data_of_a_plain_stream_are_told_at_the_end_of_the_pass(project, monkeypatch, caplog):
    config = grown(project, monkeypatch, "plain")
    ended(project, config, IN_PASS_1)
    (project / "n.txt").write_text("40 12")
    train(resume_training(project / "run", ["hooks.StopAfter.iterations=30"]))
    told = [each for each in caplog.messages if "not exact" in each]
    assert told == ["this resume is not exact: stream 'train' has 10 batches, and had 5 batches before the resume"]


@pytest.mark.campaign
def test_a_change_by_an_override_is_a_warning_that_names_it(project, monkeypatch, caplog):
    config = grown(project, monkeypatch, "context")
    config["vars"] = {"unit": 1}
    ended(project, config, IN_PASS_1)
    (project / "n.txt").write_text("40 12")
    train(resume_training(project / "run", ["hooks.StopAfter.iterations=9", "vars.unit=2"]))
    what = "has 40 examples, and had 20 examples before the resume, as this resume changes vars.unit: 1 -> 2"
    assert f"this resume is not exact: stream 'train' {what}" in caplog.messages


@pytest.mark.campaign
def test_a_position_beyond_the_end_by_an_override_is_refused_and_undone(project, monkeypatch):
    config = grown(project, monkeypatch, "context")
    ended(project, config, IN_PASS_1)
    with pytest.raises(DataChanged, match=r"as this resume changes dataset\.batch_size: not set -> 10; go back to"):
        train(resume_training(project / "run", ["hooks.StopAfter.iterations=99", "dataset.batch_size=10"]))
    train(resume_training(project / "run", ["dataset.batch_size=4"]))
    assert trace(project / "run")["status"] == "finished"


VARIED = """

class Varied(Grown):
    def plain(self, ctx):
        for first in range(0, 20 - 4 * (ctx.epoch % 2), 4):
            yield batch_of(range(first, first + 4))

    def context(self, ctx):
        for rows in ctx.batches(20 - 4 * (ctx.epoch % 2), 4):
            yield batch_of(rows)
"""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("at", "kind"),
    thinned(
        itertools.product(["epochs=2", "iterations=10", "iterations=11"], ["context", "plain"]),
        [("iterations=11", "context")],
    ),
)
def test_passes_of_different_lengths_are_no_change(project, monkeypatch, caplog, kind, at):
    config = grown(project, monkeypatch, kind)
    config["dataset"]["class"] = "varied_data.Varied"
    (project / "varied_data.py").write_text(GROWN + VARIED)
    config["hooks"] = [{"StopAfter": {"epochs": 3}}]
    train(create_training(config, output_dir=project / "straight"))
    train(create_training(config, output_dir=project / "run", overrides=[f"hooks.StopAfter.{at}"]))
    caplog.clear()
    train(resume_training(project / "run", ["hooks.StopAfter.epochs=3", "hooks.StopAfter.iterations=99"]))
    assert "not exact" not in caplog.text
    latest = "checkpoints/latest/model.safetensors"
    assert (project / "run" / latest).read_bytes() == (project / "straight" / latest).read_bytes()
