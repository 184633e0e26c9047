"""The values of a config under the keys that overrides have."""

import pytest

from emrun.runs.config_comparison import values_of
from emrun.runs.stored_run import StoredRun


@pytest.fixture
def values(tmp_path):
    def read(text):
        (tmp_path / "config.yaml").write_text(text)
        run = StoredRun(tmp_path)
        return values_of(run), run.problems

    return read


def test_values_have_the_keys_of_overrides(values):
    text = """\
seed: 1
dataset: {class: Digits, batch_size: 32, sizes: [1, [2, 3]], none: null, empty: {}}
model:
  module:
    args:
      - {class: a.B, width: "${seed}"}
      - [x]
hooks:
  - LogVariables
  - StopAfter: {epochs: 3}
  - WriteCSV:
  - WriteCSV: {file: b.csv}
"""
    found, problems = values(text)
    assert problems == []
    assert found == {
        "seed": 1,
        "dataset.class": "Digits",
        "dataset.batch_size": 32,
        "dataset.sizes.0": 1,
        "dataset.sizes.1.0": 2,
        "dataset.sizes.1.1": 3,
        "dataset.none": None,
        "dataset.empty": {},
        "model.module.args.0.class": "a.B",
        "model.module.args.0.width": "${seed}",
        "model.module.args.1.0": "x",
        "hooks.LogVariables": {},
        "hooks.StopAfter.epochs": 3,
        "hooks.2.WriteCSV": {},
        "hooks.3.WriteCSV.file": "b.csv",
    }


def test_what_only_the_parser_understands_has_the_same_values(values):
    plain = "seed: 1\nmodel: {a: {lr: 0.1}, b: {lr: 0.1}}\n"
    unusual = "base: &base {lr: 0.1}\nseed: 1\nmodel:\n  a:\n    <<: *base\n  b: *base\n"
    assert {key: value for key, value in values(unusual)[0].items() if key != "base.lr"} == values(plain)[0]


@pytest.mark.parametrize("text", ["{", "- a", "", "a: b: c"])
def test_a_config_that_cannot_be_read_has_none_and_is_a_problem(values, text):
    found, problems = values(text)
    assert found == {}
    assert len(problems) == 1


def test_a_config_with_very_many_values_is_cut(values, monkeypatch):
    monkeypatch.setattr("emrun.runs.config_comparison._MOST_VALUES", 200)
    found, problems = values("a:\n" + "\n".join(f"  k{index}: {index}" for index in range(210)) + "\n")
    assert len(found) == 200
    assert problems == ["the config has more than 200 values; the others are left out"]
