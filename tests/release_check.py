"""Installs the wheel on each Python and torch that is promised, and with each extra, and uses emrun there.

    make release-check                          # all rows: hours, and tens of gigabytes of builds of torch
    python tests/release_check.py 3.14 sweep    # the rows whose title contains one of these words
    python tests/release_check.py --table       # the table of all rows that were ever tried, without trying any

Needs `uv`, and finds the Pythons that `uv python find` finds. Each row makes `build/release/environment` anew. uv's
cache should be on the same file system: its files are linked. What Python compiles is kept for the next rows. Commands
run with the environment alone on PATH: there is neither git nor make.

A row with `lowest` installs the lowest of all direct dependencies that pyproject.toml admits. A row with `tests` also
runs the quick tests of the folders `TESTED`, which need no extra, against the wheel; see `without_extras.py`.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.request import urlopen

from tabulate import tabulate

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "build" / "release"
ENVIRONMENT = PLACE / "environment"
PYTHON = ENVIRONMENT / "bin" / "python"
ROWS = PLACE / "rows.json"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LEFT_OUT = {"PIP_CONSTRAINT", "UV_CONSTRAINT", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH"}  # of make, or of the user
OLDEST = "2.6.0"
OLDEST_FOR_3_14 = "2.9.0"  # the first torch with wheels for Python 3.14
NEWEST = "2.15.0"
PINNED = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
EXTRAS = [name for name in PROJECT["optional-dependencies"] if name not in {"test", "dev", "docs", "bench"}]
TEST_TOOLS = ["pytest>=8", "pytest-timeout", "hypothesis", "jsonschema", "psutil", "setuptools>=77", "trustme"]
TESTED = ["base", "config", "loop", "models", "ranks", "record", "runs", "storage", "streams"]
"""The folders of the tests of the engine, which imports no library of an extra."""

TRAIN = "emrun train config.yaml --output-dir run hooks.StopAfter.epochs=1"
TRACK = "emrun init project --from majority; cd project; emrun train config.yaml --output-dir run "
TRIALS = {
    "core": """
emrun init project --from mixed
cd project
emrun train config.yaml --output-dir run hooks.StopAfter.epochs=1
emrun resume run hooks.StopAfter.epochs=2
emrun eval run hard_valid
emrun predict run hard_valid --output rows.csv
emrun report run
""",
    "metrics": """
emrun init project
cd project
emrun train config.yaml --output-dir run hooks.StopAfter.epochs=1
emrun resume run hooks.StopAfter.epochs=2
cd ..
emrun init digits --from minimal
cd digits
emrun train config.yaml hooks.StopAfter.epochs=1 \
    'model.metrics.f1={class: torchmetrics.F1Score, task: multiclass, num_classes: 10, inputs: [logits, label]}'
""",
    "data": """
emrun init pictures --from pictures
cd pictures
python prepare.py
emrun train config.yaml --output-dir run hooks.StopAfter.epochs=1
cd ..
emrun init rows --from mixed
cd rows
python -c "
import json, random
for _ in range(200):
    x = [float(random.random() < 0.5) for _ in range(11)]
    print(json.dumps({'x': x, 'y': float(sum(x) > 5)}))
" > rows.jsonl
emrun train config.yaml --output-dir run main_loop.extra_streams=[valid] hooks.StopAfter.epochs=1 \
    'dataset={class: HuggingFace, train: rows.jsonl, valid: rows.jsonl, columns: [x, y], cache_dir: cache}'
emrun predict run valid --output rows.parquet --variables x,y,logit
emrun train config.yaml main_loop.extra_streams=[valid] hooks.StopAfter.epochs=1 \
    'dataset={class: Parquet, train: rows.parquet, valid: rows.parquet, columns: [x, y]}'
python -c "import torchdata.stateful_dataloader"
""",
    "vision": """
emrun init pictures --from pictures
cd pictures
python prepare.py
emrun train config.yaml hooks.StopAfter.epochs=1 'dataset.augment=[{ColorJitter: {brightness: 0.3}}]'
python -c "import torchvision; torchvision.models.resnet18()"
""",
    "download": """
python -c "
import functools, hashlib, http.server, threading
from pathlib import Path
from emrun.datasets import DownloadableDataset
Path('served').mkdir()
Path('served/data.txt').write_text('data')
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory='served')
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
file = {'url': f'http://127.0.0.1:{server.server_port}/data.txt', 'sha256': hashlib.sha256(b'data').hexdigest()}
print(DownloadableDataset('data', {'data.txt': file}).download())
assert Path('data/data.txt').read_text() == 'data'
"
""",
    "sweep": """
emrun init project --from majority
cd project
emrun sweep config.yaml hooks.StopAfter.epochs=1 sweep.objective=valid/loss/mean sweep.method=tpe sweep.trials=2 \
    -p 'model.optimizer.lr={low: 0.01, high: 1.0, log: true}'
""",
    "plots": TRACK + "'hooks=[{PlotLines: {variables: [x], streams: [valid]}}, {StopAfter: {epochs: 1}}]'",
    "tensorboard": TRACK + "'hooks=[ComputeStats, WriteTensorBoard, {StopAfter: {epochs: 1}}]'",
    "wandb": TRACK + "'hooks=[ComputeStats, {WriteWandb: {project: p, mode: offline}}, {StopAfter: {epochs: 1}}]'",
    "trackio": TRACK + "'hooks=[ComputeStats, {WriteTrackio: {project: p}}, {StopAfter: {epochs: 1}}]'",
    "mlflow": f"""
{TRACK} "hooks=[ComputeStats, {{WriteMLflow: {{uri: '$SERVER', experiment: e}}}}, {{StopAfter: {{epochs: 1}}}}]"
emrun resume run hooks.StopAfter.epochs=2
python -c "
from mlflow.tracking import MlflowClient
client = MlflowClient('$SERVER')
run, = client.search_runs([client.get_experiment_by_name('e').experiment_id])
assert run.info.status == 'FINISHED', run
steps = [each.step for each in client.get_metric_history(run.info.run_id, 'valid/loss')]
assert steps == [0, 80, 160], steps
"
""",
    "export": f"""
emrun init project --from majority
cd project
{TRAIN}
emrun export run valid --to onnx --output onnx
emrun export run valid --to torch-export --output torch-export
""",
    "transformers": f"""
emrun init project --from text_classification
cd project
python prepare.py
{TRAIN}
emrun eval run valid
python -c "import peft"
""",
}
"""What is done with emrun alone and with the libraries of each extra, in an empty folder."""


class Failed(Exception):
    """A command has ended with an error; the message is the end of its output."""


@dataclass(frozen=True)
class Case:
    """A row of the table: an environment, and what is tried there."""

    python: str
    torch: str
    extras: tuple[str, ...] = ()
    lowest: bool = False
    tests: bool = False

    @property
    def shown_extras(self):
        """The extras in the table."""
        return "all" if list(self.extras) == EXTRAS else ", ".join(self.extras)

    @property
    def title(self):
        """What the row is asked for by."""
        return f"{self.python}_{self.torch}_{self.shown_extras or 'core'}{'_lowest' if self.lowest else ''}"


CASES = [
    Case("3.11", OLDEST, lowest=True, tests=True),
    Case("3.12", OLDEST),
    Case("3.13", OLDEST),
    Case("3.14", OLDEST_FOR_3_14),
    Case("3.11", NEWEST),
    Case("3.12", NEWEST),
    Case("3.13", NEWEST),
    Case("3.14", NEWEST, tests=True),
    *(Case("3.11", PINNED, (name,)) for name in EXTRAS if name != "vision"),
    Case("3.13", NEWEST, ("vision",)),
    Case("3.13", NEWEST, tuple(EXTRAS)),
    Case("3.11", OLDEST, tuple(EXTRAS), lowest=True),
]


def run(*command, cwd=ROOT, **variables):
    """Return the output of a command, errors included."""
    inherited = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**inherited, "PYTHONPYCACHEPREFIX": str(PLACE / "bytecode"), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(done.stdout.strip()[-2000:])
    return done.stdout


def build():
    """Build the sdist, and the wheel from the sdist; return the wheel."""
    dist = PLACE / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run("uv", "build", "--quiet", "--out-dir", dist, ROOT)
    (wheel,) = dist.glob("*.whl")
    return wheel


def install(case, wheel):
    """Make the environment with the wheel, a torch and extras."""
    run("uv", "venv", "--quiet", "--clear", "--no-project", "--python", case.python, ENVIRONMENT)
    pip = ("uv", "pip", "install", "--quiet", "--python", PYTHON)
    torch = f"torch=={case.torch}"
    if case.lowest:
        extras = [f"--extra={name}" for name in case.extras]
        run(*pip, "--resolution=lowest-direct", torch, *extras, "--requirements", ROOT / "pyproject.toml")
        run(*pip, "--no-deps", wheel)
    else:
        extras = f"[{','.join(case.extras)}]" if case.extras else ""
        run(*pip, torch, f"{wheel}{extras}")
    if case.tests:
        run(*pip, *TEST_TOOLS)


def use(case):
    """Try emrun and its extras in empty folders, with nothing but the environment on PATH."""
    bash = shutil.which("bash")
    for name in case.extras or ("core",):
        folder = PLACE / "trials" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        server = mlflow_server(folder) if name == "mlflow" else nullcontext("")
        try:
            with server as address:
                run(bash, "-ec", TRIALS[name], cwd=folder, PATH=str(PYTHON.parent), HOME=str(folder), SERVER=address)
        except Failed as error:
            raise Failed(f"{error} ({name})") from error


@contextmanager
def mlflow_server(folder):
    """Yield the address of a server of the whole MLflow; the extra has the client alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, log = f"http://127.0.0.1:{port}", folder / "server.log"
    command = ["uvx", "--python", "3.11", "--from", "mlflow>=3", "mlflow", "server", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/runs.db"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)
    try:
        while not answers(f"{address}/health"):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                raise Failed(f"the server has ended: {log.read_text()[-2000:]}")
        yield address
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def answers(address):
    """Return whether a server is there."""
    try:
        with urlopen(address) as answer:
            return answer.status == HTTPStatus.OK
    except OSError:
        return False


def test():
    """Run the tests that need no extra; return how many have passed."""
    folders = [f"tests/{name}" for name in TESTED]
    command = [PYTHON.with_name("pytest"), "-q", "-p", "without_extras", "-m", "not slow and not campaign", *folders]
    output = run(*command, PYTHONPATH=str(ROOT / "tests"))
    print(output[output.rindex("short test summary") :], file=sys.stderr)
    return re.search(r"(\d+) passed", output)[1]


def seconds_of(function, *arguments):
    """Call a function; return how long that took, and what it returned."""
    began = time.monotonic()
    result = function(*arguments)
    return round(time.monotonic() - began), result


def attempt(case, wheel):
    """Return the row of a case."""
    row = {"Python": case.python, "torch": case.torch, "extras": case.shown_extras, "libraries": "newest"}
    if case.lowest:
        row["libraries"] = "lowest"
    try:
        row["install (s)"], _ = seconds_of(install, case, wheel)
        version = "import platform, torch; print(platform.python_version(), torch.__version__)"
        row["Python"], row["torch"] = run(PYTHON, "-c", version).split()[-2:]
        row["use (s)"], _ = seconds_of(use, case)
        if case.tests:
            row["tests (s)"], row["passed"] = seconds_of(test)
        row["result"] = "ok"
    except Failed as error:
        print(error, file=sys.stderr)
        row["result"] = summary(str(error).strip().splitlines())[:100]
    return row


def summary(lines):
    """Return the line that says how many tests have failed, else the last: libraries may print more at their end."""
    return next((line for line in reversed(lines) if re.search(r"\d+ (failed|error)", line)), lines[-1])


def main():
    """Try the rows that were asked for, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose title contains one of these")
    parser.add_argument("--table", action="store_true", help="try nothing, print the table")
    options = parser.parse_args()
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    if not options.table:
        wheel = build()
        words = options.words or [""]
        for case in CASES:
            if any(word in case.title for word in words):
                print(f"{case.title} ...", file=sys.stderr)
                rows[case.title] = attempt(case, wheel)
                ROWS.write_text(json.dumps(rows, indent=1))
    table = [rows[case.title] for case in CASES if case.title in rows]
    print(tabulate(table, headers="keys", tablefmt="github"))
    sys.exit(any(row["result"] != "ok" for row in table))


if __name__ == "__main__":
    main()
