"""Every sample config is trained once, and its run is evaluated; interrupted and resumed it ends the same.

`make test` interrupts every fifth, `make campaign` all; it also trains here those that other tests train and interrupt.
Some are trained by the command too, which gives the same bits. tests/test_readme.py trains two of them to the end.
"""

import json
import runpy
import shutil
from pathlib import Path

import pytest
from campaign import thinned
from samples import SAMPLES, own_modules, shorter
from training.resuming import Interrupt, resumed, train_with

from emrun import create_training, resume_training
from emrun.training.evaluate import evaluate

APART = [SAMPLES / name for name in ("chat", "text_classification", "transformers")]
"""What needs more libraries: see tests/test_transformers_samples.py."""
ELSEWHERE = (
    SAMPLES / "dpo" / "base.yaml",  # prepare.py trains it
    SAMPLES / "recipes" / "probe.yaml",  # begins with the run of another config: see tests/test_recipes.py
)
CONFIGS = sorted(
    path.relative_to(SAMPLES) for path in SAMPLES.rglob("*.yaml") if path.parent not in APART and path not in ELSEWHERE
)
BY_COMMAND = ("mixed.yaml", "my_project/config.yaml")
INTERRUPTED_ELSEWHERE = ("digits_everything.yaml", "char_gpt/config.yaml")  # in tests/training, by themselves
INTERRUPTED = [path for path in CONFIGS if str(path) not in INTERRUPTED_ELSEWHERE]
FEW = [(path, path in INTERRUPTED[::5]) for path in INTERRUPTED]
CASES = [*FEW, *((path, True) for path in INTERRUPTED if path not in INTERRUPTED[::5])]
CASES += [(path, False) for path in CONFIGS if path not in INTERRUPTED]
SHORT = ["seed=3", "hooks.StopAfter.epochs=2", "main_loop.fixed_epoch_size=8", "main_loop.report=false"]


@pytest.fixture
def project(tmp_path, config, monkeypatch):
    """Return a copy of the folder of a sample, with its data, where its modules are imported from."""
    place = shutil.copytree(SAMPLES / config.parent, tmp_path / "project")
    monkeypatch.chdir(place)
    if Path("prepare.py").exists():
        runpy.run_path("prepare.py", run_name="__main__")
    own_modules(place, monkeypatch)
    return place


def found(directory):
    """Return what must be the same: statistics, and the weights of each named checkpoint."""
    names = [path for path in (directory / "checkpoints").iterdir() if path.is_symlink()]
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    weights = {path.name: (path / "model.safetensors").read_bytes() for path in names}
    return [json.loads(line)["streams"] for line in lines], weights


def run(training, at=None):
    """Train until the n-th event; return the events."""
    hook = Interrupt(at)
    train_with(training, hook)
    return hook.events


@pytest.mark.parametrize(("config", "interrupted"), thinned(CASES, FEW), ids=str)
def test_a_sample_trains_can_be_interrupted_in_an_epoch_and_in_an_evaluation_and_evaluates(
    config, interrupted, project, emrun
):
    overrides = [*SHORT, *shorter(config)]
    events = run(create_training(config.name, output_dir="straight", overrides=overrides))
    expected = found(project / "straight")
    if interrupted:
        first = events.index("before_epoch 1")
        evaluated = events[events.index("after_stream train", first) + 2]  # of a batch, if there are extra streams
        run(create_training(config.name, output_dir="run", overrides=overrides), first + 10)
        run(resume_training(project / "run"), evaluated)
        resumed(project / "run")
        assert found(project / "run") == expected
    if str(config) in BY_COMMAND:
        assert emrun("eval", "-q", "straight", "valid", cwd=project).returncode == 0
        done = emrun("train", "-q", config.name, "--output-dir", "again", *overrides, cwd=project)
        assert (done.returncode, done.stderr) == (0, "")
        assert found(project / "again") == expected
    else:
        evaluate(project / "straight", "valid")
