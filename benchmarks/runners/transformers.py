"""The Trainer of Hugging Face transformers."""

from __future__ import annotations

import tempfile

from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments

NOTES = {
    "bare": "gradient clipping switched off",
    "typical": "no accuracy, no CSV (trainer_state.json), no fsync",
}


class Ours(Trainer):
    """Iterates over the batches as they are."""

    def __init__(self, batches, **arguments) -> None:
        super().__init__(**arguments)
        self._batches = batches

    def get_train_dataloader(self):
        """Return the batches."""
        return self._batches


def trainer(work, place, **arguments):
    batches = work.batches(lambda image, label: {"image": image, "label": label})
    module = work.with_loss()
    optimizer = work.sgd()
    return Ours(
        batches,
        model=module,
        args=TrainingArguments(
            output_dir=str(place),
            num_train_epochs=work.epochs,
            max_grad_norm=0,
            use_cpu=True,
            report_to=[],
            **arguments,
        ),
        train_dataset=batches,
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
    )


def bare(work):
    with tempfile.TemporaryDirectory() as place:
        trainer(work, place, logging_strategy="no", save_strategy="no", disable_tqdm=True).train()


class Losses(TrainerCallback):
    """Stores the mean loss of each epoch."""

    def __init__(self, losses) -> None:
        self._losses = losses

    def on_log(self, args, state, control, logs, **kwargs):
        """Store the mean loss."""
        if "loss" in logs:
            self._losses.append(float(logs["loss"]))


def typical(work, place):
    ours = trainer(work, place, logging_strategy="epoch", save_strategy="epoch", disable_tqdm=False)
    ours.add_callback(Losses(work.losses))
    ours.train()
