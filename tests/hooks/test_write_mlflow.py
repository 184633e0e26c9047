"""The runs in a database of MLflow, and, in campaigns, of a real MLflow server on loopback that has one."""

import fcntl
import os
import re
import sqlite3
import subprocess
import sys
import threading
from collections import namedtuple
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import pytest
from conftest import Warm
from sweeps import statuses, trials, write_project

from emrun import resume_training
from emrun.base.errors import ArgumentError, HookError
from emrun.base.wording import counted
from emrun.hooks import AbstractTracker, WriteMLflow
from emrun.hooks.write_mlflow import _key
from emrun.training.create import train


@pytest.fixture(scope="module")
def warm(warm):
    """Let `emrun` run where MLflow is imported already."""
    process = Warm("mlflow", "mlflow.tracking", parent=warm)
    yield process
    process.end()


@pytest.fixture
def store(request, tmp_path_factory):
    """Return the address of a store, and its database: the database itself, or a server with one."""
    place = tmp_path_factory.mktemp("mlflow")
    database = place / "runs.db"
    if request.param == "database":
        yield f"sqlite:///{database}", database
        return
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", "0", "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{database}", "--default-artifact-root", str(place / "files")]
    with (place / "log").open("w") as log, subprocess.Popen(command, cwd=place, stdout=log, stderr=log) as process:
        try:
            yield address_of(process, place / "log"), database
        finally:
            process.terminate()
            process.wait()


def address_of(process, log):
    """Return the address of a server with a port that it has chosen, when it listens there."""
    while process.poll() is None:
        if (found := re.search(r"running on (http://127\.0\.0\.1:[1-9]\d*)", log.read_text())) is not None:
            return found[1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    pytest.fail(f"the server has ended: {log.read_text()}")


@pytest.fixture
def sent(monkeypatch):
    """Keep what is sent, in place of MLflow, whose tables alone take seconds: campaigns have the real one."""
    kept = SimpleNamespace(points=[], tags={}, params={}, statuses=[], refuses=False, run="one")

    class Client:
        def __init__(self, uri):
            kept.uri = uri

        def get_experiment_by_name(self, name):
            if kept.refuses:
                raise failure("API request to http://of.a.server failed")
            return SimpleNamespace(experiment_id=f"id of {name}")

        def create_run(self, experiment, run_name, tags):
            kept.tags.update(tags, name=run_name, experiment=experiment)
            return SimpleNamespace(info=SimpleNamespace(run_id=kept.run))

        def update_run(self, run, status):
            kept.statuses.append((run, status))

        set_terminated = update_run

        def set_tag(self, run, name, value):
            kept.tags[name] = value

        def log_batch(self, run, metrics=(), params=()):
            kept.points += [(each.key, each.step) for each in metrics]
            kept.params.update(params)

        def get_run(self, run):
            return SimpleNamespace(data=SimpleNamespace(metrics={key for key, _ in kept.points}))

        def get_metric_history(self, run, name):
            return [SimpleNamespace(step=step) for key, step in kept.points if key == name]

    failure = type("MlflowException", (Exception,), {})
    modules = {
        "mlflow": {},
        "mlflow.entities": {"Metric": namedtuple("Metric", "key value timestamp step"), "Param": lambda *pair: pair},
        "mlflow.exceptions": {"MlflowException": failure},
        "mlflow.tracking": {"MlflowClient": Client},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return kept


def test_a_run_and_its_resume_send_each_value_once(sent, train_digits):
    hook = {"uri": "http://of.a.server", "experiment": "one", "tags": {"who": "me"}, "every": "2 updates"}
    hooks = [{"ComputeStats": {"variables": ["loss"]}}, {"WriteMLflow": hook}]
    run = train_digits(hooks, batch_size=500).output_dir  # an epoch has three updates
    assert sent.tags["reason"] == "1 epoch done (StopAfter epochs: 1)"
    train(resume_training(run, ["hooks.StopAfter.epochs=2"]))
    assert sent.statuses == [("one", "FINISHED"), ("one", "RUNNING"), ("one", "FINISHED")]
    steps = {name: [step for key, step in sent.points if key == name] for name in ("valid/loss", "steps/loss")}
    assert steps == {"valid/loss": [0, 3, 6], "steps/loss": [2, 4, 6]}
    expected = {"name": run.name, "experiment": "id of one", "who": "me"}
    assert sent.tags.items() >= {**expected, "reason": "2 epochs done (StopAfter epochs: 2)"}.items()
    assert (sent.uri, sent.params["model.optimizer.lr"]) == ("http://of.a.server", "0.5")


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["database", "server"], indirect=True)
@pytest.mark.parametrize("signals", ["one", "two", "ten"], indirect=True)
def test_a_run_that_is_interrupted_and_killed_has_each_value_once(run_often, store, signals, epochs):
    uri, database = store
    run_often(f"  - WriteMLflow: {{uri: '{uri}', experiment: one, tags: {{who: me}}, every: 10 updates}}", signals)
    with closing(sqlite3.connect(database)) as found:
        runs = dict(found.execute("SELECT name, run_uuid FROM runs WHERE status = 'FINISHED'"))
        assert sorted(runs) == ["often", "straight"]
        assert found.execute("SELECT DISTINCT name FROM experiments WHERE name != 'Default'").fetchall() == [("one",)]
        points = {}
        for name, run in runs.items():
            tags, params = (dict(found.execute(f"SELECT key, value FROM {table} WHERE run_uuid = ?", [run]))
                            for table in ("tags", "params"))  # fmt: skip
            assert (tags["who"], tags["reason"]) == (
                "me",
                f"{counted(epochs, 'epoch')} done (StopAfter epochs: {epochs})",
            )
            assert params["model.optimizer.lr"] == "0.5"
            points[name] = points_of(found, run)
    assert points["straight"] == points["often"]
    steps = {key: [step for name, step, *_ in points["often"] if name == key] for key in ("valid/loss", "steps/loss")}
    end = 45 * epochs + 1
    assert steps == {"valid/loss": [*range(0, end, 45)], "steps/loss": [*range(10, end, 10)]}


def points_of(database, run):
    query = "SELECT key, step, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY key, step, value"
    return database.execute(query, [run]).fetchall()


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("store", ["server"], indirect=True)
def test_a_run_that_is_killed_at_any_moment_has_each_value_once(killed_at_random, store):
    uri, database = store
    _, names = killed_at_random(f"  - WriteMLflow: {{uri: '{uri}', every: 10 updates}}")
    with closing(sqlite3.connect(database)) as found:
        runs = dict(found.execute("SELECT name, run_uuid FROM runs WHERE status = 'FINISHED'"))
        points = {name: points_of(found, run) for name, run in runs.items()}
    assert sorted(points) == sorted([*names, "straight"])
    assert points == dict.fromkeys(points, points["straight"])


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"refuses": True}, "WriteMLflow cannot reach the tracker: MlflowException: API request to http://of.a.server"),
        ({"run": None}, "http://of.a.server has given no run; is this the address of an MLflow server"),
    ],
)
def test_a_server_that_cannot_be_used_is_an_error_before_the_run(sent, train_digits, tmp_path, kept, message):
    vars(sent).update(kept)
    with pytest.raises(HookError, match=re.escape(message)):
        train_digits([{"WriteMLflow": {"uri": "http://of.a.server"}}], batch_size=500)
    assert not list(tmp_path.glob("log/*/checkpoints/*"))


@pytest.mark.campaign  # with MLflow itself; the test above has what stands in for it
def test_nobody_who_listens_is_an_error_before_the_run(emrun, often_project, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    place = often_project("  - WriteMLflow: {uri: 'http://127.0.0.1:9'}")
    done = emrun("train", "-q", "config.yaml", "--output-dir", "run", cwd=place)
    assert done.returncode == 2
    assert "WriteMLflow cannot reach the tracker: MlflowException: API request to http://127.0.0.1:9/" in done.stderr
    assert not list((place / "run").glob("checkpoints/*"))


@pytest.mark.parametrize(("arguments", "argument"), [
    ({"uri": "127.0.0.1:5000"}, "uri"), ({"uri": ""}, "uri"), ({"uri": "http://h", "experiment": 3}, "experiment"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(arguments, argument):
    with pytest.raises(ArgumentError) as caught:
        WriteMLflow(**arguments)
    assert caught.value.argument == argument


KEYS = {
    "valid/f1/+": "valid/f1/_x2b", "valid/f1/=": "valid/f1/_x3d", "valid/f1/.": "valid/f1/_x2e",
    "train/gradient_norm(bias)": "train/gradient_norm_bias_", "valid/loss": "valid/loss", "a.b/c d": "a.b/c d",
    "../x": "_x2e_x2e/x",
}  # fmt: skip


@pytest.fixture
def with_mlflow(warm, tmp_path):
    """Run code where MLflow is imported already: its import takes longer than a test."""

    def run(code, *arguments):
        (tmp_path / "code.py").write_text(code)
        return warm.run([str(tmp_path / "code.py"), *arguments], tmp_path, timeout=60)

    return run


def test_names_that_mlflow_does_not_allow_are_written_otherwise():
    assert {name: _key(name) for name in KEYS} == KEYS


@pytest.mark.campaign  # the import of MLflow takes two seconds
def test_names_that_mlflow_does_not_allow_stay_apart(with_mlflow):
    code = "import sys; from mlflow.utils.validation import _validate_metric_name as validate\n"
    done = with_mlflow(f"{code}for name in sys.argv[1:]: validate(name)", *KEYS.values())
    assert (done.returncode, done.stderr) == (0, "")
    assert "Invalid value" in with_mlflow(f"{code}validate(sys.argv[1])", "valid/f1/+").stderr


BEGINS = """
import sys
from emrun.hooks import WriteMLflow
from emrun.record.facts import Facts

WriteMLflow(uri=sys.argv[1]).begin(Facts("run", {}, "", None, None, ""), None)
"""


@pytest.mark.campaign  # with MLflow itself; see above
def test_a_server_of_something_else_is_an_error(monkeypatch, with_mlflow):
    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_request(self, *_):
            pass

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = with_mlflow(BEGINS, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert done.returncode == 1
    assert "HookError: " in done.stderr
    assert "has given no run; is this the address of an MLflow server" in done.stderr


def test_one_process_at_a_time_makes_the_tables_of_a_database(tmp_path, monkeypatch):
    """Two that do so at once fail, as the trials below would."""
    makes, begins = [], []

    class Client:
        def __init__(self, uri):
            self.uri = uri

        def search_experiments(self, max_results):
            descriptor = os.open(tmp_path, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
            makes.append(self.uri)

    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))  # whose import takes longer than the test
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setattr(AbstractTracker, "before_training", lambda self: begins.append(len(makes)))
    hook = WriteMLflow(uri=f"sqlite:///{tmp_path}/runs.db")
    hook.main_loop = SimpleNamespace(evaluating=False)
    hook.before_training()
    assert (makes, begins) == ([f"sqlite:///{tmp_path}/runs.db"], [1])
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again
    os.close(descriptor)


@pytest.mark.campaign
def test_trials_that_begin_at_once_with_a_new_database_file_do_not_fail(tmp_path, emrun):
    project = write_project(tmp_path)
    config = (project / "config.yaml").read_text()
    hook = "hooks:\n  - WriteMLflow: {uri: 'sqlite:///runs.db'}"
    (project / "config.yaml").write_text(config.replace("hooks:", hook))
    done = emrun("sweep", "config.yaml", "--jobs", "2", cwd=project)
    assert (done.returncode, statuses(project)) == (0, ["finished"] * 2), done.stderr
    with closing(sqlite3.connect(project / "runs.db")) as database:
        found = sorted(database.execute("SELECT name, status FROM runs"))
    assert found == [(each.name, "FINISHED") for each in trials(project)]
