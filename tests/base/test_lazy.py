"""torchvision is imported, also beside a build of torch that its operators were not compiled for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

VISION = Path(sys.prefix) / "vision"
SCRIPT = """
import torch
from emrun.config.import_finder import locate
from emrun.datasets import ImageFolder
print(locate("torchvision.models.resnet18")().fc.out_features)
v2, tv_tensors = locate("torchvision.transforms.v2"), locate("torchvision.tv_tensors")
print(v2.Resize(4)(tv_tensors.Image(torch.zeros(3, 8, 8, dtype=torch.uint8))).shape)
"""


@pytest.mark.skipif(not (VISION / "torchvision").is_dir(), reason="torchvision is not installed for the tests")
def test_transforms_and_models_work_beside_any_build_of_torch():
    environment = {**os.environ, "PYTHONPATH": str(VISION)}  # without the help of the other tests
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == ["1000", "torch.Size([3, 4, 4])"]
