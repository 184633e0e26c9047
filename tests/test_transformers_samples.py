"""The samples with transformers and peft: trained from a config, with another head, and with LoRA.

They are skipped without these libraries, which the extra `transformers` installs. One test runs the three configs, as
the second and the third begin with the weights of the first.
"""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from emrun.storage.checkpoints.state_file import load_state

SAMPLES = Path(__file__).parent.parent / "sample_configs" / "transformers"
SHORT = ["hooks.StopAfter.epochs=1", "main_loop.fixed_epoch_size=4", "main_loop.skip_zeroth_epoch=true"]

for library in ("transformers", "peft"):
    if importlib.util.find_spec(library) is None:  # not imported here: that takes seconds
        pytest.skip(f"{library} is not installed: pip install 'emrun[transformers]'", allow_module_level=True)


@pytest.fixture(scope="session")
def warm(warm_with_transformers):
    """Let `emrun` run where the libraries are imported already."""
    return warm_with_transformers


def weights(run):
    return load_file(run / "checkpoints" / "latest" / "model.safetensors")


def loaded(run):
    """Return the table of `init_from`: what -> number of tensors."""
    return {
        what: int(count)
        for what, count in re.findall(r"^(\w.*?) {2,}(\d+) +[\d,]+ ", (run / "train.log").read_text(), re.MULTILINE)
    }


def test_a_model_of_transformers_is_trained_and_two_others_begin_with_its_weights(tmp_path, emrun, warm):
    project = shutil.copytree(SAMPLES, tmp_path / "project")
    first, second, third = (project / name for name in ("first", "second", "third"))
    assert warm.run([str(project / "prepare.py")], project, 100).returncode == 0

    def train(config, run):
        done = emrun("train", "--no-progress", config, "--output-dir", run, *SHORT, cwd=project)
        assert done.returncode == 0, done.stderr

    train("config.yaml", first)
    train("finetune.yaml", second)
    assert loaded(second) == {"loaded": 39, "not loaded: another shape": 2}
    assert weights(second)["bert.classifier.weight"].shape == (2, 64)

    train("lora.yaml", third)
    assert loaded(third) == {"loaded": 41, "not loaded: left out by match": 8}
    begun, trained = load_file(first / "checkpoints" / "best" / "model.safetensors"), weights(third)
    adapters = {name: each for name, each in trained.items() if ".lora_" in name}
    assert all(each.any() for each in adapters.values())  # half of them were zero before the first update
    others = {name.replace("base_model.model.", "").replace("base_layer.", ""): each for name, each in trained.items()}
    assert len(others) == len(begun) + len(adapters)
    assert all(torch.equal(others[name], begun[name]) for name in begun)
    state = load_state(third / "checkpoints" / "latest")["model"]["optimizer"]["state"]["state"]
    assert len(state) == len(adapters) == 8

    shutil.rmtree(first)  # an evaluation has all weights in its checkpoint
    assert emrun("eval", "-q", third, "valid", cwd=project).returncode == 0
