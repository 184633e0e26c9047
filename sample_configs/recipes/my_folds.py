import numpy as np
from sklearn.datasets import load_digits

import emrun


class Folds(emrun.AbstractDataset):
    """Digits: one of several equal parts is `valid`, the others are `train`."""

    def __init__(self, fold=0, folds=5, batch_size=32):
        self.images, self.labels = load_digits(return_X_y=True)
        self.images = (self.images / 16).astype(np.float32)
        parts = np.random.default_rng(0).permutation(len(self.labels)) % folds  # the same parts for each fold and seed
        self.rows = {"train": np.flatnonzero(parts != fold), "valid": np.flatnonzero(parts == fold)}
        self.batch_size = batch_size

    def stream(self, ctx, name, shuffle=False):
        own = self.rows[name]
        for rows in ctx.batches(len(own), self.batch_size, shuffle=shuffle):
            yield {"image": self.images[own[rows]], "label": self.labels[own[rows]]}

    def train_stream(self, ctx):
        return self.stream(ctx, "train", shuffle=True)

    def valid_stream(self, ctx):
        return self.stream(ctx, "valid")
