"""The device in the trace of a run."""

import pytest
import torch

from emrun.training.create import device_of, unused_gpu


class Model:
    def __init__(self, device):
        self.device = device


def test_a_cpu_is_named_with_its_threads():
    count = torch.get_num_threads()
    try:
        for threads, text in ((1, "cpu, 1 thread"), (2, "cpu, 2 threads")):
            torch.set_num_threads(threads)
            assert device_of(Model(torch.device("cpu"))) == text
    finally:
        torch.set_num_threads(count)


def test_a_gpu_is_named_with_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H200 number {device.index}")
    assert device_of(Model(torch.device("cuda", 1))) == "cuda:1, H200 number 1"


@pytest.mark.parametrize(
    ("device", "has_gpu", "is_said"), [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)]
)
def test_a_gpu_that_a_training_on_the_cpu_leaves_unused_is_said(device, has_gpu, is_said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    said = unused_gpu(Model(torch.device(device)))
    assert (said is not None) == is_said
    assert said is None or "the GPU (H200) is not used; model.device=auto" in said
    assert unused_gpu(object()) is None


def test_a_model_need_not_have_a_device():
    assert device_of(object()) is None
    assert device_of(Model("cpu")) is None
