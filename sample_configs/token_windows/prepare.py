"""Writes the descriptions of scikit-learn's datasets as text files, the last one for validation."""

from pathlib import Path

from sklearn.datasets import load_breast_cancer, load_digits, load_wine

Path("data").mkdir(exist_ok=True)
for name, load in {"train-0": load_breast_cancer, "train-1": load_wine, "valid": load_digits}.items():
    Path(f"data/{name}.txt").write_text(load().DESCR, encoding="utf-8")
