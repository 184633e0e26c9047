"""The devices: the real CPU, and devices that fail or are not found."""

import warnings

import pytest
import torch

from emrun.diagnosis import environment as devices
from emrun.diagnosis.environment import inspect_devices, unused_gpu


def test_the_cpu_is_a_device():
    rows, problems = inspect_devices()
    assert (rows[0]["device"], problems) == ("cpu", [])


def test_a_device_that_fails_is_a_problem_in_one_line(monkeypatch):
    def fails(name, row):
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")

    monkeypatch.setattr(devices, "_describe", fails)
    problems = inspect_devices()[1]
    assert problems[0] == "cpu fails: CUDA error: no kernel image is available; choose another device with model.device"


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Make this a machine with a driver of NVIDIA, and a PyTorch that finds no GPU and warns of it."""

    def is_available():
        warnings.warn("CUDA initialization: the driver is too old\nmore", stacklevel=1)
        return False

    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    monkeypatch.setattr(devices, "_NVIDIA", file)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return file


def test_a_gpu_that_is_not_used_is_named_with_the_reason(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert unused_gpu().startswith("there is an NVIDIA driver (535.104.05), but this PyTorch was built without CUDA; ")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "built for CUDA 12.8, finds no GPU (CUDA initialization: the driver is too old); see" in unused_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unused_gpu().endswith("but CUDA_VISIBLE_DEVICES='' hides the GPUs")
    driver.unlink()
    assert unused_gpu() is None
