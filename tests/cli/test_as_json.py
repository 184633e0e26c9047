"""`--json`: which commands have it, and what they print."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from emrun.cli import bench, emrun as commands
from emrun.cli.output import plain
from emrun.config.catalogue import PLACES, listing
from emrun.diagnosis.differences import Difference
from emrun.diagnosis.stream_bench import Bench, Setting, Speed, StreamBench
from emrun.diagnosis.verification import _row

ROOT = Path(__file__).parent.parent.parent
WITHOUT = {"completion", "init", "report", "trace"}
"""Commands that print only errors as JSON; `trace` prints JSON lines with `-f jsonl`."""


def printed(*arguments):
    done = CliRunner().invoke(commands, arguments)
    assert done.exception is None, done.exception
    return json.loads(done.stdout)


def test_every_command_has_the_option_and_gets_it_where_it_prints_a_result():
    for each in commands.commands.values():
        (option,) = (parameter for parameter in each.params if "--json" in parameter.opts)
        assert option.expose_value == (each.name not in WITHOUT), each.name


def test_the_page_of_json_has_a_row_for_each_command():
    page = (ROOT / "docs" / "reference" / "json.md").read_text()
    for each in commands.commands.values():
        if each.name not in WITHOUT:
            assert any(f"`{each.name}`" in row.split(" | ")[0] for row in page.splitlines() if row.startswith("| `"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "NaN"),
        ([float("inf"), -float("inf"), 0.5], ["Infinity", "-Infinity", 0.5]),
        (np.float32("nan"), "NaN"),
        (np.float64(0.5), 0.5),
        (torch.tensor([1.0, float("nan")]), [1.0, "NaN"]),
        ({1: (None, True), "x": {2}}, {"1": [None, True], "x": [2]}),
        (Path("log/run"), "log/run"),
        (object, "<class 'object'>"),
    ],
)
def test_values_become_what_json_has(value, expected):
    assert plain(value) == expected
    json.dumps(plain(value), allow_nan=False)


def test_config_prints_values_and_origins(project):
    found = printed("config", "config.yaml", "seed=7", "--json")
    assert (found["config"]["seed"], found["config"]["dataset"]["batch_size"], found["origins"]) == (7, 16, None)
    origins = {
        each["key"]: each for each in printed("config", "config.yaml", "seed=7", "--origins", "--json")["origins"]
    }
    assert origins["seed"] == {"key": "seed", "value": 7, "origin": "override 'seed=7'"}
    assert origins["model.module.dropout"] == {
        "key": "model.module.dropout", "value": 0.2, "origin": "default of my_model.Classifier"
    }  # fmt: skip
    assert CliRunner().invoke(commands, ["config", "--schema", "--json"], standalone_mode=False).exception


def test_show_prints_lists_and_explanations():
    found = printed("show", "--json")
    assert found.keys() == PLACES.keys()
    assert [(each["name"], each["summary"]) for each in found["hooks"]] == listing("hooks")
    assert printed("show", "metrics", "--json").keys() == {"metrics"}
    explained = printed("show", "StopAfter", "--json")
    assert explained["name"] == "StopAfter"
    assert "- StopAfter:" in explained["text"]


def test_dataset_prints_a_result_and_what_the_code_prints_stays_out(project):
    (project / "my_data.py").write_text(
        "class Tumours:\n    def __init__(self, batch_size):\n        print('building')\n\n"
        "    def sizes(self):\n        print('counting')\n        return {'train': 3, 'share': float('nan')}\n\n"
        "    def train_stream(self):\n        yield {'x': [1, 5]}\n\n"
        "    def valid_stream(self):\n        raise ValueError('no rows')\n"
    )
    assert printed("dataset", "sizes", "config.yaml", "--json") == {"result": {"train": 3, "share": "NaN"}}
    found = printed("dataset", "stream_info", "config.yaml", "--json")
    source = {"stream": "train", "source": "x", "dtype": "int64", "shape": "()", "range": "1 to 5"}
    assert found["streams"][0].keys() == source.keys()
    assert found["streams"][0]["source"] == "x"
    assert "stream 'valid' fails after 0 batches: ValueError: no rows" in found["failures"][0]


def test_bench_prints_measurements_and_the_setting():
    readings = [Speed(Setting(), 0.5, 0.5), Speed(Setting(buffer=4, workers=2), 0.001, 0.001)]
    streams = [StreamBench("train", True, True, 100, readings), StreamBench("valid", False, False, None, [])]
    found = plain(bench._in_json(Bench(streams, 0.01)))
    assert found["recommended"] == found["change"] == {"buffer": 4, "workers": 2}
    assert found["streams"][0]["readings"][1].keys() == {
        "buffer", "workers", "first_batch_seconds", "seconds_per_batch", "waiting"
    }  # fmt: skip
    unknown = plain(bench._in_json(Bench(streams, None, "no model")))
    assert (unknown["recommended"], unknown["why_no_step"]) == (None, "no model")
    assert {each["waiting"] for each in unknown["streams"][0]["readings"]} == {None}


def test_verify_resume_prints_what_differs():
    difference = Difference("at iteration 3, x differs: 1 and 2", "batch", cause="a clock")
    row = {"interrupted_at": None, "iteration": None, "by": "SIGTERM", "resumed_at": None}
    row |= {"resumed_on": None, "rounding": None}
    told = {"difference": difference.what, "likely_cause": "a clock"}
    assert _row(None, "SIGTERM", difference) == {**row, **told}
