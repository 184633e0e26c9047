import numpy as np
import torch
from torch import nn

KINDS = 4  # of nodes


def molecule(rng):
    """Return nodes and edges of a random graph, and whether its ring has two nodes of kind 0 side by side."""
    size, ring = rng.integers(8, 20), rng.integers(3, 7)
    kinds = rng.integers(KINDS, size=size)
    edges = [(node, (node + 1) % ring) for node in range(ring)]
    edges += [(node, rng.integers(node)) for node in range(ring, size)]  # trees that hang on the ring
    label = any(kinds[a] == kinds[b] == 0 for a, b in edges[:ring])
    names = rng.permutation(size)
    pairs = names[np.array(edges)]
    return {"kinds": kinds[np.argsort(names)], "edges": np.concatenate([pairs, pairs[:, ::-1]])}, np.float32(label)


class Graphs:
    """Graphs of several sizes: the source `graph` is a list of dicts, one for each example."""

    def __init__(self, train=2000, valid=500, batch_size=64):
        rng = np.random.default_rng(0)
        found = [molecule(rng) for _ in range(train + valid)]
        self.parts, self.batch_size = {"train": found[:train], "valid": found[train:]}, batch_size

    def read(self, part, ctx):
        for rows in ctx.batches(len(part), self.batch_size, shuffle=ctx.stream_name == "train"):
            graphs, labels = zip(*(part[row] for row in rows), strict=True)
            yield {"graph": list(graphs), "label": np.array(labels)}

    def train_stream(self, ctx):
        return self.read(self.parts["train"], ctx)

    def valid_stream(self, ctx):
        return self.read(self.parts["valid"], ctx)


class GIN(nn.Module):
    """A graph isomorphism network (Xu et al., 2019): a node adds up its neighbours, a graph its nodes in each layer."""

    def __init__(self, width=32, layers=4):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, width)
        self.own = nn.Parameter(torch.zeros(layers))  # epsilon of the paper
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            for _ in range(layers)
        )
        self.head = nn.Linear(width * (layers + 1), 1)

    def forward(self, graph):
        sizes = torch.tensor([len(each["kinds"]) for each in graph], device=self.own.device)
        begins = sizes.cumsum(0) - sizes
        edges = torch.cat([each["edges"] + begin for each, begin in zip(graph, begins, strict=True)])
        of = torch.arange(len(graph), device=sizes.device).repeat_interleave(sizes)  # the graph of each node
        nodes = self.kinds(torch.cat([each["kinds"] for each in graph]))
        sums = [nodes.new_zeros(len(graph), nodes.shape[1]).index_add(0, of, nodes)]
        for own, layer in zip(self.own, self.layers, strict=True):
            nodes = layer(nodes.index_add(0, edges[:, 1], nodes[edges[:, 0]]) + own * nodes)
            sums.append(torch.zeros_like(sums[0]).index_add(0, of, nodes))
        return self.head(torch.cat(sums, dim=1)).squeeze(1)


def right(logit, label):
    return ((logit > 0) == (label > 0.5)).float()
