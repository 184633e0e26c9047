import numpy as np
from sklearn.datasets import load_breast_cancer


class Tumours:
    """569 tumours, 30 measurements each; malignant (0) or benign (1)?"""

    def __init__(self, batch_size=16):
        self.batch_size = batch_size
        data = load_breast_cancer()
        features = (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
        held_out = np.arange(len(features)) % 5 == 0
        self.train = features[~held_out], data.target[~held_out]
        self.valid = features[held_out], data.target[held_out]

    def train_stream(self, ctx):
        features, labels = self.train
        for rows in ctx.batches(len(features), self.batch_size, shuffle=True):
            yield {"features": features[rows], "label": labels[rows]}

    def valid_stream(self, ctx):
        features, labels = self.valid
        for rows in ctx.batches(len(features), self.batch_size):
            yield {"features": features[rows], "label": labels[rows]}
