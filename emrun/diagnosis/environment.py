"""The environment of a run, looked at without a config: versions, limits of the machine, the folder, the devices."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from emrun.base.cores import allowed_cores, limits_of_groups, processors
from emrun.base.errors import reason_of
from emrun.base.wording import listed, size_of
from emrun.loop.determinism import DeterministicKernels
from emrun.storage.lock import RunLock

_FOR_DEVELOPERS = ("test", "dev", "bench")  # extras that no config needs
_LEAST_DISK, _LEAST_SHARED, _LEAST_FILES = 10**9, 2**29, 1024  # bytes, bytes, open files
_SHARED = Path("/dev/shm")
_TOLERANCE = 0.01  # of the largest gradient; TF32 and the like are within it
_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Environment:
    """What `inspect_environment` found.

    Args:
        facts: name -> value, as they are printed.
        devices: a row for each device: heading -> value.
        problems: what makes runs fail, and what to do about it.
        warnings: what makes runs slow, or some of them fail, and what to do about it.
    """

    facts: dict[str, str] = field(default_factory=dict)
    devices: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def inspect_environment(folder: Path) -> Environment:
    """Look at versions, limits and devices; a small computation runs on each device.

    Args:
        folder: where run directories would be created; a temporary folder is created in it and deleted.
    """
    found = Environment()
    _inspect_versions(found)
    _inspect_machine(found)
    _inspect_folder(found, folder)
    _inspect_limits(found)
    rows, problems = inspect_devices()
    found.devices.extend(rows)
    found.problems.extend(problems)
    unused = unused_gpu()
    found.warnings.extend([unused] if unused is not None else [])
    return found


def _inspect_versions(found: Environment) -> None:
    found.facts.update(
        {
            "emrun": metadata.version("emrun"),
            "Python": f"{platform.python_version()}, {sys.executable}",
            "PyTorch": f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}",
        }
    )
    extras: dict[str, dict[str, str]] = {}
    for requirement, _, marker in (line.partition(";") for line in metadata.requires("emrun") or ()):
        extra = marker.partition('"')[2].rstrip('"')
        if extra and extra not in _FOR_DEVELOPERS:
            versions, name = extras.setdefault(extra, {}), requirement.partition(">=")[0].strip()
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = "is missing"
    for extra, versions in extras.items():
        advice = f" (pip install 'emrun[{extra}]')" if "is missing" in versions.values() else ""
        found.facts[f"extra {extra}"] = listed([" ".join(each) for each in versions.items()]) + advice


def _inspect_machine(found: Environment) -> None:
    found.facts["system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    own, allowed = processors(), allowed_cores()
    threads = torch.get_num_threads()
    limit = f" (the control group allows {allowed:.3g})" if allowed < own else ""
    found.facts["CPU"] = f"{own} cores{limit}, PyTorch threads: {threads}"
    if threads > max(1, allowed):
        message = f"PyTorch uses {threads} threads on {allowed:.3g} cores, which is slow"
        found.warnings.append(f"{message}; set the environment variable OMP_NUM_THREADS={max(1, int(allowed))}")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = [int(size) for name in ("memory.max", "memory.limit_in_bytes") for (size,) in limits_of_groups(name)]
    least = min([memory, *sizes])
    limit = f" (the control group allows {size_of(least)})" if least < memory else ""
    found.facts["memory"] = f"{size_of(memory)}{limit}"


def _inspect_folder(found: Environment, folder: Path) -> None:
    """Do in the folder what a run does: write, make a link, lock."""
    elsewhere = "start emrun in another directory or use --output-root"
    try:
        with tempfile.TemporaryDirectory(prefix=".emrun-", dir=folder) as name:
            (Path(name) / "link").symlink_to("file")
            RunLock(Path(name)).release()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        error.filename = error.filename2 = None  # of the temporary folder
        found.facts["directory"] = f"{folder}, not writable"
        found.problems.append(f"run directories cannot be written in {folder}: {reason_of(error)}; {elsewhere}")
        return
    found.facts["directory"] = f"{folder}, writable, {size_of(free)} free"
    if free < _LEAST_DISK:
        found.problems.append(f"only {size_of(free)} of disk space are free in {folder}; delete files, {elsewhere}")


def _inspect_limits(found: Environment) -> None:
    """Look at what worker processes need."""
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    found.facts["worker processes"] = f"start method {default}"
    if _SHARED.is_dir():
        usage = shutil.disk_usage(_SHARED)
        found.facts["shared memory"] = f"{_SHARED}, {size_of(usage.free)} of {size_of(usage.total)} free"
        if usage.free < _LEAST_SHARED:
            message = f"only {size_of(usage.free)} of {_SHARED} are free; worker processes send batches through it"
            found.warnings.append(
                f"{message}: start a Docker container with --shm-size=8g, or set no main_loop.workers"
            )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_limited = files != resource.RLIM_INFINITY
    found.facts["open files"] = f"at most {files:,}" if is_limited else "unlimited"
    if is_limited and files < _LEAST_FILES:
        found.warnings.append(
            f"only {files} open files are allowed, too few for many worker processes; run ulimit -n 4096"
        )


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
