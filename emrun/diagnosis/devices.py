"""The devices that PyTorch can use: what they are, and whether a small computation on each is right."""

from __future__ import annotations

import os
import platform
import re
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from emrun.base.wording import size_of
from emrun.loop.determinism import DeterministicKernels

_TOLERANCE = 0.01  # of the largest gradient; TF32 and the like are within it
_NVIDIA = Path("/proc/driver/nvidia/version")


def inspect_devices() -> tuple[list[dict[str, str]], list[str]]:
    """Return a row for each device, heading -> value, and what is wrong with the devices."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count() if _has_cuda()[0] else 0)]
    names = ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]
    expected = _gradient("cpu", torch.float64)
    rows, problems = [], []
    for name in names:
        row = {"device": name, "name": "", "memory": "", "bf16": "no", "deterministic": "no", "computation": "failed"}
        rows.append(row)
        try:
            _describe(name, row)
            row["deterministic"] = "yes" if _is_deterministic(name) else "no"
            difference = (_gradient(name, torch.float32) - expected).abs().max() / expected.abs().max()
            row["computation"] = "correct" if difference <= _TOLERANCE else "wrong"
            with suppress(RuntimeError):
                row["bf16"] = "yes" if _gradient(name, torch.bfloat16).isfinite().all() else "no"
        except (RuntimeError, AssertionError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            problems.append(f"{name} fails: {reason}; choose another device with model.device")
        if row["computation"] == "wrong":
            message = f"{name} computes wrong gradients, which differ from those of the CPU by {difference:.0%}"
            problems.append(f"{message}; choose another device with model.device, update the driver and PyTorch")
    return rows, problems


def unused_gpu() -> str | None:
    """Return why PyTorch cannot use NVIDIA GPUs although there is a driver for them; None when nothing is unused."""
    has_cuda, said = _has_cuda()
    if has_cuda or not _NVIDIA.exists():
        return None
    version = next(iter(re.findall(r"\s(\d{3,}\.[\d.]+)\s", _NVIDIA.read_text())), "unknown version")
    if not torch.version.cuda:
        reason = "this PyTorch was built without CUDA; install another build, see https://pytorch.org/get-started"
    elif "CUDA_VISIBLE_DEVICES" in os.environ:
        reason = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides the GPUs"
    else:
        reason = f"PyTorch, built for CUDA {torch.version.cuda}, finds no GPU{said}; see what nvidia-smi lists"
    return f"there is an NVIDIA driver ({version}), but {reason}"


def _has_cuda() -> tuple[bool, str]:
    """Return whether PyTorch finds a GPU, and its warnings, such as one of an old driver, in parentheses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    return is_available, "".join(f" ({str(each.message).splitlines()[0]})" for each in caught)


def _describe(name: str, row: dict[str, str]) -> None:
    if name == "cpu":
        row["name"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    elif name == "mps":
        row["memory"] = size_of(torch.mps.recommended_max_memory())
    else:
        facts = torch.cuda.get_device_properties(name)
        row["name"] = f"{facts.name} ({facts.major}.{facts.minor})"
        row["memory"] = "{} of {} free".format(*map(size_of, torch.cuda.mem_get_info(name)))


def _is_deterministic(device: str) -> bool:
    """Compute twice with deterministic algorithms; the first computation of a device, as cuBLAS reads its setting once.

    Raises:
        RuntimeError: the computation fails for another reason.
    """
    kernels = DeterministicKernels()
    kernels.before_training()
    try:
        return torch.equal(_gradient(device, torch.float32), _gradient(device, torch.float32))
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        return False
    finally:
        kernels.after_training(True)


def _gradient(device: str, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a convolution's kernel behind which a matrix product follows, in float64 on the CPU."""
    images, kernel, weights = (
        torch.arange(1, count + 1, dtype=torch.float64).sin().to(dtype).to(device).reshape(shape).requires_grad_()
        for count, shape in ((2048, (8, 1, 16, 16)), (36, (4, 1, 3, 3)), (7840, (784, 10)))
    )
    hidden = torch.nn.functional.conv2d(images, kernel).tanh().flatten(1)
    return torch.autograd.grad((hidden @ weights).square().mean(), kernel)[0].cpu().double()
