import lightning as L
import pandas as pd
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUMBERS = ["alcohol", "color_intensity", "flavanoids", "proline"]
L.seed_everything(1)
wine, new = pd.read_csv("wine.csv"), pd.read_csv("new.csv")
names = sorted(wine["grower"].unique())
test = wine.groupby("grower").sample(frac=0.15, random_state=1)
valid = wine.drop(test.index).groupby("grower").sample(frac=0.18, random_state=1)
train = wine.drop(test.index).drop(valid.index)
mean, deviation = train[NUMBERS].mean(), train[NUMBERS].std()


def loader(frame, shuffle=False):
    columns = [torch.tensor(((frame[NUMBERS] - mean) / deviation).values, dtype=torch.float32)]
    if "grower" in frame:
        columns.append(torch.tensor(frame["grower"].map(names.index).values))
    return DataLoader(TensorDataset(*columns), batch_size=16, shuffle=shuffle)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        hidden = [nn.Linear(len(NUMBERS), 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1)]
        hidden += [nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*hidden, nn.Linear(128, len(names)))

    def step(self, batch, stream):
        numbers, labels = batch
        logits = self.layers(numbers)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log(f"{stream}_loss", loss, on_epoch=True, on_step=False)
        self.log(f"{stream}_accuracy", (logits.argmax(-1) == labels).float().mean(), on_epoch=True, on_step=False)
        return loss

    def training_step(self, batch):
        return self.step(batch, "train")

    def validation_step(self, batch):
        self.step(batch, "valid")

    def test_step(self, batch):
        self.step(batch, "test")

    def predict_step(self, batch):
        return self.layers(batch[0]).softmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=0.01)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps, pct_start=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


trainer = L.Trainer(
    max_epochs=10,
    gradient_clip_val=1.0,
    callbacks=[
        ModelCheckpoint(monitor="valid_accuracy", mode="max"),
        EarlyStopping(monitor="valid_accuracy", mode="max", patience=10),
    ],
)
trainer.fit(Net(), loader(train, shuffle=True), loader(valid))
trainer.test(dataloaders=loader(test), ckpt_path="best")
found = torch.cat(trainer.predict(dataloaders=loader(new), ckpt_path="best")).numpy()
table = pd.DataFrame(found, columns=[f"probability.{name}" for name in names])
table.insert(0, "name", [names[index] for index in found.argmax(-1)])
table.insert(0, "id", new["bottle"])
table.to_csv("predicted.csv", index=False)
