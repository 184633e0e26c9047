"""What one rank wants, all ranks do after the same batch; what all ranks want alike needs no agreement."""

import os
import signal
from functools import partial

import numpy as np
import pytest
from doubles import SGD, Affine, Streams
from in_ranks import all_in_ranks, in_ranks

from emrun import AbstractHook, MainLoop, TorchModel, TrainingTerminated
from emrun.hooks import StopAfter
from emrun.ranks.group import Ranks, join

BATCHES = [{"x": np.arange(4.0), "y": np.arange(4.0)}] * 400


class Wishes(AbstractHook):
    """Does something after the n-th train batch, on one rank."""

    reads = ()

    def __init__(self, at, what):
        super().__init__()
        self.at, self.what = at, what

    def after_batch(self):
        if self.main_loop.training and self.main_loop.iterations_done == self.at:
            self.what(self)


class OnEveryRank(Wishes):
    every_rank = True


def loop_of(*hooks, batches=BATCHES, **arguments):
    join()
    model = TorchModel(Affine().double(), ["x", "y"], ["predicted", "loss"], optimizer=SGD)
    return MainLoop(model, Streams(train=batches), hooks, skip_zeroth_epoch=True, **arguments)


def ended(*hooks, **arguments):
    loop = loop_of(*hooks, **arguments)
    outcome = loop.run_training()
    weights = [each.item() for each in loop.model.module.parameters()]
    return loop.iterations_done, outcome.status, outcome.reason, weights


def terminate(hook):
    raise TrainingTerminated("enough")


def terminate_alike(hook):
    raise TrainingTerminated("enough", alike=True)


def terminate_on_one(hook):
    if join().rank == 1:
        terminate(hook)


def evaluate(hook):
    hook.main_loop.run_evaluation("train")


def calls_of_a_watcher():
    calls = []
    ended(Wishes(2, lambda hook: calls.append(join().rank)), StopAfter(iterations=3))
    return calls


class OneEpoch(AbstractHook):
    every_rank = True

    def after_epoch(self):
        terminate_on_one(self)


OF_TWO = {
    "limit": lambda: ended(StopAfter(iterations=7)),
    "alike": lambda: ended(OnEveryRank(5, terminate_alike)),
    "on one": lambda: ended(OnEveryRank(5, terminate_on_one), StopAfter(epochs=1)),
    "on one at the end": lambda: ended(OneEpoch(), batches=BATCHES[:20]),
    "on rank 0": lambda: ended(Wishes(5, terminate), StopAfter(epochs=1)),
    "evaluation": lambda: ended(
        Wishes(5, terminate), OnEveryRank(6, evaluate), StopAfter(epochs=1), batches=BATCHES[:20]
    ),
    "near the end": lambda: ended(Wishes(10, terminate), StopAfter(epochs=9), batches=BATCHES[:10]),
    "seconds": lambda: ended(StopAfter(minutes=1e-9)),
    "watcher": calls_of_a_watcher,
}


@pytest.fixture(scope="module")
def of_two():
    """Return how trainings of two ranks have ended, those that got signals by the number or a word."""
    signals = {number: partial(ended_by, number) for number in (signal.SIGTERM, signal.SIGINT)}
    others = {"two signals": ended_by_two, "one twice": ended_by_one_twice, "exchanges": exchanges_of_a_hundred}
    return all_in_ranks(2, {**OF_TWO, **signals, **others})


def test_a_limit_that_all_ranks_count_alike_ends_them_at_once(of_two):
    for done, status, reason, _ in of_two["limit"]:
        assert (done, status, reason) == (7, "finished", "7 iterations done (StopAfter iterations: 7)")


def test_a_termination_that_all_ranks_have_alike_needs_no_agreement(of_two):
    for done, _, reason, _ in of_two["alike"]:
        assert (done, reason) == (5, "enough")


def test_a_hook_that_runs_on_every_rank_and_ends_the_run_on_one_ends_all_of_them(of_two):
    one, other = zip(of_two["on one"], of_two["on one at the end"], strict=True)
    assert one == other
    (done, *within), at_the_end = one
    assert 5 <= done < 400
    assert within[:2] == ["finished", "enough"]
    assert at_the_end[:3] == (20, "finished", "enough")


def check_end_of_all(found):
    assert all(each[:3] == found[0][:3] for each in found)
    assert all(each[3] == found[0][3] for each in found)
    done, status, reason, _ = found[0]
    assert 5 <= done < 400
    assert (status, reason) == ("finished", "enough")


def test_a_termination_on_rank_0_ends_all_ranks_after_the_same_batch(of_two):
    check_end_of_all(of_two["on rank 0"])


@pytest.mark.campaign
def test_a_termination_on_rank_0_ends_three_ranks_after_the_same_batch():
    check_end_of_all(in_ranks(3, OF_TWO["on rank 0"]))


def test_an_evaluation_by_hand_does_not_drop_a_wish(of_two):
    for _, status, reason, _ in of_two["evaluation"]:
        assert (status, reason) == ("finished", "enough")


def test_a_termination_near_the_end_of_an_epoch_takes_effect_at_its_end(of_two):
    assert [each[:3] for each in of_two["near the end"]] == [(10, "finished", "enough")] * 2


def ended_by(number):
    def send(hook):
        if join().rank == 1:
            os.kill(os.getpid(), number)

    return ended(OnEveryRank(5, send), StopAfter(epochs=1))


def ended_by_two():
    numbers = {1: signal.SIGINT, 0: signal.SIGTERM}
    hooks = [
        OnEveryRank(at, lambda hook, rank=rank: join().rank == rank and os.kill(os.getpid(), numbers[rank]))
        for at, rank in ((5, 1), (20, 0))
    ]
    return ended(*hooks, StopAfter(epochs=1), on_interrupt="epoch")


def ended_by_one_twice():
    def twice(hook):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emrun.loop.ranks.requests._SECONDS_OF_SIGNALS", 1000)  # whatever stops this process in between
        return ended(OnEveryRank(5, twice), StopAfter(epochs=1))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_ends_all_ranks_after_the_same_batch(of_two, number):
    found = of_two[number]
    assert found[0] == found[1]
    assert found[0][1:3] == ("interrupted", f"interrupted by {number.name}")


def test_a_second_signal_to_another_rank_ends_all_ranks_after_a_batch_and_not_the_epoch(of_two):
    first, second = of_two["two signals"]
    assert first == second
    assert first[1:3] == ("interrupted", "interrupted by SIGTERM")
    assert first[0] < len(BATCHES)


def test_the_same_signal_twice_within_a_second_is_one(of_two):
    assert [each[1] for each in of_two["one twice"]] == ["interrupted"] * 2


def test_a_limit_in_seconds_is_that_of_the_first_rank_that_reaches_it(of_two):
    found = of_two["seconds"]
    assert found[0][:2] == found[1][:2]


def test_a_rank_0_hook_that_only_watches_runs_on_rank_0_only(of_two):
    assert of_two["watcher"] == [[0], []]


class Clock(AbstractHook):
    """A clock by which an iteration takes a hundredth of a second."""

    every_rank = True
    reads = ()
    seconds = 0.0

    def before_batch(self):
        self.seconds += 0.01


def exchanges_of_a_hundred():
    """Return how many there are in a hundred iterations."""
    clock, sent, original = Clock(), [0], Ranks.begin_maximum

    def begin_maximum(ranks, tensor):
        sent[0] += 1
        return original(ranks, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emrun.loop.ranks.requests.perf_counter", lambda: clock.seconds)
        patch.setattr(Ranks, "begin_maximum", begin_maximum)
        ended(clock, StopAfter(epochs=1), batches=BATCHES[:100])
    return sent[0]


def test_exchanges_are_rare(of_two):
    """No collective of emrun's own in each step: after the first iterations, one in a quarter of a second."""
    for sent in of_two["exchanges"]:
        assert 100 / 25 <= sent < 100 / 25 + 5
