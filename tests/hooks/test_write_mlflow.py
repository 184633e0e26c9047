"""The runs of a real MLflow server on loopback, with a database."""

import gc
import socket
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections import defaultdict
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from conftest import Warm
from sweeps import statuses, trials, write_project

from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import WriteMLflow
from emrun.storage.facts import Facts

DUE = [0, *range(10, 136, 10), 45, 135]


@pytest.fixture(scope="module")
def warm(warm):
    """Let `emrun` run where MLflow is imported already."""
    process = Warm("mlflow", "mlflow.tracking", parent=warm)
    yield process
    process.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return the address of a server."""
    place = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{place}/runs.db", "--default-artifact-root", str(place / "files")]
    with (place / "log").open("w") as log, subprocess.Popen(command, cwd=place, stdout=log, stderr=log) as process:
        try:
            wait_until_up(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()
            with warnings.catch_warnings():  # the sockets of MLflow's client, which a later test would get
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()


def wait_until_up(url, process):
    while process.poll() is None:
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, ConnectionError, TimeoutError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
    pytest.fail("the server has ended")


@pytest.mark.timeout(300)
def test_a_run_that_is_interrupted_and_killed_has_each_value_once(run_often, server, signals):
    from mlflow.tracking import MlflowClient

    arguments = f"uri: '{server}', experiment: e{len(signals)}, tags: {{who: me}}, every: 10 updates"
    run_often(f"  - WriteMLflow: {{{arguments}}}", signals)
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name(f"e{len(signals)}").experiment_id
    straight, often = sorted(client.search_runs([experiment]), key=lambda run: run.info.run_name, reverse=True)
    assert (straight.info.run_name, often.info.run_name) == ("straight", "often")
    for run in (straight, often):
        assert run.info.status == "FINISHED"
        assert run.data.tags["who"] == "me"
        assert run.data.tags["reason"] == "3 epochs done (StopAfter epochs: 3)"
        assert run.data.params["model.optimizer.lr"] == "0.5"
    points = [history(client, run) for run in (straight, often)]
    assert points[0] == points[1]
    assert [step for step, _ in points[0]["valid/loss"]] == [0, 45, 90, 135]
    assert [step for step, _ in points[0]["steps/loss"]] == list(range(10, 136, 10))


def history(client, run):
    found = defaultdict(list)
    for name in run.data.metrics:
        found[name] = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
    return {name: sorted(each) for name, each in found.items()}


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


def test_a_server_of_something_else_is_an_error(monkeypatch):
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
        hook = WriteMLflow(uri=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(HookError, match="has given no run; is this the address of an MLflow server"):
            hook.start(Facts("run", {}, "", None, None, ""), None)
        server.shutdown()


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
