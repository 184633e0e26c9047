"""Writes scikit-learn's digits as tar shards of PNG images and labels: three for training, one for validation."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
pixels = (digits.images * 255 / 16).astype(np.uint8)


def write(path, rows):
    with tarfile.open(path, "w") as archive:
        for row in rows:
            image = io.BytesIO()
            Image.fromarray(pixels[row]).save(image, "PNG")
            for field, content in (("png", image.getvalue()), ("cls", b"%d" % digits.target[row])):
                member = tarfile.TarInfo(f"{row:04d}.{field}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


Path("data").mkdir(exist_ok=True)
for shard in range(3):
    write(f"data/train-{shard}.tar", range(shard * 400, (shard + 1) * 400))
write("data/valid.tar", range(1200, 1500))
