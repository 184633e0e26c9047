"""Every sample config is trained for a few batches; interrupted and resumed it ends the same, and its run is evaluated.

`make test` trains all but a few, which it checks without data.
`make test` interrupts one, `make campaign` all. What a sample's prepare.py trains is trained for a few batches. Some
are trained by the command too, which gives the same bits. tests/test_readme.py trains two of them to the end.
"""

import json
import runpy
import shutil
from functools import partial
from pathlib import Path

import pytest
from campaign import thinned
from samples import SAMPLES, own_modules, shorter
from training.resuming import Interrupt, resumed, train_with

from emrun import create_training, resume_training
from emrun.config.config import load_config
from emrun.config.plan import check_statically
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
INTERRUPTED = Path("my_project/config.yaml")
"""The one that `make test` interrupts: a project with its own modules."""
TRAINED = [path for path in CONFIGS if path != INTERRUPTED and path.name != "digits_everything.yaml"]
"""Without the one that is interrupted here, and the one that tests/training trains."""
CHECKED = [
    *("char_gpt/config.yaml", "detection/config.yaml", "dpo/config.yaml", "hugging_face/config.yaml"),
    *("image_folder/config.yaml", "imdb_gru/config.yaml", "pictures/config.yaml", "tar_shards/config.yaml"),
]
"""Those that take longer to prepare or to train: `make test` only checks them, `make campaign` trains them."""
SHORT = ["seed=3", "main_loop.fixed_epoch_size=8", "main_loop.report=false"]
FEW_BATCHES = ["hooks.StopAfter.epochs=1", "main_loop.fixed_epoch_size=3"]


@pytest.fixture
def project(tmp_path, config, monkeypatch):
    """Return a copy of the folder of a sample, with its data, where its modules are imported from."""
    place = shutil.copytree(SAMPLES / config.parent, tmp_path / "project")
    monkeypatch.chdir(place)
    monkeypatch.setattr("emrun.create_training", partial(create_training, overrides=FEW_BATCHES))
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


@pytest.mark.whole
@pytest.mark.parametrize("config", thinned(TRAINED, [path for path in TRAINED if str(path) not in CHECKED]), ids=str)
def test_a_sample_trains(config, project):
    overrides = [*SHORT, *FEW_BATCHES, "main_loop.skip_zeroth_epoch=true", *shorter(config)]
    training = create_training(config.name, output_dir="run", overrides=overrides)
    assert training.main_loop.run_training().status == "finished"


@pytest.mark.parametrize("config", CHECKED)
def test_a_sample_that_is_not_trained_is_valid(config, monkeypatch):
    place = SAMPLES / config
    monkeypatch.chdir(place.parent)
    own_modules(place.parent, monkeypatch)
    check_statically(load_config(place.name), evaluations=True)


@pytest.mark.whole
@pytest.mark.parametrize("config", thinned(CONFIGS, [INTERRUPTED]), ids=str)
def test_a_sample_can_be_interrupted_in_an_epoch_and_in_an_evaluation_and_evaluates(config, project, emrun_here):
    overrides = [*SHORT, "hooks.StopAfter.epochs=2", *shorter(config)]
    events = run(create_training(config.name, output_dir="straight", overrides=overrides))
    expected = found(project / "straight")
    first = events.index("before_epoch 1")
    evaluated = events[events.index("after_stream train", first) + 2]  # of a batch, if there are extra streams
    run(create_training(config.name, output_dir="run", overrides=overrides), first + 10)
    run(resume_training(project / "run"), evaluated)
    resumed(project / "run")
    assert found(project / "run") == expected
    if str(config) in BY_COMMAND:
        assert emrun_here("eval", "-q", "straight", "valid", cwd=project).returncode == 0
        done = emrun_here("train", "-q", config.name, "--output-dir", "again", *overrides, cwd=project)
        assert (done.returncode, done.stderr) == (0, "")
        assert found(project / "again") == expected
    else:
        evaluate(project / "straight", "valid")
