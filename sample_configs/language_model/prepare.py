"""Writes Python's standard library as text: most files for training, the beginnings of the others for validation."""

import sysconfig
from pathlib import Path

files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
texts = [text for file in files if (text := file.read_bytes()).isascii()]  # so that a byte is a character
Path("data").mkdir(exist_ok=True)
train = b"".join(text for number, text in enumerate(texts) if number % 10)
Path("data/train.txt").write_bytes(train[:4_000_000])
Path("data/valid.txt").write_bytes(b"".join(text[:5_000] for text in texts[::10]))
