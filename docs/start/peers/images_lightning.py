from pathlib import Path

import lightning as L
import pandas as pd
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from PIL import Image
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18
from torchvision.transforms.v2 import Compose, RandomHorizontalFlip, Resize, ToDtype, ToImage

L.seed_everything(1)
resize = Compose([ToImage(), Resize((24, 24)), ToDtype(torch.float32, scale=True)])
training = ImageFolder("fruit", transform=Compose([resize, RandomHorizontalFlip()]))
evaluated = ImageFolder("fruit", transform=resize)
names, labels = evaluated.classes, evaluated.targets
train, held = train_test_split(range(len(labels)), test_size=0.3, stratify=labels, random_state=1)
valid, test = train_test_split(held, test_size=0.5, stratify=[labels[row] for row in held], random_state=1)


def loader(data, rows, shuffle=False):
    return DataLoader(Subset(data, rows), batch_size=8, shuffle=shuffle)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = resnet18(num_classes=len(names))

    def step(self, batch, stream):
        inputs, labels = batch
        logits = self.net(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log(f"{stream}_loss", loss, on_epoch=True, on_step=False)
        self.log(f"{stream}_accuracy", (logits.argmax(1) == labels).float().mean(), on_epoch=True, on_step=False)
        return loss

    def training_step(self, batch):
        return self.step(batch, "train")

    def validation_step(self, batch):
        self.step(batch, "valid")

    def test_step(self, batch):
        self.step(batch, "test")

    def predict_step(self, batch):
        return self.net(batch).softmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.05)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


trainer = L.Trainer(
    max_epochs=4,
    gradient_clip_val=1.0,
    callbacks=[
        ModelCheckpoint(monitor="valid_accuracy", mode="max"),
        EarlyStopping(monitor="valid_accuracy", mode="max", patience=10),
    ],
)
trainer.fit(Net(), loader(training, train, shuffle=True), loader(evaluated, valid))
trainer.test(dataloaders=loader(evaluated, test), ckpt_path="best")
files = sorted(Path("new").iterdir())
new = DataLoader([resize(Image.open(file).convert("RGB")) for file in files], batch_size=8)
found = torch.cat(trainer.predict(dataloaders=new, ckpt_path="best")).numpy()
table = pd.DataFrame(found, columns=[f"probability.{name}" for name in names])
table.insert(0, "name", [names[index] for index in found.argmax(-1)])
table.insert(0, "id", [file.name for file in files])
table.to_csv("new.csv", index=False)
