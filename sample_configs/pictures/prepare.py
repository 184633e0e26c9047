"""Writes pictures of two kinds of shapes, and masks with the class of each pixel: images/*.jpg and masks/*.png."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

random = np.random.default_rng(0)
for folder in ("images", "masks"):
    Path(folder).mkdir(exist_ok=True)
for number in range(120):
    width, height = random.integers(48, 80, 2).tolist()
    noise = random.integers(0, 120, (height, width, 3), np.uint8)
    picture = Image.fromarray(noise)
    mask = Image.new("L", (width, height))
    for label in (1, 2):
        left, top, size = random.integers([0, 0, 12], [width - 24, height - 24, 24]).tolist()
        color = tuple(random.integers(100, 256, 3).tolist())
        for canvas, fill in ((picture, color), (mask, label)):
            draw = ImageDraw.Draw(canvas)
            shape = draw.ellipse if label == 1 else draw.rectangle
            shape((left, top, left + size, top + size), fill=fill)
    picture.save(f"images/{number:03}.jpg", quality=95)
    mask.save(f"masks/{number:03}.png")
