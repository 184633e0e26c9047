"""A terminal that is closed ends a run with a checkpoint, also on several ranks; a run that ignores this goes on."""

import fcntl
import json
import os
import pty
import signal
import termios
from functools import partial
from itertools import product

import psutil
import pytest
from campaign import thinned
from projects import SEVERAL, SEVERAL_PARTS
from ruamel.yaml import YAML
from warm import stand_by

PARTS = f"""{SEVERAL_PARTS}

import os
import select
import sys

from emrun import AbstractHook
from emrun.ranks.group import ranks


class Waits(AbstractHook):
    '''Waits on rank 0, after a batch, until the terminal is closed.'''

    every_rank = True
    reads = ()

    def after_batch(self):
        if self.main_loop.iterations_done == 12 and ranks().is_first:
            closed = select.poll()
            closed.register(os.dup(2), 0)  # emrun replaces 2
            print("waits", file=sys.stderr, flush=True)
            closed.poll()
"""
CONFIG = f"""{SEVERAL}
hooks: [ComputeStats, LogVariables, ShowProgress, parts.Waits, {{StopAfter: {{epochs: 20}}}}]
"""


def on_terminal(terminal, others, *, ranks, ignores):
    """Be the process that a terminal belongs to, and begin ranks that stand by."""
    os.close(others)
    if ignores:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for place in (1, 2):
        os.dup2(terminal, place)
    os.close(terminal)
    stand_by(ranks)


@pytest.mark.parametrize(("size", "ignores"), thinned(product((1, 2), (False, True)), [(1, False)]))
def test_a_closed_terminal_ends_a_run_with_a_checkpoint_unless_it_is_ignored(tmp_path, small, size, ignores):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "config.yaml").write_text(CONFIG)
    words = ["train", *["-q"] * ignores, "config.yaml", "--nproc", size, "--output-dir", "run"]
    ours, theirs = pty.openpty()
    prepare = partial(on_terminal, theirs, ours, ranks=size * (size > 1), ignores=ignores)
    command = small.began(words, tmp_path, prepare)
    os.close(theirs)
    children = []
    with os.fdopen(ours, "rb", 0) as terminal:
        said = b""
        while b"waits" not in said:
            said += terminal.read(1000)
        children = psutil.Process(command[0]).children() if size > 1 else []  # of one process, git may run just now
    done = small.finished(command)
    trace = YAML(typ="safe").load(tmp_path / "run" / "trace.yaml")
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "latest" / "manifest.json").read_text())
    assert len(children) == size * (size > 1)
    assert psutil.wait_procs(children, timeout=0)[1] == []
    if ignores:
        assert (done.returncode, trace["status"], trace["iterations_done"]) == (0, "finished", 100)
    else:
        assert (done.returncode, trace["reason"]) == (-signal.SIGHUP, "interrupted by SIGHUP")
        assert 12 <= trace["iterations_done"] == manifest["iteration"] < 100
