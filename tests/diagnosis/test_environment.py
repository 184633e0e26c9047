"""The environment: what is found on this machine, and what is reported of machines with less."""

import os
from importlib import metadata

import pytest
import torch

from emrun.base import cores
from emrun.diagnosis.environment import inspect_environment


@pytest.fixture
def roomy(monkeypatch, tmp_path):
    """Make this a machine on which nothing is wrong, without control groups."""
    monkeypatch.setattr(cores, "_GROUP", tmp_path / "no groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)


def test_a_machine_with_room_has_neither_problems_nor_warnings(roomy):
    found = inspect_environment()
    assert (found.problems, found.warnings) == ([], [])
    assert found.facts["emrun"] == metadata.version("emrun")
    assert found.facts["PyTorch"].startswith(torch.__version__)
    packages = ("scikit-learn", "torchmetrics")
    assert found.facts["extra metrics"] == ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    assert not {"extra test", "extra dev", "extra bench"} & set(found.facts)
    assert found.devices[0]["device"] == "cpu"


def test_a_missing_library_of_an_extra_is_a_fact_with_its_command(roomy, monkeypatch):
    def version(name, version=metadata.version):
        if name == "pyarrow":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", version)
    found = inspect_environment()
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
    found = inspect_environment()
    assert found.facts["CPU"] == "64 cores (the control group allows 1.5), PyTorch threads: 64"
    assert found.facts["memory"].endswith(" (the control group allows 1 MB)")
    slow = "PyTorch uses 64 threads on 1.5 cores, which is slow; set the environment variable OMP_NUM_THREADS=1"
    assert found.warnings == [slow]
