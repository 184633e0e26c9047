"""A checkpoint that all ranks write: the failure of one of them is told by rank 0, and nobody waits for ever."""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from in_ranks import in_ranks, results_of

from emrun.base.encoding import Rows
from emrun.base.errors import RankFailed, StorageError
from emrun.loop.ranks.shards import write_together
from emrun.ranks.group import join
from emrun.storage.checkpoints.commits import commit
from emrun.storage.checkpoints.finding import newest
from emrun.storage.checkpoints.manifest import Contents, verify
from emrun.storage.checkpoints.shards import read_tensors, write_shard
from emrun.storage.checkpoints.weights import FILE


def saved(root, pipe):
    """Write checkpoints, of which some fail; return what each raises, and what is there afterwards."""
    ranks = join()
    writers, own = ranks.apart(60), Rows(torch.full((1, 2), float(ranks.rank)), (ranks.size, 2), ranks.rank)

    def write(directory):
        return [write_shard({FILE: ({"a": own}, {})}, ranks.rank, directory)]

    def write_to_full_disk(directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / "model.safetensors"))

    def write_too_late(directory):
        if not ranks.is_first:
            os.read(pipe[0], 1)  # until rank 0 has given up
        return write(directory)

    def tried(write, writers=writers, root=root):
        how = {"epoch": 1, "iteration": 5, "names": ["latest"]}
        try:
            place = write_together(writers, write, (lambda save: commit(root, save, **how)) if ranks.is_first else None)
        except (StorageError, RankFailed) as error:
            return error
        return place and place.name

    found = [
        tried(write),
        tried(write_to_full_disk if ranks.rank == 1 else write),
        tried(write_to_full_disk if ranks.is_first else write),
        tried(write, root=root / "nowhere/checkpoints"),
        tried(write),
        tried(write_too_late, ranks.apart(0.2)),
    ]
    if ranks.is_first:
        os.write(pipe[1], b".")
    return found


def test_the_failure_of_a_rank_costs_that_checkpoint_only(tmp_path):
    first, other = in_ranks(2, saved, tmp_path / "checkpoints", os.pipe())
    assert [first[0], first[4]] == ["it-00000005", "it-00000005-2"]
    assert (first[1].errno, first[2].errno) == (errno.ENOSPC, errno.ENOSPC)
    assert str(first[1]).startswith("rank 1 of 2: the disk is full: ")
    assert "cannot write a checkpoint in" in str(first[3])
    assert "another rank does not answer" in str(first[5])
    assert other[:5] == [None] * 5  # rank 0 tells what has failed
    place = newest(tmp_path / "checkpoints")
    assert place.name == first[4]
    assert sorted(verify(place).files) == ["model-0.safetensors", "model-1.safetensors", "shards.json"]
    assert read_tensors(place, FILE)["a"][:].tolist() == [[0, 0], [1, 1]]
    assert Contents.of(tmp_path / "checkpoints").asides == []


STEPS = (os, "fsync"), *((Path, name) for name in ("mkdir", "rename", "replace", "rmdir", "symlink_to", "unlink"))


def killed(root, which, step):
    """Write two checkpoints; kill a rank at a step of the second one. Return the number of steps."""
    ranks = join()
    writers, steps = ranks.apart(60), 0

    def save(value):
        own = Rows(torch.full((1, 2), value + ranks.rank), (2, 2), ranks.rank)
        how = {"epoch": 1, "iteration": int(value), "names": ["latest"]}
        write_together(
            writers,
            lambda directory: [write_shard({FILE: ({"a": own}, {})}, ranks.rank, directory)],
            (lambda save: commit(root, save, **how)) if ranks.is_first else None,
        )

    def counted(function):
        def call(*arguments, **keywords):
            nonlocal steps
            steps += 1
            if (ranks.rank, steps) == (which, step):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return call

    save(0.0)
    for owner, name in STEPS:
        setattr(owner, name, counted(getattr(owner, name)))
    save(10.0)
    return steps


@pytest.mark.campaign
@pytest.mark.parametrize("which", [0, 1])
def test_a_checkpoint_is_whole_or_absent_wherever_a_rank_is_killed(tmp_path, which):
    step, is_killed, seen = 0, True, set()
    while is_killed:
        step += 1
        root = tmp_path / str(step)
        is_killed = results_of(2, killed, root, which, step)[which] == -signal.SIGKILL
        [[first, _], [other, _]] = read_tensors(newest(root), FILE)["a"][:].tolist()
        assert other == first + 1
        seen.add(first)
    assert seen == {0, 10}
