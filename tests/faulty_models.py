"""A small dataset and modules, each with a fault that `check --numerics` names, and what runs the comparison."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from emrun.config.config import load_config
from emrun.config.plan import with_statistics
from emrun.diagnosis.numerics.proof import prove
from emrun.model import AbstractModel

HALVES, COMPILED, PRECISION = "gradients of the halves of a batch", "compiled and plain", "16 bits and float32"
PARTS, RECOMPUTED, RANKS = "parts of a batch", "recomputed activations", "several ranks and one"
FRESH, LOADED, AGAIN = "evaluated in a fresh process", "saved and loaded", "a second pass of evaluated streams"


def config_of(model, dataset=None, **more):
    """Return the config of a `TorchModel` with these arguments and the dataset below."""
    usual = {"inputs": ["x"], "outputs": ["logits"], "optimizer": {"class": "SGD", "lr": 0.1}}
    usual["loss"] = {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "y"]}
    model = {name: value for name, value in {**usual, **model}.items() if value is not None}
    config = {
        "dataset": {"class": "faulty_models.Data", **(dataset or {})},
        "model": model,
        "main_loop": {"extra_streams": ["valid"], "on_unused_sources": "ignore"},
        "hooks": [{"StopAfter": {"epochs": 1}}],
        **more,
    }
    return with_statistics(load_config(config))


def rows_of(model, *only, **more):
    """Return `what` -> row."""
    return {row["what"]: row for row in prove(config_of(model, **more), only=only)}


def row_of(model, what, **more):
    """Return one row: its result, its name and its text."""
    row = rows_of(model, what, **more)[what]
    return row["result"], row["name"], row["text"]


class Data:
    """Two batches of each stream; `fault` says what is wrong with it."""

    def __init__(self, fault=None, batch_size=6):
        rng = np.random.default_rng(3)
        self._x = rng.normal(size=(12, 4)).astype(np.float32)
        self._tokens = rng.integers(0, 5, (12, 6))
        self._length = np.arange(12) % 6 + 1
        self._fault, self._size, self._own = fault, batch_size, rng

    def _stream(self, ctx, crops=False):
        for rows in ctx.batches(12, self._size):
            x = self._x[rows]
            if crops:
                x = x * {"unseeded": self._own, "global": np.random, "ctx": ctx.rng}[self._fault].uniform(0.5, 1)
            if self._fault == "view":
                x = self._x[rows[0] : rows[-1] + 1]
            mask = np.arange(6) < self._length[rows, None]
            yield {"x": x.astype(np.float32, copy=False), "y": rows % 3, "tokens": self._tokens[rows], "mask": mask}

    def train_stream(self, ctx):
        return self._stream(ctx)

    def valid_stream(self, ctx):
        return self._stream(ctx, crops=self._fault not in (None, "view"))


class Net(nn.Module):
    def __init__(self, part=None, rate=0.0):
        super().__init__()
        self.first, self.part, self.drop = nn.Linear(4, 5), part or nn.Identity(), nn.Dropout(rate)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.part(self.first(x)))))


class FunctionalDropout(Net):
    def forward(self, x):
        return self.last(functional.dropout(self.first(x), 0.5, self.training))


class DropRate(Net):
    dropout = 0.5

    def __init__(self):
        super().__init__()
        self.dropout = 0.5

    def forward(self, x):
        return self.last(functional.dropout(self.first(x), self.dropout, self.training))


class OwnNoise(Net):
    def __init__(self):
        super().__init__()
        self._rng = np.random.default_rng()

    def forward(self, x):
        return super().forward(x + float(self._rng.normal()))


class Counting(Net):
    """Computes another thing with each call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Centred(Net):
    """Subtracts the mean of the batch, without a part of its own for it."""

    def forward(self, x):
        return self.last(self.first(x) - self.first(x).mean(0))


class ByName(Net):
    """Gives its parts their inputs by name."""

    def forward(self, x):
        hidden = self.first(input=x)
        return self.last(input=hidden - hidden.mean(0))


class Tokens(nn.Module):
    """A loss over tokens: a plain mean, a sum, or with the weights of the examples."""

    def __init__(self, how):
        super().__init__()
        self.table, self.how = nn.Embedding(5, 5), how

    def forward(self, tokens, mask):
        lost = functional.cross_entropy(self.table(tokens).transpose(1, 2), tokens.roll(1, 1), reduction="none")
        if self.how == "weighted":
            return {"loss": (lost * mask).sum(1) / mask.sum(1), "loss_weight": mask.sum(1)}
        total = (lost * mask).sum()
        return {"loss": total if self.how == "sum" else total / mask.sum()}


TOKENS = {"inputs": ["tokens", "mask"], "outputs": None, "loss": None}


def contrastive(logits, y):
    """Compare each example with the others of its batch."""
    points = functional.normalize(logits, dim=1)
    return functional.cross_entropy(points @ points.T.detach() * 3, torch.arange(len(points)))


class Hardest(nn.Module):
    """The loss of the hardest example of a batch."""

    def forward(self, logits, y):
        return functional.cross_entropy(logits, y, reduction="none").max()


class Doubled(Net):
    """Another backward when it is compiled."""

    def forward(self, x):
        hidden = self.first(x)
        hidden = hidden + hidden.detach() if torch.compiler.is_compiling() else hidden * 2
        return self.last(hidden)


class WrongInAutocast(Net):
    def forward(self, x):
        return super().forward(x) * (0.5 if torch.is_autocast_enabled("cpu") else 1.0)


class Forgetful(Net):
    """Computes another thing when an activation is computed again."""

    class Part(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return torch.tanh(x * self.calls)

    def __init__(self):
        super().__init__()
        self.part = self.Part()

    def forward(self, x):
        self.part.calls = 0
        return super().forward(x)


class InPlace(Net):
    def forward(self, x):
        return super().forward(x.sub_(0.5))


class LostBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.scale.mul_(1.5)
        return super().forward(x) * self.scale


class AlwaysDropping(Net):
    def train(self, mode=True):
        super().train(mode)
        self.drop.train()
        return self


class ListedMean:
    """A metric of a whole stream whose reset forgets its list."""

    def __init__(self):
        self.found = []

    def update(self, logits):
        self.found.append(float(logits.mean()))

    def compute(self):
        return sum(self.found)

    def reset(self):
        pass


class Noisy(Net):
    """Draws noise, as a generator of pictures does."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


SEEN = []


class Remembering(Net):
    """Counts the training batches of the process, and uses the count in evaluations."""

    def forward(self, x):
        if self.training:
            SEEN.append(1)
        return super().forward(x) * (1 if self.training else 1 + len(SEEN))


class OnlyOnce(Net):
    """Cannot be run twice."""

    has_run = False

    def forward(self, x):
        if self.has_run:
            raise RuntimeError("it runs only once")
        self.has_run = True
        return super().forward(x)


class Mean(AbstractModel):
    """Has a mean, and no gradients."""

    input_names, output_names = ("x",), ("loss",)
    mean = 0.0

    def run(self, batch, train, stream):
        if train:
            self.mean = float(np.mean(batch["x"]))
        return {"loss": np.abs(batch["x"] - self.mean).mean(1)}

    def save(self, directory):
        (directory / "mean.txt").write_text(repr(self.mean))

    def load(self, directory):
        self.mean = float((directory / "mean.txt").read_text())

    def state_dict(self):
        return {}
