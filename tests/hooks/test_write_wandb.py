"""The offline directories of W&B, which W&B itself synchronises."""

import json
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import Warm
from training.resuming import SEND

from emrun import resume_training
from emrun.base.errors import ArgumentError
from emrun.hooks import WriteWandb
from emrun.training.create import train


@pytest.fixture(scope="module")
def warm(warm):
    """Let `emrun` run where W&B is imported already, and what it imports when a run begins."""
    process = Warm("wandb", "requests", "yaml", parent=warm)
    yield process
    process.end()


SEND_WITHOUT_LAUNCH = f"""{SEND}
import sys

sys.modules["wandb.sdk.launch"] = None
"""
"""W&B asks its launch jobs for inputs, whose import takes three seconds, and goes on without it."""


@pytest.fixture
def begun(monkeypatch):
    """Keep what is logged, in place of W&B, whose runs take a second each: campaigns have the real one."""
    kept = []

    class Run:
        def __init__(self, **arguments):
            self.id = arguments["id"] or "new"
            self.arguments, self.rows, self.summary = arguments, [], {}
            place = Path(arguments["dir"]) / "wandb" / f"offline-run-{len(kept)}-{self.id}"
            place.mkdir(parents=True)
            kept.append(self)

        def log(self, values, step):
            self.rows.append((step, values))

        def finish(self, exit_code):
            self.exit_code = exit_code

    module = ModuleType("wandb")
    module.init, module.Settings = Run, dict
    module.Image = module.Histogram = module.Html = None
    monkeypatch.setitem(sys.modules, "wandb", module)
    return kept


def test_a_resume_makes_the_offline_run_again(begun, train_digits):
    hook = {"project": "digits", "mode": "offline", "tags": ["a"], "every": "2 updates"}
    hooks = [{"ComputeStats": {"variables": ["loss"]}}, {"WriteWandb": hook}]
    run = train_digits(hooks, batch_size=500).output_dir  # an epoch has three updates
    train(resume_training(run, ["hooks.StopAfter.epochs=2"]))
    assert [path.name for path in (run / "wandb").iterdir()] == ["offline-run-1-new"]
    first, second = begun
    assert [step for step, _ in first.rows] == [0, 2, 3]
    assert [step for step, _ in second.rows] == [0, 2, 3, 4, 6]
    assert second.rows[:3] == first.rows
    assert {"valid/loss", "train/learning_rate", "epoch"} <= dict(first.rows)[3].keys()
    assert dict(first.rows)[2].keys() == {"steps/loss", "steps/learning_rate"}
    assert (second.exit_code, second.summary["reason"]) == (0, "2 epochs done (StopAfter epochs: 2)")
    expected = {"project": "digits", "mode": "offline", "tags": ["a"], "name": run.name, "resume": "allow"}
    assert first.arguments.items() >= {**expected, "id": None}.items()
    assert second.arguments.items() >= {**expected, "id": "new"}.items()


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("signals", ["one", "two", "ten"], indirect=True)
def test_a_run_that_is_interrupted_and_killed_has_each_value_once(run_often, signals, due):
    files = {"send.py": SEND_WITHOUT_LAUNCH}
    place = run_often("  - WriteWandb: {project: digits, mode: offline, every: 10 updates}", signals, files)
    straight, often = history(place / "straight"), history(place / "often")
    assert sorted(often) == sorted(straight)
    assert sorted(step for step, _ in straight) == due
    values = dict(straight)
    assert {"valid/loss", "valid/loss/std", "train/learning_rate"} <= json.loads(values[45]).keys()


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_at_any_moment_has_each_value_once(killed_at_random):
    place, names = killed_at_random("  - WriteWandb: {project: digits, mode: offline, every: 10 updates}")
    straight = sorted(history(place / "straight"))
    assert {name: sorted(history(place / name)) for name in names} == dict.fromkeys(names, straight)


def history(run):
    """Return step and values of each row in the offline directories of a run."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in records_of(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item
                }
                own = {name: value for name, value in items.items() if not name.startswith("_")}
                found.append((record.history.step.num, json.dumps(own, sort_keys=True)))
    return found


def records_of(content):
    """Yield the records of a file: blocks of 32 KiB with parts, each after its checksum, length and kind."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
        _, length, kind = struct.unpack_from("<IHB", content, at)
        part = content[at + 7 : at + 7 + length]
        if kind == 0 or len(part) < length:  # what a killed process has not written completely
            return
        at += 7 + length
        parts = part if kind in (1, 2) else parts + part  # a whole record, or the first part of one
        if kind in (1, 4):
            yield parts


@pytest.mark.parametrize(("arguments", "argument"), [
    ({"project": "a/b"}, "project"), ({"project": ""}, "project"), ({"project": "p", "mode": "of"}, "mode"),
    ({"project": "p", "tags": "one"}, "tags"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(arguments, argument):
    with pytest.raises(ArgumentError) as caught:
        WriteWandb(**arguments)
    assert caught.value.argument == argument
