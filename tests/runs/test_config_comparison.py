"""Configs of two runs are compared by meaning: keys, hooks by name, references replaced."""

import pytest

from emrun.runs.config_comparison import compare_configs
from emrun.runs.stored_run import StoredRun

BASE = """\
seed: 42
vars: {width: 32}
model:
  module: {class: Net, width: "${vars.width}", sizes: [1, 2]}
  optimizer: {class: AdamW, lr: 0.003}
hooks:
  - LogVariables
  - StopAfter: {epochs: 3}
"""


@pytest.fixture
def differences(tmp_path):
    """Return a function that compares two configs: key -> the two values, `...` where there is none."""

    def compare(one, other, **traces):
        for name, text in (("a", one), ("b", other)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.yaml").write_text(text)
            (tmp_path / name / "trace.yaml").write_text(traces.get(name, "status: finished\n"))
        found = compare_configs(StoredRun(tmp_path / "a"), StoredRun(tmp_path / "b"))
        compare.whole = found
        return {
            each["key"]: tuple(... if each[side] is None else each[side]["value"] for side in "ab")
            for each in found["config"]
        }

    return compare


def changed(old, new):
    assert old in BASE
    return BASE.replace(old, new)


def test_comments_order_and_style_do_not_matter(differences):
    other = "# mine\n" + changed("seed: 42\n", "").replace("lr: 0.003", "lr: 3.0e-3") + "seed: 42\n"
    assert differences(BASE, other) == {}
    assert differences(BASE, changed('"${vars.width}"', "32")) == {}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("lr: 0.003", "lr: 0.01", {"model.optimizer.lr": (0.003, 0.01)}),
        ("lr: 0.003", "lr: 0.003, eps: 1", {"model.optimizer.eps": (..., 1)}),
        ("seed: 42\n", "", {"seed": (42, ...)}),
        ("seed: 42", "seed: 42.0", {"seed": (42, 42.0)}),
        ("[1, 2]", "[1, 3]", {"model.module.sizes.1": (2, 3)}),
        ("[1, 2]", "[1]", {"model.module.sizes": ([1, 2], [1])}),
        ("width: 32", "width: 64", {"vars.width": (32, 64), "model.module.width": (32, 64)}),
        ("epochs: 3", "epochs: 4", {"hooks.StopAfter.epochs": (3, 4)}),
        ("  - LogVariables\n", "", {"hooks.LogVariables": ({}, ...)}),
        ("  - LogVariables", "  - LogVariables:\n  - LogVariables:", None),
        ("AdamW, lr: 0.003}", "AdamW}\nhook: 1", {"model.optimizer.lr": (0.003, ...), "hook": (..., 1)}),
    ],
)
def test_a_difference_has_the_key_of_an_override(old, new, expected, differences):
    found = differences(BASE, changed(old, new))
    if expected is None:  # a hook that is listed twice goes by its index
        expected = {
            "hooks.LogVariables": ({}, ...),
            "hooks.0.LogVariables": (..., {}),
            "hooks.1.LogVariables": (..., {}),
        }
    assert found == expected


def test_the_order_of_hooks_is_a_difference_of_its_own(differences):
    other = changed("  - LogVariables\n  - StopAfter: {epochs: 3}", "  - StopAfter: {epochs: 3}\n  - LogVariables")
    assert differences(BASE, other) == {}
    names = ["LogVariables", "StopAfter"]
    assert differences.whole["hooks_order"] == {"a": names, "b": names[::-1]}


def test_origins_are_lines_and_overrides_of_all_commands(differences):
    trace = (
        "status: finished\ncommand: [emrun, resume, log/run, hooks.StopAfter.epochs=9]\n"
        "resumes:\n- before: {command: [emrun, train, -o=x, c.yaml, model.optimizer.lr=0.1]}\n- before: 3\n"
    )
    differences(BASE, changed("lr: 0.003", "lr: 0.1").replace("epochs: 3", "epochs: 9"), b=trace)
    origins = [(each["key"], each["a"]["origin"], each["b"]["origin"]) for each in differences.whole["config"]]
    lr, epochs = "config.yaml:5", "config.yaml:8"
    assert origins == [
        ("model.optimizer.lr", lr, f"{lr}, override model.optimizer.lr=0.1"),
        ("hooks.StopAfter.epochs", epochs, f"{epochs}, override hooks.StopAfter.epochs=9"),
    ]


def test_a_reference_that_leads_nowhere_is_compared_as_it_is_written(differences):
    assert differences(BASE, changed("${vars.width}", "${vars.nothing}")) == {
        "model.module.width": (32, "${vars.nothing}")
    }


def test_values_of_the_environment_are_not_read(differences, monkeypatch):
    monkeypatch.setenv("EMRUN_TEST_SECRET", "hush")
    assert differences(BASE, changed("lr: 0.003", 'lr: "${env:EMRUN_TEST_SECRET}"')) == {
        "model.optimizer.lr": (0.003, "${env:EMRUN_TEST_SECRET}")
    }


def test_no_more_than_a_thousand_differences_are_collected(differences):
    many = "".join(f"  key{number}: 1\n" for number in range(1_010))
    assert len(differences(BASE, changed("vars: {width: 32}\n", f"vars:\n  width: 32\n{many}"))) == 1_000
