from torch import nn


class LanguageModel(nn.Module):
    """A recurrent network that predicts the next byte of a text."""

    def __init__(self, vocabulary_size=256, width=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary_size)

    def forward(self, tokens):
        hidden, _ = self.recurrent(self.embedding(tokens))
        return {"logits": self.head(hidden).transpose(1, 2)}  # (B, vocabulary_size, window)
