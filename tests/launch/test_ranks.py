"""What is printed about ranks that failed: the cause first, once."""

import json
import signal
from types import SimpleNamespace

import pytest
import torch

from emrun.errors import UsageError
from emrun.launch.ranks import _explained, launch


def explained(place, failures, words):
    """Return what is printed; failures: rank -> exit status, words: rank -> (cause, survived, time)."""
    for rank, (cause, survived, time) in words.items():
        (place / f"{rank}.json").write_text(json.dumps({"cause": cause, "survived": survived, "time": time}))
    found = {rank: SimpleNamespace(exitcode=code, timestamp=1) for rank, code in failures.items()}
    return _explained(found, place)


@pytest.mark.parametrize(
    ("failures", "words", "status", "lines"),
    [
        ({0: 1, 1: 2}, {0: ("", "kept", 1), 1: ("error: y", "", 2)}, 2, ["rank 1: error: y", "kept"]),
        ({0: 2, 1: 2}, {0: ("error: x", "", 3), 1: ("error: x", "", 2)}, 2, ["error: x"]),
        ({0: 1, 1: -9}, {0: ("", "kept", 1)}, -9, ["error: rank 1 was killed by SIGKILL", "kept"]),
        ({0: 1, 1: 9}, {0: ("", "kept", 1)}, 9, ["error: rank 1 ended with exit status 9", "kept"]),
        ({0: -15, 2: -9, 1: 1}, {1: ("", "", 1)}, -9, ["error: rank 2 was killed by SIGKILL"]),
        ({0: -15, 1: 1}, {1: ("error: y", "", 1)}, 1, ["rank 1: error: y"]),
        ({0: -15, 1: -15}, {0: ("", "kept", 1)}, -15, ["kept"]),
        ({2: 1, 1: 1}, {1: ("error: y", "", 5), 2: ("error: z", "", 4)}, 1, ["rank 2: error: z"]),
    ],
)
def test_the_cause_is_printed_first_and_gives_the_exit_status(tmp_path, failures, words, status, lines):
    found = explained(tmp_path, failures, words)
    assert (found.status, list(found.lines), found.directory) == (status, lines, None)


@pytest.mark.parametrize(
    ("failures", "words", "repeats"),
    [
        ({0: 1, 1: -9}, {0: ("", "kept", 1)}, True),
        ({0: 1, 1: -15}, {0: ("error: x", "", 1)}, True),
        ({0: 9}, {}, True),
        ({0: 2, 1: 2}, {0: ("error: x", "", 1), 1: ("error: x", "", 1)}, False),
        ({0: 75, 1: 75}, {0: ("", "", 1), 1: ("", "", 1)}, False),
        ({0: -15, 1: -15}, {}, False),
    ],
)
def test_only_failures_may_be_repeated(tmp_path, failures, words, repeats):
    (tmp_path / "directory").write_text("/runs/one")
    found = explained(tmp_path, failures, words)
    assert (found.is_failure, found.directory) == (repeats, "/runs/one")


def test_a_status_that_the_config_asks_for_is_not_an_error(tmp_path):
    assert explained(tmp_path, {0: 75, 1: 75}, {0: ("", "", 1), 1: ("", "", 1)}).lines == []


def test_more_ranks_than_gpus_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UsageError, match="--nproc 2: this machine has 1 GPU; each rank needs one"):
        launch(2, ["train", "config.yaml"])
    assert signal.getsignal(signal.SIGTERM) is before
