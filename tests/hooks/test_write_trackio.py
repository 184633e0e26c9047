"""The runs in trackio's database."""

import json
import sqlite3
from contextlib import closing

import pytest
from campaign import thinned
from conftest import Warm

from emrun.base.errors import ArgumentError
from emrun.hooks import WriteTrackio


@pytest.fixture(scope="module")
def warm(warm):
    """Let `emrun` run where what trackio needs is imported already; trackio reads the environment when it is."""
    process = Warm("gradio_client", "huggingface_hub.hf_api", parent=warm)
    yield process
    process.end()


@pytest.mark.parametrize("signals", thinned(["one", "two", "ten"], ["one"]), indirect=True)
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
