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


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a copy of the sample with its data, and with the hook that sends signals."""
    project = shutil.copytree(SAMPLES / "char_gpt", tmp_path / "project")
    monkeypatch.chdir(project)
    runpy.run_path("prepare.py", run_name="__main__")
    (project / "send.py").write_text(SEND)
    config = project / "config.yaml"
    config.write_text(config.read_text() + "  - send.Send\n")  # `hooks` is the last section
    return project


@pytest.mark.campaign
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.timeout(900)
def test_whatever_happens_to_the_run_it_ends_the_same(project, emrun, size):
    updates, overrides, characters = SIZES[size]
    text = project / "data" / "valid.txt"
    text.write_bytes(text.read_bytes()[: characters + 1])  # all of it is evaluated, as `emrun eval` does
    overrides = [*overrides, f"main_loop.fixed_epoch_size={updates} updates", "main_loop.skip_zeroth_epoch=true"]
    train = ["train", "-q", "config.yaml", *overrides, "hooks.StopAfter.epochs=2"]
    longer = ["hooks.StopAfter.epochs=4", "model.scheduler.on_extend=replan"]
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


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_on_two_ranks_it_ends_the_same_and_on_one_and_three_nearly_so(project, emrun):
    overrides = [*SMALL_GPT, "main_loop.fixed_epoch_size=8 updates", "hooks.StopAfter.epochs=4"]
    train = ["train", "-q", "config.yaml", *overrides, "--nproc", "2", "--output-dir"]

    def run(status, *command):
        done = emrun(*command, cwd=project, timeout=600)
        assert done.returncode == status, done.stderr

    def losses(directory):
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return [value["loss"]["mean"] for line in lines for value in line["streams"].values()]

    run(0, *train, "straight")
    sent = [(signal.SIGTERM, "train", 10), (signal.SIGKILL, "valid", 32), (signal.SIGINT, "train", 37)]
    (project / "signals.json").write_text(json.dumps(sent))
    run(-signal.SIGTERM, *train, "often")
    (project / "signals.json").rename("kept.json")
    for size in (1, 3):
        shutil.copytree("often", f"on-{size}", symlinks=True)
        run(0, "resume", "-q", f"on-{size}", "--nproc", size)
        assert losses(project / f"on-{size}") == pytest.approx(losses(project / "straight"), rel=0.02)  # in bf16
    (project / "kept.json").rename("signals.json")
    run(128 + signal.SIGKILL, "resume", "-q", "often")
    run(-signal.SIGINT, "resume", "-q", "often")
    run(0, "resume", "-q", "often")
    expected, found = result(project / "straight"), result(project / "often")
    assert {name: found[name] == expected[name] for name in expected} == dict.fromkeys(expected, True)
