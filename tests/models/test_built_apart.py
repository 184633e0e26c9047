"""A module is built a second time in a child process, which leaves nothing behind."""

import os
import signal
import threading
import warnings
from itertools import count

import psutil
import pytest
import torch
from torch import nn

from emrun.models.built_apart import BuiltApart

LONG = 30.0


def children():
    return {each.pid for each in psutil.Process().children()}  # also those that nobody has waited for


def structure(build, seconds=LONG):
    before = children()
    apart = BuiltApart.begin(build)
    assert len(children() - before) == 1
    found = apart.structure(seconds)
    assert children() == before
    return found


def test_a_module_that_is_built_apart_has_names_shapes_and_dtypes():
    def build():
        return nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d(dtype=torch.float64))

    assert structure(build) == {
        "0.weight": ((2, 3), torch.float32),
        "0.bias": ((2,), torch.float32),
        "1.weight": (None, torch.float64),
        "1.bias": (None, torch.float64),
        "1.running_mean": (None, torch.float64),
        "1.running_var": (None, torch.float64),
        "1.num_batches_tracked": ((), torch.int64),
    }


def test_more_than_a_pipe_holds_comes_back():
    assert len(structure(lambda: nn.ModuleList(nn.Linear(1, 1) for _ in range(2000)))) == 4000


def test_what_building_changes_stays_as_it_was_here(capfd, tmp_path):
    numbers, place = count(), tmp_path / "file"

    def build():
        next(numbers)
        print("building")
        os.environ["BUILT"] = "1"
        return nn.Linear(3, 2)

    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert structure(build)
        assert structure(lambda: place.write_text("") and build()) is None
    assert next(numbers) == 0
    assert "BUILT" not in os.environ
    assert not place.exists()
    assert torch.equal(before, torch.get_rng_state())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(3, int(torch.ones(1).item())),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: (_ for _ in ()).throw(KeyboardInterrupt),
        lambda: os.system("true"),
        lambda: torch.cuda._lazy_init(),
    ],
    ids=["values", "killed", "interrupted", "a process", "a GPU"],
)
def test_what_cannot_be_built_apart_is_left_out(build):
    assert structure(build) is None


def test_a_child_that_is_slow_is_not_waited_for_and_killed():
    assert structure(signal.pause, 0) is None


def test_a_child_that_is_not_asked_ends_with_its_object():
    before = children()
    apart = BuiltApart.begin(signal.pause)
    assert children() != before
    del apart
    assert children() == before


def test_there_is_no_child_where_forking_is_not_safe(monkeypatch):
    found = []
    thread = threading.Thread(target=lambda: found.append(BuiltApart.begin(lambda: nn.Linear(1, 1))))
    thread.start()
    thread.join()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found.append(BuiltApart.begin(lambda: nn.Linear(1, 1)))
    assert found == [None, None]
