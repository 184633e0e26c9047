"""`emrun predict`: the file agrees with `emrun eval`, labels may be missing, and the run directory is only read."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from campaign import thinned
from here import run_here
from samples import own_modules

from emrun import create_training, load_run, predict
from emrun.base.errors import UsageError
from emrun.stream_context import StreamContext
from emrun.training.create import train

DATA = """
import os
import numpy as np


class Data:
    def __init__(self, n=50, moves=False):
        self.x = np.random.default_rng(0).normal(size=(n, 4)).astype("float32")
        self.y = (self.x.sum(1) > 0).astype("int64")
        if moves:
            os.chdir(os.sep)

    def _batches(self, **sources):
        for at in range(0, len(self.x), 16):
            yield {name: values[at:at + 16] for name, values in sources.items()}

    def train_stream(self):
        return self._batches(x=self.x, y=self.y)

    valid_stream = train_stream

    def unlabelled_stream(self):
        return self._batches(x=self.x, id=[f"row {i}" for i in range(len(self.x))])

    def killed_stream(self):
        for index, batch in enumerate(self.unlabelled_stream()):
            if index == 2:
                os.kill(os.getpid(), 9)
            yield batch
"""
MODULE = """
import torch


class Net(torch.nn.Linear):
    def forward(self, x, y=None, **others):
        logits = super().forward(x) + others["shift"]
        outputs = {"logits": logits, "words": [object()] * len(x), "parts": [[0.5] * (i + 1) for i in range(len(x))]}
        return outputs if y is None else {**outputs, "loss": torch.nn.functional.cross_entropy(logits, y)}
"""
HOOKS = """
from emrun import AbstractHook


class Double(AbstractHook):
    def before_batch(self, batch):
        batch["x"] = batch["x"] * 2


class Fails(AbstractHook):
    def after_batch(self):
        if self.main_loop.evaluating:
            raise ValueError("not in a prediction")
"""
CONFIG = """
seed: 1
dataset: {class: data.Data}
model:
  module: {class: torch.nn.Linear, in_features: 4, out_features: 2}
  inputs: [x]
  outputs: [logits]
  loss: {class: torch.nn.CrossEntropyLoss, reduction: none, inputs: [logits, y]}
  metrics: {accuracy: {import: emrun.metrics.accuracy, inputs: [logits, y]}}
  optimizer: {class: SGD, lr: 0.1}
main_loop: {extra_streams: [valid], fixed_batch_size: 16}
hooks: [ComputeStats, hooks.Double, hooks.Fails, {StopAfter: {epochs: 1}}]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a directory with a finished run, its config and its modules; it is not changed."""
    place = tmp_path_factory.mktemp("finished")
    for name, text in (("data.py", DATA), ("hooks.py", HOOKS), ("config.yaml", CONFIG)):
        (place / name).write_text(text)
    done = run_here(["train", "-q", "config.yaml", "--output-dir", "run"], place)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def run(finished, tmp_path):
    """Return the path of a copy of this run."""
    shutil.copytree(finished, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path / "run"


def test_a_module_with_an_optional_label_gets_all_other_sources(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_modules(tmp_path, monkeypatch)
    (tmp_path / "net.py").write_text(MODULE)
    shifted = DATA.replace("(x=self.x, ", "(x=self.x, shift=self.x[:, :1] * 9, ")
    (tmp_path / "data.py").write_text(shifted + "    classes_names = ['odd', 'even']\n")
    model = "module: {class: net.Net, in_features: 4, out_features: 2}\n  inputs: [x, shift, y]\n"
    config = CONFIG[: CONFIG.index("  module:") + 2] + model + CONFIG[CONFIG.index("  optimizer:") :]
    (tmp_path / "config.yaml").write_text(config.replace("ComputeStats, ", ""))
    train(create_training("config.yaml", output_dir="own"))
    status, told = call("predict", "own", "unlabelled", "-o", "p.csv", "--classes")
    assert status == 0, told
    assert "the batch has no 'y': forward of Net is called without it" in told
    assert "SavePredictions leaves out words: it has values of the type object" in told
    assert "leaves out parts: only .parquet and .jsonl can hold lists of different lengths" in told
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "logits.0", "logits.1", "class", "name"]
    assert all(int(row["class"]) == (float(row["logits.1"]) > float(row["logits.0"])) for row in rows)
    assert {(row["class"], row["name"]) for row in rows} <= {("0", "odd"), ("1", "even")}
    status, told = call("predict", "-q", "own", "unlabelled", "-o", "p.jsonl", "--classes", "--variables", "id")
    assert status == 0, told
    wrong = ["dataset.classes=true", "model.inputs=[x, shift]"]
    assert "unknown argument 'classes'" in call("predict", "own", "unlabelled", "-o", "q.csv", *wrong)[1]


def content(directory):
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_the_file_agrees_with_an_evaluation_and_the_run_is_only_read(run, emrun_here, tmp_path):
    before = content(run)
    done = emrun_here("predict", "-q", "run", "valid", "-o", "p.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["rows"], found["columns"]) == (50, ["position", "logits", "loss", "accuracy"])  # the last batch has 2
    assert found["checkpoint"]["iteration"] == 3
    assert content(run) == before
    done = emrun_here(
        "eval", "-q", "run", "valid", "main_loop.fixed_batch_size=null", "hooks=[ComputeStats, hooks.Double]"
    )
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    means = {name: f"{np.mean([line[name] for line in lines]):.6g}" for name in ("loss", "accuracy")}
    rows = dict(line.split()[1:] for line in done.stdout.splitlines()[2:])
    assert {name: rows[name] for name in means} == means


def test_a_stream_without_labels(run, emrun_here, tmp_path):
    done = emrun_here("predict", "run", "unlabelled", "-o", "p.csv", "--variables", "logits,x", "dataset.moves=true")
    assert done.returncode == 0, done.stderr
    assert "model.loss is left out: the batch has no 'y'" in done.stderr
    assert "model.metrics.accuracy is left out: the batch has no 'y'" in done.stderr
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "logits.0", "logits.1", "x.0", "x.1", "x.2", "x.3"]
    assert [row["id"] for row in rows] == [f"row {i}" for i in range(50)]
    done = emrun_here("predict", "-q", "run", "unlabelled", "-o", "p.csv")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'p.csv'} exists" in done.stderr or "p.csv exists" in done.stderr
    done = emrun_here("predict", "-q", "run", "unlabelled", "-o", "p.csv", "--overwrite", "--variables", "loss")
    assert done.returncode == 2
    assert "there is no output or source 'loss'" in done.stderr
    assert "row 49" in (tmp_path / "p.csv").read_text()  # of before


def test_python_gets_the_columns_of_the_file_up_to_a_limit(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_modules(tmp_path, monkeypatch)
    before, columns = content(run), predict("run", "valid")
    assert list(columns) == ["position", "logits", "loss", "accuracy"]
    assert [(each.dtype.name, each.shape) for each in columns.values()] == [
        ("int64", (50,)), ("float32", (50, 2)), ("float32", (50,)), ("float32", (50,)),
    ]  # fmt: skip
    predict("run", "valid", "p.jsonl")
    lines = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert all([line[name] for line in lines] == columns[name].tolist() for name in columns)
    found = predict("run", "unlabelled", variables=["x"], limit=50)
    assert list(found) == ["id", "x"]
    assert found["id"].tolist() == [f"row {i}" for i in range(50)]  # texts of several lengths
    with pytest.raises(UsageError, match=r"stream 'valid' has more than 49 examples: write a file, as in predict"):
        predict("run", "valid", limit=49)
    assert content(run) == before


def call(*words):
    """Run a command in this process; return its exit status and what it says."""
    done = run_here(words, Path.cwd())
    return done.returncode, done.stdout + done.stderr


def test_what_cannot_be_predicted_is_said(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_modules(tmp_path, monkeypatch)
    for arguments, message in [
        (("run", "valid", "-o", "p.txt"), "the name 'p.txt' must end in .parquet, .csv, .jsonl; emrun.predict returns"),
        (("run", "vaild", "-o", "p.csv"), "no method 'vaild_stream'; did you mean 'valid'? (its streams: "),
        (("run", "valid", "-o", "nowhere/p.csv"), "there is no directory nowhere; create it first"),
        (("data.py", "valid", "-o", "p.csv"), "data.py"),
        (("run", "valid", "-o", "p.csv", "--checkpoint", "bset"), "bset"),
        (
            ("run", "unlabelled", "model.inputs=[z]", "model.metrics.accuracy.inputs=[logits, z]", "-o", "p.csv"),
            "forward of Linear needs z, which the batch does not have (it has x, id) (leave out a source",
        ),
    ]:
        status, told = call("predict", *arguments)
        assert status == 2, told
        assert message in told
    assert not [path for path in tmp_path.iterdir() if "p." in path.name]


@pytest.mark.campaign
def test_a_label_that_forward_needs_is_answered_with_what_to_write(run, emrun_here, tmp_path):
    net = (
        "import torch\n\nclass Net(torch.nn.Linear):\n    def forward(self, x, y):\n        return super().forward(x)\n"
    )
    (tmp_path / "net.py").write_text(net)
    config = CONFIG.replace("torch.nn.Linear,", "net.Net,").replace("ComputeStats, ", "")
    lines = [line for line in config.splitlines() if not line.startswith(("  inputs", "  loss", "  metrics"))]
    (tmp_path / "own.yaml").write_text("\n".join(lines))
    done = emrun_here("eval", "run", "unlabelled", "-c", "own.yaml")
    assert done.returncode == 2
    assert "forward of Net needs y" in done.stderr
    assert "(for a stream without labels there is `emrun predict`, not an evaluation)" in done.stderr
    done = emrun_here("predict", "run", "unlabelled", "-o", "p.csv", "-c", "own.yaml")
    assert done.returncode == 2
    assert "(a label may be absent if its parameter of forward has a default value, such as label=None)" in done.stderr
    (tmp_path / "net.py").write_text(net.replace("y):", "y=None):"))
    assert emrun_here("predict", "run", "unlabelled", "-o", "p.csv", "-c", "own.yaml").returncode == 0


def test_a_prediction_that_is_killed_leaves_no_file(run, emrun, emrun_here, tmp_path):
    done = emrun("predict", "run", "killed", "-o", "p.csv")
    assert done.returncode == -9
    assert not (tmp_path / "p.csv").exists()
    (left,) = [path for path in tmp_path.iterdir() if path.name.startswith(".p.csv")]
    assert emrun_here("predict", "-q", "run", "unlabelled", "-o", "p.csv").returncode == 0  # it is in nobody's way
    assert left.exists()


@pytest.mark.campaign
@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_memory_does_not_grow_with_the_rows(run, tmp_path, ending):
    peaks = []
    for n in (100_000, 1_000_000):
        command = [
            Path(sys.executable).with_name("emrun"),
            "predict",
            "-q",
            "run",
            "unlabelled",
            f"dataset.n={n}",
            "-o",
            f"{n}.{ending}",
        ]
        began = time.perf_counter()
        with subprocess.Popen(command, cwd=tmp_path) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        peaks.append(usage.ru_maxrss / 1024 - n * (16 + 8 + 70) / 2**20)  # without the dataset's own rows
        print(ending, n, f"{time.perf_counter() - began:.1f} s", f"{usage.ru_maxrss / 1024:.0f} MiB")
    assert peaks[1] < peaks[0] + 60


SHUFFLED = """
import numpy as np


class Data:
    n = 50

    def __init__(self):
        self.x = np.random.default_rng(0).normal(size=(self.n, 4)).astype("float32")
        self.y = (self.x.sum(1) > 0).astype("int64")

    def _of(self, rows, **more):
        return {"x": self.x[rows], "y": self.y[rows], **more}

    def train_stream(self, ctx):
        for rows in ctx.batches(self.n, 16, shuffle=True):
            yield self._of(rows)

    valid_stream = train_stream

    def whole_stream(self, ctx):
        for rows in ctx.batches(self.n, 16, shuffle=True, drop_last=True):
            yield self._of(rows)

    def parts_stream(self, ctx):
        for rows in ctx.batches(self.n, 16, shuffle=True, blocks=[20, 5, 25]):
            yield self._of(rows)

    def two_stream(self, ctx):
        for rows in ctx.batches(20, 16, shuffle=True):
            yield self._of(rows)
        for rows in ctx.batches(30, 16, shuffle=True):
            yield self._of(rows + 20)

    def augmented_stream(self, ctx):
        for rows in ctx.batches(self.n, 16, shuffle=True):
            ctx.rng.normal(size=3)
            yield self._of(rows)

    def named_stream(self, ctx):
        for rows in ctx.batches(self.n, 16, shuffle=True):
            yield self._of(rows, id=rows)

    def numbered_stream(self, ctx):
        order = ctx.rng.permutation(self.n)
        for at in range(0, self.n, 16):
            yield self._of(order[at : at + 16], position=order[at : at + 16])

    def own_stream(self):
        order = np.random.default_rng(1).permutation(self.n)
        for at in range(0, self.n, 16):
            yield self._of(order[at : at + 16])

    def context_stream(self, ctx):
        order = ctx.rng.permutation(self.n)
        for at in range(0, self.n, 16):
            yield self._of(order[at : at + 16])

    def views_stream(self, ctx):
        for rows in ctx.batches(self.n, 16, shuffle=True):
            yield self._of(np.repeat(rows, 2))
"""
ORDERED = CONFIG.replace("data.Data", "shuffled.Data").replace("hooks.Double, hooks.Fails, ", "")


@pytest.fixture(scope="module")
def once_ordered(tmp_path_factory):
    """The directory of a run whose streams are in the module `shuffled`, and the outputs of all rows."""
    place = tmp_path_factory.mktemp("ordered")
    (place / "shuffled.py").write_text(SHUFFLED)
    (place / "config.yaml").write_text(ORDERED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        own_modules(place, patch)
        training = create_training("config.yaml", output_dir="run")
        train(training)
        model = load_run("run", "latest").model
    with torch.no_grad():
        logits = model.module(torch.from_numpy(training.dataset.x)).numpy()
    return place, logits


@pytest.fixture
def ordered(once_ordered, tmp_path, monkeypatch):
    """A copy of the directory of this run, and the outputs of all rows."""
    place, logits = once_ordered
    shutil.copytree(place, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    own_modules(tmp_path, monkeypatch)
    return tmp_path / "run", logits


POSITIONS = [
    *((name, []) for name in ("train", "valid", "whole", "parts", "two", "augmented")),
    *((name, ["main_loop.workers=2"]) for name in ("train", "two")),
    ("train", ["main_loop.buffer=2"]),
]
FEW_POSITIONS = [("parts", []), ("two", ["main_loop.workers=2"])]


@pytest.mark.parametrize(("stream", "more"), thinned(POSITIONS, FEW_POSITIONS))
def test_a_position_is_the_row_of_a_shuffled_stream(ordered, stream, more, caplog):
    run, logits = ordered
    made = predict(run, stream, run.parent / "p.jsonl", more, checkpoint_name="latest")
    rows = [json.loads(line) for line in made.file.read_text().splitlines()]
    assert [row["position"] for row in rows] == list(range(50))
    np.testing.assert_allclose([row["logits"] for row in rows], logits, rtol=1e-5, atol=1e-6)
    assert made.order == "row"
    assert "only its own code orders them" not in caplog.text


def test_arrays_are_in_the_order_of_the_rows(ordered):
    run, logits = ordered
    found = predict(run, "train", checkpoint_name="latest")
    assert found["position"].tolist() == list(range(50))
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-5, atol=1e-6)


ORDERS = [("named", None), ("numbered", "row"), ("own", "stream"), ("context", "stream"), ("views", "stream")]


@pytest.mark.parametrize(("stream", "order"), thinned(ORDERS, ORDERS[:3]))
def test_what_a_position_is_is_told(ordered, stream, order, caplog):
    run, logits = ordered
    caplog.set_level("INFO")
    made = predict(run, stream, run.parent / "p.jsonl", checkpoint_name="latest")
    assert made.order == order
    told = f"position counts the rows as stream {stream!r} gives them: only its own code orders them"
    assert (told in caplog.text) == (order == "stream")
    rows = [json.loads(line) for line in made.file.read_text().splitlines()]
    if order != "stream":
        numbers = [row.get("id", row.get("position")) for row in rows]
        np.testing.assert_allclose([row["logits"] for row in rows], logits[numbers], rtol=1e-5, atol=1e-6)


@pytest.mark.campaign
def test_the_order_is_told_in_json_also_on_several_ranks(ordered, emrun):
    done = emrun(
        "predict", "-q", "run", "train", "-o", "p.jsonl", "--json", "--nproc", "2", "--checkpoint", "latest", ranks=2
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["order"] == "row"
    rows = [json.loads(line) for line in (ordered[0].parent / "p.jsonl").read_text().splitlines()]
    assert [row["position"] for row in rows] == list(range(50))
    np.testing.assert_allclose([row["logits"] for row in rows], ordered[1], rtol=1e-5, atol=1e-6)


def test_a_training_and_its_evaluations_stay_shuffled(ordered):
    context = StreamContext("valid", seed=1)
    (rows,) = context.batches(50, 50, shuffle=True)
    assert rows.tolist() != list(range(50))
