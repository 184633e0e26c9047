"""Two machines, each with its own torchrun: a rank is killed, torchrun starts the ranks again, and the run continues.

The machines are two network namespaces, which a virtual cable joins; they share the run directory.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from projects import SEVERAL, SEVERAL_PARTS
from warm import stand_by

TORCHRUN = Path(sys.executable).with_name("torchrun")
MACHINES = """
set -e
ip link set lo up
unshare --net sleep 3600 &
other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do :; done
ip link add cable0 type veth peer name cable1 netns $other
ip addr add 10.7.0.1/24 dev cable0
ip link set cable0 up
in_other() { nsenter --target $other --net -- "$@"; }
in_other ip link set lo up
in_other ip addr add 10.7.0.2/24 dev cable1
in_other ip link set cable1 up
set +e
GLOO_SOCKET_IFNAME=cable0 "$@" --local-addr 10.7.0.1 --rdzv-conf is_host=1 $WORDS >out0 2>&1 &
first=$!
GLOO_SOCKET_IFNAME=cable1 in_other "$@" --local-addr 10.7.0.2 --rdzv-conf is_host=0 $WORDS >out1 2>&1
second=$?
wait $first
first=$?
kill $other
exit $((first | second))
"""
FAULT = '''

import os
import signal

from emrun import AbstractHook
from emrun.ranks.group import ranks


class Fault(AbstractHook):
    """Kills one rank once, as the file `fault` says: the rank, the iteration."""

    every_rank = True
    reads = ()

    def after_batch(self):
        if os.path.exists("fault") and open("fault").read() == f"{ranks().rank} {self.main_loop.iterations_done}":
            os.unlink("fault")
            os.kill(os.getpid(), signal.SIGKILL)
'''
CONFIG = f"""{SEVERAL}
hooks:
  - ComputeStats
  - SaveEvery: {{every: 4 updates, keep: 2}}
  - parts.Fault
  - StopAfter: {{epochs: 4}}
"""
SHARDED = "model.strategy.shard=^0$"


@pytest.fixture
def machines():
    """Return the start of a command that runs torchrun on two machines."""
    words = ["unshare", "--map-root-user", "--net", "bash", "-c"]
    try:
        done = subprocess.run([*words, "unshare --net true && ip link"], capture_output=True, text=True)
        why = done.stderr if done.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        pytest.skip(f"the system gives a test no network namespaces: {why}")
    return [*words, MACHINES, "machines"]


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("a rank on one of two machines is killed, and torchrun starts the ranks again", share=3)
def test_a_run_of_two_machines_continues_when_a_rank_was_killed(tmp_path, small, trials, machines):
    (tmp_path / "parts.py").write_text(SEVERAL_PARTS + FAULT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    expected = {}
    for overrides in ("", SHARDED):
        words = ["train", "-q", "config.yaml", "--nproc", 2, "--output-dir", f"straight{overrides}", *overrides.split()]
        assert small.command(*words, cwd=tmp_path, prepare=partial(stand_by, 2)).returncode == 0
        expected[overrides] = small.result_of_ranks(tmp_path / f"straight{overrides}")
    torchrun = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.7.0.1:29400"]
    for trial in trials(product(("", SHARDED), (0, 1), range(1, 20)), small=4):
        with trial:
            overrides, rank, at = trial.case
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            (tmp_path / "fault").write_text(f"{rank} {at}")
            words = f"-m emrun train config.yaml --output-dir run --auto-resume {overrides}"
            environment = os.environ | {"WORDS": words, "OMP_NUM_THREADS": "1"}
            done = subprocess.run([*machines, *torchrun], cwd=tmp_path, env=environment, timeout=300)
            said = [(tmp_path / f"out{each}").read_text() for each in range(2)]
            assert done.returncode == 0, said
            assert not (tmp_path / "fault").exists()
            assert any("exitcode: -9" in each for each in said)
            assert small.result_of_ranks(tmp_path / "run") == expected[overrides]
