"""PredictedArrays: what `emrun.predict` returns."""

import numpy as np
import pytest

from emrun import MainLoop
from emrun.base.errors import UsageError
from emrun.hooks._predicted_arrays import PredictedArrays


class Parts:
    """Two batches whose texts and lists have different lengths."""

    def valid_stream(self):
        yield {"x": np.ones((2, 3), np.float32), "id": ["a", "b"], "parts": [[1.0], [1.0, 2.0]]}
        yield {"x": np.zeros((1, 3), np.float32), "id": ["longer"], "parts": [[3.0]]}

    train_stream = valid_stream


@pytest.fixture
def arrays_of(scripted, tmp_path, monkeypatch):
    def run(*variables):
        monkeypatch.chdir(tmp_path)
        hook = PredictedArrays("valid", variables, classes=False, limit=3)
        loop = MainLoop(scripted(lambda batch: {"y": batch["x"]}), Parts(), [hook], on_unused_sources="ignore")
        loop.run_evaluation("valid")
        assert not list(tmp_path.iterdir())
        assert hook.rows == 3
        return hook.arrays

    return run


def test_values_keep_their_types_and_texts_their_lengths(arrays_of):
    found = arrays_of("y")
    assert [(name, each.dtype.str, each.shape) for name, each in found.items()] == [
        ("id", "<U6", (3,)), ("y", "<f4", (3, 3)),
    ]  # fmt: skip
    assert found["id"].tolist() == ["a", "b", "longer"]
    assert found["y"][:, 0].tolist() == [1.0, 1.0, 0.0]


def test_values_of_different_shapes_are_an_error(arrays_of):
    with pytest.raises(UsageError, match=r"no array can hold 'parts', whose values .*: leave it out of variables, or"):
        arrays_of("parts")
