"""Which sources of a sample are sorted."""

import numpy as np
import torch

from emrun.diagnosis.values import sorted_sources


def found(**sources):
    return sorted_sources({name: values[i : i + 5] for name, values in sources.items()} for i in range(0, 20, 5))


def test_sorted_labels_are_found():
    labels = np.repeat([0, 1], 10)
    assert found(array=labels, tensor=torch.tensor(labels), list=labels.tolist(), one=np.zeros(20, int)) == [
        "array", "tensor", "list", "one",
    ]  # fmt: skip


def test_other_sources_are_not_reported():
    rng = np.random.default_rng(0)
    assert not found(
        shuffled=rng.integers(3, size=20),
        number=np.arange(20),
        real=np.zeros(20),
        images=np.zeros((20, 2), int),
        text=["a"] * 20,
        ragged=[[1]] * 10 + [[1, 2]] * 10,
    )


def test_few_values_may_be_sorted_by_chance():
    assert not sorted_sources([{"label": [0, 0, 1]}])
