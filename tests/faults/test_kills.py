"""A training that is killed at any moment and started again by the same call ends in the same bits.

Taken out once by hand, restoring the random states made this fail.
"""

import shutil
import signal
from time import perf_counter

import pytest


@pytest.mark.campaign  # tests/training/test_mechanics.py has kills after some batches, test_power_loss.py between them
@pytest.mark.timeout(7200)
@pytest.mark.fault("kill -9 at random moments, resumed until done", share=8)
@pytest.mark.parametrize("part", range(4))
def test_kills_at_random_moments_change_nothing(tmp_path, small, trials, part):
    began = perf_counter()
    assert small.forked(small.start_or_resume, tmp_path / "straight") == 0
    seconds = perf_counter() - began
    expected = small.result(tmp_path / "straight")
    directory = tmp_path / "run"

    def run(delay):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process like a kill
        signal.setitimer(signal.ITIMER_REAL, delay)
        small.start_or_resume(directory)

    for trial in trials(range(part, 2000, 4), small=12):
        with trial:
            status = small.forked(run, trial.random.uniform(0.001, seconds))
            while status == 0:  # it came to its end before it was killed
                assert small.result(directory) == expected
                shutil.rmtree(directory)
                status = small.forked(run, trial.random.uniform(0.001, seconds))
            with trial.reading():
                assert status == -signal.SIGALRM
    with_or_without = small.forked(small.start_or_resume, directory)
    assert with_or_without == 0
    assert small.result(directory) == expected
