import numpy as np
from sklearn import datasets
from transformers import PreTrainedTokenizerFast


def descriptions():
    """Return the texts that describe three datasets of scikit-learn."""
    return [load().DESCR for load in (datasets.load_breast_cancer, datasets.load_diabetes, datasets.load_iris)]


def numbers(passage):
    """Return how many words have a digit: 0, 1, or 2 for more."""
    return min(2, sum(any(each.isdigit() for each in word) for word in passage.split()))


def comma(passage):
    """Return whether there is a comma."""
    return int("," in passage)


class Passages:
    """Passages of six words, with what a task says of them."""

    def __init__(self, tokenizer, task=numbers, capitals=False, batch_size=16):
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer, pad_token="[PAD]")
        self.batch_size = batch_size
        words = " ".join(descriptions()).split()
        self.passages = [" ".join(words[start : start + 6]) for start in range(0, len(words), 3)]
        self.labels = np.array([task(each) for each in self.passages])
        if capitals:
            self.passages = [each.upper() for each in self.passages]
        rows = np.arange(len(self.labels))
        self.rows = {"train": rows[rows // 10 % 4 > 0], "valid": rows[rows // 10 % 4 == 0]}

    def batches(self, stream, ctx, shuffle):
        for chosen in ctx.batches(len(self.rows[stream]), self.batch_size, shuffle=shuffle):
            rows = self.rows[stream][chosen]
            tokens = self.tokenizer([self.passages[row] for row in rows], padding=True, return_tensors="np")
            yield {"tokens": tokens, "label": self.labels[rows]}  # the tokenizer's output, a mapping, is one source

    def train_stream(self, ctx):
        return self.batches("train", ctx, shuffle=True)

    def valid_stream(self, ctx):
        return self.batches("valid", ctx, shuffle=False)
