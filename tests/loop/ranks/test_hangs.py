"""A rank that waits long for the others says so, and SIGUSR2 writes the stacks of a rank into its log."""

import logging
import signal
import time

from in_ranks import in_ranks

from emrun.loop.ranks.hangs import HangWatch
from emrun.ranks.group import join, ranks


def of_hang(directory):
    join()
    ours, lines = ranks(), []
    ours.limit_waits(2.0)
    handler = logging.Handler()
    handler.emit = lambda record: (lines.append(record.getMessage()), (directory / "said").touch())
    logging.getLogger("emrun.loop.ranks.hangs").addHandler(handler)
    watch = HangWatch(ours, directory / f"train-{ours.rank}.log")
    watch.start()
    while not ours.is_first and not (directory / "said").exists():
        time.sleep(0.01)
    ours.all_gathered("meeting", None)
    watch.stop()
    return lines


def test_a_rank_that_waits_says_so_once_and_the_rank_that_hangs_does_not(tmp_path):
    (line,), none = in_ranks(2, of_hang, tmp_path)
    assert line.startswith(
        "rank 0 of 2 has waited for the others for 0.4 seconds; a rank that does not say so hangs, or"
    )
    assert none == []


def test_sigusr2_writes_the_stacks_into_the_log_until_the_watch_is_stopped(tmp_path):
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        (tmp_path / "train.log").write_text("before\n")
        watch = HangWatch(ranks(), tmp_path / "train.log")
        watch.start()
        signal.raise_signal(signal.SIGUSR2)
        watch.stop()
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    log = (tmp_path / "train.log").read_text()
    assert log.startswith("before\n")
    assert log.count(", line ") > log.count("in test_sigusr2_writes_the_stacks") == 1
