"""The environment: what is found on this machine, and what is reported of machines with less."""

import errno
import os
import resource
from collections import namedtuple
from importlib import metadata

import pytest
import torch

from emrun.base import cores
from emrun.diagnosis import environment
from emrun.diagnosis.environment import inspect_environment

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def roomy(monkeypatch, tmp_path):
    """Make this a machine on which nothing is wrong, without control groups."""
    monkeypatch.setattr(cores, "_GROUP", tmp_path / "no groups")
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: Usage(10**11, 0, 10**11))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)


def test_a_machine_with_room_has_neither_problems_nor_warnings(roomy, tmp_path):
    found = inspect_environment(tmp_path)
    assert (found.problems, found.warnings) == ([], [])
    assert found.facts["emrun"] == metadata.version("emrun")
    assert found.facts["PyTorch"].startswith(torch.__version__)
    packages = ("scikit-learn", "torchmetrics")
    assert found.facts["extra metrics"] == ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    assert found.facts["directory"] == f"{tmp_path}, writable, 100 GB free"
    assert not {"extra test", "extra dev", "extra bench"} & set(found.facts)
    assert found.devices[0]["device"] == "cpu"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_of_an_extra_is_a_fact_with_its_command(roomy, tmp_path, monkeypatch):
    def version(name, version=metadata.version):
        if name == "pyarrow":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", version)
    found = inspect_environment(tmp_path)
    assert "pyarrow is missing" in found.facts["extra data"]
    assert found.facts["extra data"].endswith(" (pip install 'emrun[data]')")
    assert found.problems == []


@pytest.mark.parametrize(
    "files",
    [
        {"a/cpu.max": "max 100000", "a/b/cpu.max": "150000 100000", "a/memory.max": "1000000", "a/b/memory.max": "max"},
        {
            "cpu,cpuacct/a/cpu.cfs_quota_us": "150000",
            "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "1000000",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_limits_of_control_groups_count(roomy, tmp_path, monkeypatch, files):
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/not/mounted/here\n0::/a/b\n")
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(f"{text}\n")
    monkeypatch.setattr(cores, "_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    found = inspect_environment(tmp_path)
    assert found.facts["CPU"] == "64 cores (the control group allows 1.5), PyTorch threads: 64"
    assert found.facts["memory"].endswith(" (the control group allows 1 MB)")
    slow = "PyTorch uses 64 threads on 1.5 cores, which is slow; set the environment variable OMP_NUM_THREADS=1"
    assert found.warnings == [slow]


def test_a_folder_that_cannot_hold_a_run_is_a_problem(roomy, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (problem,) = inspect_environment(tmp_path / "file").problems
    assert problem.startswith(f"run directories cannot be written in {tmp_path / 'file'}: not a directory; start emrun")


def test_a_file_system_without_links_is_a_problem(roomy, tmp_path, monkeypatch):
    def refuse(path, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(target), None, str(path))

    monkeypatch.setattr("pathlib.Path.symlink_to", refuse)
    (problem,) = inspect_environment(tmp_path).problems
    assert f"{tmp_path}: operation not permitted; start emrun" in problem
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_problem_and_small_limits_are_warnings(roomy, tmp_path, monkeypatch):
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: Usage(10**9, 0, 6.4e7))
    monkeypatch.setattr(environment, "_SHARED", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    found = inspect_environment(tmp_path)
    (problem,) = found.problems
    assert problem.startswith(f"only 64 MB of disk space are free in {tmp_path}; delete files, ")
    shared, files = found.warnings
    assert shared.startswith(f"only 64 MB of {tmp_path} are free; worker processes send batches through it: ")
    assert files == "only 256 open files are allowed, too few for many worker processes; run ulimit -n 4096"
