from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import SegformerConfig, SegformerForSemanticSegmentation, Trainer, TrainingArguments

FILES = sorted(Path("parts/images").iterdir())
order = torch.randperm(len(FILES), generator=torch.Generator().manual_seed(1)).tolist()
parts = [[FILES[row] for row in rows] for rows in (order[:20], order[20:25], order[25:])]


class Pictures(torch.utils.data.Dataset):
    def __init__(self, files, training=False):
        self.files, self.training = files, training

    def __len__(self):
        return len(self.files)

    def __getitem__(self, row):
        file = self.files[row]
        pixels = torch.from_numpy(np.array(Image.open(file).convert("RGB").resize((32, 32)))).permute(2, 0, 1) / 255
        if file.parent.name == "new":
            return {"pixel_values": pixels}
        mask = Image.open(f"parts/masks/{file.name}").resize((32, 32), Image.NEAREST)
        mask = torch.from_numpy(np.array(mask)).long()
        if self.training and torch.rand(()) < 0.5:
            pixels, mask = pixels.flip(-1), mask.flip(-1)
        return {"pixel_values": pixels, "labels": mask}


def accuracy(found):
    logits = torch.nn.functional.interpolate(torch.from_numpy(found.predictions), size=(32, 32))
    return {"accuracy": (logits.argmax(1).numpy() == found.label_ids).mean()}


trainer = Trainer(
    model=SegformerForSemanticSegmentation(
        SegformerConfig(num_labels=3, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], decoder_hidden_size=32)
    ),
    args=TrainingArguments(
        "run",
        num_train_epochs=4,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        remove_unused_columns=False,
        report_to="none",
        seed=1,
    ),
    train_dataset=Pictures(parts[0], training=True),
    eval_dataset=Pictures(parts[1]),
    compute_metrics=accuracy,
)
trainer.train()
print(trainer.evaluate(Pictures(parts[2])))
new = sorted(Path("new").iterdir())
logits = torch.from_numpy(trainer.predict(Pictures(new)).predictions)
Path("predicted").mkdir(exist_ok=True)
for file, mask in zip(new, torch.nn.functional.interpolate(logits, size=(32, 32)).argmax(1), strict=True):
    Image.fromarray(mask.numpy().astype(np.uint8)).save(f"predicted/{file.name}")
