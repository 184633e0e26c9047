"""Lightning: a LightningModule and its Trainer."""

from __future__ import annotations

import logging
import warnings

import lightning
from torch.nn.functional import cross_entropy

NOTES = {
    "typical": "the bar is drawn anew at each batch, its default",
    "null": "manual optimization",
}

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
OFF = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(lightning.LightningModule):
    """The model and its step."""

    def __init__(self, work, with_metrics=False) -> None:
        super().__init__()
        self.inner = work.module
        self._sgd = work.sgd
        self._losses = work.losses
        self._with_metrics = with_metrics

    def training_step(self, batch, index):
        """Return the loss."""
        image, label = batch
        logits = self.inner(image)
        loss = cross_entropy(logits, label)
        if self._with_metrics:
            hits = (logits.argmax(1) == label).float().mean()
            self.log("loss", loss, prog_bar=True, on_step=False, on_epoch=True, batch_size=len(label))
            self.log("accuracy", hits, on_step=False, on_epoch=True, batch_size=len(label))
        return loss

    def on_train_epoch_end(self):
        """Store the mean loss."""
        if self._with_metrics:
            self._losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        """Return the optimizer."""
        return self._sgd()


class Nothing(lightning.LightningModule):
    """A model that does nothing."""

    automatic_optimization = False

    def training_step(self, batch, index):
        """Return nothing."""

    def configure_optimizers(self):
        """Return no optimizer."""


def bare(work):
    batches = work.batches(lambda image, label: (image, label))
    lightning.Trainer(max_epochs=1, **OFF).fit(Module(work), batches)


def typical(work, place):
    from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger

    batches = work.batches(lambda image, label: (image, label))
    trainer = lightning.Trainer(
        max_epochs=work.epochs,
        accelerator="cpu",
        devices=1,
        enable_model_summary=False,
        logger=CSVLogger(place),
        callbacks=[TQDMProgressBar(), ModelCheckpoint(place, save_top_k=-1, every_n_epochs=1)],
    )
    trainer.fit(Module(work, with_metrics=True), batches)


def null(work):
    lightning.Trainer(max_epochs=1, **OFF).fit(Nothing(), work.nothing())


def several(work):
    batches = work.batches(lambda image, label: (image, label))
    off = {**OFF, "devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    lightning.Trainer(max_epochs=1, **off).fit(Module(work), batches)
