import gzip
import zlib
from pathlib import Path

import numpy as np

import emrun
from emrun.errors import ArgumentError


class Images(emrun.AbstractDataset):
    """Images and labels in IDX files, plain or gzipped; every tenth train image is held out for `valid`.

    Sources: `image`, uint8 of shape (B, 1, H, W), and `label`, int64 of shape (B,).
    """

    def __init__(self, folder: str = "data", batch_size: int = 64):
        self.batch_size = batch_size
        images, labels = read_pair(folder, "train")
        held_out = np.arange(len(labels)) % 10 == 0
        self.parts = {"train": (images[~held_out], labels[~held_out]), "valid": (images[held_out], labels[held_out])}
        self.parts["test"] = read_pair(folder, "t10k")

    @property
    def num_batches(self):
        return {name: -(-len(labels) // self.batch_size) for name, (_, labels) in self.parts.items()}

    def batches(self, ctx, part, shuffle=False):
        images, labels = self.parts[part]
        for rows in ctx.batches(len(labels), self.batch_size, shuffle=shuffle):
            yield {"image": images[rows], "label": labels[rows]}

    def train_stream(self, ctx):
        return self.batches(ctx, "train", shuffle=True)

    def valid_stream(self, ctx):
        return self.batches(ctx, "valid")

    def test_stream(self, ctx):
        return self.batches(ctx, "test")


def read_pair(folder, part):
    """Return the images and labels of a part, named as those of MNIST are."""
    found = []
    for kind, axes in (("images", 3), ("labels", 1)):
        names = [f"{part}-{kind}-idx{axes}-ubyte{ending}" for ending in ("", ".gz")]
        paths = [path for path in (Path(folder, name) for name in names) if path.exists()]
        if not paths:
            raise ArgumentError("folder", f"{folder} has neither {names[0]} nor {names[1]}")
        found.append(read_idx(paths[0], axes))
    if len(found[0]) != len(found[1]):
        raise ArgumentError("folder", f"{folder}: {len(found[0])} images of {part}, but {len(found[1])} labels")
    return found[0][:, None], found[1].astype("int64")


def read_idx(path, axes):
    """Return the array of an IDX file of bytes."""
    content = path.read_bytes()
    try:
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (OSError, EOFError, zlib.error) as error:
        raise ArgumentError("folder", f"{path}: cannot be unpacked: {error}") from error
    magic = bytes([0, 0, 8, axes])
    if content[:4] != magic:
        begins = f"{path} begins with {content[:4].hex(' ') or 'nothing'}"
        raise ArgumentError("folder", f"{begins}, not with {magic.hex(' ')}, as an IDX file of {axes} axes does")
    shape = np.frombuffer(content[4 : 4 + 4 * axes].ljust(4 * axes, b"\0"), ">u4").astype(int)
    values = content[4 + 4 * axes :]
    if len(values) != shape.prod() or not len(values):
        raise ArgumentError("folder", f"{path} has {len(values)} values, but the shape {shape.tolist()}")
    return np.frombuffer(values, np.uint8).reshape(shape)
