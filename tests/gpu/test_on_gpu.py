"""What only a GPU shows; `make test-gpu` runs this by hand, and skips it where there is none.

EMRUN_GPU_TESTS=cpu runs on the CPU what can run there, to try the tests themselves.
"""

import json
import os
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from samples import SAMPLES, own_modules, shorter
from training.resuming import Interrupt, train_with

from emrun import AbstractHook, create_training, resume_training
from emrun.config.catalogue import listing
from emrun.config.config import load_config
from emrun.diagnosis.tryout import try_out
from emrun.ranks.group import Ranks
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
    "tf32": ["model.precision=tf32"],
    "compiled": ["model.compile=true"],
    "prefetch": ["main_loop.buffer=4"],
    "no prefetch": ["main_loop.buffer=4", "main_loop.prefetch_to_device=false"],
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


EVERYTHING = SAMPLES / "digits_everything.yaml"
SERVICES = {"WriteMLflow", "WriteTrackio", "WriteWandb"}
OFTEN = [  # each hook does its work within two epochs of 8 updates
    *(f"hooks.{name}.every=1" for name in ("SaveConfusionMatrix", "SaveExamples", "PlotLines", "SaveMasks")),
    "hooks.SaveEvery.every=5 updates",
    "hooks.Freeze.until=4 updates",
    "hooks.LogNorms.every=2 updates",
    "hooks.Diagnose.every=4 updates",
    "~hooks.Check",
]
WRITTEN = (
    *("checkpoints/best", "report.html", "curves.csv", "predictions.csv", "logits.csv", "sequences.csv"),
    *("metrics.sqlite", "confusion_matrix_*.png", "examples/*", "masks/*", "profile/*", "tensorboard/*", "visual/*"),
)


def test_every_hook_works_on_the_device(tmp_path):
    assert {name for name, _ in listing("hooks")} <= SERVICES | set(re.findall(r"\b\w+\b", EVERYTHING.read_text()))
    run = tmp_path / "run"
    train(create_training(EVERYTHING, output_dir=run, overrides=[*SHORT, "hooks.StopAfter.epochs=2", *OFTEN]))
    assert [pattern for pattern in WRITTEN if not list(run.glob(pattern))] == []
    assert result(run)[0][-1]["valid"]["loss"]


def test_the_forecast_of_memory_is_beside_what_was_used(tmp_path, capsys):
    config = SAMPLES / "digits_mlp.yaml"
    wide = ["dataset.batch_size=512", "model.module.args.0.out_features=8192", "model.module.args.2.in_features=8192"]
    overrides = [*SHORT, *wide, "~hooks.SaveBest", "main_loop.extra_streams=[]"]
    found = try_out(load_config(config, overrides))
    step = found["forecast"]["tensors of a step"]
    forecast = step["bytes"] + sum(found["memory"].values())
    used = None
    if not DRY:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    train(create_training(config, output_dir=tmp_path / "run", overrides=overrides))
    if not DRY:
        used = torch.cuda.max_memory_allocated() - before
    with capsys.disabled():
        print(f"\nforecast {forecast:,} bytes, used {used if used is None else format(used, ',')}")
    assert forecast > 512 * 8192 * 4  # what one layer gives for a batch
    assert used is None or 0.5 < forecast / used < 2  # cuBLAS takes memory of its own to work in


def test_a_rank_exchanges_tensors_of_the_device(tmp_path):
    dist = torch.distributed
    device = torch.device("cpu" if DRY else "cuda:0")
    dist.init_process_group(
        "gloo" if DRY else "nccl",
        store=dist.FileStore(str(tmp_path / "store"), 1),
        rank=0,
        world_size=1,
        device_id=None if DRY else device,
    )
    try:
        one = Ranks(size=2, group=dist.new_group(backend="gloo"), background=dist.new_group(backend="gloo"))
        total, copied, largest = (torch.arange(3.0, device=device) for _ in range(3))
        one.add_up(total)  # of all ranks that are there: this one
        one.copy_from_first(copied)
        largest = largest.cpu()
        end = one.begin_maximum(largest)
        end()
        assert all(torch.equal(each.cpu(), torch.arange(3.0)) for each in (total, copied, largest))
    finally:
        dist.destroy_process_group()


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
    assert its == pytest.approx(loss, rel=0.02 if name in ("bf16", "fp16", "tf32") else 1e-5)


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
