import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset


class TorchDigits(Dataset):
    """Handwritten digits, written as in torch's tutorials: one example at a time."""

    def __init__(self, held_out=False):
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 16, dtype=torch.float32)
        self.labels = torch.tensor(labels)
        self.rows = [row for row in range(len(labels)) if (row % 5 == 0) == held_out]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return self.images[row], self.labels[row]
