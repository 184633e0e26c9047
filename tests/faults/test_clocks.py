"""A clock that is set back, jumps or changes to summer time: the order is by iteration, durations are never negative.

Taken out once by hand, the number behind the name of a directory that is taken made this fail.
"""

import json
import os
import shutil
import time
from datetime import UTC, datetime, timedelta

import pytest
from ruamel.yaml import YAML

START = datetime(2026, 3, 29, 0, 59, 58, tzinfo=UTC)  # summer time begins in Berlin two seconds later
TURNS = {
    "stands still": lambda count: 0,
    "set back by an hour with every look": lambda count: -3600 * count,
    "jumps by a year, back and forth": lambda count: (-1) ** count * 31_536_000,
    "goes back before the year 1970": lambda count: -2e9,
    "into summer time": lambda count: count,
    "out of summer time": lambda count: 18_741_600 + 1800 * count,
}


def turn_clock(of):
    """Let the wall clock of the process go as told."""
    os.environ["TZ"] = "Europe/Berlin"
    time.tzset()
    count = 0

    def now():
        nonlocal count
        count += 1
        return START.timestamp() + of(count)

    class Turned(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.fromtimestamp(0, UTC).astimezone(tz) + timedelta(seconds=now())

    from emrun.storage import trace

    trace.datetime = Turned
    time.time = now


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("a clock set back, jumping, changing to summer time")
def test_a_clock_that_cannot_be_trusted_changes_nothing(project, small, expected, trials):
    train = ("train", "-q", "config.yaml", "--output-dir", "run", "main_loop.report=true")
    for trial in trials(TURNS.items(), small=3):
        _, of = trial.case
        for name in ("run", "log"):
            shutil.rmtree(project / name, ignore_errors=True)

        def prepare(of=of):
            turn_clock(of)

        with trial:
            assert small.command(*train, "hooks.StopAfter.epochs=1", cwd=project, prepare=prepare).returncode == 0
            again = small.command("resume", "-q", "run", "hooks.StopAfter.epochs=3", cwd=project, prepare=prepare)
            assert again.returncode == 0, again.stderr
            assert small.result(project / "run", ("latest", "best")) == expected
            lines = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
            assert all(line["seconds"] >= 0 for line in lines)
            trace = YAML(typ="safe", pure=True).load((project / "run" / "trace.yaml").read_text())
            assert trace["iterations_done"] == 15
            for _ in range(2):
                done = small.command(
                    "train", "-q", "config.yaml", "hooks.StopAfter.epochs=0", cwd=project, prepare=prepare
                )
                assert done.returncode == 0, done.stderr
            assert len(list((project / "log").iterdir())) == 2
