import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, max_pool2d, softplus

SIZE, CELL = 48, 8  # pixels of a picture, and of a cell of the grid


def draw(rng):
    """Return a picture of rectangles (label 0) and ellipses (label 1), and their boxes (x0, y0, x1, y1)."""
    picture, found = rng.normal(0, 0.2, (1, SIZE, SIZE)), []
    for _ in range(rng.integers(1, 5)):
        label, (width, height) = rng.integers(2), rng.integers(9, 22, 2)
        x, y = rng.integers(SIZE - width), rng.integers(SIZE - height)
        across, down = np.ogrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
        picture[0, y : y + height, x : x + width] += (across**2 + down**2 <= 1) if label else 1.0
        found.append((x, y, x + width, y + height, label))
    found = np.array(found)
    return picture.astype(np.float32), {"boxes": found[:, :4].astype(np.float32), "labels": found[:, 4]}


class Shapes:
    def read(self, ctx, first, count):
        for rows in ctx.batches(count, 32, shuffle=ctx.stream_name == "train"):
            pictures, targets = zip(*(draw(np.random.default_rng(first + row)) for row in rows), strict=True)
            yield {"picture": np.stack(pictures), "targets": list(targets)}  # a list of dicts

    def train_stream(self, ctx):
        return self.read(ctx, 0, 3200)

    def valid_stream(self, ctx):
        return self.read(ctx, 1_000_000, 320)


class Detector(nn.Module):
    """Each cell tells which shapes have their middle in it, and how far their sides are from its own middle."""

    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1))
        for _ in range(3):
            self.layers += nn.Sequential(nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(4, 2 * width))
            width *= 2
        self.layers += nn.Sequential(nn.ReLU(), nn.Conv2d(width, 6, 1))
        self.layers[-1].bias.data[:2] = -3.0  # most cells are empty

    def forward(self, picture, targets):
        grid = self.layers(picture)  # (B, 6, cells, cells)
        logits, sides = grid[:, :2], softplus(grid[:, 2:]) * CELL
        y, x = torch.meshgrid([torch.arange(CELL / 2, SIZE, CELL, device=grid.device)] * 2, indexing="ij")
        boxes = torch.stack([x - sides[:, 0], y - sides[:, 1], x + sides[:, 2], y + sides[:, 3]], dim=-1)
        counts = torch.tensor([len(each["labels"]) for each in targets], device=grid.device)
        of = torch.arange(len(counts), device=grid.device).repeat_interleave(counts)  # the picture of each box
        wanted = torch.cat([each["boxes"] for each in targets])
        column, row = ((wanted[:, :2] + wanted[:, 2:]) / 2 // CELL).long().unbind(dim=1)
        there = torch.zeros_like(logits)
        there[of, torch.cat([each["labels"] for each in targets]), row, column] = 1.0
        error = (boxes[of, row, column] - wanted).abs().mean(dim=1) / CELL
        of_cells = binary_cross_entropy_with_logits(logits, there, reduction="none").sum(dim=(1, 2, 3))
        loss = of_cells.index_add(0, of, error) / counts  # weighted by counts: exact in parts of a batch
        found = {} if self.training else {"found": self.found(logits.sigmoid(), boxes)}
        return {"loss": loss, "example_weight": counts.float(), **found}

    def found(self, scores, boxes):
        scores = scores * (max_pool2d(scores, 3, 1, 1) == scores)  # of neighbours, the surest
        best, places = scores.flatten(1).topk(8)
        labels, cells = places // boxes[0, ..., 0].numel(), places % boxes[0, ..., 0].numel()
        boxes = boxes.flatten(1, 2).gather(1, cells[..., None].expand(-1, -1, 4))
        return [{"boxes": b, "scores": s, "labels": k} for b, s, k in zip(boxes, best, labels, strict=True)]


class AveragePrecision:
    """A metric of the whole stream: the area below the curve of precision and recall, of boxes that overlap by half."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.scores, self.hits, self.count = [], [], 0

    def update(self, found, targets):
        for own, target in zip(found, targets, strict=True):
            taken, others, self.count = set(), target["boxes"], self.count + len(target["boxes"])
            for box, score, label in zip(own["boxes"], own["scores"].tolist(), own["labels"], strict=True):
                low, high = torch.maximum(box[:2], others[:, :2]), torch.minimum(box[2:], others[:, 2:])
                both = (high - low).clamp(min=0).prod(dim=1)
                either = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(dim=1) - both
                share, best = (both / either * (target["labels"] == label)).max(dim=0)
                self.hits.append(share.item() > 0.5 and best.item() not in taken)  # the surest box comes first
                self.scores.append(score)
                taken |= {best.item()} if self.hits[-1] else set()

    def state_dict(self):
        return {"scores": self.scores, "hits": self.hits, "count": self.count}

    def load_state_dict(self, state):
        self.scores, self.hits, self.count = state["scores"], state["hits"], state["count"]

    def compute(self):
        right = np.array(self.hits, float)[np.argsort(self.scores, kind="stable")[::-1]]
        precision = right.cumsum() / np.arange(1, len(right) + 1)
        return float((np.maximum.accumulate(precision[::-1])[::-1] * right).sum() / max(1, self.count))
