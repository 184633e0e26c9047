"""What is printed about ranks that failed: the cause first, once."""

import errno
import fcntl
import json
import resource
import tempfile

import pytest

from emrun.base.errors import StorageError
from emrun.launch.ranks import _explained, launch, run_processes


def explained(place, failures, words):
    """Return what is printed; failures: rank -> exit status, words: rank -> (cause, survived, time)."""
    for rank, (cause, survived, time) in words.items():
        said = {"cause": cause, "survived": survived, "time": time, "problems": []}
        (place / f"{rank}.json").write_text(json.dumps(said))
    return _explained(failures, place)


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


def without_space(monkeypatch):
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, most))


def without_locks(monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def without_directory(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")


@pytest.mark.parametrize("fault", [without_space, without_locks, without_directory])
def test_a_directory_in_which_ranks_cannot_meet_is_named(monkeypatch, fault):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    fault(monkeypatch)
    try:
        with pytest.raises(StorageError, match=r"the ranks cannot meet in .*; set TMPDIR to a directory") as found:
            launch(2, ["train", "config.yaml"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found.value.exit_status == 74


WORDS = """
import json, os, pathlib, sys
place, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
if rank == "1":
    while not (place / "0.json").exists():
        os.sched_yield()
    other = int((place / "other").read_text())
    try:
        while True:  # until the launcher has waited for the other rank
            os.kill(other, 0)
            os.sched_yield()
    except ProcessLookupError:
        pass
    cause = "the cause"
else:
    (place / "other").write_text(str(os.getpid()))
    cause = ""
for _ in range(1000):  # a signal of the launcher would end the process here
    os.sched_yield()
words = place / f"{rank}.json"
words.with_suffix(".part").write_text(json.dumps({"cause": cause, "survived": "", "time": 1.0, "problems": []}))
words.with_suffix(".part").rename(words)
sys.exit(1)
"""


def test_a_rank_has_time_for_its_words_when_others_that_miss_it_end_first(tmp_path):
    failures = run_processes(2, WORDS, [str(tmp_path)], tmp_path)
    assert failures == {0: 1, 1: 1}
    assert _explained(failures, tmp_path).lines == ["rank 1: the cause"]
