"""Every sample config trains, evaluates, and repeats itself bit for bit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent.parent / "sample_configs"
CONFIGS = sorted(path.relative_to(SAMPLES) for path in SAMPLES.rglob("*.yaml"))


def streams_of(directory):
    return [json.loads(line)["streams"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_sample_trains_evaluates_and_repeats_itself(config, tmp_path, emrun, run_directory):
    """Those in folders of their own, which are there for their data, are trained once."""
    shutil.copytree(SAMPLES / config.parent, tmp_path / "project")
    project = tmp_path / "project"
    if (project / "prepare.py").exists():
        subprocess.run([sys.executable, "prepare.py"], cwd=project, timeout=60, check=True)
    roots = ["one", "two"] if config.name != "config.yaml" else ["one"]
    for root in roots:
        done = emrun("train", "-q", config.name, "-o", root, "seed=3", "hooks.StopAfter.epochs=1", cwd=project)
        assert (done.returncode, done.stderr) == (0, "")
    runs = [run_directory(project / root) for root in roots]
    weights = [run / "checkpoints" / "latest" / "model.safetensors" for run in runs]
    assert streams_of(runs[0]) == streams_of(runs[-1])
    assert weights[0].read_bytes() == weights[-1].read_bytes()
    assert emrun("eval", "-q", runs[0], "valid", cwd=project).returncode == 0


def test_the_convnet_learns_the_digits(tmp_path, emrun, run_directory):
    done = emrun("train", "-q", SAMPLES / "digits_convnet.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    run = run_directory(tmp_path / "log")
    best = max(streams["valid"]["accuracy"]["mean"] for streams in streams_of(run))
    assert best >= 0.98
    printed = emrun("eval", "-q", run, "valid").stdout
    assert f"{best:.6g}" in printed
