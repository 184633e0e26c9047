"""The environment of a run, looked at without a config: versions and devices."""

from __future__ import annotations

import os
import platform
import re
import sys
import warnings
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from emrun import __version__
from emrun.base.wording import listed, size_of

_FOR_DEVELOPERS = ("test", "dev", "bench")  # extras that no config needs
_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Environment:
    """What `inspect_environment` found.

    Args:
        facts: name -> value, as they are printed.
        devices: a row for each device: heading -> value.
        problems: what makes runs fail, and what to do about it.
        warnings: what runs cannot use, and why.
    """

    facts: dict[str, str] = field(default_factory=dict)
    devices: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def inspect_environment() -> Environment:
    """Look at versions and devices."""
    environment = Environment()
    _inspect_versions(environment)
    rows, problems = inspect_devices()
    environment.devices.extend(rows)
    environment.problems.extend(problems)
    unused = unused_gpu()
    if unused is not None:
        environment.warnings.append(unused)
    return environment


def _inspect_versions(environment: Environment) -> None:
    environment.facts.update(
        {
            "emrun": __version__,
            "Python": f"{platform.python_version()}, {sys.executable}",
            "PyTorch": f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}",
        }
    )
    extras: dict[str, dict[str, str]] = {}
    for requirement, _, marker in (line.partition(";") for line in metadata.requires("emrun") or ()):
        extra = marker.partition('"')[2].rstrip('"')
        if extra and extra not in _FOR_DEVELOPERS:
            versions = extras.setdefault(extra, {})
            name = requirement.partition(">=")[0].strip()
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = "is missing"
    for extra, versions in extras.items():
        advice = f" (pip install 'emrun[{extra}]')" if "is missing" in versions.values() else ""
        environment.facts[f"extra {extra}"] = listed([" ".join(version) for version in versions.items()]) + advice


def inspect_devices() -> tuple[list[dict[str, str]], list[str]]:
    """Return a row for each device, heading -> value, and what is wrong with the devices."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count() if _has_cuda()[0] else 0)]
    names = ["cpu", *cuda]
    if torch.backends.mps.is_available():
        names.append("mps")
    rows = []
    problems = []
    for name in names:
        row = {"device": name, "name": "", "memory": ""}
        rows.append(row)
        try:
            _describe(name, row)
        except (RuntimeError, AssertionError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            problems.append(f"{name} fails: {reason}; choose another device with model.device")
    return rows, problems


def unused_gpu() -> str | None:
    """Return why PyTorch cannot use NVIDIA GPUs although there is a driver for them; None when nothing is unused."""
    has_cuda, warning = _has_cuda()
    if has_cuda or not _NVIDIA.exists():
        return None
    version = next(iter(re.findall(r"\s(\d{3,}\.[\d.]+)\s", _NVIDIA.read_text())), "unknown version")
    if not torch.version.cuda:
        reason = "this PyTorch was built without CUDA; install another build, see https://pytorch.org/get-started"
    elif "CUDA_VISIBLE_DEVICES" in os.environ:
        reason = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides the GPUs"
    else:
        reason = f"PyTorch, built for CUDA {torch.version.cuda}, finds no GPU{warning}; see what nvidia-smi lists"
    return f"there is an NVIDIA driver ({version}), but {reason}"


def _has_cuda() -> tuple[bool, str]:
    """Return whether PyTorch finds a GPU, and its warnings, such as one of an old driver, in parentheses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    return is_available, "".join(f" ({str(warning.message).splitlines()[0]})" for warning in caught)


def _describe(name: str, row: dict[str, str]) -> None:
    if name == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        row["name"] = f"{platform.machine()} {capability}, {torch.get_num_threads()} threads"
    elif name == "mps":
        row["memory"] = size_of(torch.mps.recommended_max_memory())
    else:
        facts = torch.cuda.get_device_properties(name)
        row["name"] = f"{facts.name} ({facts.major}.{facts.minor})"
        row["memory"] = "{} of {} free".format(*map(size_of, torch.cuda.mem_get_info(name)))
