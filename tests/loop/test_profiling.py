"""What is timed only when a hook listens to `after_epoch_profile`."""

from array import array

import pytest

from emrun.loop.profiling import HookTimes, counted


class Hook:
    def __init__(self):
        self.called = []

    def before_update(self, **arguments):
        self.called.append(arguments)

    def after_stream(self, stream_name):
        raise ValueError(stream_name)


def test_the_times_of_a_hook_add_up_and_begin_again():
    times, hook = HookTimes(), Hook()
    call = times.timed(hook.before_update, hook, "before_update")
    call(model=1)
    call(model=2)
    assert hook.called == [{"model": 1}, {"model": 2}]
    first = times.take()
    assert list(first) == ["hook_Hook", "hooks_in_updates"]
    assert first["hook_Hook"] == first["hooks_in_updates"]
    assert first["hook_Hook"][0] > 0
    assert times.take() == {"hook_Hook": array("d", [0]), "hooks_in_updates": array("d", [0])}


def test_a_call_that_fails_is_timed_too_and_other_events_are_not_within_updates():
    times, hook = HookTimes(), Hook()
    with pytest.raises(ValueError, match="train"):
        times.timed(hook.after_stream, hook, "after_stream")(stream_name="train")
    taken = times.take()
    assert list(taken) == ["hook_Hook"]
    assert taken["hook_Hook"][0] > 0


def test_batches_are_counted_after_the_model_ran():
    lengths = array("d")
    run = counted(lambda batch, train, name: {name: batch}, lengths, lambda: 7)
    assert run("b", True, "train") == {"train": "b"}
    assert list(lengths) == [7]
