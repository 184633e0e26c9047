import pandas as pd
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

PAST, FUTURE = 48, 24
load = pd.read_csv("load.csv")[["load", "temperature"]].values
cuts = [0, int(0.7 * len(load)), int(0.85 * len(load)), len(load)]
mean, deviation = load[: cuts[1]].mean(0), load[: cuts[1]].std(0)


def scaled(values):
    return torch.tensor((values - mean) / deviation, dtype=torch.float32)


def windows(begin, end):
    values = scaled(load[max(0, begin - PAST) : end])
    every = values.unfold(0, PAST + FUTURE, 1).transpose(1, 2)
    return TensorDataset(every[:, :PAST], every[:, PAST:, :1])


def collate(rows):
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return dict(zip(("past", "labels"), columns, strict=False))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = [nn.Linear(PAST * 2, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1)]
        hidden += [nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, FUTURE), nn.Unflatten(1, (FUTURE, 1)))

    def forward(self, past, labels=None):
        forecast = self.layers(past)
        if labels is None:
            return {"forecast": forecast}
        return {"loss": nn.functional.mse_loss(forecast, labels), "forecast": forecast}


trainer = Trainer(
    model=Net(),
    args=TrainingArguments(
        "run",
        num_train_epochs=8,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        remove_unused_columns=False,
        report_to="none",
        seed=1,
    ),
    data_collator=collate,
    train_dataset=windows(cuts[0], cuts[1]),
    eval_dataset=windows(cuts[1], cuts[2]),
    compute_metrics=lambda found: {"mae": abs(found.predictions - found.label_ids).mean() * deviation[0]},
)
trainer.train()
print(trainer.evaluate(windows(cuts[2], cuts[3])))
latest = scaled(pd.read_csv("latest.csv")[["load", "temperature"]].values[-PAST:])
forecast = trainer.predict(TensorDataset(latest[None])).predictions[0, :, 0] * deviation[0] + mean[0]
pd.DataFrame([forecast]).to_csv("forecast.csv", index=False)
