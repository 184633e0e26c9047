from itertools import pairwise

import lightning as L
import pandas as pd
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(1)
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


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        hidden = [nn.Linear(PAST * 2, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1)]
        hidden += [nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, FUTURE), nn.Unflatten(1, (FUTURE, 1)))

    def step(self, batch, stream):
        past, future = batch
        forecast = self.layers(past)
        loss = nn.functional.mse_loss(forecast, future)
        self.log(f"{stream}_loss", loss, on_epoch=True, on_step=False)
        self.log(f"{stream}_mae", (forecast - future).abs().mean() * deviation[0], on_epoch=True, on_step=False)
        return loss

    def training_step(self, batch):
        return self.step(batch, "train")

    def validation_step(self, batch):
        self.step(batch, "valid")

    def test_step(self, batch):
        self.step(batch, "test")

    def predict_step(self, batch):
        return self.layers(batch[0]) * deviation[0] + mean[0]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.01)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


trainer = L.Trainer(
    max_epochs=8,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(monitor="valid_loss"), EarlyStopping(monitor="valid_loss", patience=5)],
)
train, valid, test = (windows(begin, end) for begin, end in pairwise(cuts))
trainer.fit(Net(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(valid, batch_size=64))
trainer.test(dataloaders=DataLoader(test, batch_size=64), ckpt_path="best")
latest = scaled(pd.read_csv("latest.csv")[["load", "temperature"]].values[-PAST:])
(forecast,) = trainer.predict(dataloaders=DataLoader(TensorDataset(latest[None])), ckpt_path="best")
pd.DataFrame(forecast[:, :, 0].numpy()).to_csv("forecast.csv", index=False)
