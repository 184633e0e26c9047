"""MMEngine: its Runner and loops."""

from __future__ import annotations

import logging
import tempfile

from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.nn.functional import cross_entropy

NOTES = {
    "bare": "no default hooks",
    "typical": "no bar (log lines), JSON lines instead of CSV, no fsync",
}


class Model(BaseModel):
    """The model and its losses."""

    def __init__(self, work, with_metrics=False) -> None:
        super().__init__()
        self.inner = work.module
        self._with_metrics = with_metrics

    def forward(self, image, label, mode="loss"):
        """Return the values to log; those with `loss` in their name are minimised."""
        logits = self.inner(image)
        losses = {"loss": cross_entropy(logits, label)}
        if self._with_metrics:
            losses["accuracy"] = (logits.argmax(1) == label).float().mean()
        return losses


class Nothing(BaseModel):
    """A model that does nothing."""

    def forward(self):
        """Return nothing."""

    def train_step(self, data, optim_wrapper):
        """Return no losses."""
        return {}


class Loader:
    """An object that the runner accepts as a DataLoader."""

    dataset = ()

    def __init__(self, batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self):
        return iter(self._batches)


HOOKS = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
OFF = dict.fromkeys(HOOKS)
COUNT = iter(range(10**9))


def runner(work, model, batches, place, **arguments):
    return Runner(
        model,
        str(place),
        train_dataloader=Loader(batches),
        train_cfg={"by_epoch": True, "max_epochs": work.epochs},
        optim_wrapper={"optimizer": work.sgd()},
        experiment_name=f"run{next(COUNT)}",
        **arguments,
    )


def bare(work):
    batches = work.batches(lambda image, label: {"image": image, "label": label})
    with tempfile.TemporaryDirectory() as place:
        runner(work, Model(work), batches, place, default_hooks=OFF, log_level=logging.ERROR).train()


def typical(work, place):
    batches = work.batches(lambda image, label: {"image": image, "label": label})
    window = [{"data_src": name, "method_name": "mean", "window_size": "epoch"} for name in ("loss", "accuracy")]
    made = runner(
        work,
        Model(work, with_metrics=True),
        batches,
        place,
        default_hooks={
            "logger": {"type": "LoggerHook", "interval": work.steps},
            "checkpoint": {"type": "CheckpointHook", "interval": 1},
        },
        log_processor={"custom_cfg": window},
        visualizer={"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]},
    )
    made.train()
    work.losses.append(made.message_hub.get_scalar("train/loss").mean(work.steps))


def null(work):
    with tempfile.TemporaryDirectory() as place:
        runner(work, Nothing(), work.nothing(), place, default_hooks=OFF, log_level=logging.ERROR).train()
