"""The runs in trackio's database."""

import json
import sqlite3
import sys
from contextlib import closing
from types import ModuleType, SimpleNamespace

import pytest
from conftest import Warm

from emrun import resume_training
from emrun.base.errors import ArgumentError
from emrun.hooks import WriteTrackio
from emrun.training.create import train


@pytest.fixture(scope="module")
def warm(warm):
    """Let `emrun` run where what trackio needs is imported already; trackio reads the environment when it is."""
    process = Warm("gradio_client", "huggingface_hub.hf_api", parent=warm)
    yield process
    process.end()


@pytest.fixture
def logged(monkeypatch):
    """Keep what is logged, in place of trackio, whose import takes a second: campaigns have the real one."""
    kept = SimpleNamespace(points=[], begun=[])

    class Run:
        def log(self, values, step):
            kept.points.append((step, values))

        def finish(self):
            assert kept.begun

    def init(project, **arguments):
        kept.begun.append({"project": project, **arguments})
        return Run()

    def newest(project, name):
        assert {"project": project, "name": name}.items() <= kept.begun[-1].items()
        return max((step for step, _ in kept.points), default=None)

    modules = {
        "trackio": {"init": init, "Image": None, "Histogram": None, "Markdown": None},
        "trackio.sqlite_storage": {"SQLiteStorage": SimpleNamespace(get_max_step_for_run=newest)},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return kept


def test_a_run_and_its_resume_log_each_value_once_also_if_a_kill_comes_before_the_note_of_what_was_sent(
    logged, train_digits
):
    hook = {"project": "digits", "group": "a", "every": "2 updates"}
    hooks = [{"ComputeStats": {"variables": [{"loss": ["mean", "std"]}]}}, {"WriteTrackio": hook}]
    run = train_digits(hooks, batch_size=500).output_dir  # an epoch has three updates
    assert [step for step, _ in logged.points] == [0, 2, 3]
    note = run / "trackers" / "WriteTrackio.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "last": [0, 0, 0]}))
    train(resume_training(run, ["hooks.StopAfter.epochs=2"]))
    assert [step for step, _ in logged.points] == [0, 2, 3, 4, 6]
    values = dict(logged.points)
    assert {"valid/loss", "valid/loss/std", "train/learning_rate"} <= values[6].keys()
    assert values[4].keys() == {"steps/loss", "steps/learning_rate"}
    expected = {"project": "digits", "group": "a", "name": identity(run), "resume": "allow"}
    assert all(each.items() >= expected.items() for each in logged.begun)
    assert identity(run).startswith(f"{run.name}-")


@pytest.mark.campaign
@pytest.mark.parametrize("signals", ["one", "two", "ten"], indirect=True)
def test_a_run_that_is_interrupted_and_killed_has_each_value_once(run_often, monkeypatch, tmp_path, signals, due):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    place = run_often("  - WriteTrackio: {project: digits, every: 10 updates}", signals)
    straight, often = (
        rows_of(tmp_path / "trackio" / "digits.db", identity(place / name)) for name in ("straight", "often")
    )
    assert often == straight
    assert sorted(step for step, _ in straight) == due
    values = dict(straight)
    assert {"valid/loss", "valid/loss/std", "train/learning_rate"} <= values[45].keys()
    assert values[10].keys() == {"steps/loss", "steps/learning_rate"}


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_at_any_moment_has_each_value_once(killed_at_random, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    place, names = killed_at_random("  - WriteTrackio: {project: digits, every: 10 updates}")
    found = {name: rows_of(tmp_path / "trackio" / "digits.db", identity(place / name)) for name in ("straight", *names)}
    assert found == dict.fromkeys(found, found["straight"])


def identity(run):
    return json.loads((run / "trackers" / "WriteTrackio.json").read_text())["identity"]


def rows_of(path, name):
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY step", [name]).fetchall()
    return [(step, json.loads(metrics)) for step, metrics in rows]


def test_a_project_without_a_name_is_an_error():
    with pytest.raises(ArgumentError, match="is not the name of a project"):
        WriteTrackio(project=" ")
