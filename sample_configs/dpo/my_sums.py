import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid

SUMS = [(a, b) for a in range(5) for b in range(5)]


def text(a, b, answer):
    return list(f"{a}+{b}={answer};".encode())


class Sums:
    """Sums, of which a quarter have a wrong answer: `text`, or as pairs a `chosen` and a `rejected` text."""

    def __init__(self, pairs=False, size=6400, batch_size=64):
        self.pairs, self.size, self.batch_size = pairs, size, batch_size

    def read(self, ctx, size):
        for rows in ctx.batches(size, self.batch_size):
            right, wrong = [], []
            for row in rows:
                a, b = SUMS[row % len(SUMS)]
                right.append(text(a, b, a + b))
                wrong.append(text(a, b, (a + b + ctx.rng_for(row).integers(1, 9)) % 9))
            if self.pairs:
                yield {"chosen": np.array(right), "rejected": np.array(wrong)}
            else:
                coin = np.array([ctx.rng_for(row).random() for row in rows])[:, None]
                yield {"text": np.where(coin < 0.75, right, wrong)}

    def train_stream(self, ctx):
        return self.read(ctx, self.size)

    def valid_stream(self, ctx):
        return self.read(ctx, 8 * len(SUMS))


class LanguageModel(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.layer, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, 128)

    def logs(self, text):  # (B, T) -> the log probability of each character but the first, (B, T - 1)
        logits = self.head(self.layer(self.characters(text[:, :-1]))[0])
        return -cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none")

    def forward(self, text):
        return {"loss": -self.logs(text).mean(dim=1)}


class Preferring(nn.Module):
    """Direct preference optimisation (Rafailov et al., 2023); both models begin with the weights of one run."""

    def __init__(self, beta=0.5, width=64):
        super().__init__()
        self.policy, self.reference, self.beta = LanguageModel(width), LanguageModel(width), beta
        self.reference.requires_grad_(False)

    def forward(self, chosen, rejected):
        right, wrong = self.policy.logs(chosen), self.policy.logs(rejected)
        with torch.no_grad():
            before = self.reference.logs(chosen).sum(dim=1) - self.reference.logs(rejected).sum(dim=1)
        margin = self.beta * (right.sum(dim=1) - wrong.sum(dim=1) - before)
        answer = right[:, 3].exp()  # the probability of the right answer
        return {"margin": margin, "answer": answer, "preferred": (margin > 0).float(), "loss": -logsigmoid(margin)}
