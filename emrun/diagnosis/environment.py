"""The environment of a run, looked at without a config: versions, limits of the machine, the folder, the devices."""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from emrun.base.cores import allowed_cores, limits_of_groups, processors
from emrun.base.errors import reason_of
from emrun.base.wording import listed, size_of
from emrun.diagnosis.devices import inspect_devices, unused_gpu
from emrun.storage.lock import RunLock

_FOR_DEVELOPERS = ("test", "dev", "bench")  # extras that no config needs
_LEAST_DISK, _LEAST_SHARED, _LEAST_FILES = 10**9, 2**29, 1024  # bytes, bytes, open files
_SHARED = Path("/dev/shm")


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
    found.facts["emrun"] = metadata.version("emrun")
    found.facts["Python"] = f"{platform.python_version()}, {sys.executable}"
    found.facts["PyTorch"] = f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}"
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
