"""The samples with transformers and peft: texts, chats, and a model with another head and with LoRA.

They are skipped without these libraries, which the extra `transformers` installs.
"""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from campaign import thinned
from safetensors.torch import load_file

from emrun.config.config import load_config
from emrun.config.plan import check_statically
from emrun.storage.checkpoints.state_file import load_state

ALL = Path(__file__).parent.parent / "sample_configs"
SAMPLES = ALL / "transformers"
SHORT = ["hooks.StopAfter.epochs=1", "main_loop.fixed_epoch_size=4", "main_loop.skip_zeroth_epoch=true"]

for library in ("transformers", "peft"):
    if importlib.util.find_spec(library) is None:  # not imported here: that takes seconds
        pytest.skip(f"{library} is not installed: pip install 'emrun[transformers]'", allow_module_level=True)


@pytest.fixture(scope="session")
def warm(warm_with_transformers):
    """Let `emrun` run where the libraries are imported already."""
    return warm_with_transformers


ADAPTERS = """
import peft
import torch
from emrun import create_training, export, load_run
from ruamel.yaml import YAML

config = YAML(typ="safe").load(open("config.yaml"))
adapter = {"class": "peft.LoraConfig", "r": 4, "target_modules": ["q_proj", "v_proj"]}
model = config["model"]["module"]
config["model"]["module"] = {"class": "peft.get_peft_model", "model": model, "peft_config": adapter}
config["main_loop"] = {"fixed_epoch_size": 4, "skip_zeroth_epoch": True, "report": False}
config["hooks"] = [{"StopAfter": {"epochs": 1}}]
create_training(config, output_dir="lora").main_loop.run_training()
module = load_run("lora").model.module
module.save_pretrained("adapter")
tokens = torch.arange(9)[None]
expected = module(input_ids=tokens).logits
base = module.unload()
assert not torch.equal(base(input_ids=tokens).logits, expected)
loaded = peft.PeftModel.from_pretrained(base, "adapter").eval()
assert torch.equal(loaded(input_ids=tokens).logits, expected)
made = export("lora", to="adapter", output="exported")
assert made.files[:2] == ["adapter_config.json", "adapter_model.safetensors"]
assert made.facts["comparison"]["where"] == "in a process without emrun"
loaded = peft.PeftModel.from_pretrained(loaded.unload(), "exported").eval()
assert torch.equal(loaded(input_ids=tokens).logits, expected)
"""
IN_A_FORK = """
import os
import runpy
import subprocess
import sys


def run_in_a_fork(command, **options):
    pid = os.fork()
    if not pid:
        for name in [each for each in sys.modules if each.partition(".")[0] == "emrun"]:
            del sys.modules[name]
        sys.argv = command[4:]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return subprocess.CompletedProcess(command, 0, "", "")


subprocess.run = run_in_a_fork
"""
"""Lets the process without emrun begin with the libraries, whose import takes seconds."""


def weights(run):
    return load_file(run / "checkpoints" / "latest" / "model.safetensors")


def loaded(run):
    """Return the table of `init_from`: what -> number of tensors."""
    return {
        what: int(count)
        for what, count in re.findall(r"^(\w.*?) {2,}(\d+) +[\d,]+ ", (run / "train.log").read_text(), re.MULTILINE)
    }


@pytest.mark.campaign  # tests/test_readme.py trains, evaluates and predicts with both bases
@pytest.mark.parametrize(("name", "lines"), [("text_classification", 22), ("chat", 25)])
def test_texts_are_a_config_without_python(name, lines, tmp_path, emrun_here, warm):
    project = shutil.copytree(ALL / name, tmp_path / name)
    assert sum(map(bool, (project / "config.yaml").read_text().splitlines())) <= lines
    assert {path.name for path in project.iterdir()} == {"config.yaml", "prepare.py"}
    assert warm.run([str(project / "prepare.py")], project, 100).returncode == 0
    done = emrun_here("train", "--no-progress", "config.yaml", "--output-dir", "run", *SHORT, cwd=project)
    assert done.returncode == 0, done.stderr
    assert emrun_here("eval", "-q", "run", "valid", cwd=project).returncode == 0
    if name == "text_classification":
        (project / "new.jsonl").write_text('{"review": "the film was great"}\n{"review": "the hotel was dull"}\n')
        command = ["predict", "-q", "run", "test", "dataset.test=new.jsonl", "--classes", "-o", "new.csv"]
        assert emrun_here(*command, cwd=project).returncode == 0
        assert len((project / "new.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("begin", thinned(["", IN_A_FORK], [IN_A_FORK]), ids=["new process", "fork"])
def test_an_adapter_of_a_chat_model_is_trained_loaded_and_exported(begin, tmp_path, warm):
    project = shutil.copytree(ALL / "chat", tmp_path / "chat")
    assert warm.run([str(project / "prepare.py")], project, 100).returncode == 0
    (project / "adapters.py").write_text(begin + ADAPTERS)  # what docs/guide/weights.md says of peft
    done = warm.run([str(project / "adapters.py")], project, 250)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def project(tmp_path, warm):
    """Return a copy of the sample with three configs, with its data."""
    place = shutil.copytree(SAMPLES, tmp_path / "project")
    assert warm.run([str(place / "prepare.py")], place, 100).returncode == 0
    return place


@pytest.fixture
def train(project, emrun):
    """Return a function that trains a config of the sample; the others begin with the run `first`."""

    def run(config, directory):
        done = emrun("train", "--no-progress", config, "--output-dir", directory, *SHORT, cwd=project)
        assert done.returncode == 0, done.stderr
        return project / directory

    return run


def test_a_model_of_transformers_is_trained_and_adapters_begin_with_its_weights(train):
    first = train("config.yaml", "first")
    third = train("lora.yaml", "third")
    assert loaded(third) == {"loaded": 41, "not loaded: left out by match": 8}
    begun, trained = load_file(first / "checkpoints" / "best" / "model.safetensors"), weights(third)
    adapters = {name: each for name, each in trained.items() if ".lora_" in name}
    assert all(each.any() for each in adapters.values())  # half of them were zero before the first update
    others = {name.replace("base_model.model.", "").replace("base_layer.", ""): each for name, each in trained.items()}
    assert len(others) == len(begun) + len(adapters)
    assert all(torch.equal(others[name], begun[name]) for name in begun)
    state = load_state(third / "checkpoints" / "latest")["model"]["optimizer"]["state"]["state"]
    assert len(state) == len(adapters) == 8


def test_the_config_of_another_head_is_valid(monkeypatch):
    monkeypatch.chdir(SAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    check_statically(load_config("finetune.yaml"), evaluations=True)


@pytest.mark.campaign
def test_another_head_begins_with_the_weights_of_the_model(train):
    train("config.yaml", "first")
    second = train("finetune.yaml", "second")
    assert loaded(second) == {"loaded": 39, "not loaded: another shape": 2}
    assert weights(second)["bert.classifier.weight"].shape == (2, 64)


@pytest.mark.campaign
def test_an_evaluation_with_adapters_needs_only_their_run(train, project, emrun_here):
    train("config.yaml", "first")
    train("lora.yaml", "third")
    shutil.rmtree(project / "first")  # all weights are in the checkpoint
    assert emrun_here("eval", "-q", "third", "valid", cwd=project).returncode == 0
