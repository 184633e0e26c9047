"""The environment: versions and devices."""

from importlib import metadata

import torch

import emrun
from emrun.diagnosis.environment import inspect_environment


def test_versions_and_devices_are_found():
    found = inspect_environment()
    assert found.problems == []
    assert found.facts["emrun"] == emrun.__version__
    assert found.facts["PyTorch"].startswith(torch.__version__)
    packages = ("scikit-learn", "torchmetrics")
    assert found.facts["extra metrics"] == ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    assert not {"extra test", "extra dev", "extra bench"} & set(found.facts)
    assert found.devices[0]["device"] == "cpu"


def test_a_missing_library_of_an_extra_is_a_fact_with_its_command(monkeypatch):
    def version(name, version=metadata.version):
        if name == "pyarrow":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", version)
    found = inspect_environment()
    assert "pyarrow is missing" in found.facts["extra data"]
    assert found.facts["extra data"].endswith(" (pip install 'emrun[data]')")
    assert found.problems == []
