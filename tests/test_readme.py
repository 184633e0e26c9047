"""The README: every file in it is written, every command run, in order, as a newcomer would paste them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:^`(?P<file>[\w.]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SET_UP = {"make train": "emrun train sample_configs/digits_convnet.yaml"}  # without the virtual environment


@pytest.mark.timeout(300)
def test_every_command_and_file_of_the_readme_works(tmp_path):
    clone = tmp_path / "emrun"
    shutil.copytree(ROOT / "sample_configs", clone / "sample_configs")
    script = ["set -eu"]
    for index, block in enumerate(BLOCK.finditer(README)):
        if block["file"]:
            script.append(f"cat > {block['file']} <<'END_OF_{index}'\n{block['text']}END_OF_{index}")
        elif block["kind"] == "sh":
            script += [SET_UP.get(line, line) for line in block["text"].splitlines()]
        elif block["kind"] == "python":
            script.append(f"python - <<'END_OF_{index}'\n{block['text']}END_OF_{index}")
    commands = "\n".join(script)
    assert commands.count("emrun ") >= 5
    done = subprocess.run(
        ["bash", "-c", commands],
        cwd=clone,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "finished 2 epochs done (StopAfter epochs: 2)" in done.stdout
    accuracies = [float(line.split()[-1]) for line in done.stdout.splitlines() if re.match(r"test +accuracy", line)]
    assert accuracies[0] > 0.95


def test_the_first_config_of_the_readme_trains(tmp_path, emrun):
    first = next(block for block in BLOCK.finditer(README) if block["kind"] == "yaml")
    (tmp_path / "config.yaml").write_text(first["text"])
    done = emrun("train", "-q", "config.yaml", "hooks.StopAfter.epochs=1")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_project_of_the_readme_is_the_sample():
    files = {block["file"]: block["text"] for block in BLOCK.finditer(README) if block["file"]}
    folder = ROOT / "sample_configs" / "my_project"
    assert files == {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}


def test_the_readme_lists_every_hook():
    names = {path.stem.replace("_", "") for path in (ROOT / "hooks").glob("[!_]*.py")}
    listed = {name.lower() for name in re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)}
    assert names <= listed
