"""Kernels of torch that give the same numbers each time: the hook behind the key `deterministic`."""

from __future__ import annotations

import os

import torch

from emrun.hook import AbstractHook


class DeterministicKernels(AbstractHook):
    """Switches torch's deterministic algorithms on for a training, and back at its end."""

    def before_training(self) -> None:
        """Switch them on."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it
        self._before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    def after_training(self, success: bool) -> None:
        """Switch them back."""
        torch.use_deterministic_algorithms(self._before[0])
        torch.backends.cudnn.benchmark = self._before[1]
