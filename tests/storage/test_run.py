"""The run directory: made, written and described by one process."""

import errno
import os

import pytest
from ruamel.yaml import YAML

from emrun.errors import StorageError
from emrun.storage.lock import RunLock
from emrun.storage.run import create_run, holds_run


def create(tmp_path, output_dir=None):
    return create_run("name: digits\n", "digits", output_root=tmp_path / "log", output_dir=output_dir, seed=42)


def trace_of(run):
    return YAML(typ="safe").load(run.directory / "trace.yaml")


def test_a_run_whose_end_cannot_be_written_is_free_again(tmp_path, monkeypatch):
    run = create(tmp_path, output_dir=tmp_path / "mine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageError):
            run.end("finished", 0, None)
    RunLock(tmp_path / "mine").release()


def test_the_first_end_counts(run):
    run.trace.begin()
    run.end("failed", 1, "the model", 0, 5)
    run.end("finished", 0, "the command", 0, 6)
    trace = trace_of(run)
    assert (trace["status"], trace["exit_status"], trace["reason"], trace["iterations_done"]) == (
        "failed",
        1,
        "the model",
        5,
    )


def test_removing_deletes_the_directory_and_nothing_beside_it(tmp_path):
    run, other = create(tmp_path), create(tmp_path)
    run.remove()
    assert not run.directory.exists()
    assert holds_run(other.directory)
    with pytest.raises(StorageError, match="cannot delete"):
        run.remove()


def test_the_checkpoints_lie_in_the_directory(run):
    assert run.checkpoints == run.directory / "checkpoints"
    assert not run.checkpoints.exists()
