"""Many trainings in one process: it keeps no descriptor, thread, child or signal handler of them.

Taken out once by hand, the closing of the log at the end of a training made this fail.
"""

import gc
import logging
import shutil
import signal
import threading

import psutil
import pytest

from emrun import create_training
from emrun.training.create import train

BEFORE = 1


def kept_by_the_process():
    gc.collect()
    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "threads of Python": threading.active_count(),
        "children": len(process.children()),
    }


def set_in_the_process():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    return handlers, list(logging.getLogger().handlers)


@pytest.mark.campaign  # tests/training/test_create.py has one that fails and one that does not
@pytest.mark.timeout(7200)
@pytest.mark.fault("200 trainings in one process")
def test_no_training_leaves_anything_in_its_process_after_the_first_few(tmp_path, small, trials, patient):
    expected = None
    for number, trial in enumerate(trials(range(200), small=4, together=True)):
        changes = ["hooks.StopAfter.epochs=1", "main_loop.report=true"]
        training = create_training(small.config, output_dir=tmp_path / "run", overrides=changes)
        if number % 3 == 2:
            training.model.run = None  # this one fails
            with pytest.raises(TypeError):
                train(training)
        else:
            train(training)
        del training
        shutil.rmtree(tmp_path / "run")
        if number == BEFORE:
            expected, were_set = kept_by_the_process(), set_in_the_process()
        with trial:
            if expected is not None:
                found = kept_by_the_process()
                assert {name: max(count, expected[name]) for name, count in found.items()} == expected
                assert set_in_the_process() == were_set
