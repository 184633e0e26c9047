import torch
from torch import nn

from emrun import AbstractHook


class Classifier(nn.Module):
    """Classifies a text by the state of a GRU after its last token."""

    def __init__(self, vocabulary_size=5000, embedding=32, hidden=32, classes=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, embedding, padding_idx=0)
        self.gru = nn.GRU(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens, length):  # (B, T), (B,)
        states, _ = self.gru(self.embed(tokens))
        logits = self.head(states[torch.arange(length.shape[0]), length - 1])
        return {"logits": logits, "probability": logits.softmax(1)}


class Say(AbstractHook):
    """Prints the class of each text."""

    reads = ("probability",)
    whole_batches = True

    def __init__(self, dataset):
        super().__init__()
        self.classes = dataset.classes_names()

    def after_batch(self, batch_data):
        for row in batch_data["probability"].tolist():
            print(f"{self.classes[row.index(max(row))]} {max(row):.3f}", flush=True)  # noqa: T201 - the answer
