"""What is timed only when a hook listens to `after_epoch_profile`."""

import itertools
from array import array

import pytest
from doubles import by_counting, wrapped

from emrun.loop.profiling import Profiling, timed_batches


class Hook:
    def __init__(self):
        self.called = []

    def before_update(self, **arguments):
        self.called.append(arguments)

    def after_stream(self, stream_name):
        raise ValueError(stream_name)


def taken(profiling):
    """Return the times of hooks in an epoch."""
    times = {name: each for name, each in profiling.end_epoch(0.0).items() if name.startswith("hook")}
    profiling.begin_epoch()
    return times


def test_the_times_of_a_hook_add_up_and_begin_again():
    times, hook = Profiling(int), Hook()
    call = times.timed(hook.before_update, hook, "before_update")
    call(model=1)
    call(model=2)
    assert hook.called == [{"model": 1}, {"model": 2}]
    first = taken(times)
    assert list(first) == ["hook_Hook", "hooks_in_updates"]
    assert first["hook_Hook"] == first["hooks_in_updates"]
    assert first["hook_Hook"][0] > 0
    assert taken(times) == {"hook_Hook": array("d", [0]), "hooks_in_updates": array("d", [0])}


def test_a_call_that_fails_is_timed_too_and_other_events_are_not_within_updates():
    times, hook = Profiling(int), Hook()
    with pytest.raises(ValueError, match="train"):
        times.timed(hook.after_stream, hook, "after_stream")(stream_name="train")
    found = taken(times)
    assert list(found) == ["hook_Hook"]
    assert found["hook_Hook"][0] > 0


def test_batches_are_counted_after_the_model_ran():
    profiling = Profiling(lambda: 7)
    profiling.begin_epoch()
    lengths = []

    def model_run(batch, train, name):
        lengths.append(list(profiling.seconds["batch_length_train"]))
        return {name: batch}

    run = profiling.run_of("train", model_run)
    assert run("b", True, "train") == {"train": "b"}
    assert lengths == [[]]
    assert list(profiling.seconds["batch_length_train"]) == [7]
    assert len(profiling.seconds["eval_batch_train"]) == 1


@pytest.mark.parametrize(("buffer", "epoch_size"), [(0, -1), (0, 10), (1, 3), (4, -1), (4, 10)])
def test_the_profile_has_one_entry_for_each_batch_that_is_read(buffer, epoch_size):
    seconds = array("d")
    with wrapped(by_counting(), buffer, epoch_size, "train") as stream:
        first, second = (len(list(timed_batches(stream, seconds))) for _ in range(2))
        assert len(seconds) == first + second
        others = array("d")
        handed_out = len(list(itertools.islice(timed_batches(stream, others), 2)))
        assert len(others) == handed_out
    assert all(each >= 0 for each in seconds)
