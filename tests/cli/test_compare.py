"""`emrun compare`: pairs of runs until there is a verdict, killed and continued, and its bad input."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from campaign import thinned
from sweeps import trace, trials, write_project

EMRUN = Path(sys.executable).with_name("emrun")
B20 = ("-b", "model.width=20", "--pairs", "2")


@pytest.fixture
def project(tmp_path):
    return write_project(tmp_path)


@pytest.fixture(scope="module")
def once(tmp_path_factory, warm):
    """Return a directory with the project, the runs of a comparison, and what it has printed in `found.json`."""
    place = write_project(tmp_path_factory.mktemp("once"))
    command = [str(EMRUN), "compare", "config.yaml", "--output-dir", "runs", *B20, "--json"]
    done = warm.run(command, place, timeout=100)
    assert done.returncode == 0, done.stderr
    (place / "found.json").write_text(done.stdout)
    return place


@pytest.fixture
def first(once):
    """Return what the comparison has found."""
    return json.loads((once / "found.json").read_text())


@pytest.fixture
def project_with_runs(once, tmp_path):
    """Return a copy of the directory, in which the comparison continues."""
    return shutil.copytree(once, tmp_path, symlinks=True, dirs_exist_ok=True)


def compared(emrun, *arguments, status=0):
    done = emrun("compare", "config.yaml", "--output-dir", "runs", *arguments, "--json")
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


def resumes(project):
    return {run.name: trace(run).get("resumes") for run in sorted((project / "runs").glob("trial-*"))}


def test_the_better_one_is_told_and_nothing_is_trained_twice(project_with_runs, emrun, emrun_here):
    found = compared(emrun, "-b", "model.width=20")
    assert (found["verdict"], found["metric"], found["condition"]) == ("a", "valid/loss/mean", "min")
    assert found["difference"] == pytest.approx(0.19, abs=0.02)
    low, high = found["interval"]
    assert 0 < low < found["difference"] < high
    assert 3 <= found["pairs"] == len(found["runs"]) <= 12
    assert len({run["seed"] for run in found["runs"]}) == found["pairs"]
    assert len(list((project_with_runs / "runs").glob("trial-*"))) == 2 * found["pairs"]
    again = compared(emrun_here, "-b", "model.width=20")
    assert {**again, "seconds": 0} == {**found, "seconds": 0}
    shown = emrun_here("compare", "config.yaml", "--output-dir", "runs", "-b", "model.width=20").stdout.splitlines()
    assert shown[0] == "A is better"
    assert shown[-1].startswith(f"{found['pairs']} pairs, ")


@pytest.mark.campaign
def test_a_config_is_no_different_from_itself_and_trained_once(project, emrun):
    found = compared(emrun, "config.yaml", "--pairs", "2..3")
    assert (found["verdict"], found["difference"], found["pairs"]) == ("none", 0, 2)
    assert len(list((project / "runs").glob("trial-*"))) == 2


@pytest.mark.campaign
def test_finished_runs_are_not_trained_again(project, emrun, emrun_here):
    for name, width in (("a", 1), ("b=20", 20)):
        done = emrun_here("train", "-q", "config.yaml", f"model.width={width}", "--output-dir", f"log/{name}")
        assert done.returncode == 0
    before = (project / "log" / "a" / "trace.yaml").read_bytes()
    done = emrun("compare", "log/a", "log/b=20", "--output-dir", "runs", "--pairs", "2", "--json")
    found = json.loads(done.stdout)
    places = [[each[side]["directory"] for each in found["runs"]] for side in "ab"]
    assert [each[0] for each in places] == [str(project / "log" / name) for name in ("a", "b=20")]
    assert [Path(each[1]).parent.name for each in places] == ["runs", "runs"]
    assert "the run log/a has the config and the seed of a pair, and is not trained again" in done.stderr
    assert "(2 of 2)" in done.stderr
    assert re.search(r"^B, trial-\S+ \(seed=\d+\): finished in ", done.stderr, re.MULTILINE)
    assert (project / "log" / "a" / "trace.yaml").read_bytes() == before


def test_a_comparison_that_was_killed_continues_to_the_same_verdict(project_with_runs, first, emrun):
    project = project_with_runs
    for side in "ab":  # of the second pair, which is trained again, and the comparison is killed
        shutil.rmtree(project / "runs" / Path(first["runs"][1][side]["directory"]).name)
    (project / "do").write_text("both")
    done = emrun("compare", "config.yaml", "--output-dir", "runs", *B20)
    assert done.returncode != 0
    found = compared(emrun, *B20)
    assert sum(each is not None and len(each) for each in resumes(project).values()) == 1
    for key in ("verdict", "means", "noise"):
        assert found[key] == first[key]


def test_runs_that_fail_are_told_and_those_of_the_other_config_are_not_trained_again(project_with_runs, emrun):
    done = emrun("compare", "config.yaml", "-b", "model.fails=true", "--pairs", "2", "--output-dir", "runs")
    assert done.returncode == 0
    first, *_ = done.stdout.splitlines()
    assert first == "warning: 2 runs of B failed or diverged; such a run counts as worse than all others"
    assert len(list((project_with_runs / "runs").glob("trial-*"))) == 4 + 2


@pytest.mark.campaign
@pytest.mark.parametrize("values", [(), ("model.lr=0",)], ids=["values differ", "values are equal"])
def test_a_config_that_fails_is_worse(project, emrun, values):
    done = emrun("compare", "config.yaml", *values, "-b", "model.fails=true", "--pairs", "3..6", "--output-dir", "runs")
    assert done.returncode == 0
    first, second, *_ = done.stdout.splitlines()
    assert re.fullmatch(r"warning: \d runs of B failed or diverged; such a run counts as worse than all others", first)
    assert second == "A is better"


@pytest.mark.campaign
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


@pytest.mark.campaign
def test_a_config_that_diverges_is_worse_and_this_is_told(project, emrun):
    done = emrun("compare", "config.yaml", "-b", "model.width=.nan", "--pairs", "3..6", "--output-dir", "runs")
    assert re.match(r"warning: \d runs of B failed or diverged", done.stdout)
    assert "\nA is better\n" in done.stdout


BAD = [
    ((), "give two configs or runs, or one and -b OVERRIDE"),
    (("-b", "model.width=2", "--metric", "loss"), "write STREAM/VARIABLE"),
    (("-b", "model.width=2", "--metric", "valid/size"), "add --max or --min"),
    (("-b", "model.width=2", "--pairs", "1"), "neither a number of pairs nor a range"),
    (("-b", "model.lr=0.1"), "the two configs are the same"),
    (("-b", "hooks.StopAfter.epochs=9"), "the budget of the two differ (hooks.StopAfter.epochs)"),
]


def test_bad_input_trains_nothing(project, emrun_here):
    for arguments, message in BAD:
        problems = compared(emrun_here, *arguments, status=2)["problems"]
        assert message in problems[0]["message"]
        assert not list((project / "runs").glob("trial-*"))


@pytest.mark.campaign
def test_a_metric_that_no_hook_writes_trains_nothing(project, emrun):
    problems = compared(emrun, "-b", "model.width=2", "--metric", "valid/size", "--max", status=2)["problems"]
    assert "no hook writes 'size/mean'" in problems[0]["message"]
    assert not list((project / "runs").glob("trial-*"))


def test_runs_of_other_code_are_refused(project_with_runs, first, emrun_here):
    assert compared(emrun_here, *B20)["means"] == first["means"]
    code = project_with_runs / "my_code.py"
    code.write_text(code.read_text() + "\nMORE = 1\n")
    problems = compared(emrun_here, *B20, status=2)["problems"]
    assert "was trained with other code" in problems[0]["message"]
    assert len(trials(project_with_runs)) == 0


DATA_THEN = "self.fold + float(ctx.rng.random())"


def change_data(project):
    """Let the file with which the data are made say something else, so that the code stays the same."""
    (project / "data.txt").write_text("0.25")


def last_loss(run):
    """Return the loss on `valid` of the last epoch of a run."""
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["streams"]["valid"]["loss"]["mean"]


@pytest.fixture
def with_file(project):
    """The project, whose data depend on a file beside its code."""
    code = (project / "my_code.py").read_text()
    assert DATA_THEN in code
    code = code.replace(DATA_THEN, f"{DATA_THEN} + float(Path('data.txt').read_text())")
    (project / "my_code.py").write_text(code)
    config = (project / "config.yaml").read_text()
    (project / "config.yaml").write_text(config.replace("epochs: 3", "epochs: 1"))
    (project / "data.txt").write_text("0")
    return project


def test_a_finished_run_of_other_data_takes_no_place_in_a_pair(with_file, emrun, emrun_here):
    assert emrun_here("train", "-q", "config.yaml", "model.width=1", "--output-dir", "log/a").returncode == 0
    change_data(with_file)
    done = emrun("compare", "config.yaml", "model.width=1", "--output-dir", "runs", *B20, "--json")
    assert "a pair is trained again, as the data may have changed since log/" in done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert {Path(run[side]["directory"]).parent.name for run in runs for side in "ab"} == {"runs"}
    assert emrun_here("train", "-q", "config.yaml", "model.width=1", "--output-dir", "log/new").returncode == 0
    old, new = (last_loss(with_file / "log" / name) for name in ("a", "new"))
    assert runs[0]["a"]["value"] == new != old


@pytest.mark.campaign
@pytest.mark.parametrize("sides", [("a",), ("b",), ("a", "b")])
def test_a_finished_run_of_other_data_is_trained_again(with_file, emrun, emrun_here, sides):
    widths = {"a": 1, "b": 20}
    for side in sides:
        done = emrun_here("train", "-q", "config.yaml", f"model.width={widths[side]}", "--output-dir", f"log/{side}")
        assert done.returncode == 0
    change_data(with_file)
    if sides == ("a", "b"):  # one of them is of the data that there are now
        assert emrun_here("train", "-q", "config.yaml", "model.width=20", "--output-dir", "log/c").returncode == 0
        (with_file / "log" / "b").rename(with_file / "old")
    arguments = ("config.yaml", "model.width=1", "--output-dir", "runs", *B20)
    done = emrun("compare", *arguments, "--json")
    assert "a pair is trained again, as the data may have changed since log/" in done.stderr
    found = json.loads(done.stdout)
    assert {Path(run[side]["directory"]).parent.name for run in found["runs"] for side in "ab"} == {"runs"}
    fresh = json.loads(emrun("compare", *arguments[:2], "--output-dir", "fresh", "-o", "none", *B20, "--json").stdout)
    assert [fresh[key] for key in ("verdict", "means", "difference")] == [
        found[key] for key in ("verdict", "means", "difference")
    ]


@pytest.mark.campaign
def test_a_comparison_that_continues_with_other_data_trains_the_older_partner_again(with_file, emrun):
    first = compared(emrun, *B20)
    change_data(with_file)
    place = Path(first["runs"][1]["b"]["directory"])
    place.rename(with_file / "old")
    found = compared(emrun, *B20)
    assert found["runs"][0] == first["runs"][0]
    again = Path(found["runs"][1]["a"]["directory"])
    assert again.name == f"again-{Path(first['runs'][1]['a']['directory']).name}"
    assert found["runs"][1]["a"]["value"] != first["runs"][1]["a"]["value"]
    assert compared(emrun, *B20)["runs"] == found["runs"]


@pytest.mark.campaign  # tests/launch/test_pairs.py has what is compared
@pytest.mark.parametrize("evaluated", ["0.5", "self.fold + 0.5"])
def test_what_is_trained_on_may_differ_and_what_is_evaluated_may_not(project, emrun, evaluated):
    code = (project / "my_code.py").read_text()
    code = code.replace("    def __init__(self, fold", '    train_only = ("fold",)\n\n    def __init__(self, fold')
    (project / "my_code.py").write_text(code.replace('{"x": [0.5]}', f'{{"x": [{evaluated}]}}'))
    arguments = ("-b", "dataset.fold=1", "--pairs", "2")
    if evaluated == "0.5":
        assert compared(emrun, *arguments)["pairs"] == 2
        return
    message = compared(emrun, *arguments, status=2)["problems"][0]["message"]
    assert message.startswith("the data of the two differ: 'x' in the first batch of stream 'valid'")
    assert len(list((project / "runs").glob("trial-*"))) == 2
    assert compared(emrun, *arguments, "--anyway")["pairs"] == 2


DAMAGES = ["gone", "cut in a line", "cut at a line", "a line less"]


@pytest.mark.parametrize("damage", thinned(DAMAGES, ["cut at a line"]))
def test_a_damaged_record_is_an_error_with_the_name_of_the_file(project_with_runs, first, emrun, emrun_here, damage):
    assert all(run[side]["reason"] for run in first["runs"] for side in "ab")
    name = Path(first["runs"][0]["a"]["directory"]).name
    file = project_with_runs / "runs" / name / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    if damage == "gone":
        file.unlink()
    else:
        cuts = {"cut in a line": [*lines[:-1], lines[-1][:10]], "cut at a line": lines[:-1], "a line less": lines[1:]}
        file.write_bytes(b"".join(cuts[damage]))
    done = emrun_here("compare", "config.yaml", "--output-dir", "runs", *B20)
    if damage == "a line less" and b'"epoch": 0' in lines[0]:  # the epoch before the training does not count
        assert done.returncode == 0
        return
    assert done.returncode == 74
    assert f"runs/{name}/metrics.jsonl" in done.stderr
    assert "put the file back, or remove runs/trial-" in done.stderr
    shutil.rmtree(file.parent)
    assert compared(emrun, *B20)["means"] == first["means"]
