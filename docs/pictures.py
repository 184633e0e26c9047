"""Draws the pictures of docs/start: it runs the blocks of each page in a temporary directory and draws what came out.

`make docs-pictures` runs it for all pages; `python docs/pictures.py images masks` for some of them.
"""

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from PIL import Image

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(?:`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLORS = ["#2a6f97", "#e07a2f", "#5a9e6f"]
PALETTE = np.array([[35, 35, 45], [224, 122, 47], [90, 150, 230]], np.uint8)
"""The colors of the classes of masks."""


def follow(page, place):
    """Do what a page says in a directory: write its files, run its commands and its code."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for file, kind, text in BLOCK.findall((DOCS / "start" / f"{page}.md").read_text(encoding="utf-8")):
        if file:
            (place / file).write_text(text, encoding="utf-8")
        elif kind == "python":
            subprocess.run([sys.executable, "-c", text], cwd=place, check=True)
        elif kind in ("console", "sh"):
            lines = re.findall(r"^\$ (.*)$" if kind == "console" else r"^(.*)$", text, re.MULTILINE)
            subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=place, check=True, env={**os.environ, "PATH": path})


def table(file):
    """Return the rows of a CSV file as mappings."""
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def curves(axes, run, variable, title):
    """Draw a statistic of each epoch, of the streams train and valid."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for stream, color in zip(("train", "valid"), COLORS, strict=False):
        values = [line["streams"][stream][variable]["mean"] for line in lines]
        axes.plot(range(len(values)), values, marker="o", markersize=3, color=color, label=stream)
    axes.set(title=title, xlabel="epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)


def picture(axes, pixels, title):
    """Show a picture without axes."""
    axes.imshow(pixels, interpolation="nearest")
    axes.set_title(title, fontsize=8)
    axes.axis("off")


def images(place):
    """Accuracy, and new pictures with their classes."""
    figure = plt.figure(figsize=(7.5, 2.8), layout="constrained")
    left, right = figure.subfigures(1, 2)
    curves(left.subplots(), place / "run", "accuracy", "accuracy")
    for axes, row in zip(right.subplots(2, 3).flat, table(place / "new.csv"), strict=True):
        probability = float(row[f"probability.{row['name']}"])
        picture(axes, Image.open(place / "new" / row["id"]), f"{row['name']} {probability:.0%}")
    return figure


def masks(place):
    """New pictures with their masks."""
    figure, grid = plt.subplots(2, 4, figsize=(7.5, 3.6), layout="constrained")
    for (above, below), file in zip(grid.T, sorted((place / "new").iterdir()), strict=True):
        picture(above, Image.open(file), f"new/{file.name}")
        picture(below, PALETTE[np.array(Image.open(place / "predicted" / file.name))], f"predicted/{file.name}")
    return figure


def tables(place):
    """How often each class was predicted as each other one, in the part test."""
    command = [Path(sys.executable).with_name("emrun"), "predict", "run", "test", "-o", "test.csv", "--probabilities"]
    subprocess.run(command, cwd=place, check=True)
    right = {row["bottle"]: row["grower"] for row in table(place / "wine.csv")}
    pairs = [(right[row["id"]], row["name"]) for row in table(place / "test.csv")]
    names = sorted({name for pair in pairs for name in pair})
    counts = np.array([[pairs.count((true, predicted)) for predicted in names] for true in names])
    figure, (left, axes) = plt.subplots(1, 2, figsize=(7.5, 2.8), layout="constrained")
    curves(left, place / "run", "accuracy", "accuracy")
    axes.imshow(counts, cmap="Blues", vmax=counts.max() * 1.5)
    for (row, column), count in np.ndenumerate(counts):
        axes.text(column, row, count, ha="center", va="center")
    axes.set(title="rows of the part test", xlabel="predicted", ylabel="right")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    return figure


def series(place):
    """The known past, the forecast and what came."""
    past, future = ([float(row["load"]) for row in table(place / f"{name}.csv")] for name in ("latest", "tomorrow"))
    (row,) = table(place / "forecast.csv")
    forecast = [float(value) for name, value in row.items() if name.startswith("forecast.")]
    figure, axes = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
    after = range(len(past), len(past) + len(future))
    axes.plot(past, color="grey", label="known")
    axes.plot(after, future, color=COLORS[0], label="what came")
    axes.plot(after, forecast, color=COLORS[1], linestyle="--", label="forecast")
    axes.set(xlabel="hour", ylabel="load", ylim=(20, None))
    axes.legend(frameon=False, ncols=3, loc="lower left")
    return figure


def text(place):
    """Accuracy, and new texts with the probability of their classes."""
    figure, (left, axes) = plt.subplots(1, 2, figsize=(7.5, 2.8), layout="constrained", width_ratios=(2, 3))
    curves(left, place / "run", "accuracy", "accuracy")
    rows = table(place / "new.csv")
    texts = [json.loads(line)["text"] for line in (place / "new.jsonl").read_text(encoding="utf-8").splitlines()]
    axes.barh(range(len(rows)), [float(row["probability.good"]) for row in rows], color="#f3c9a8")
    for place_of_bar, words in enumerate(texts):
        axes.text(0.01, place_of_bar, words, va="center", fontsize=6)
    axes.set(title="probability of good", xlim=(0, 1), yticks=[])
    axes.invert_yaxis()
    return figure


def language_models(place):
    """Loss, and answers to new chats."""
    figure, (left, axes) = plt.subplots(1, 2, figsize=(7.5, 2.6), layout="constrained")
    curves(left, place / "run", "loss", "loss")
    lines = (place / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    for number, answer in enumerate(json.loads(line) for line in lines):
        asked = re.search(r"user\n(.*?)<end>", answer["prompt"])[1]
        for text, x, y, color in ((asked, 0.02, 0.92, "#dde8f0"), (answer["generated"], 0.4, 0.77, "#f6dcc6")):
            axes.text(x, y - number / 3, text, fontsize=8, va="top", bbox={"facecolor": color, "edgecolor": "none"})
    axes.axis("off")
    return figure


PICTURES = {
    "images": images,
    "masks": masks,
    "tables": tables,
    "series": series,
    "text": text,
    "language_models": language_models,
}
"""Page -> what draws its picture from the directory in which its blocks were run."""


def main(pages):
    """Draw the pictures of these pages, or of all."""
    mpl.use("agg")
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "emrun"})
    for page in pages or PICTURES:
        with tempfile.TemporaryDirectory() as place:
            follow(page, Path(place))
            figure = PICTURES[page](Path(place))
        figure.savefig(DOCS / "pictures" / f"{page}.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1:])
