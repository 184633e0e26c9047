import torch
from torch import nn


class Embeddings(nn.Module):
    """Scores of all entities, or of candidates, as answers to queries."""

    def __init__(self, dataset, size=64, dropout=0.0):
        super().__init__()
        self.entities = nn.Embedding(len(dataset.entities), size)
        self.relations = nn.Embedding(dataset.relation_count, size)
        self.dropout = nn.Dropout(dropout)
        for each in (self.entities, self.relations):
            nn.init.xavier_normal_(each.weight)

    def forward(self, entity, relation, sign, candidates=None):  # (B,), (B,), (B,), (B, C)
        entities, relations = self.dropout(self.entities(entity)), self.dropout(self.relations(relation))
        query = self.query(entities, relations, sign[:, None])  # (B, size)
        if candidates is None:
            return {"scores": self.scores(query, self.entities.weight)}  # (B, entities)
        return {"scores": self.scores(query[:, None], self.entities(candidates))[:, 0]}  # (B, C)

    def scores(self, query, entities):
        return query @ entities.mT


class DistMult(Embeddings):
    """The sum over the products of subject, relation and object."""

    def query(self, entity, relation, sign):
        return entity * relation


class ComplEx(Embeddings):
    """The real part of this sum for complex numbers, the object conjugated; the second halves are imaginary parts."""

    def query(self, entity, relation, sign):
        (a, b), (c, d) = entity.chunk(2, 1), relation.chunk(2, 1)
        d = d * sign  # for the subject, it is the relation that is conjugated
        return torch.cat([a * c - b * d, a * d + b * c], 1)


class TransE(Embeddings):
    """The distance from subject + relation to object, negated."""

    def query(self, entity, relation, sign):
        return entity + relation * sign

    def scores(self, query, entities):
        return -torch.cdist(query, entities, p=1)


def n3(entity, relation, module):
    """Return the sum of the cubes of the embeddings of each query."""
    parts = module.entities(entity), module.relations(relation)
    return sum(each.abs().pow(3).sum(1) for each in parts)


def rank(scores, target, known):
    """Return the place of each answer among the entities that are not `known`; of equal scores, the mean rounded."""
    own, others = scores.gather(1, target[:, None]), scores.masked_fill(known, -torch.inf)
    return (1 + (others > own).sum(1) + (others == own).sum(1) // 2).float()


def reciprocal_rank(scores, target, known):
    return 1 / rank(scores, target, known)


class Hits:
    """Returns 1 for each answer among the first k, else 0."""

    def __init__(self, k):
        self.k = k

    def __call__(self, scores, target, known):
        return (rank(scores, target, known) <= self.k).float()
