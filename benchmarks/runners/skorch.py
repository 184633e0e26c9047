"""skorch: a scikit-learn estimator around a module."""

from __future__ import annotations

import torch
from skorch import NeuralNet
from skorch.callbacks import Checkpoint, PassthroughScoring, ProgressBar

from runners.work import Mlp

NOTES = {
    "bare": "callbacks disabled",
    "typical": "no CSV (history.json with each checkpoint), no fsync",
    "null": "`train_step` returns a loss, whose value is recorded",
}


class Net(NeuralNet):
    """Iterates over the batches as they are."""

    batches: object

    def get_dataset(self, X, y=None):
        """Return nothing to split."""
        return X

    def get_iterator(self, dataset, training=False):
        """Return the batches."""
        return self.batches


class Scored(Net):
    """Records the accuracy of each batch."""

    def train_step(self, batch, **arguments):
        """Make the step and store the accuracy."""
        step = super().train_step(batch, **arguments)
        self.history.record_batch("train_accuracy", (step["y_pred"].argmax(1) == batch[1]).float().mean().item())
        return step


class Nothing(Net):
    """Does nothing."""

    def train_step(self, batch, **arguments):
        """Return the loss, which skorch requires."""
        return {"loss": ZERO}


ZERO = torch.zeros(())


def trained(kind, work, batches, **arguments):
    """Train on the batches and return the net."""
    net = kind(
        Mlp,
        torch.nn.CrossEntropyLoss,
        optimizer=work.optimizer,
        lr=work.rate,
        max_epochs=work.epochs,
        train_split=None,
        verbose=0,
        **arguments,
    )
    net.batches = batches
    net.initialize()
    net.module_.load_state_dict(work.module.state_dict())
    work.module = net.module_
    return net.partial_fit(batches)


def bare(work):
    trained(Net, work, work.batches(lambda image, label: (image, label)), callbacks="disable")


def typical(work, place):
    batches = work.batches(lambda image, label: (image, label))
    callbacks = [
        ("mean_accuracy", PassthroughScoring("train_accuracy", lower_is_better=False, on_train=True)),
        ("bar", ProgressBar(batches_per_epoch=len(batches))),
        ("checkpoint", Checkpoint(dirname=str(place), monitor=None, f_params="{last_epoch[epoch]}.pt")),
    ]
    net = trained(Scored, work, batches, callbacks=callbacks)
    work.losses.extend(net.history[:, "train_loss"])


def null(work):
    trained(Nothing, work, work.nothing(), callbacks="disable")
