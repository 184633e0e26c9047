"""What a stranger or the user has put into a run: no command changes or reads it, and none waits for it."""

import os
import random
import shutil
import subprocess
from contextlib import ExitStack, contextmanager

import pytest
from here import run_here
from projects import LINEAR

CONFIG = (
    "seed: 1\ndataset: {class: Majority, n: 50}\n"
    + LINEAR
    + "main_loop: {extra_streams: [valid], on_unused_sources: ignore}\n"
    + "hooks: [{ComputeStats: {variables: [loss]}}, WriteCSV, SaveBest, {StopAfter: {epochs: 1}}]\n"
)
SECRET = "SECRET-7781"
LONGER = "hooks.StopAfter.epochs=2"
COMMANDS = [
    ["ls", "r", "-v"],
    ["trace", "r"],
    ["report", "r", "-o", "page.html", "--overwrite"],
    ["diff", "r", "run"],
    ["replay", "r"],
    ["predict", "-q", "r", "valid", "-o", "p.csv", "--overwrite"],
    ["eval", "-q", "r", "valid"],
    ["train", "-q", "--output-dir", "r", "c.yaml"],
    ["train", "-q", "--output-dir", "r", "c.yaml", "--auto-resume"],
    ["resume", "-q", "r", LONGER],
    ["prune", "r", "--optimizer-states", "--yes"],
    ["prune", "r", "--yes"],
]
NEW = [
    "config-1.yaml", "notes.txt", "metrics.sqlite", "eval/mine", "eval/valid-2", "failures",
    "failures/1",
    "failures/1/failure.json", "code-2", "code-2/record.json", "code/modules/mine.py", "checkpoints/pretrained.pt",
    "checkpoints/epoch-1", "checkpoints/best/notes.txt", "tensorboard", "trackers/write_mlflow.json", "files/x",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a directory with a config, and a run of it that has been evaluated."""
    place = tmp_path_factory.mktemp("strangers")
    (place / "c.yaml").write_text(CONFIG)
    for command in (["train", "-q", "c.yaml", "--output-dir", "run"], ["eval", "-q", "run", "valid"]):
        done = run_here(command, place)
        assert done.returncode == 0, done.stderr
    return place


def tree(root):
    found = {}
    for path in root.rglob("*"):
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[path.relative_to(root)] = content
    return found


@contextmanager
def mounted(folder, place):
    """Have the files of a folder at another place too, as a file system that is mounted there."""
    if subprocess.run(["mount", "--bind", folder, place], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(each, marks=pytest.mark.campaign) for each in range(4, 300))])
def test_what_is_not_of_the_run_stays_and_is_not_read(run, emrun_here, tmp_path, seed):
    draw = random.Random(seed)
    with ExitStack() as stack:
        play(draw, run, emrun_here, tmp_path, stack)


def play(draw, run, emrun_here, tmp_path, stack):
    shutil.copytree(run, tmp_path, symlinks=True, dirs_exist_ok=True)
    shutil.copytree(run / "run", tmp_path / "r", symlinks=True)
    outside = tmp_path / "outside"
    (outside / "more").mkdir(parents=True)
    for name in ("file", "more/config.yaml", "more/manifest.json", ".tmp-1"):
        (outside / name).write_text(SECRET)
    own = sorted(str(path.relative_to(tmp_path / "r")) for path in (tmp_path / "r").rglob("*"))
    kind = draw.choice(["file", "link to a file", "link to a folder", "pipe", "run", "mount"])
    name = draw.choice(NEW if kind == "file" else [*NEW, *own])
    place = tmp_path / "r" / name
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    mine = f"mine {name}"
    match kind:
        case "file":
            place.write_text(mine)
        case "link to a file":
            place.symlink_to(outside / "file")
        case "link to a folder":
            place.symlink_to(outside)
        case "pipe":
            os.mkfifo(place)
        case "run":
            shutil.copytree(run / "run", place, symlinks=True)
        case "mount":
            (tmp_path / "mounted" / "more").mkdir(parents=True)
            for inner in ("file", "config.yaml", "manifest.json", ".tmp-1", "more/notes.txt"):
                (tmp_path / "mounted" / inner).write_text(mine)
            place.mkdir()
            stack.enter_context(mounted(tmp_path / "mounted", place))
    before = tree(outside), tree(place) if kind in ("run", "mount") else None
    steps = COMMANDS if draw.random() < 0.2 else sorted(draw.sample(COMMANDS, 4), key=COMMANDS.index)
    for command in steps:
        done = emrun_here(*command)
        said = f"{kind} at {name}, {command}, status {done.returncode}: {done.stderr}"
        assert done.returncode in (0, 2, 74), said
        assert tree(outside) == before[0], said
        is_named_as_a_config_of_the_run = name == "config-1.yaml" and command[-1] == "--yes"
        if kind == "file" and not is_named_as_a_config_of_the_run:
            assert mine in [path.read_text("latin-1") for path in (tmp_path / "r").rglob("*") if path.is_file()], said
        if kind in ("run", "mount"):
            renamed = place.with_name(f"{place.name}-replaced-1")  # the name of a checkpoint has taken its place
            there = renamed if renamed.exists() else place
            now = tree(there)  # an evaluation may lie in a folder that is mounted as eval
            assert {path: now.get(path, "gone") for path in before[1]} == before[1], said
        pages = [path for path in tmp_path.rglob("*") if path.is_file() and outside not in path.parents]
        found = [path for path in pages if not path.is_symlink() and SECRET in path.read_text("latin-1")]
        assert not found, f"{said} {found}"
        assert SECRET not in f"{done.stdout}{done.stderr}", said
