"""What only a GPU shows; `make test-gpu` runs this by hand, and skips it where there is none.

EMRUN_GPU_TESTS=cpu runs on the CPU what can run there, to try the tests themselves.
"""

import json
import os
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from samples import SAMPLES, own_modules, shorter
from training.resuming import Interrupt, train_with

from emrun import AbstractHook, create_training, resume_training
from emrun.training.create import train

DRY = os.environ.get("EMRUN_GPU_TESTS") == "cpu"
DEVICE = "cpu" if DRY else "cuda"
pytestmark = pytest.mark.skipif(not (DRY or torch.cuda.is_available()), reason="needs a GPU")
APART = SAMPLES / "transformers"  # needs more libraries
CONFIGS = sorted(path.relative_to(SAMPLES) for path in SAMPLES.rglob("*.yaml") if path.parent != APART)
SHORT = ["seed=3", "hooks.StopAfter.epochs=1", "main_loop.fixed_epoch_size=8", f"model.device={DEVICE}"]
SETTINGS = {
    "plain": [],
    "bf16": ["model.precision=bf16"],
    "fp16": ["model.precision=fp16"],
    "compiled": ["model.compile=true"],
    "prefetch": ["main_loop.buffer=4"],
    "fused": ["model.optimizer.fused=true"],
    "windows": ["model.accumulate=2"],
    "recomputed": ["model.recompute=['1']"],
}


def result(directory):
    """Return the statistics of all epochs and the last weights."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    weights = (directory / "checkpoints" / "latest" / "model.safetensors").read_bytes()
    return [json.loads(line)["streams"] for line in lines], weights


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_sample_trains_and_is_resumed(config, tmp_path, monkeypatch):
    place = shutil.copytree(SAMPLES / config.parent, tmp_path / "project")
    monkeypatch.chdir(place)
    if Path("prepare.py").exists():
        runpy.run_path("prepare.py", run_name="__main__")
    own_modules(place, monkeypatch)
    train_with(create_training(config.name, output_dir="run", overrides=[*SHORT, *shorter(config)]), Interrupt(20))
    train(resume_training("run"))
    assert result(place / "run")[0]


def digits(directory, *overrides):
    """Train `digits_mlp.yaml` to the end of the first epoch."""
    more = ["deterministic=true", *SHORT, *overrides]
    train(create_training(SAMPLES / "digits_mlp.yaml", output_dir=directory, overrides=more))
    return directory


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resume_gives_the_same_bits(name, tmp_path, monkeypatch):
    if DRY and name == "fp16":
        pytest.skip("fp16 needs a GPU")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    digits(tmp_path / "straight", *SETTINGS[name], "hooks.StopAfter.epochs=2")
    train(resume_training(digits(tmp_path / "run", *SETTINGS[name]), ["hooks.StopAfter.epochs=2"]))
    assert result(tmp_path / "run") == result(tmp_path / "straight")


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("plain", "windows")])
def test_each_setting_trains_as_float32_does(name, tmp_path):
    if DRY and name == "fp16":
        pytest.skip("fp16 needs a GPU")
    plain, other = (result(digits(tmp_path / each, *SETTINGS[each])) for each in ("plain", name))
    loss, its = (found[0][-1]["valid"]["loss"]["mean"] for found in (plain, other))
    assert its == pytest.approx(loss, rel=0.02 if name in ("bf16", "fp16") else 1e-5)


class NoSync(AbstractHook):
    """Makes a synchronisation with the device an error, but for the first batches."""

    reads = ()

    def before_batch(self, stream_name, batch):
        if self.main_loop.training and self.main_loop.iterations_done == 3:
            torch.cuda.set_sync_debug_mode("error")

    def after_stream(self, stream_name):
        torch.cuda.set_sync_debug_mode("default")

    def register_mainloop(self, main_loop):
        self.main_loop = main_loop


@pytest.mark.skipif(DRY, reason="needs a GPU")
@pytest.mark.parametrize("overrides", [[], ["main_loop.buffer=4"], ["model.precision=bf16"]], ids=str)
def test_a_step_does_not_wait_for_the_device(overrides, tmp_path):
    hooks = f"hooks=[{{{__name__}.NoSync: null}}, {{StopAfter: {{epochs: 1}}}}]"
    try:
        digits(tmp_path / "run", *overrides, "deterministic=false", "main_loop.extra_streams=[]", hooks)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class TooLarge(torch.nn.Linear):
    """Asks for more memory than there is."""

    def forward(self, image):
        torch.empty(2**50, device=image.device)
        return super().forward(image)


def test_a_step_without_memory_leaves_a_capsule(tmp_path):
    module = f"model.module={{class: {__name__}.TooLarge, in_features: 64, out_features: 10}}"
    with pytest.raises(RuntimeError):  # `torch.OutOfMemoryError` on a GPU
        digits(tmp_path / "run", module, "main_loop.skip_zeroth_epoch=true")
    assert list((tmp_path / "run" / "failures").glob("*/failure.json"))


@pytest.mark.skipif(DRY, reason="needs a GPU")
def test_there_is_at_most_one_rank_on_a_gpu(tmp_path, emrun):
    config, count = SAMPLES / "digits_mlp.yaml", torch.cuda.device_count()
    words = ["train", "-q", str(config), *SHORT, "--nproc"]
    failed = emrun(*words, str(count + 1), "--output-dir", str(tmp_path / "too-many"))
    assert failed.returncode == 2
    assert "start at most one process per GPU" in failed.stderr
    if count > 1:
        assert emrun(*words, str(count), "--output-dir", str(tmp_path / "ranks")).returncode == 0
