"""The sample `night`: it proposes, trains under a budget, and keeps or drops, all through `--json`."""

import json
import runpy

import pytest
from samples import SAMPLES


@pytest.fixture
def night():
    return runpy.run_path(str(SAMPLES / "night" / "night.py"))


def test_a_night_runs_to_its_end(night, emrun, emrun_here, tmp_path):
    (tmp_path / "config.yaml").write_text((SAMPLES / "night" / "config.yaml").read_text())
    called = []

    def run(*arguments):
        command = emrun if arguments[0] == "compare" else emrun_here  # a comparison forks its trainings
        done = command(*arguments, "--json", cwd=tmp_path)
        called.append(arguments[0])
        return json.loads(done.stdout)

    found = night["night"](1, 0.0005, run, pairs="2", seed=1)
    (line,) = found["experiments"]
    assert called == ["check", "train", "compare"]
    assert line["verdict"] in ("a", "b", "none", "undecided")
    assert line["best"]["statistic"] == "valid/accuracy/mean"
    assert found["kept"] == (line["change"] if line["verdict"] == "b" else [])


def test_what_the_check_can_repair_is_repaired_and_the_rest_is_dropped(night):
    def check(*arguments):
        wrong = [each for each in arguments if each == "model.optimizer.lrr=1"]
        fix = {"overrides": ["~model.optimizer.lrr", "model.optimizer.lr=1"]}
        return {"problems": [{"fix": fix}] if wrong and "model.optimizer.lr=1" not in arguments else []}

    assert night["repaired"](["model.optimizer.lrr=1"], check)[-1] == "model.optimizer.lr=1"
    assert night["repaired"](["x=1"], lambda *_: {"problems": [{"fix": None}]}) is None
