import copy

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

import emrun


def encoder(size=64, width=128):
    return nn.Sequential(
        *(nn.Linear(size, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.BatchNorm1d(width))
    )


class Byol(nn.Module):
    """Two noisy views of each image: the student predicts, from one, what the teacher sees in the other."""

    def __init__(self, width=128, noise=0.3):
        super().__init__()
        self.student = encoder(width=width)
        self.predictor = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.noise = noise

    def view(self, image):
        kept = torch.rand_like(image) > 0.2 if self.training else torch.ones_like(image)
        return (image + self.noise * torch.randn_like(image)) * kept if self.training else image

    def forward(self, image):
        one, two = self.view(image), self.view(image)
        found = [self.predictor(self.student(view)) for view in (one, two)]
        with torch.no_grad():
            wanted = [self.teacher(view) for view in (two, one)]
        losses = [2 - 2 * cosine_similarity(*pair) for pair in zip(found, wanted, strict=True)]
        return {"loss": sum(losses) / 2, "features": wanted[0]}


class MoveTeacher(emrun.AbstractHook):
    """Moves the teacher towards the student after each update; its weights lie in the module, and in checkpoints."""

    def __init__(self, decay=0.98, **kwargs):
        super().__init__(**kwargs)
        self.decay = decay

    @torch.no_grad()
    def after_update(self):
        module = self.main_loop.model.module
        for old, new in zip(module.teacher.parameters(), module.student.parameters(), strict=True):
            old.lerp_(new, 1 - self.decay)
