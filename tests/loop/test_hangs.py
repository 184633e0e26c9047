"""The stacks of all ranks in one file: when they wait too long, or on a signal; and which rank is elsewhere."""

import logging
import os
import signal
import time

import pytest
from in_ranks import in_ranks

from emrun.loop.hangs import HangWatch
from emrun.ranks.group import join, ranks


def wait_for(path, count):
    while not path.exists() or path.read_text().count("rank ") < count:
        time.sleep(0.01)


def of_hang(directory, timeout, how):
    join()
    ours, lines = ranks(), []
    ours.limit_waits(timeout)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("emrun.loop.hangs").addHandler(handler)
    watch = HangWatch(ours, directory)
    watch.start()
    ours.all_gathered(None)  # files from before a watch has started are not its concern
    path = directory / "stacks-1.txt"
    if how == "waits":
        ours.rank and wait_for(path, 2)
    elif ours.is_first:
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for(path, 2)
    else:
        wait_for(path, 2)
    ours.all_gathered(None)
    while ours.is_first and not lines:
        time.sleep(0.01)
    ours.all_gathered(None)
    watch.stop()
    return lines


@pytest.mark.parametrize("how", ["waits", "asked"])
def test_each_rank_writes_its_stacks_and_the_first_says_which_is_elsewhere(how, tmp_path):
    (line,), none = in_ranks(2, of_hang, tmp_path, 2.0, how)
    assert not none
    text = (tmp_path / "stacks-1.txt").read_text()
    assert text.count("in of_hang") == text.count("thread MainThread:") == 2
    if how == "waits":
        assert "rank 0 of 2, process " in text
        assert line.startswith("rank 1 is elsewhere (")
        assert line.endswith(f"), and the others wait; the stacks of all ranks are in {tmp_path}/stacks-1.txt")
    else:  # rank 1 may have begun to wait for rank 0, which reports
        assert line.startswith(("no rank waits for another; ", "rank 0 is elsewhere ("))


def test_a_rank_that_does_not_answer_is_elsewhere(tmp_path, caplog):
    watch = HangWatch(ranks(), tmp_path)
    watch._look, watch._ranks = 0.01, ranks().__class__(0, 2)
    watch._reader, watch._writer = os.pipe()
    watch._append(tmp_path / "stacks-1.txt", since=1.0)
    watch._report(tmp_path / "stacks-1.txt")
    assert caplog.messages[0].startswith("rank 1 is elsewhere (it does not answer), and the others wait; ")
