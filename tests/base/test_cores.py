"""How many cores a process has: those of the machine, of control groups, and its share of them."""

import os

import pytest

from emrun.base import cores
from emrun.base.cores import reading_threads, share_of


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make this a machine with six cores, whose control group is told by the function that is returned."""
    for name in ("EMRUN_THREADS", "EMRUN_CORES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    monkeypatch.setattr(cores, "_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "_GROUPS", tmp_path)

    def allow(quota):
        (tmp_path / "cgroup").write_text("0::/\n")
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")

    return allow


@pytest.mark.parametrize(("quota", "count"), [(None, 6), ("max", 6), (250_000, 2), (50_000, 1), (900_000, 6)])
def test_the_cores_are_those_of_the_machine_that_a_control_group_allows(machine, quota, count):
    if quota is not None:
        machine(quota)
    assert (cores.cores(), reading_threads()) == (count, count)


@pytest.mark.parametrize(
    "files",
    [
        {"a/cpu.max": "max 100000", "a/b/cpu.max": "150000 100000"},
        {
            "cpu,cpuacct/a/cpu.cfs_quota_us": "150000",
            "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_the_smallest_limit_of_nested_control_groups_counts(machine, tmp_path, files):
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/not/mounted/here\n0::/a/b\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cores.allowed_cores() == 1.5


def test_a_process_that_emrun_or_torchrun_started_with_others_has_its_share(machine, monkeypatch):
    assert [share_of(processes) for processes in (1, 2, 4, 9)] == [6, 3, 1, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores.cores() == 3
    monkeypatch.setenv("EMRUN_CORES", "2")  # the share counts the other ranks already
    assert (cores.cores(), reading_threads(), share_of(2)) == (2, 2, 1)


def test_the_number_of_threads_can_be_set(machine, monkeypatch):
    monkeypatch.setenv("EMRUN_THREADS", "7")
    assert (cores.cores(), reading_threads()) == (6, 7)
