import torch
from torch.nn import functional


class Classifier(torch.nn.Module):
    def __init__(self, hidden=32, dropout=0.2):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(30, hidden), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(hidden, 2)
        )

    def forward(self, features, label):
        logits = self.layers(features)
        return {
            "loss": functional.cross_entropy(logits, label, reduction="none"),
            "accuracy": (logits.argmax(dim=1) == label).float(),
        }
