"""`emrun diff`: what differs between two runs is named, each difference alone."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from here import run_here

from emrun.cli import emrun as commands
from emrun.storage.run import CONFIG

CONFIG_TEXT = """\
seed: 1
name: small
dataset: {class: my_rows.Rows}
model:
  module: {class: torch.nn.Linear, in_features: 3, out_features: 1}
  inputs: [x]
  outputs: [y_hat]
  loss: {class: torch.nn.MSELoss, inputs: [y_hat, y]}
  optimizer: {class: SGD, lr: 0.01}
main_loop: {report: false}
hooks:
  - ComputeStats: {variables: [loss]}
  - SaveLatest
  - StopAfter: {epochs: 1}
"""
MODULE = """\
import numpy as np


class Rows:
    def train_stream(self):
        rows = np.load("rows.npy")
        for first in range(0, len(rows), 4):
            yield {"x": rows[first : first + 4, :3], "y": rows[first : first + 4, 3:]}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A directory with a project and runs `one` and others, each with one difference; see `trained`."""
    place = tmp_path_factory.mktemp("project")
    rows = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
    np.save(place / "rows.npy", rows)
    (place / "config.yaml").write_text(CONFIG_TEXT)
    (place / "my_rows.py").write_text(MODULE)

    def train(name, *overrides):
        done = run_here(["train", "-q", "config.yaml", "--output-dir", name, *overrides], place)
        assert done.returncode == 0, done.stderr

    train("one")
    train("again")
    train("seed", "seed=2")
    train("longer", "hooks.StopAfter.epochs=2")
    (place / "config.yaml").write_text(CONFIG_TEXT.replace("  - SaveLatest\n", "") + "  - SaveLatest\n")
    train("order")
    (place / "config.yaml").write_text(CONFIG_TEXT)
    (place / "my_rows.py").write_text(MODULE.replace("range(0,", "range(0 * 1,"))
    train("code")
    (place / "my_rows.py").write_text(MODULE)
    rows.view(np.uint32)[22, 1] ^= 1 << 20  # one bit of a row of the sixth batch
    np.save(place / "rows.npy", rows)
    train("bit")
    shutil.copytree(place / "one", place / "package", symlinks=True)
    edit_record(place / "package", lambda record: record["packages"].update(numpy="1.0"))
    return place


def edit_record(run, edit):
    record = json.loads((run / "code" / "record.json").read_text())
    edit(record)
    (run / "code" / "record.json").write_text(json.dumps(record))


def compared(runs, a, b, *options):
    done = CliRunner().invoke(commands, ["diff", str(runs / a), str(runs / b), *options])
    assert done.exception is None, done.exception
    return done.output


def differing(runs, a, b):
    """Return the parts that differ, with what JSON says about them."""
    found = json.loads(compared(runs, a, b, "--json"))
    keys = ("config", "hooks_order", "modules", "packages", "python", "repositories", "device", "data", "epochs")
    parts = {key: found[key] for key in keys if found[key]}
    assert found["not_compared"] == {}
    return parts if found["steps"]["equal"] else {**parts, "steps": found["steps"]}


def test_the_same_run_twice_is_equal(runs, emrun_here):
    done = emrun_here("diff", runs / "one", runs / "again")
    assert (done.returncode, done.stderr) == (0, "")
    assert differing(runs, "one", "again") == {}
    assert done.stdout.split("\n\n")[1].splitlines() == [
        "config: equal", "code: equal", "packages: equal", "device: equal", "data: equal", "statistics: equal",
        "steps: equal for all 10 iterations", "the runs are equal",
    ]  # fmt: skip


def test_one_bit_of_a_row_is_found_at_the_step_that_reads_it(runs, emrun_here):
    found = differing(runs, "one", "bit")
    assert found.keys() == {"epochs", "steps"}
    steps = found["steps"]
    assert (steps["compared"], steps["first"]["iteration"], list(steps["first"]["values"])) == (5, 6, ["loss"])
    one, other = steps["first"]["values"]["loss"]
    assert one != other
    done = emrun_here("diff", runs / "one", runs / "bit")
    assert done.returncode == 1
    assert "data: equal" in done.stdout
    assert "steps: equal for 5 iterations; at 6 the loss differs: " in done.stdout
    assert done.stdout.endswith("the runs differ\n")


def test_a_bit_of_the_first_batch_is_named_as_data(runs):
    shutil.copytree(runs / "one", runs / "first", symlinks=True)
    path = runs / "first" / "code" / "batches.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    line["digests"]["x"] = "0" * 64
    path.write_text(json.dumps(line) + "\n")
    assert differing(runs, "one", "first") == {"data": [{"stream": "train", "pass": line["pass"], "sources": ["x"]}]}


def test_a_seed_is_named_with_its_override(runs):
    found = differing(runs, "one", "seed")
    assert found.keys() == {"config", "epochs", "steps"}
    origins = {"a": "config.yaml:1", "b": "config.yaml:2, override seed=2"}
    sides = {side: {"value": value, "origin": origins[side]} for side, value in (("a", 1), ("b", 2))}
    assert found["config"] == [{"key": "seed", **sides}]
    assert found["steps"]["first"]["iteration"] == 1
    assert "steps: not equal from the beginning; at 1 the loss differs: " in compared(runs, "one", "seed")


def test_the_version_of_a_package_is_named(runs):
    found = differing(runs, "one", "package")
    assert found == {"packages": [{"name": "numpy", "a": np.__version__, "b": "1.0"}]}
    assert f" {np.__version__}  1.0\n" in compared(runs, "one", "package")


def test_the_order_of_hooks_is_named(runs):
    names = {"a": ["ComputeStats", "SaveLatest", "StopAfter"], "b": ["ComputeStats", "StopAfter", "SaveLatest"]}
    assert differing(runs, "one", "order") == {"hooks_order": names}


def test_a_changed_module_is_shown_with_its_lines(runs):
    found = differing(runs, "one", "code")
    assert [(each["name"], each["change"]) for each in found.pop("modules")] == [("my_rows", "changed")]
    assert found == {}
    shown = compared(runs, "one", "code")
    assert "  -        for first in range(0, len(rows), 4):" in shown
    assert "  +        for first in range(0 * 1, len(rows), 4):" in shown


def test_a_longer_run_is_equal_as_far_as_both_go(runs):
    found = differing(runs, "one", "longer")
    assert found["epochs"] == {"first": 2, "a": 1, "b": 2}
    assert (found["steps"]["first"], found["steps"]["compared"], found["steps"]["last"]) == (None, 10, [10, 20])
    assert "steps: equal for 10 iterations; the last is 10 in a and 20 in b" in compared(runs, "one", "longer")


def test_what_is_not_a_run_is_refused(runs, tmp_path, emrun_here):
    for place, why in ((tmp_path, "is not a run directory"), (tmp_path / "nowhere", "does not exist")):
        done = emrun_here("diff", runs / "one", place)
        assert done.returncode == 2
        assert why in done.stderr


def test_a_damaged_run_is_compared_as_far_as_possible(runs):
    shutil.copytree(runs / "one", runs / "damaged", symlinks=True)
    (runs / "damaged" / CONFIG).write_text("model: {class: [")
    (runs / "damaged" / "code" / "record.json").write_text("{")
    (runs / "damaged" / "code" / "batches.jsonl").write_text("\0\n")
    (runs / "damaged" / "trace.yaml").write_text("status: finished\nseed: 1\n")
    (runs / "damaged" / "steps.jsonl").unlink()
    found = json.loads(compared(runs, "one", "damaged", "--json"))
    assert found["not_compared"].keys() == {"config", "code", "device", "data"}
    shown = compared(runs, "one", "damaged")
    for part in ("config: not compared: ", "code: not compared: ", "device: not compared: the device of b is not"):
        assert part in shown
    assert "steps: not compared: b recorded none" in shown
    assert "the runs differ" in shown


def test_nothing_of_a_run_reaches_the_terminal_unescaped(runs):
    evil = "\x1b]0;owned\x07<script>\nline"
    place = runs / "evil"
    shutil.copytree(runs / "one", place, symlinks=True)
    (place / CONFIG).write_text(CONFIG_TEXT + f"vars: {json.dumps({evil: evil})}\n")
    edit_record(place, lambda record: record["packages"].update({evil: evil}))
    edit_record(
        place, lambda record: record["modules"].update({evil: {"sha256": None}, "../../config": {"sha256": "0"}})
    )
    module = place / "code" / "modules" / "my_rows.py"
    module.write_text(f"# {evil}\n")
    edit_record(place, lambda record: record["modules"]["my_rows"].update(sha256="1"))
    entry = {"epoch": 0, "streams": {evil: {evil: 1.0}}}
    (place / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    (place / "steps.jsonl").write_text(json.dumps({"format": 1, "from": 1, "every": 1, evil: [1.0]}) + "\n")
    shown = compared(runs, "one", "evil")
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\\x1b]0;owned\\x07<script>\\nline" in shown
