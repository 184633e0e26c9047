"""The device in the trace of a run."""

import torch

from emrun.training.device import device_of


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


def test_a_model_need_not_have_a_device():
    assert device_of(object()) is None
    assert device_of(Model("cpu")) is None
