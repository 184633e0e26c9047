"""SavePredictions: rows of every format, as the model returned them; complete files only."""

import csv
import json
import sys

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from emrun import MainLoop, create_training
from emrun.base.errors import ArgumentError, HookError, MissingExtra, StorageError, StreamError
from emrun.hooks import SavePredictions


class Rows:
    """Five examples in two batches, with what a batch may hold."""

    def __init__(self, **sources):
        self.sources = sources

    def valid_stream(self):
        for rows in (slice(0, 3), slice(3, 5)):
            yield {"x": [1.0] * len(range(5)[rows]), **{name: values[rows] for name, values in self.sources.items()}}

    train_stream = valid_stream


@pytest.fixture
def save(tmp_path, scripted):
    """Evaluate a stream with these sources and outputs, and return the hook; `outputs` maps names to five values."""

    def run(file, outputs, variables=None, stream="valid", **sources):
        at = 0

        def function(batch):
            nonlocal at
            rows = slice(at, at + len(batch["x"]))
            at = rows.stop
            return {name: values[rows] if len(values) == 5 else values[0] for name, values in outputs.items()}

        hook = SavePredictions(stream, file, variables, tmp_path)
        MainLoop(scripted(function), Rows(**sources), [hook], on_unused_sources="ignore").run_evaluation("valid")
        return hook

    return run


LOGITS = torch.tensor([[0.1, -2.5], [float("nan"), 3], [float("inf"), -float("inf")], [1e-30, 7], [5, 6]])
HOSTILE = ["=1+1", 'a "quoted", cell', "two\nlines\rthree", "ünïcode\x1b[31m", ""]


def test_the_numbers_of_a_stream_are_beside_its_ids(save, tmp_path):
    numbers = np.array([0, 2, 3, 6, 9])
    ids = {"id": list("abcde"), "position": numbers}
    assert save("p.csv", {"loss": torch.zeros(5)}, **ids).columns == ["id", "position", "loss"]
    with (tmp_path / "p.csv").open() as file:
        assert [int(row["position"]) for row in csv.DictReader(file)] == numbers.tolist()
    for other in (numbers + 0.5, np.stack([numbers, numbers], axis=1)):  # not what counts examples
        assert save("p.csv", {"loss": torch.zeros(5)}, position=other).columns == ["position", "loss"]
    with (tmp_path / "p.csv").open() as file:
        assert [int(row["position"]) for row in csv.DictReader(file)] == [0, 1, 2, 3, 4]


def test_parquet_without_pyarrow_is_an_error_before_the_training(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"a Parquet file needs pyarrow.*pip install 'emrun\[data\]'"):
        SavePredictions("valid", "p.parquet", output_dir=tmp_path)
    SavePredictions("valid", "p.csv", output_dir=tmp_path)


def test_every_format_holds_the_values_with_all_their_digits(save, tmp_path):
    outputs = {
        "logits": LOGITS,
        "low": LOGITS[:, 0].bfloat16(),
        "class": torch.arange(5),
        "right": LOGITS[:, 1] > 0,
        "loss": [torch.tensor(1.0)],
    }
    for ending in ("csv", "jsonl", "parquet"):
        hook = save(f"p.{ending}", outputs, id=HOSTILE)
        assert hook.rows == 5
    table = parquet.read_table(tmp_path / "p.parquet")
    assert table["id"].to_pylist() == HOSTILE
    np.testing.assert_array_equal(np.stack(table["logits"].to_pylist()).astype("f4"), LOGITS.numpy())
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "logits.0", "logits.1", "low", "class", "right"]
    assert [row["id"] for row in rows] == HOSTILE
    written = np.array([[float(row["logits.0"]), float(row["logits.1"])] for row in rows])
    np.testing.assert_array_equal(written, LOGITS.double().numpy())
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert lines[2] == {"id": HOSTILE[2], "logits": ["Infinity", "-Infinity"], "low": "Infinity", "class": 2,
                        "right": False}  # fmt: skip
    assert lines[1]["logits"] == ["NaN", 3.0]


def test_lists_of_different_lengths(save, tmp_path):
    ragged = [[1, 2], [], [3], [4, 5, 6], [7]]
    images = torch.arange(30.0).reshape(5, 2, 3)
    for ending in ("jsonl", "parquet"):
        save(f"p.{ending}", {"images": images}, ["images", "tokens"], tokens=ragged)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    table = parquet.read_table(tmp_path / "p.parquet").to_pylist()
    for rows in (lines, table):
        assert [row["position"] for row in rows] == [0, 1, 2, 3, 4]
        assert [row["tokens"] for row in rows] == ragged
        assert [row["images"] for row in rows] == images.tolist()
    with pytest.raises(HookError, match=r"\.csv cannot hold 'tokens'.*choose .parquet or .jsonl"):
        save("p.csv", {"images": images}, ["images", "tokens"], tokens=ragged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.jsonl", "p.parquet"]


class InTurn(list):
    """A source that has other values in the second batch."""

    def __getitem__(self, rows):
        return super().__getitem__(1 if rows.start else 0)


@pytest.mark.parametrize(
    "batches",
    [
        [[np.array([1, 2], "i4"), np.array([3], "i4"), np.array([], "i4")], np.array([[4], [5]], "i4")],
        [np.array([[4], [5], [6]], "i4"), [[], []]],
        [[[1], [2, 3], []], [[], []]],
    ],
)
def test_lists_whose_lengths_are_equal_by_chance(batches, save, tmp_path):
    save("p.parquet", {"y": torch.zeros(5)}, ["tokens"], tokens=InTurn(batches))
    table = parquet.read_table(tmp_path / "p.parquet")
    assert table["tokens"].to_pylist() == [list(each) for batch in batches for each in batch]
    assert str(table.schema.field("tokens").type.value_type).startswith("int")


def test_text_that_a_format_cannot_hold(save, tmp_path):
    outputs = {"y": torch.zeros(5)}
    with pytest.raises(StreamError, match=r"cannot write 'id': .* has a lone surrogate"):
        save("p.csv", outputs, id=["\ud800"] * 5)
    with pytest.raises(HookError, match=r"'y\.0': two columns would have this name"):
        save("p.csv", {"y": torch.zeros(5, 2), "y.0": torch.zeros(5)})
    assert not list(tmp_path.iterdir())


def test_a_shape_that_changes_within_the_stream(save, tmp_path):
    class Growing(list):
        def __getitem__(self, rows):
            return torch.zeros(len(range(5)[rows]), 2 if rows.start else 3)

    with pytest.raises(HookError, match=r"'y': its shape changes from \(3,\) to \(2,\)"):
        save("p.csv", {"y": Growing(range(5))})
    assert not list(tmp_path.iterdir())
    assert save("p.parquet", {"y": Growing(range(5))}).rows == 5  # a list may have any length


def test_a_row_group_of_parquet_has_many_batches(save, tmp_path):
    save("p.parquet", {"y": torch.zeros(5)})
    assert parquet.ParquetFile(tmp_path / "p.parquet").num_row_groups == 1


WRONG = [
    ({"file": "p.txt"}, r"the name 'p.txt' must end in .parquet, .csv, .jsonl; emrun.predict returns arrays"),
    ({"file": "p.npz"}, r"the name 'p.npz' must end in .parquet, .csv, .jsonl; emrun.predict returns arrays"),
    ({"file": "there/p.csv"}, "there is no directory"),
    ({"file": 3}, "3 is not the name of a file"),
    ({"file": "p.csv", "variables": "logits"}, "logits"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments(arguments, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        SavePredictions("valid", output_dir=tmp_path, **arguments)


def test_wrong_variables_are_errors_at_the_first_batch(save, tmp_path):
    with pytest.raises(StreamError, match="no output or source 'logit'; did you mean 'logits'") as caught:
        save("p.csv", {"logits": LOGITS}, ["logit"])
    assert caught.value.exit_status == 2
    with pytest.raises(StreamError, match="'loss' has one value for the whole batch, but the batch has 3 examples"):
        save("p.csv", {"logits": LOGITS, "loss": [torch.tensor(1.0)]}, ["loss"])
    with pytest.raises(StreamError, match=r"no output can be a column .*: not a value for each"):
        save("p.csv", {"loss": [torch.tensor(1.0)]})
    with pytest.raises(StreamError, match=r"'y': it has values .*neither numbers nor strings"):
        save("p.csv", {"y": [object()] * 5})
    with pytest.raises(HookError, match="JSON has no complex numbers"):
        save("p.jsonl", {"y": torch.zeros(5, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_leaves_the_file_before(save, tmp_path, monkeypatch):
    save("p.csv", {"y": torch.zeros(5)})
    before = (tmp_path / "p.csv").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*p\.csv: the disk is full"):
        save("p.csv", {"y": torch.ones(5)})
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]
    assert (tmp_path / "p.csv").read_bytes() == before


def test_in_a_run_the_file_has_the_last_evaluation(train_digits, in_docstring):
    training = train_digits([*in_docstring(SavePredictions), {"ComputeStats": {"variables": ["accuracy"]}}])
    table = parquet.read_table(training.output_dir / "predictions.parquet")
    assert table.column_names == ["position", "logits", "loss", "accuracy"]
    last = training.main_loop.metrics[-1]["streams"]["valid"]["accuracy"]["mean"]
    assert np.mean(table["accuracy"].to_numpy(), dtype=np.float64) == pytest.approx(last, abs=1e-15)


KILL = """
import os, signal
from pathlib import Path
from emrun import AbstractHook

class Kill(AbstractHook):
    def after_batch(self, stream_name):
        if stream_name == "valid" and self.main_loop.training_epochs_done == 1 and Path("kill").exists():
            Path("kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_writes_leaves_no_other_file_after_the_resume(
    tmp_path, emrun, emrun_here, digits_config
):
    hooks = [{"SavePredictions": {"stream": "valid", "file": "p.csv"}}, "my_code.Kill", "SaveLatest"]
    config = digits_config([*hooks, {"StopAfter": {"epochs": 2}}], batch_size=500)
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "my_code.py").write_text(KILL)
    (tmp_path / "kill").touch()
    assert emrun("train", "-q", "config.yaml", "--output-dir", "run").returncode == -9
    assert len(list((tmp_path / "run").glob(".p.csv*"))) == 1
    assert emrun_here("resume", "-q", "run").returncode == 0
    assert not list((tmp_path / "run").glob(".p.csv*"))
    config["hooks"].remove("my_code.Kill")
    assert create_training(config, output_dir=tmp_path / "other").main_loop.run_training().status == "finished"
    assert (tmp_path / "run" / "p.csv").read_bytes() == (tmp_path / "other" / "p.csv").read_bytes()
