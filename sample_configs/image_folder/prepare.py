"""Writes handwritten digits as image files: digits/train/<digit>/<number>.png, and the same in digits/valid."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
for number, (pixels, digit) in enumerate(zip(digits.images[:600], digits.target, strict=False)):
    folder = Path("digits", "train" if number % 5 else "valid", str(digit))
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(folder / f"{number}.png")
