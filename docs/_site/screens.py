"""Makes the pictures of pages and of a terminal: `make docs-pictures`; it needs chromium.

`python docs/_site/screens.py run` makes one of them. The pages of a run, of a sweep and of a failed run are
photographed light and dark. The terminal, the loop and the run directory are drawn as SVG, whose colours follow the
reader's scheme.
"""

import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGES = {
    "run": ("emrun train config.yaml -q --output-dir log/run", "log/run/report.html"),
    "sweep": (
        "emrun sweep config.yaml -q --repeats 2 sweep.objective=valid/loss/mean hooks.StopAfter.epochs=5 "
        "-p 'model.optimizer.lr=[3.0e-4, 3.0e-3, 3.0e-2]' -p 'model.module.hidden=[8, 32]'; "
        "emrun report log/tumours_sweep",
        "log/tumours_sweep/report.html",
    ),
    "failure": (
        "sed -i 's/self.train = features/features[71, 3] = float(\"nan\"); self.train = features/' my_data.py; "
        "emrun train config.yaml -q --output-dir log/failed main_loop.skip_zeroth_epoch=true",
        "log/failed/report.html",
    ),
}
"""Picture -> what makes the page in a project, and the page."""
SESSION = [
    "emrun train config.yaml --output-dir log/one hooks.StopAfter.epochs=2",
    "sed s/epochs/epoch/ config.yaml > typo.yaml; emrun train typo.yaml",
]
SCHEMES = {"light": 1, "dark": 0}  # as blink numbers them
STYLE = """<style>
text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #24292f; white-space: pre }
.command { font-weight: bold } .event { fill: #0550ae } .note { fill: #57606a }
.back { fill: #f6f8fa }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .event { fill: #79c0ff } .note { fill: #9198a1 } .back { fill: #161b22 }
}
</style>"""
LOOP = [
    (0, "before_training", "once"),
    (1, "before_epoch", "for each epoch; epoch 0 only evaluates"),
    (2, "before_stream", "for the train stream, then for each stream that is evaluated"),
    (3, "before_batch", "for each batch"),
    (4, "", "the model runs; in the train stream, an update:"),
    (5, "before_update", "the gradients are complete"),
    (5, "after_update", "the optimizer has made its step"),
    (3, "after_batch", "sources and outputs of the batch"),
    (2, "after_stream", ""),
    (1, "after_epoch", "statistics are written and read; then checkpoints are saved"),
    (0, "after_training", "always"),
]
"""How deep an event is in the loop, its name, and when it comes."""
RUN_DIRECTORY = [
    ("log/tumours_20261120-210301/", ""),
    ("├─ config.yaml", "the whole config: trains the same again"),
    ("├─ trace.yaml", "begin, end, status, seed, versions"),
    ("├─ train.log", "the log"),
    ("├─ report.html", "a page of curves, to open in a browser"),
    ("├─ metrics.jsonl", "the statistics of each epoch"),
    ("├─ steps.jsonl", "the loss and the learning rate of each iteration"),
    ("├─ checkpoints/", ""),
    ("│  ├─ best, latest", "links to checkpoints, such as this one:"),
    ("│  └─ it-00000087/", "after 87 iterations"),
    ("│     ├─ model.safetensors", "the weights"),
    ("│     ├─ state.pt", "state of the optimizer, the data and the hooks"),
    ("│     └─ manifest.json", "checksums of the two files"),
    ("├─ code/", "your modules, versions of packages, the git commit"),
    ("├─ failures/", "steps that failed, for emrun replay"),
    ("└─ eval/", "results of emrun eval"),
]
"""A file or directory of a run with its place in the tree, and what it has."""


def svg(lines, width):
    """Return lines of text, each a list of pairs of class and text, as an SVG."""
    height = 18 * len(lines) + 24
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    parts = [head, STYLE, f'<rect class="back" width="{width}" height="{height}" rx="6"/>']
    for number, line in enumerate(lines):
        spans = "".join(f'<tspan class="{name}">{html.escape(text)}</tspan>' for name, text in line)
        parts.append(f'<text x="14" y="{18 * number + 26}" xml:space="preserve">{spans}</text>')
    return "\n".join([*parts, "</svg>\n"])


def loop():
    """Return the picture of the loop: the events, indented by what repeats them."""
    lines = []
    for depth, event, note in LOOP:
        indent = "  " * depth
        lines.append([("event", f"{indent}{event}".ljust(28)), ("note", f"{'' if event else indent}{note}")])
    return svg(lines, 760)


def tree():
    """Return the picture of the files of a run, as a tree."""
    return svg([[("event", place.ljust(30)), ("note", note)] for place, note in RUN_DIRECTORY], 660)


def run(command, place):
    """Run a command in a project; return what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def photograph(page, name, place):
    """Write the pictures of a page, light and dark."""
    for scheme, number in SCHEMES.items():
        subprocess.run(
            [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={place}/browser",
                f"--blink-settings=preferredColorScheme={number}",
                "--window-size=1100,900",
                f"--screenshot={PICTURES}/{name}-{scheme}.png",
                page.as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        picture = PICTURES / f"{name}-{scheme}.png"
        Image.open(picture).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(picture, optimize=True)


def without_paths(run_directory):
    """Write the page of a run again, with a command without the place of emrun."""
    trace = run_directory / "trace.yaml"
    trace.write_text(trace.read_text(encoding="utf-8").replace(f"{Path(sys.executable).parent}/", ""), encoding="utf-8")
    run(f"emrun report {run_directory.name}", run_directory.parent)


def main(names):
    """Make these pictures, or all."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "loop.svg").write_text(loop(), encoding="utf-8")
    (PICTURES / "run_directory.svg").write_text(tree(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or [*PAGES, "terminal"]:
            place = shutil.copytree(ROOT / "sample_configs" / "my_project", Path(folder, name))
            if name == "terminal":
                (PICTURES / "terminal.svg").write_text(svg(session(place), 960), encoding="utf-8")
                continue
            command, page = PAGES[name]
            run(command, place)
            if name != "sweep":
                without_paths((place / page).parent)
            photograph(place / page, name, folder)


def session(place):
    """Return the lines of a terminal: commands and what they print."""
    lines = []
    for command in SESSION:
        lines.append([("command", f"$ {command}")])
        lines += [[("", line)] for line in run(command, place).splitlines() if line != "importing PyTorch..."]
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
