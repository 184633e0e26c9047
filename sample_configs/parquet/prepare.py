"""Writes scikit-learn's digits as Parquet files: two for training, one for validation."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))  # so that each row group has examples of all classes
images = (digits.data[order] / 16).astype(np.float32)
table = pa.table(
    {
        "image": pa.FixedSizeListArray.from_arrays(pa.array(images.ravel()), 64),
        "label": digits.target[order],
    }
)
Path("data").mkdir(exist_ok=True)
pq.write_table(table[:700], "data/train-0.parquet", row_group_size=200)
pq.write_table(table[700:1400], "data/train-1.parquet", row_group_size=200)
pq.write_table(table[1400:], "data/valid.parquet")
