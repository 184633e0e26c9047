from pathlib import Path
from typing import Literal

import numpy as np

import emrun
from emrun.errors import ArgumentError


class Triples(emrun.AbstractDataset):
    """Two queries for each triple, for its object and for its subject; with KvsAll, each query once.

    Sources: `entity`, `relation`, `sign` (1: for the object, -1: for the subject) and `target`, the answer. `target` is
    a share for each entity with KvsAll, and 0 with negative sampling: the answer's place among the `candidates`. In
    evaluations, `known` (B, entities) has the other answers that are true.
    """

    def __init__(
        self,
        train: str,
        valid: str,
        test: str,
        type: Literal["KvsAll", "1vsAll", "negative_sampling"] = "KvsAll",
        reciprocal: bool = False,
        negatives: int = 32,
        sampling: Literal["uniform", "frequency"] = "uniform",
        batch_size: int = 128,
    ):
        files = {"train": train, "valid": valid, "test": test}
        triples = {name: read(name, path) for name, path in files.items()}
        self.entities = numbered(each for s, _, o in triples["train"] for each in (s, o))
        relations = numbered(relation for _, relation, _ in triples["train"])
        self.relation_count = len(relations) * (1 + reciprocal)
        self.queries, self.known = {}, {}
        for name, path in files.items():
            for line, (s, r, o) in enumerate(triples[name], 1):
                for each, there in ((s, self.entities), (r, relations), (o, self.entities)):
                    if each not in there:
                        raise ArgumentError(name, f"{path}:{line}: {each!r} is not in the train triples, {train}")
            s, r, o = np.array([(self.entities[s], relations[r], self.entities[o]) for s, r, o in triples[name]]).T
            one, back = np.ones_like(s), r + len(relations) if reciprocal else r
            queries = [(s, r, one, o), (o, back, one if reciprocal else -one, s)]
            self.queries[name] = np.concatenate([np.stack(each, 1) for each in queries])
            for *query, answer in self.queries[name].tolist():
                self.known.setdefault(tuple(query), set()).add(answer)
            if name == "train":
                self.answers = {query: set(answers) for query, answers in self.known.items()}
        counts = np.bincount(self.queries["train"][:, 0]) if sampling == "frequency" else np.ones(len(self.entities))
        self.up_to = np.cumsum(counts / counts.sum())
        if type == "KvsAll":
            self.queries["train"] = np.array(list(self.answers))
        self.type, self.negatives, self.batch_size = type, negatives, batch_size

    def train_stream(self, ctx):
        queries = self.queries["train"]
        for rows in ctx.batches(len(queries), self.batch_size, shuffle=True):
            batch = dict(zip(("entity", "relation", "sign", "target"), queries[rows].T, strict=False))
            if self.type == "KvsAll":
                target = self.mask(queries[rows], self.answers).astype(np.float32)
                batch["target"] = target / target.sum(1, keepdims=True)
            elif self.type == "negative_sampling":
                drawn = np.stack([ctx.rng_for(row).random(self.negatives) for row in rows])
                wrong = np.searchsorted(self.up_to[:-1], drawn, side="right")
                batch["candidates"] = np.concatenate([batch["target"][:, None], wrong], 1)
                batch["target"] = np.zeros_like(batch["target"])
            yield batch

    def valid_stream(self, ctx):
        return self.evaluated("valid", ctx)

    def test_stream(self, ctx):
        return self.evaluated("test", ctx)

    def evaluated(self, name, ctx):
        for rows in ctx.batches(len(self.queries[name]), self.batch_size):
            entity, relation, sign, target = self.queries[name][rows].T
            known = self.mask(self.queries[name][rows], self.known)
            known[np.arange(len(rows)), target] = False
            yield {"entity": entity, "relation": relation, "sign": sign, "target": target, "known": known}

    def mask(self, queries, answers):
        """Return for each query which entities are answers."""
        found = np.zeros((len(queries), len(self.entities)), bool)
        for row, query in enumerate(queries[:, :3].tolist()):
            found[row, list(answers[tuple(query)])] = True
        return found


def numbered(names):
    return {name: number for number, name in enumerate(sorted(set(names)))}


def read(argument, path):
    """Return the triples of a file."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            triples = [line.rstrip("\n").split("\t") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(argument, f"{path} cannot be read: {error}") from error
    for number, triple in enumerate(triples or [[]], 1):
        if len(triple) != 3 or not all(map(str.strip, triple)):
            what = "is not subject, relation and object with tabs between them"
            raise ArgumentError(argument, f"{path}:{number}: {triple} {what}")
    return triples
