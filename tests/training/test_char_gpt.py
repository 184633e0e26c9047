"""The sample `char_gpt`: interrupted, killed, resumed and made longer, its run ends in the same bits as a straight one.

Another process evaluates it to the same figures, without the hooks of the run.
"""

import json
import runpy
import shutil
import signal

import pytest
from samples import SAMPLES, SMALL_GPT
from training.resuming import SEND, result

SIZES = {"small": (3, SMALL_GPT, 512), "large": (31, [], 20 * 16 * 64)}
"""Name -> number of updates in an epoch, each of two batches; overrides; characters in the evaluated batches."""


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.campaign)])
@pytest.mark.timeout(900)
def test_whatever_happens_to_the_run_it_ends_the_same(tmp_path, emrun, monkeypatch, size):
    project = shutil.copytree(SAMPLES / "char_gpt", tmp_path / "project")
    monkeypatch.chdir(project)
    runpy.run_path("prepare.py", run_name="__main__")
    (project / "send.py").write_text(SEND)
    config = project / "config.yaml"
    config.write_text(config.read_text() + "  - send.Send\n")  # `hooks` is the last section
    updates, overrides, characters = SIZES[size]
    text = project / "data" / "valid.txt"
    text.write_bytes(text.read_bytes()[: characters + 1])  # all of it is evaluated, as `emrun eval` does
    overrides = [*overrides, f"main_loop.fixed_epoch_size={updates} updates", "main_loop.skip_zeroth_epoch=true"]
    train = ["train", "-q", "config.yaml", *overrides, "hooks.StopAfter.epochs=2"]
    longer = ["hooks.StopAfter.epochs=4", "model.scheduler.on_extend=rewarm"]
    signals = [
        (signal.SIGTERM, "train", updates),  # in an update
        None,
        (signal.SIGKILL, "valid", 6 * updates),  # in an evaluation, while the module has the averages
        None,
    ]

    def run(*command):
        return emrun(*command, cwd=project, timeout=600)

    for name, planned in {"straight": [None, None], "often": signals}.items():
        (project / "signals.json").write_text(json.dumps(list(filter(None, planned))))
        command = [*train, "--output-dir", name]
        for sent in planned:
            done = run(*command)
            assert done.returncode == (-sent[0] if sent else 0), done.stderr
            command = ["resume", "-q", name]
            command += longer if sent is None else []
    expected, found = result(project / "straight"), result(project / "often")
    assert {name: found[name] == expected[name] for name in expected} == dict.fromkeys(expected, True)
    assert len(found["metrics"]) == 4

    without_hooks = ["hooks=[ComputeStats]", "--checkpoint", "latest", "--output-dir", "elsewhere"]
    done = run("eval", "-q", "often", "valid", *without_hooks)
    assert done.returncode == 0, done.stderr
    (results,) = (project / "elsewhere").rglob("metrics.jsonl")
    assert json.loads(results.read_text())["streams"]["valid"] == found["metrics"][-1]["streams"]["valid"]
