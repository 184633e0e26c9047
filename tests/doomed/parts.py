"""A dataset, a model and hooks that fail as their arguments say."""

import numpy as np
import torch

from emrun import AbstractHook, TorchModel, TrainingAborted


class Data:
    def __init__(self, at=3, bad=(), stream="train", labels=(), raises=None, kind=None, large=()):
        self.large = large
        self.kind = kind
        self.at, self.bad, self.stream, self.labels, self.raises = at, bad, stream, labels, raises

    def _stream(self, ctx, name):
        numbers = np.random.default_rng(5)
        for index in range(6):
            x = numbers.normal(size=(32, 4)).astype(np.float32)
            label = numbers.integers(0, 3, size=32)
            if name == self.stream and index == self.at:
                if self.raises == "interrupt":
                    raise KeyboardInterrupt
                if self.raises:
                    raise ValueError(self.raises)
                x[list(self.bad), 2] = np.nan
                x[list(self.large)] *= 1e4
                label[list(self.labels)] = 7
            yield {"x": self._as_kind(x), "label": label, "name": [f"{name}-{index}-{row}" for row in range(32)]}

    def _as_kind(self, x):
        if self.kind == "jagged":
            return torch.nested.nested_tensor([torch.from_numpy(row) for row in x], layout=torch.jagged)
        return x if self.kind is None else {"values": {"first": x[:, :1], "others": x[:, 1:]}}

    def train_stream(self, ctx):
        return self._stream(ctx, "train")

    def valid_stream(self, ctx):
        return self._stream(ctx, "valid")


class Net(torch.nn.Module):
    def __init__(self, dropout=0.0, unlucky=0.0, batch_norm=False, secret=""):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(4) if batch_norm else torch.nn.Identity()
        self.dropout = torch.nn.Dropout(dropout)
        self.unlucky = unlucky
        self.secret = secret
        self.embedding = torch.nn.Embedding(3, 3)

    def forward(self, x, label):
        kept = self.dropout(torch.ones(8)) if self.unlucky else None
        if kept is not None and kept[:3].sum() == 0:
            raise RuntimeError("an unlucky draw of " + " ".join(str(int(each > 0)) for each in kept))
        if label.max() > 2:
            raise RuntimeError(f"a label is {label.max().item()}, with {self.secret}")
        if isinstance(x, dict):
            x = torch.cat([x["values"]["first"], x["values"]["others"]], dim=1)
        elif x.is_nested:
            x = torch.stack(x.unbind())
        logits = self.layer(self.norm(x)) + 0 * self.embedding(label)
        return {"loss": torch.nn.functional.cross_entropy(logits, label, reduction="none")}


class Root(torch.nn.Module):
    """Its loss is finite and its gradient is not."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return {"loss": torch.sqrt(torch.nan_to_num(x).abs() * self.scale).sum(dim=1)}


class OwnScheme(TorchModel):
    """Makes its updates without emrun, and fails before or after the update of a batch that is bad."""

    def __init__(self, module, fails="before", by_hand=False, **kwargs):
        super().__init__(module, **kwargs)
        self.fails = fails
        if not by_hand:
            self.mine = torch.optim.SGD(module.parameters(), lr=0.1)
        self.by_hand = by_hand

    def train_step(self, inputs):
        outputs = self.forward(inputs)
        is_bad = bool(outputs["loss"].isnan().any())
        if is_bad and self.fails == "before":
            raise RuntimeError("bad before the update")
        outputs["loss"].mean().backward()
        if self.by_hand:
            for parameter in self.module.parameters():
                parameter.data -= 0.1 * parameter.grad
        else:
            self.update(self.mine)
        if is_bad:
            raise RuntimeError("bad after the update")
        return outputs


class Guard(AbstractHook):
    def __init__(self, message="the loss is bad"):
        super().__init__()
        self.message = message
        self.count = 0

    def after_batch(self, batch_data):
        self.count += 1
        if self.main_loop.training and batch_data["loss"].isnan().any():
            raise TrainingAborted(f"{self.message}, after {self.count} batches")

    def state_dict(self):
        return {"count": self.count - 1}

    def load_state_dict(self, state):
        self.count = state["count"]


class Faulty(AbstractHook):
    def before_batch(self, batch):
        if self.main_loop.iterations_done == 2:
            raise KeyError(f"the first is {batch['name'][0]}")
