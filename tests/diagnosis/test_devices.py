"""The devices: the real CPU, and devices that fail, compute wrong numbers or are not found."""

import warnings

import pytest
import torch

from emrun.diagnosis import environment as devices
from emrun.diagnosis.environment import inspect_devices, unused_gpu

REAL = devices._gradient


def test_the_cpu_computes_correctly_and_nothing_stays_switched_on():
    rows, problems = inspect_devices()
    assert problems == []
    assert rows[0]["device"] == "cpu"
    assert (rows[0]["deterministic"], rows[0]["computation"]) == ("yes", "correct")
    assert not torch.are_deterministic_algorithms_enabled()


def inspected(monkeypatch, gradient):
    """Return the row and the problem of the CPU when it computes gradients in this way."""
    monkeypatch.setattr(devices, "_gradient", gradient)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    (row,), problems = inspect_devices()
    return row, problems


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_wrong_gradients_are_a_problem(monkeypatch, factor):
    row, (problem,) = inspected(
        monkeypatch, lambda device, dtype: REAL(device, dtype) * (1 if dtype == torch.float64 else factor)
    )
    assert row["computation"] == "wrong"
    assert problem.startswith("cpu computes wrong gradients, which differ from those of the CPU by ")


def test_a_device_that_fails_is_a_problem_in_one_line(monkeypatch):
    def fails(device, dtype):
        if dtype == torch.float64:
            return REAL(device, dtype)
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")

    row, problems = inspected(monkeypatch, fails)
    assert row["computation"] == "failed"
    assert problems == ["cpu fails: CUDA error: no kernel image is available; choose another device with model.device"]


def test_bfloat16_and_deterministic_algorithms_may_be_missing(monkeypatch):
    def without(device, dtype):
        if dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("conv2d does not have a deterministic implementation")
        return REAL(device, dtype)

    row, problems = inspected(monkeypatch, without)
    assert (row["bf16"], row["deterministic"], row["computation"], problems) == ("no", "no", "correct", [])


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
