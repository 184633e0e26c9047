"""Metrics: one number an example, or one a position of an example."""

import pytest
import torch

from emrun.metrics import accuracy, errors, top_k

LOGITS = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0]])
LABELS = torch.tensor([1, 1, 0, 2])


def test_accuracy_is_one_where_the_largest_logit_is_that_of_the_label():
    assert accuracy(LOGITS, LABELS).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_errors_are_one_where_accuracy_is_zero():
    assert errors(LOGITS, LABELS).tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("k", "expected"), [(1, [1.0, 0.0, 0.0, 1.0]), (2, [1.0, 1.0, 0.0, 1.0]), (3, [1.0] * 4), (5, [1.0] * 4)]
)
def test_top_k_is_one_where_the_label_is_among_the_k_largest(k, expected):
    assert top_k(LOGITS, LABELS, k).tolist() == expected


def test_top_k_takes_five_by_default():
    logits = torch.arange(8.0).expand(8, 8)
    assert top_k(logits, torch.arange(8)).tolist() == [0.0] * 3 + [1.0] * 5


@pytest.mark.parametrize("metric", [accuracy, errors, top_k])
@pytest.mark.parametrize(
    ("logits", "label"), [((4, 1), (4, 1)), ((4, 1), (4,)), ((4, 3), (4, 1)), ((3, 3), (3, 3)), ((4,), (4,))]
)
def test_shapes_that_torch_would_broadcast_to_a_wrong_number_are_an_error(metric, logits, label):
    with pytest.raises(ValueError, match=r"logits of shape \(.*\) do not fit labels of shape \(.*compares it with 0"):
        metric(torch.zeros(logits), torch.zeros(label))


def test_no_label_is_among_no_logits():
    with pytest.raises(ValueError, match="k is 0; at least the largest logit must count"):
        top_k(LOGITS, LABELS, 0)


def test_top_one_is_accuracy():
    logits, labels = torch.rand(64, 10), torch.randint(10, (64,))
    assert torch.equal(top_k(logits, labels, 1), accuracy(logits, labels))


@pytest.mark.parametrize("shape", [(), (7,), (4, 5)], ids=["vectors", "sequences", "images"])
@pytest.mark.parametrize("metric", [accuracy, errors, top_k])
def test_labels_may_have_positions_behind_the_classes_of_the_logits(metric, shape):
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(3, 6, *shape, generator=generator)
    labels = torch.randint(6, (3, *shape), generator=generator)
    found = metric(logits, labels)
    assert found.shape == labels.shape
    flat = metric(logits.movedim(1, -1).reshape(-1, 6), labels.reshape(-1))
    assert torch.equal(found.reshape(-1), flat)
    assert 0 < found.sum() < found.numel() or found.numel() == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("metric", [accuracy, errors, top_k])
def test_a_metric_has_the_dtype_of_the_logits(metric, dtype):
    assert metric(LOGITS.to(dtype), LABELS).dtype is dtype
