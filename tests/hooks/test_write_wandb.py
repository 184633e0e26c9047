"""The offline directories of W&B, which W&B itself synchronises."""

import json

import pytest
from conftest import Warm

from emrun.base.errors import ArgumentError
from emrun.hooks import WriteWandb
from emrun.hooks._wandb_files import newest_step, records_of

DUE = [0, *range(10, 136, 10), 45, 135]


@pytest.fixture(scope="module")
def warm(warm):
    """Let `emrun` run where W&B is imported already."""
    process = Warm("wandb", parent=warm)
    yield process
    process.close()


def test_a_run_that_is_interrupted_and_killed_has_each_value_once(run_often, signals):
    place = run_often("  - WriteWandb: {project: digits, mode: offline, every: 10 updates}", signals)
    straight, often = history(place / "straight"), history(place / "often")
    assert sorted(often) == sorted(straight)
    assert sorted(step for step, _ in straight) == sorted(DUE)
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


def test_a_file_that_a_killed_process_left_is_read_up_to_its_last_whole_record(run_often):
    place = run_often("  - WriteWandb: {project: digits, mode: offline, every: 1 updates}", [])
    name = json.loads((place / "straight" / "trackers" / "WriteWandb.json").read_text())["identity"]
    (path,) = (place / "straight").glob("wandb/offline-run-*/*.wandb")
    content = path.read_bytes()
    assert len(content) > 2**15  # records go over the end of a block
    whole = list(records_of(content))
    assert newest_step(place / "straight" / "wandb", name) == 135
    for length in (0, 7, 100, 2**15 - 3, 2**15, 2**15 + 5, len(content) - 1):
        part = list(records_of(content[:length]))
        assert part == whole[: len(part)]
    path.write_bytes(content[: 2**15])
    assert 0 < newest_step(place / "straight" / "wandb", name) < 135


@pytest.mark.parametrize(("arguments", "argument"), [
    ({"project": "a/b"}, "project"), ({"project": ""}, "project"), ({"project": "p", "mode": "of"}, "mode"),
    ({"project": "p", "tags": "one"}, "tags"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(arguments, argument):
    with pytest.raises(ArgumentError) as caught:
        WriteWandb(**arguments)
    assert caught.value.argument == argument
