"""Every sample config trains and evaluates; those that draw most random numbers repeat themselves bit for bit."""

import json
import runpy
import shutil

import pytest
from samples import SAMPLES, shorter

APART = SAMPLES / "transformers"  # needs more libraries: see tests/test_transformers_samples.py
CONFIGS = sorted(path.relative_to(SAMPLES) for path in SAMPLES.rglob("*.yaml") if path.parent != APART)
REPEATED = ("digits_convnet.yaml", "mixed.yaml")
SHORT = ["seed=3", "hooks.StopAfter.epochs=1", "main_loop.fixed_epoch_size=10", "main_loop.skip_zeroth_epoch=true"]


@pytest.fixture(scope="session")
def warm(warm_with_sklearn):
    """Let `emrun` run where scikit-learn is imported already."""
    return warm_with_sklearn


def streams_of(directory):
    return [json.loads(line)["streams"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_sample_trains_evaluates_and_repeats_itself(config, tmp_path, emrun, run_directory, monkeypatch):
    """tests/test_readme.py trains the convolutional network to the end."""
    project = shutil.copytree(SAMPLES / config.parent, tmp_path / "project")
    monkeypatch.chdir(project)
    if (project / "prepare.py").exists():
        runpy.run_path("prepare.py", run_name="__main__")
    roots = ["one", "two"] if config.name in REPEATED else ["one"]
    for root in roots:
        done = emrun("train", "-q", config.name, "-o", root, *SHORT, *shorter(config), cwd=project)
        assert (done.returncode, done.stderr) == (0, "")
    runs = [run_directory(project / root) for root in roots]
    weights = [run / "checkpoints" / "latest" / "model.safetensors" for run in runs]
    assert streams_of(runs[0]) == streams_of(runs[-1])
    assert weights[0].read_bytes() == weights[-1].read_bytes()
    assert emrun("eval", "-q", runs[0], "valid", cwd=project).returncode == 0
