"""The hook behind the config key `deterministic`: torch kernels that give the same numbers each time."""

from __future__ import annotations

import os

import torch

from emrun.hook import AbstractHook


class DeterministicKernels(AbstractHook):
    """Switches torch's deterministic algorithms on for the training, and restores the previous setting afterwards."""

    def before_training(self) -> None:
        """Switch the deterministic algorithms on."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
        self._before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    def after_training(self, success: bool) -> None:
        """Restore the previous setting."""
        torch.use_deterministic_algorithms(self._before[0])
        torch.backends.cudnn.benchmark = self._before[1]
