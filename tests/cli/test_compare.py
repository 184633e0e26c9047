"""`emrun compare`: pairs of runs until there is a verdict, killed and continued, and its bad input."""

import json
import re
from pathlib import Path

import pytest
from sweeps import trace, trials, write_project


@pytest.fixture
def project(tmp_path):
    return write_project(tmp_path)


def compared(emrun, *arguments, status=0):
    done = emrun("compare", "config.yaml", "--output-dir", "runs", *arguments, "--json")
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


def resumes(project):
    return {run.name: trace(run).get("resumes") for run in sorted((project / "runs").glob("trial-*"))}


def test_the_better_one_is_told_and_nothing_is_trained_twice(project, emrun):
    found = compared(emrun, "-b", "model.width=20")
    assert (found["verdict"], found["metric"], found["condition"]) == ("a", "valid/loss/mean", "min")
    assert found["difference"] == pytest.approx(0.19, abs=0.02)
    low, high = found["interval"]
    assert 0 < low < found["difference"] < high
    assert 3 <= found["pairs"] == len(found["runs"]) <= 12
    assert len({run["seed"] for run in found["runs"]}) == found["pairs"]
    assert len(list((project / "runs").glob("trial-*"))) == 2 * found["pairs"]
    again = compared(emrun, "-b", "model.width=20")
    assert {**again, "seconds": 0} == {**found, "seconds": 0}
    shown = emrun("compare", "config.yaml", "--output-dir", "runs", "-b", "model.width=20").stdout.splitlines()
    assert shown[0] == "A is better"
    assert shown[-1].startswith(f"{found['pairs']} pairs, ")


def test_a_config_is_no_different_from_itself_and_trained_once(project, emrun):
    found = compared(emrun, "config.yaml", "--pairs", "2..3")
    assert (found["verdict"], found["difference"], found["pairs"]) == ("none", 0, 2)
    assert len(list((project / "runs").glob("trial-*"))) == 2


def test_finished_runs_are_not_trained_again(project, emrun):
    for name, width in (("a", 1), ("b=20", 20)):
        done = emrun("train", "-q", "config.yaml", f"model.width={width}", "--output-dir", f"log/{name}")
        assert done.returncode == 0
    before = (project / "log" / "a" / "trace.yaml").read_bytes()
    done = emrun("compare", "log/a", "log/b=20", "--output-dir", "runs", "--pairs", "2", "--json")
    found = json.loads(done.stdout)
    places = [[each[side]["directory"] for each in found["runs"]] for side in "ab"]
    assert [each[0] for each in places] == [str(project / "log" / name) for name in ("a", "b=20")]
    assert [Path(each[1]).parent.name for each in places] == ["runs", "runs"]
    assert "the run log/a has the config and the seed of a pair, and is not trained again" in done.stderr
    assert "(2 of 2)" in done.stderr
    assert (project / "log" / "a" / "trace.yaml").read_bytes() == before


def test_a_comparison_that_was_killed_continues_to_the_same_verdict(project, emrun):
    arguments = ("-b", "model.width=20", "--pairs", "3")
    (project / "do").write_text("both")
    done = emrun("compare", "config.yaml", "--output-dir", "runs", *arguments)
    assert done.returncode != 0
    found = compared(emrun, *arguments)
    assert sum(each is not None and len(each) for each in resumes(project).values()) == 1
    straight = json.loads(emrun("compare", "config.yaml", "--output-dir", "straight", *arguments, "--json").stdout)
    assert [found[key] for key in ("verdict", "means", "interval")] == [
        straight[key] for key in ("verdict", "means", "interval")
    ]


@pytest.mark.parametrize(
    "values", [pytest.param((), marks=pytest.mark.campaign), ("model.lr=0",)], ids=["values differ", "values are equal"]
)
def test_a_config_that_fails_is_worse(project, emrun, values):
    done = emrun("compare", "config.yaml", *values, "-b", "model.fails=true", "--pairs", "3..6", "--output-dir", "runs")
    assert done.returncode == 0
    first, second, *_ = done.stdout.splitlines()
    assert re.fullmatch(r"warning: \d runs of B failed or diverged; such a run counts as worse than all others", first)
    assert second == "A is better"


def test_a_config_that_is_refused_is_trained_by_the_next_comparison(project, emrun):
    begin = "width=1, fails=False):\n"
    refuses = """        if width == 20 and not Path("file").exists():
            from emrun.base.errors import ArgumentError

            raise ArgumentError("width", "there is no file")
"""
    code = (project / "my_code.py").read_text()
    (project / "my_code.py").write_text(code.replace(begin, begin + refuses))
    arguments = ("-b", "model.width=20", "--pairs", "2..3")
    assert [run["b"]["value"] for run in compared(emrun, *arguments)["runs"]] == [None, None, None]
    (project / "file").touch()
    assert None not in [run["b"]["value"] for run in compared(emrun, *arguments)["runs"]]


def test_a_config_that_diverges_is_worse_and_this_is_told(project, emrun):
    done = emrun("compare", "config.yaml", "-b", "model.width=.nan", "--pairs", "3..6", "--output-dir", "runs")
    assert re.match(r"warning: \d runs of B failed or diverged", done.stdout)
    assert "\nA is better\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give two configs or runs, or one and -b OVERRIDE"),
        (("-b", "model.width=2", "--metric", "loss"), "write STREAM/VARIABLE"),
        (("-b", "model.width=2", "--metric", "valid/size"), "add --max or --min"),
        (("-b", "model.width=2", "--metric", "valid/size", "--max"), "no hook writes 'size/mean'"),
        (("-b", "model.width=2", "--pairs", "1"), "neither a number of pairs nor a range"),
        (("-b", "model.lr=0.1"), "the two configs are the same"),
        (("-b", "hooks.StopAfter.epochs=9"), "the budget of the two differ (hooks.StopAfter.epochs)"),
    ],
)
def test_bad_input_trains_nothing(project, emrun, arguments, message):
    problems = compared(emrun, *arguments, status=2)["problems"]
    assert message in problems[0]["message"]
    assert not list((project / "runs").glob("trial-*"))


def test_runs_of_other_code_are_refused(project, emrun):
    compared(emrun, "-b", "model.width=20", "--pairs", "2")
    code = project / "parts.py" if (project / "parts.py").exists() else next(project.glob("*.py"))
    code.write_text(code.read_text() + "\nMORE = 1\n")
    problems = compared(emrun, "-b", "model.width=20", "--pairs", "2", status=2)["problems"]
    assert "was trained with other code" in problems[0]["message"]
    assert len(trials(project)) == 0
