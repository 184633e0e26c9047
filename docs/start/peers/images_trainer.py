import numpy as np
import torch
from datasets import load_dataset
from torchvision.transforms.v2 import Compose, RandomHorizontalFlip, Resize, ToDtype, ToImage
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

parts = load_dataset("imagefolder", data_dir="fruit", split="train")
names = parts.features["label"].names
parts = parts.train_test_split(0.3, stratify_by_column="label", seed=1)
held = parts["test"].train_test_split(0.5, stratify_by_column="label", seed=1)
new = load_dataset("imagefolder", data_files="new/*", split="train", drop_labels=True)

resize = [ToImage(), Resize((24, 24)), ToDtype(torch.float32, scale=True)]
transforms = {True: Compose([*resize, RandomHorizontalFlip()]), False: Compose(resize)}


def tensors(training):
    def transform(batch):
        batch["pixel_values"] = [transforms[training](image) for image in batch.pop("image")]
        return {"labels" if name == "label" else name: values for name, values in batch.items()}

    return transform


def accuracy(predictions):
    return {"accuracy": (predictions.predictions.argmax(-1) == predictions.label_ids).mean()}


trainer = Trainer(
    model=ResNetForImageClassification(
        ResNetConfig(num_labels=len(names), embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    ),
    args=TrainingArguments(
        "run",
        num_train_epochs=4,
        per_device_train_batch_size=8,
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
    train_dataset=parts["train"].with_transform(tensors(True)),
    eval_dataset=held["train"].with_transform(tensors(False)),
    compute_metrics=accuracy,
)
trainer.train()
print(trainer.evaluate(held["test"].with_transform(tensors(False))))
logits = torch.from_numpy(trainer.predict(new.with_transform(tensors(False))).predictions)
with open("new.csv", "w") as file:
    file.write("id,name," + ",".join(names) + "\n")
    for index, row in enumerate(logits.softmax(-1).tolist()):
        file.write(f"{index},{names[int(np.argmax(row))]}," + ",".join(map(str, row)) + "\n")
