import numpy as np

from emrun import AbstractHook


class Mixup(AbstractHook):
    """Adds the source `target`, the probabilities of the classes; in training, mixes pairs of examples of a batch.

    The random numbers are NumPy's global ones, which emrun seeds and keeps in checkpoints: a resume is exact.
    """

    reads = ["image", "label"]

    def __init__(self, alpha=0.2, classes=10):
        super().__init__()
        self.alpha = alpha
        self.classes = classes

    def before_batch(self, batch):
        images, targets = batch["image"], np.eye(self.classes, dtype=np.float32)[batch["label"]]
        if self.main_loop.training:
            share = np.float32(np.random.beta(self.alpha, self.alpha))
            share = max(share, 1 - share)  # the first label is the main one, which the accuracy looks at
            other = np.random.permutation(len(images))
            images = share * images + (1 - share) * images[other]
            targets = share * targets + (1 - share) * targets[other]
        batch.update(image=images, target=targets)  # new arrays: those of the stream stay as they are
