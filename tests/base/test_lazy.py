"""torchvision is imported, also beside a build of torch that its operators were not compiled for."""

import sys
from pathlib import Path

import pytest

VISION = Path(sys.prefix) / "vision"
SCRIPT = """
import sys
import warnings

import torch
from emrun.config.import_finder import locate
from emrun.datasets import ImageFolder

warnings.simplefilter("error")
sys.meta_path[:] = [each for each in sys.meta_path if getattr(each, "__name__", "") != "TorchvisionFinder"]
assert "torchvision" not in sys.modules
print(locate("torchvision.models.resnet18")().fc.out_features)
v2, tv_tensors = locate("torchvision.transforms.v2"), locate("torchvision.tv_tensors")
print(v2.Resize(4)(tv_tensors.Image(torch.zeros(3, 8, 8, dtype=torch.uint8))).shape)
"""


@pytest.mark.skipif(not (VISION / "torchvision").is_dir(), reason="torchvision is not installed for the tests")
def test_transforms_and_models_work_beside_any_build_of_torch(tmp_path, warm):
    """In a process that has not imported torchvision, without what lets the other tests import it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    found = warm.run([str(tmp_path / "script.py")], tmp_path, timeout=100)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["1000", "torch.Size([3, 4, 4])"]
