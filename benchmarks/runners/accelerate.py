"""Accelerate: the user's own loop, with model and optimizer prepared."""

from __future__ import annotations

import csv
import sys

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

NOTES = {
    "bare": "the loop is the user's own code",
    "typical": "bar, means and CSV as in the raw loop; `save_state` with random states, no fsync",
}


def bare(work):
    batches = work.batches(lambda image, label: (image, label))
    accelerator = Accelerator(cpu=True)
    module, optimizer = accelerator.prepare(work.module, work.sgd())
    for image, label in batches:
        optimizer.zero_grad()
        loss = cross_entropy(module(image), label)
        accelerator.backward(loss)
        optimizer.step()


def typical(work, place):
    from tqdm import tqdm

    batches = work.batches(lambda image, label: (image, label))
    accelerator = Accelerator(cpu=True)
    module, optimizer = accelerator.prepare(work.module, work.sgd())
    with (place / "training.csv").open("w") as file:
        table = csv.writer(file)
        for epoch in range(work.epochs):
            losses, hits, count = torch.zeros(()), torch.zeros(()), 0
            for image, label in tqdm(batches, desc=f"epoch {epoch}", leave=False, file=sys.stderr):
                optimizer.zero_grad()
                logits = module(image)
                loss = cross_entropy(logits, label)
                accelerator.backward(loss)
                optimizer.step()
                losses += loss.detach()
                hits += (logits.argmax(1) == label).float().mean()
                count += 1
            work.losses.append(losses.item() / count)
            table.writerow([epoch, work.losses[-1], hits.item() / count])
            accelerator.save_state(str(place / str(epoch)))


several = bare  # `prepare` makes the module distributed
