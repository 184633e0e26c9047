"""Batches in types that can be saved, and back."""

import numpy as np
import pytest
import torch

from emrun import AbstractModel
from emrun.censor import Censor
from emrun.storage.capsules import Step, find_capsule, keep_failure, read_capsule
from emrun.storage.draws import Draws
from emrun.storage.run import create_run

STEP = Step("train", True, False, 1, 7, 2, 3, None, None, None)


class Model(AbstractModel):
    input_names = output_names = ()
    has_updated = False

    def run(self, batch, train, stream):
        return {}

    def save(self, directory):
        (directory / "weights.txt").write_text("1 2 3")

    def load(self, directory):
        pass


@pytest.fixture
def run(tmp_path):
    run = create_run("seed: 1\n", "run", output_root=tmp_path, output_dir=tmp_path / "run", seed=1)
    yield run
    run.release()


def keep(run, error=None, batch=None, model=None, step=STEP, **others):
    options = {"censor": Censor(), "draws": Draws(), "hook": None, "checkpoint": None, **others}
    return keep_failure(run.directory, error or ValueError("bad"), step, batch or {}, model or Model(), **options)


def kept(run, **arguments):
    place = keep(run, **arguments)
    assert place is not None
    return read_capsule(*find_capsule(place))


BATCH = {
    "tensor": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
    "gradient": torch.ones(2, requires_grad=True),
    "float16": np.array([1.5, np.inf], np.float16),
    "unsigned": np.array([1, 2**16 - 1], np.uint16),
    "big endian": np.array([1.5, 2.5], ">f8"),
    "reversed": np.arange(2)[::-1],
    "flags": np.array([True, False]),
    "complex": np.array([1j, 2.0]),
    "words": np.array(["a", "bc"]),
    "texts": ["x", "äöü"],
    "numbers": [1, 2.5],
    "ragged": [np.arange(2), torch.arange(3)],
    "nested": [{"a": np.ones(1)}, {"a": np.zeros(2)}],
    "nothing": [None, None],
}


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, equal_nan=True)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype.newbyteorder("=") and np.array_equal(one, other)
    return one == other


@pytest.mark.parametrize("name", BATCH)
def test_a_source_comes_back_as_it_was(run, name):
    found = kept(run, batch={name: BATCH[name]}).batch[name]
    assert type(found) is type(BATCH[name])
    assert equal(found, BATCH[name])


def test_what_cannot_be_stored_safely_is_left_out_and_named(run):
    objects = np.array([object(), None])
    batch = {"x": [1, 2], "objects": objects, "dates": np.array(["2026-01-01"] * 2, "M8[D]"), "some": [object(), 1]}
    found = kept(run, batch=batch)
    assert list(found.batch) == ["x"]
    assert list(found.facts["left_out"]) == ["objects", "dates", "some"]
    assert found.facts["left_out"]["some"] == "source 'some'[0] is object, which cannot be saved safely"
