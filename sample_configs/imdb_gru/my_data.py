import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import emrun
from emrun.errors import ArgumentError

CLASSES = ("neg", "pos")
PADDING, UNKNOWN = 0, 1


class Reviews(emrun.AbstractDataset):
    """Texts in the folders `train` and `test`, each with `pos` and `neg`; every fifth train text is for `valid`.

    Sources: `tokens`, int64 of shape (B, T), padded to the longest text of the batch; `length` and `label`, int64 of
    shape (B,). The stream `predict` reads a text from each line of the standard input, without a label.
    """

    def __init__(self, folder: str = "data", vocabulary_size: int = 5000, longest: int = 200, batch_size: int = 32):
        self.batch_size, self.longest = batch_size, longest
        texts = {split: read(Path(folder, split)) for split in ("train", "test")}
        held_out = np.arange(len(texts["train"][1])) % 5 == 0
        words = Counter(word for text in texts["train"][0] for word in text)
        known = [word for word, _ in sorted(words.items(), key=lambda pair: (-pair[1], pair[0]))]
        self.numbers = {word: number for number, word in enumerate(known[: vocabulary_size - 2], 2)}
        parts = {"train": ("train", ~held_out), "valid": ("train", held_out), "test": ("test", slice(None))}
        self.parts = {
            name: (np.array([self.encoded(text) for text in texts[split][0]], object)[rows], texts[split][1][rows])
            for name, (split, rows) in parts.items()
        }

    def classes_names(self):
        return list(CLASSES)

    def encoded(self, words):
        return np.array([self.numbers.get(word, UNKNOWN) for word in words[: self.longest]] or [UNKNOWN])

    def batches(self, ctx, part, shuffle=False):
        texts, labels = self.parts[part]
        for rows in ctx.batches(len(labels), self.batch_size, shuffle=shuffle):
            yield {**padded(texts[rows]), "label": labels[rows]}

    def train_stream(self, ctx):
        return self.batches(ctx, "train", shuffle=True)

    def valid_stream(self, ctx):
        return self.batches(ctx, "valid")

    def test_stream(self, ctx):
        return self.batches(ctx, "test")

    def predict_stream(self):
        for line in sys.stdin:
            yield padded([self.encoded(tokens_of(line))])


def tokens_of(text):
    """Return the words and marks of a text; the `n't` of a negation is a word."""
    return re.findall(r"\w+(?=n't)|n't|'?\w+|[!?]", text.lower())


def padded(texts):
    """Return texts of numbers as an array, and their lengths."""
    lengths = np.array([len(text) for text in texts])
    tokens = np.full((len(texts), lengths.max(initial=1)), PADDING)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return {"tokens": tokens, "length": lengths}


def read(folder):
    """Return the tokens of each text of a split, classes in turn, and the labels."""
    texts, labels = [], []
    for label, name in enumerate(CLASSES):
        paths = sorted(Path(folder, name).glob("*.txt"))
        if not paths:
            raise ArgumentError("folder", f"there are no texts in {folder / name}/*.txt")
        for path in paths:
            try:
                texts.append(tokens_of(path.read_text(encoding="utf-8")))
            except UnicodeDecodeError as error:
                raise ArgumentError("folder", f"{path}: byte {error.start} is not UTF-8 ({error.reason})") from error
        labels += [label] * len(paths)
    return texts, np.array(labels)
