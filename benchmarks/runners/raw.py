"""The plain loop with which all runners are compared."""

from __future__ import annotations

import csv
import os
import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

NOTES = {}


def bare(work):
    batches, module, optimizer = work.batches(lambda image, label: (image, label)), work.module, work.sgd()
    for image, label in batches:
        optimizer.zero_grad()
        loss = cross_entropy(module(image), label)
        loss.backward()
        optimizer.step()


def begun(work, place):
    bare(work)


def typical(work, place):
    from tqdm import tqdm

    batches, module, optimizer = work.batches(lambda image, label: (image, label)), work.module, work.sgd()
    with (place / "training.csv").open("w") as file:
        table = csv.writer(file)
        table.writerow(["epoch", "loss", "accuracy"])
        for epoch in range(work.epochs):
            losses, hits, count = torch.zeros(()), torch.zeros(()), 0
            for image, label in tqdm(batches, desc=f"epoch {epoch}", leave=False, file=sys.stderr):
                optimizer.zero_grad()
                logits = module(image)
                loss = cross_entropy(logits, label)
                loss.backward()
                optimizer.step()
                losses += loss.detach()
                hits += (logits.argmax(1) == label).float().mean()
                count += 1
            work.losses.append(losses.item() / count)
            table.writerow([epoch, work.losses[-1], hits.item() / count])
            with (place / f"{epoch}.pt").open("wb") as checkpoint:
                torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
                checkpoint.flush()
                os.fsync(checkpoint.fileno())


def null(work):
    def step(batch, train, stream):
        return {}

    for batch in work.nothing():
        step(batch, True, "train")


def several(work):
    """Train with DistributedDataParallel."""
    batches = work.batches(lambda image, label: (image, label))
    module, optimizer = DistributedDataParallel(work.module), work.sgd()
    for image, label in batches:
        optimizer.zero_grad()
        loss = cross_entropy(module(image), label)
        loss.backward()
        optimizer.step()
