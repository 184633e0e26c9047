"""Batches that are empty, ragged or of a wrong type, and sources that are missing, unused or also outputs.

As the config says: an error with names and lengths, before any update of that batch, or the batch is passed over.
Taken out once by hand, the comparison of the lengths of a batch's sources made this fail, and so did the check of
outputs against sources.
"""

import json

import pytest
from ruamel.yaml import YAML

MODULE = """
import numpy as np
import torch

X, Y = np.ones((4, 11), np.float32), np.zeros(4, np.float32)
GOOD = {"x": X, "y": Y}


class Data:
    def __init__(self, bad, at):
        self.bad, self.at = eval(bad), at

    def train_stream(self):
        for index in range(5):
            yield self.bad if index == self.at else GOOD

    def valid_stream(self):
        yield GOOD
"""
BAD = {  # what the batch is -> what the message has in it
    '{"x": X, "y": Y[:3]}': ["sources of unequal length: x 4, y 3"],
    '{"x": X[:0], "y": Y}': ["sources of unequal length: x 0, y 4"],
    '{"x": list(X), "y": tuple(Y)[:1]}': ["sources of unequal length: x 4, y 1"],
    '{"x": torch.ones(4, 11), "y": torch.zeros(5)}': ["sources of unequal length: x 4, y 5"],
    '{"x": X, "y": 3}': ["sources without a length: y (int)"],
    '{"x": X, "y": None}': ["sources without a length: y (NoneType)"],
    '{"x": X, "y": np.float32(1)}': ["sources without a length: y (float32)"],
    "[X, Y]": ["a mapping source name -> values, not list"],
    "None": ["a mapping source name -> values, not NoneType"],
    "3": ["a mapping source name -> values, not int"],
    '{"x": X}': ["model.loss needs y, which the batch does not have", "it has x"],
    '{"x": X, "Y": Y}': ["model.loss needs y, which the batch does not have", "did you mean 'Y'?"],
    '{"z": X}': ["needs x and model.loss needs y", "it has z"],
}
EMPTY = {"{}": "has no sources", '{"x": X[:0], "y": Y[:0]}': "has sources of length 0: x, y"}
UNUSED = '{**GOOD, "z": Y, "name": list("abcd")}'
CASES = [
    ("overlap", '{**GOOD, "logit": Y}', 0, None),
    *(("error", bad, at, None) for bad in BAD for at in (0, 3)),
    *(("empty", bad, 3, policy) for bad in EMPTY for policy in ("error", "warn", "ignore")),
    *(("unused", UNUSED, 0, policy) for policy in ("error", "warn", "ignore")),
]

FEW = [
    *CASES[:1], *(("error", bad, (0, 3)[number % 2], None) for number, bad in enumerate(list(BAD)[::2])),
    ("empty", "{}", 3, "error"), ("empty", '{"x": X[:0], "y": Y[:0]}', 3, "warn"), ("empty", "{}", 3, "ignore"),
    ("unused", UNUSED, 0, "error"), ("unused", UNUSED, 0, "warn"),
]  # fmt: skip


@pytest.mark.timeout(7200)
@pytest.mark.fault("batches that are empty, ragged, of a wrong type; sources missing, unused, also outputs")
def test_a_wrong_batch_is_told_with_names_and_lengths_before_it_updates_anything(project, small, trials):
    (project / "wrong.py").write_text(MODULE)
    for number, trial in enumerate(trials(CASES, small=FEW)):
        kind, bad, at, policy = trial.case
        loop = {"extra_streams": ["valid"], "buffer": 2, "skip_zeroth_epoch": True, "report": False}
        loop |= {"on_empty_batch": policy} if kind == "empty" else {}
        loop |= {"on_unused_sources": policy} if kind == "unused" else {}
        config = {**small.config, "dataset": {"class": "wrong.Data", "bad": bad, "at": at}, "main_loop": loop}
        config["hooks"] = [{"SaveEvery": {"every": "1 iterations"}}, {"StopAfter": {"epochs": 1}}]
        (project / "config.yaml").write_text(json.dumps(config))
        directory = project / f"run{number}"
        with trial, trial.telling():
            done = small.command("train", "config.yaml", "--no-progress", "--output-dir", directory, cwd=project)
            trace = YAML(typ="safe", pure=True).load(directory / "trace.yaml")
            if kind in ("empty", "unused") and policy != "error":
                assert done.returncode == 0, done.stderr
                word = EMPTY.get(bad, "neither the model nor a hook reads the sources z, name")
                assert (word in done.stderr) == (policy == "warn")
                assert trace["iterations_done"] == (4 if kind == "empty" else 5)
                continue
            assert done.returncode == (2 if at == 0 else 1), done.stderr
            words = BAD.get(bad) or [EMPTY.get(bad, "")]
            words = {
                "unused": ["neither the model nor a hook reads the sources z, name"],
                "overlap": ["logit: a source and an output"],
            }.get(kind, words)
            for word in [*words, f"stream 'train', batch {at} of the epoch"]:
                assert word in done.stderr, done.stderr
            assert "Traceback" not in done.stderr
            assert trace["iterations_done"] == at
            saved = [path.name for path in (directory / "checkpoints").glob("it-*")]
            assert all(name <= f"it-{at:08d}" for name in saved), saved
