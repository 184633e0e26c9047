"""Keras 3 on its torch backend."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import torch

NOTES = {"bare": "its own layers, optimizer and loss", "typical": "no fsync"}


class Last(keras.optimizers.SGD):
    """Ends the process after its first update."""

    def apply(self, *args, **kwargs):
        """Make the update."""
        super().apply(*args, **kwargs)
        os._exit(0)


def model(work, **arguments):
    layers = [
        keras.layers.Input((784,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
    made = keras.Sequential(layers)
    made.set_weights([w.T.numpy() if w.dim() == 2 else w.numpy() for w in work.weights()])
    optimizer = keras.optimizers.SGD if work.optimizer is torch.optim.SGD else Last
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer(work.rate), loss, **arguments)
    return made


def batches_of(work, epochs):
    batches = work.batches(lambda image, label: (image, label))
    for _ in range(epochs):
        yield from batches


def take_back(work, made):
    weights = [torch.from_numpy(w.T if w.ndim == 2 else w) for w in made.get_weights()]
    with torch.no_grad():
        for mine, theirs in zip(work.module.parameters(), weights, strict=True):
            mine.copy_(theirs)


def bare(work):
    made = model(work)
    made.fit(batches_of(work, 1), epochs=1, verbose=0)
    take_back(work, made)


def typical(work, place):
    made = model(work, metrics=["accuracy"])
    callbacks = [
        keras.callbacks.CSVLogger(str(place / "training.csv")),
        keras.callbacks.ModelCheckpoint(str(place / "{epoch}.keras")),
    ]
    batches = batches_of(work, work.epochs)
    history = made.fit(batches, steps_per_epoch=work.steps, epochs=work.epochs, verbose=1, callbacks=callbacks)
    work.losses.extend(history.history["loss"])
    take_back(work, made)
