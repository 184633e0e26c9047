"""What `make campaign MINUTES=N` does in its time: trials of the faults and longer tests, in turns, until it is over.

Each half of the time is for one of the two kinds. The longer tests come in another order each day; those that were not
reached are skipped, and named at the end.
"""

import os
import random
import time
from dataclasses import dataclass
from datetime import date

import pytest

TIMES = pytest.StashKey()
NOT_REACHED = "the campaign did not reach it"
SHARE_OF_TRIALS = 0.5  # of the time

_SEED = int(os.environ.setdefault("EMRUN_CAMPAIGN_SEED", str(date.today().toordinal())))  # the same in all workers


@dataclass(frozen=True)
class Times:
    """When the campaign ends, by the clock `time.monotonic`, and how many seconds each test with trials has."""

    ends_at: float
    seconds: dict[str, float]


def thinned(cases, few):
    """Return the parameters of a test: those in `few` are for `make test`, the others for campaigns."""
    cases = list(cases)
    assert all(each in cases for each in few), "each of the few must be a case"
    values = [each if isinstance(each, tuple) else (each,) for each in cases]
    marks = [() if each in few else pytest.mark.campaign for each in cases]
    return [pytest.param(*each, marks=mark) for each, mark in zip(values, marks, strict=True)]


def plan(config, items, minutes):
    """Share out the time, and sort the tests: one with trials, then as many others as there are for each of these."""
    trials = {item: next(item.iter_markers("fault")).kwargs.get("share", 1) for item in items if has_trials(item)}
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    each = minutes * 60 * min(1.0, SHARE_OF_TRIALS * workers / max(1, sum(trials.values())))
    seconds = {item.nodeid: each * share for item, share in trials.items()}
    config.stash[TIMES] = Times(time.monotonic() + minutes * 60, seconds)
    others = [item for item in items if item not in trials]
    random.Random(_SEED).shuffle(others)
    places = {}
    for kind in (list(trials), others):
        places |= {item: (number + 1) / (len(kind) + 1) for number, item in enumerate(kind)}
    items.sort(key=places.get)


def has_trials(item):
    """Return whether a test makes as many trials of a fault as there is time for."""
    return next(item.iter_markers("fault"), None) is not None


def skip_if_over(item):
    """Skip a test without trials if the time is over; one with trials makes a few."""
    if (times := item.config.stash.get(TIMES, None)) and not has_trials(item) and time.monotonic() > times.ends_at:
        pytest.skip(NOT_REACHED)


def not_reached(stats):
    """Return the tests that were skipped since the time was over."""
    return sorted(each.nodeid for each in stats.get("skipped", ()) if NOT_REACHED in str(each.longrepr))
