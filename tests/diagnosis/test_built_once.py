"""The module of a model that `check` tries is built once."""

import pytest
import torch
from campaign import thinned

from emrun.config.config import load_config
from emrun.diagnosis.tryout import try_out


class Counted(torch.nn.Module):
    """A module with tied weights, a buffer, an LSTM and dropout; in one way or another, it may be written to a file."""

    built = 0

    def __init__(self, keeps: str | None = None, dataset: object = None):
        super().__init__()
        type(self).built += 1
        self.layer = torch.nn.LSTM(10, 10, batch_first=True)
        self.first = torch.nn.Linear(10, 10, bias=False)
        self.second = torch.nn.Linear(10, 10, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.rand(1), persistent=False)
        self.drop = torch.nn.Dropout(0.1)
        self.length = len(dataset.num_batches)
        self.kept = {"function": lambda x: self.first(x), "dataset": dataset}.get(keeps)

    def forward(self, x):
        found = self.second(self.first(self.drop(self.layer(x[:, None])[0])))
        if callable(self.kept):
            found = self.kept(found)
        return {"loss": found.square().mean((1, 2)), "noise": torch.rand(len(x)) * self.seen}


@pytest.mark.parametrize(
    ("keeps", "times"), thinned([(None, 1), ("function", 4), ("dataset", 4)], [(None, 1), ("function", 4)])
)
def test_a_module_is_built_once_unless_a_file_cannot_hold_it_and_nothing_else_changes(monkeypatch, keeps, times):
    config = {
        "seed": 3,
        "dataset": {"class": "Majority", "n": 100, "dim": 10, "batch_size": 10},
        "model": {
            "module": {"class": f"{__name__}.Counted", "keeps": keeps},
            "inputs": ["x"],
            "optimizer": {"class": "Adam"},
        },
        "main_loop": {"extra_streams": ["valid"], "on_unused_sources": "ignore"},
        "hooks": ["ComputeStats", {"StopAfter": {"epochs": 1}}],
    }
    reports = []
    for expected in (times, 4):
        monkeypatch.setattr(Counted, "built", 0)
        reports.append(try_out(load_config(config)))
        assert Counted.built == expected
        monkeypatch.setattr("emrun.diagnosis.tryout.with_modules_built_once", lambda model, folder: model)
    for report in reports:
        for key in ("seconds_per_epoch", "forecast"):
            del report[key]
        del report["memory"]["peak of the process"]
    assert reports[0] == reports[1]
