"""Writes the 1,797 digits of scikit-learn, of 8 x 8 pixels, as gzipped IDX files with the names of MNIST."""

import gzip
import struct
from pathlib import Path

from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
arrays = {"images-idx3": (images.reshape(-1, 8, 8) * 255 / 16).astype("uint8"), "labels-idx1": labels.astype("uint8")}
Path("data").mkdir(exist_ok=True)
for name, array in arrays.items():
    for part, rows in (("train", array[:1400]), ("t10k", array[1400:])):
        header = bytes([0, 0, 8, rows.ndim]) + struct.pack(f">{rows.ndim}I", *rows.shape)
        Path(f"data/{part}-{name}-ubyte.gz").write_bytes(gzip.compress(header + rows.tobytes(), mtime=0))
