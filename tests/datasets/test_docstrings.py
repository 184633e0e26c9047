"""The YAML in a dataset's docstring builds it, on the files that its sample config prepares."""

import runpy
from pathlib import Path

import pytest

import emrun.datasets
from emrun import create_dataset

SAMPLES = Path(__file__).parent.parent.parent / "sample_configs"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("HuggingFace", "hugging_face"),
        ("Parquet", "parquet"),
        ("Pictures", "pictures"),
        ("TarShards", "tar_shards"),
        ("TokenWindows", "token_windows"),
    ],
)
def test_the_yaml_of_a_docstring_builds_the_dataset(name, sample, tmp_path, monkeypatch, passes, yaml_of):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(SAMPLES / sample / "prepare.py"), run_name="__main__")
    dataset = create_dataset(yaml_of(getattr(emrun.datasets, name)))
    for stream in ("train", "valid"):
        (batches,) = passes(dataset, stream)
        assert len(batches) == dataset.num_batches[stream] > 0


def test_the_yaml_of_the_base_of_downloads_builds_it(yaml_of):
    config = yaml_of(emrun.datasets.DownloadableDataset)["dataset"]
    assert config.pop("class") == "my_data.Flowers"
    emrun.datasets.DownloadableDataset(**config)
