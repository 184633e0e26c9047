import numpy as np
from sklearn.datasets import load_digits

import emrun


class Weighted(emrun.AbstractDataset):
    """Digits of which some are rare in the data; training draws each class equally often."""

    def __init__(self, rare=(1, 7, 8), one_of=20, balanced=True, batch_size=32):
        images, labels = load_digits(return_X_y=True)
        images, number = (images / 16).astype(np.float32), np.arange(len(labels))
        valid = number % 5 == 0
        train = ~valid & (~np.isin(labels, rare) | (number % one_of == 1))
        self.parts = {"train": (images[train], labels[train]), "valid": (images[valid], labels[valid])}
        counts = np.bincount(labels[train])
        weights = 1 / counts[labels[train]] if balanced else np.ones(train.sum())
        self.shares, self.batch_size = weights / weights.sum(), batch_size

    def train_stream(self, ctx):
        images, labels = self.parts["train"]
        for rows in ctx.batches(len(labels), self.batch_size):  # counts the batches, so that a resume is exact
            drawn = ctx.rng.choice(len(labels), size=len(rows), p=self.shares) if ctx.epoch else rows
            yield {"image": images[drawn], "label": labels[drawn]}

    def valid_stream(self, ctx):
        images, labels = self.parts["valid"]
        for rows in ctx.batches(len(labels), self.batch_size):
            yield {"image": images[rows], "label": labels[rows]}
