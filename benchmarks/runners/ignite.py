"""PyTorch-Ignite: an Engine around the user's own step."""

from __future__ import annotations

import csv

from ignite.engine import Engine, Events
from torch.nn.functional import cross_entropy

NOTES = {"typical": "CSV by a handler of three lines", "bare": "the step is the user's own code"}


def bare(work):
    batches, module, optimizer = work.batches(lambda image, label: (image, label)), work.module, work.sgd()

    def step(engine, batch):
        image, label = batch
        optimizer.zero_grad()
        loss = cross_entropy(module(image), label)
        loss.backward()
        optimizer.step()

    Engine(step).run(batches, max_epochs=1)


def typical(work, place):
    from ignite.handlers import Checkpoint, DiskSaver, ProgressBar
    from ignite.metrics import Accuracy, Average

    batches, module, optimizer = work.batches(lambda image, label: (image, label)), work.module, work.sgd()

    def step(engine, batch):
        image, label = batch
        optimizer.zero_grad()
        logits = module(image)
        loss = cross_entropy(logits, label)
        loss.backward()
        optimizer.step()
        return loss.detach(), logits.detach(), label

    trainer = Engine(step)
    Average(output_transform=lambda output: output[0]).attach(trainer, "loss")
    Accuracy(output_transform=lambda output: (output[1], output[2])).attach(trainer, "accuracy")
    ProgressBar().attach(trainer)
    saver = Checkpoint({"module": module, "optimizer": optimizer}, DiskSaver(place), n_saved=None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)

    with (place / "training.csv").open("w") as file:
        table = csv.writer(file)

        @trainer.on(Events.EPOCH_COMPLETED)
        def write(engine):
            work.losses.append(engine.state.metrics["loss"])
            table.writerow([engine.state.epoch, engine.state.metrics["loss"], engine.state.metrics["accuracy"]])

        trainer.run(batches, max_epochs=work.epochs)


def null(work):
    Engine(lambda engine, batch: {}).run(work.nothing(), max_epochs=1)
