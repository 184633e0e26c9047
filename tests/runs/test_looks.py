"""How often runs were evaluated on streams that their training does not use."""

from stored_runs import CONFIG

from emrun.runs.finding import find_runs
from emrun.runs.looks import looks_by_config, looks_of
from emrun.runs.report.one_run import _looks
from emrun.runs.stored_run import StoredRun
from emrun.storage.run import create_evaluation


def looked(run, *streams):
    for stream in streams:
        create_evaluation(run.directory / "eval", stream, CONFIG).end("finished", 0, None)
    return StoredRun(run.directory)


def test_evaluations_on_streams_of_the_training_are_no_looks(make_run):
    run = looked(make_run("a", (0.5, 0.6)), "test", "valid", "test", "test-2", "train")
    assert looks_of(run) == {"test": 2, "test-2": 1}
    assert looks_of(StoredRun(make_run("b", (0.5,)).directory)) == {}


def test_the_looks_of_a_config_are_those_of_all_its_runs_but_for_the_seed(make_run):
    first = looked(make_run("a", (0.5,)), "test")
    looked(make_run("b", (0.5,), config=CONFIG.replace("seed: 42", "seed: 43")), "test", "test")
    looked(make_run("c", (0.5,), config=CONFIG.replace("lr: 0.003", "lr: 0.1")), "test")
    assert looks_by_config(find_runs(first.directory.parent))[first.directory] == {"test": 3}
    assert _looks(first) == "test 1 time, all runs of its config 3"


def test_a_damaged_config_is_equal_to_no_other(make_run):
    for name in ("a", "b"):
        run = looked(make_run(name, (0.5,)), "test")
        (run.directory / "config.yaml").write_text("[")
    assert looks_by_config(find_runs(run.directory.parent))[run.directory] == {"test": 1}
