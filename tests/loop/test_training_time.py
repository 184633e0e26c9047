"""The seconds of training: what counts, and what does not."""

import pytest
from doubles import LossOfOne, Streams

from emrun import AbstractHook, MainLoop
from emrun.hooks import StopAfter


class Ticks(AbstractHook):
    """Moves the clock of the loop by a number of seconds in an event."""

    def __init__(self, **seconds):
        super().__init__()
        self.seconds = seconds
        self.now = 0.0

    def register_mainloop(self, main_loop):
        super().register_mainloop(main_loop)
        main_loop.time.clock = lambda: self.now

    def before_stream(self, stream_name):
        self.now += self.seconds.get(f"before_{stream_name}", 0)

    def after_batch(self, stream_name, batch_data):
        self.now += self.seconds.get(stream_name, 0)

    def after_epoch(self):
        self.now += self.seconds.get("epoch", 0)


@pytest.mark.parametrize("counts", [True, False])
def test_only_batches_of_the_train_stream_after_the_first_of_the_process_count(counts):
    hook = Ticks(train=2, valid=100, before_train=1000, before_valid=100, epoch=10_000)
    dataset = Streams(train=[{"x": [1, 2, 3]}] * 4, valid=[{"x": [1]}])
    loop = MainLoop(LossOfOne(), dataset, [hook, StopAfter(epochs=3)], extra_streams=["valid"])
    if counts:
        loop.time.count_examples()
    loop.run_training()
    assert loop.time.seconds == 2 * 12
    assert loop.time.examples == (3 * 11 if counts else 0)


def test_an_evaluation_between_two_batches_does_not_count():
    class Evaluates(AbstractHook):
        def after_batch(self, stream_name, batch_data):
            if self.main_loop.training:
                self.main_loop.batches.run(self.main_loop.get_stream("valid"), train=False)

    hook = Ticks(train=1, valid=50)
    dataset = Streams(train=[{"x": [1]}] * 3, valid=[{"x": [1]}])
    loop = MainLoop(LossOfOne(), dataset, [hook, Evaluates(), StopAfter(epochs=1)], skip_zeroth_epoch=True)
    loop.run_training()
    assert loop.time.seconds == 3
