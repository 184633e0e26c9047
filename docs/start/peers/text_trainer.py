import pandas as pd
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

reviews, new = pd.read_json("reviews.jsonl", lines=True), pd.read_json("new.jsonl", lines=True)
names = sorted(reviews["label"].unique())
test = reviews.groupby("label").sample(frac=0.15, random_state=1)
valid = reviews.drop(test.index).groupby("label").sample(frac=0.18, random_state=1)
train = reviews.drop(test.index).drop(valid.index)

words = Tokenizer(models.BPE())
words.pre_tokenizer = pre_tokenizers.ByteLevel()
words.train_from_iterator(train["text"], trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")


def examples(frame):
    rows = [{"input_ids": tokenizer(text, truncation=True, max_length=256)["input_ids"]} for text in frame["text"]]
    if "label" in frame:
        for row, label in zip(rows, frame["label"], strict=True):
            row["labels"] = names.index(label)
    return rows


sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
trainer = Trainer(
    model=BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=len(names), **sizes)),
    args=TrainingArguments(
        "run",
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
        seed=1,
    ),
    data_collator=DataCollatorWithPadding(tokenizer),
    train_dataset=examples(train),
    eval_dataset=examples(valid),
    compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean()},
)
trainer.train()
print(trainer.evaluate(examples(test)))
found = torch.from_numpy(trainer.predict(examples(new)).predictions).softmax(-1).numpy()
table = pd.DataFrame(found, columns=[f"probability.{name}" for name in names])
table.insert(0, "name", [names[index] for index in found.argmax(-1)])
table.to_csv("new.csv")
