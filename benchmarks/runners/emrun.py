"""emrun: a TorchModel in a MainLoop."""

from __future__ import annotations

import torch

from emrun import AbstractHook, AbstractModel, MainLoop, TorchModel
from emrun.base.types import Factory
from emrun.hooks import StopAfter
from emrun.metrics import accuracy
from runners.work import BATCH_SIZE

NOTES = {
    "typical": "the mean in double precision; checkpoints with checksums, every epoch also a trace, metrics, positions",
    "begun": "a run directory, a checkpoint at the end",
    "null": "six hooks that do nothing",
}


def bare(work):
    batches = work.batches(lambda image, label: {"image": image, "label": label})
    model = TorchModel(work.with_loss(), optimizer=Factory(work.optimizer, lr=work.rate), device="cpu")
    with MainLoop(model, dataset=None) as loop:
        loop.epoch([batches])


def begun(work, place):
    from emrun.training.create import create_training, train

    Given.work = work
    module, optimizer = {"class": f"{work.__module__}.MlpWithLoss"}, {"class": "SGD", "lr": work.rate}
    config = {
        "dataset": {"class": f"{__name__}.Given"},
        "model": {"module": module, "optimizer": optimizer, "device": "cpu"},
        "main_loop": {"skip_zeroth_epoch": True, "report": False},
        "hooks": [{"StopAfter": {"epochs": 1}}],
    }
    training = create_training(config, output_root=place)
    training.model.module.load_state_dict(work.module.state_dict())
    work.module = training.model.module
    train(training)


class Data:
    """The batches as a dataset."""

    def __init__(self, batches) -> None:
        self._batches = batches
        self.num_batches = {"train": len(batches)}

    def train_stream(self):
        """Return the batches of an epoch."""
        return iter(self._batches)


class Given(Data):
    """The batches of `work`, as a dataset that a config names."""

    work = None

    def __init__(self) -> None:
        super().__init__(self.work.batches(lambda image, label: {"image": image, "label": label}))


class Losses(AbstractHook):
    """Stores the mean loss of each epoch."""

    def __init__(self, losses) -> None:
        super().__init__()
        self._losses = losses

    def after_epoch(self, epoch_id, epoch_data):
        """Store the mean loss."""
        self._losses.append(epoch_data["train"]["loss"]["mean"])


def typical(work, place):
    from emrun.hooks import ComputeStats, SaveEvery, SaveLatest, ShowProgress, WriteCSV
    from emrun.storage.run import Run

    data = Data(work.batches(lambda image, label: {"image": image, "label": label}))
    model = TorchModel(
        work.module,
        inputs=["image"],
        outputs=["logits"],
        loss=Factory(torch.nn.functional.cross_entropy, is_import=True, options={"inputs": ["logits", "label"]}),
        metrics={"accuracy": Factory(accuracy, is_import=True, options={"inputs": ["logits", "label"]})},
        optimizer=Factory(work.optimizer, lr=work.rate),
        device="cpu",
    )
    hooks = [
        ComputeStats(["loss", "accuracy"]),
        ShowProgress(data),
        WriteCSV(str(place)),
        SaveEvery(1),
        SaveLatest(),
        Losses(work.losses),
        StopAfter(epochs=work.epochs),
    ]
    run = Run(place)
    run.trace.begin()  # as `emrun train` does
    MainLoop(model, data, hooks, skip_zeroth_epoch=True, run=run).run_training()


class Nothing(AbstractModel):
    """A model that does nothing."""

    input_names = ("image", "label")
    output_names = ()

    def run(self, batch, train, stream):
        """Return no outputs."""
        return {}

    def save(self, directory):
        """Write nothing."""

    def load(self, directory):
        """Read nothing."""


def null(work):
    with MainLoop(Nothing(), dataset=None, hooks=[AbstractHook() for _ in range(6)]) as loop:
        loop.epoch([work.nothing()])


class Shares(Data):
    """The batches of a rank as a dataset."""

    def train_stream(self, ctx):
        """Return the batches of an epoch, of which `ctx` gives the rows of this rank."""
        for batch, _ in zip(
            self._batches, ctx.batches(len(self._batches) * 2 * BATCH_SIZE, 2 * BATCH_SIZE), strict=True
        ):
            yield batch


def several(work):
    data = Shares(work.batches(lambda image, label: {"image": image, "label": label}))
    model = TorchModel(
        work.module,
        inputs=["image"],
        outputs=["logits"],
        loss=Factory(torch.nn.functional.cross_entropy, is_import=True, options={"inputs": ["logits", "label"]}),
        optimizer=Factory(work.optimizer, lr=work.rate),
        device="cpu",
    )
    MainLoop(model, data, [StopAfter(epochs=1)], skip_zeroth_epoch=True).run_training()
