"""What the ranks get of each dataset is what one process gets: no row is missing, and none comes twice."""

import runpy
from collections import defaultdict

import numpy as np
import pytest
from campaign import thinned
from doubles import stream_of
from samples import SAMPLES

from emrun import create_dataset
from emrun.ranks.group import Ranks
from emrun.ranks.shares import rows_in

CONFIGS = ("majority.yaml", "digits_mlp.yaml", "mixed.yaml", *(
    f"{name}/config.yaml"
    for name in (
        *("hugging_face", "image_folder", "parquet", "pictures", "table", "tar_shards", "token_windows"),
        "torch_dataset",
    )
))  # fmt: skip

CASES = [
    *thinned([(config, 0) for config in CONFIGS], [("table/config.yaml", 0), ("token_windows/config.yaml", 0)]),
    ("mixed.yaml", 1),
]


def rows_of(stream):
    """Return source -> the values of each batch, without those that count nothing."""
    found = defaultdict(list)
    with stream:
        for batch in stream:
            for name, values in batch.items():
                found[name].append(np.asarray(values)[: rows_in(batch)])
    return found


@pytest.mark.parametrize(("config", "workers"), CASES)
def test_the_shares_of_two_ranks_make_up_the_batches_of_one(config, workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend((SAMPLES / config).parent)
    if (prepare := (SAMPLES / config).with_name("prepare.py")).exists():
        runpy.run_path(str(prepare), run_name="__main__")
    for stream in ("train", "valid"):
        dataset = create_dataset(SAMPLES / config)
        whole = rows_of(stream_of(dataset, stream))
        shares = [rows_of(stream_of(dataset, stream, ranks=Ranks(rank, 2), workers=workers)) for rank in range(2)]
        assert len(whole) > 0
        for name, batches in whole.items():
            for one, *several in zip(batches, *(each[name] for each in shares), strict=True):
                assert np.array_equal(np.concatenate(several), one)
