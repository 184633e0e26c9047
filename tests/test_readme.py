"""The README and the pages of docs/: every file in them is written, every command and snippet run, every link followed.

A transcript (a block of kind `console`) must have the output that the command has, but for numbers and blanks; a line
`...` stands for any lines. `REFRESH_TRANSCRIPTS=1 pytest -n 0 tests/test_readme.py -m ''` writes the output into the
pages instead.

docs/guide/runs.md has the transcripts of the commands on runs. All blocks of a page run one after another in a copy of
the project of docs/start/project.md, so that a later block finds the runs of an earlier one. To add a command: write a
section with a block `console` that has only its lines `$ emrun ...`, and let the command above write the output into
it; give runs fixed names (`--output-dir`), add a block `sh` for what need not be shown, and mark a block that takes
more than a few seconds `console slow`: `make campaign` runs it, in a copy of the project of its own. A page whose
commands take more than about two CPU seconds together is listed in COSTLY: `make test` only checks its configs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from emrun.config.config import load_config
from emrun.config.plan import check_statically

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "sample_configs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
COSTLY = [
    f"docs/{each}.md"
    for each in (
        *("guide/agents", "guide/check", "guide/config", "guide/devices", "guide/export", "guide/failures"),
        *("guide/hooks", "guide/models", "guide/predict", "guide/python", "guide/ragged", "guide/recipes"),
        *("guide/resume", "guide/runs", "guide/speed", "guide/sweep", "guide/weights", "guide/write_hooks"),
        "reference/json",
    )
]
"""The pages whose commands only `make campaign` runs."""
SHORTER = {
    "emrun resume long hooks.StopAfter.iterations=200": "hooks.StopAfter.iterations=60",
    "emrun train chats.yaml --output-dir run": "vars.epochs=1",
    "emrun train config.yaml": "hooks.StopAfter.epochs=1",
    "emrun train config.yaml --output-dir long hooks.StopAfter.iterations=100": "hooks.StopAfter.iterations=30",
    "emrun train fruit.yaml --output-dir run": "vars.epochs=1",
    "emrun train load.yaml --output-dir run": "vars.epochs=1",
    "emrun train parts.yaml --output-dir run": "vars.epochs=1",
    "emrun train reviews.yaml --output-dir run": "vars.epochs=1",
    "emrun train sample_configs/digits_mlp.yaml model.optimizer.lr=0.01 hooks.StopAfter.epochs=3": (
        "main_loop.fixed_epoch_size=8"
    ),
    "emrun train wine.yaml --output-dir run": "vars.epochs=1",
}
"""A command of docs/start -> the override with which `make test` runs it."""
LEARNT = ("cat", "cut", "head")
"""Commands that show what a model has learnt, which `make test` does not compare where it trains shorter."""
WITH_TRANSFORMERS = ("docs/start/language_models.md", "docs/start/text.md")
"""The pages whose commands import transformers."""
BLOCK = re.compile(
    r"(?:`(?P<file>[\w.]+)`:\n\n)?^```(?P<kind>\w+)(?: (?P<info>\w+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
DIGITS = "emrun train sample_configs/digits_convnet.yaml"
SHORT = "hooks.StopAfter.epochs=1 main_loop.fixed_epoch_size=8 'main_loop.extra_streams=[{valid: {batches: 2}}]'"
SET_UP = {"make train": f"{DIGITS} {SHORT}"}  # without the virtual environment, and not to the end
SLOW_START = re.compile(r"^(importing|building|reading) .*\.\.\.\n", re.MULTILINE)  # told where it takes long
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def page(name):
    """Return the text of a page, by its path in the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text, *kinds):
    return [block for block in BLOCK.finditer(text) if not kinds or block["kind"] in kinds]


def bash(script, cwd, timeout=100):
    """Run a script; return the finished process, its output and errors in one text."""
    return subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        env={**os.environ, "PATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def project(tmp_path):
    """The directory of the README's project."""
    return shutil.copytree(SAMPLES / "my_project", tmp_path / "project")


@pytest.fixture
def warm(request, warm):
    """Let the commands of a page that needs transformers run where the library is imported, unless that is here."""
    if request.node.get_closest_marker("campaign") and request.node.name.endswith(
        tuple(f"[{name}]" for name in WITH_TRANSFORMERS)
    ):
        return request.getfixturevalue("warm_with_transformers")
    return warm


@pytest.fixture
def shell(emrun, emrun_here, tmp_path):
    """Run a line of a page in a directory; its first command, if emrun's, runs where PyTorch is imported already.

    With `here`, this is the process of the tests.
    """

    def run(line, cwd, *, here=False):
        first = re.match(r"emrun [^;&|<>]*", line)
        if not first or len(re.findall("[\"']", first[0])) % 2:
            done = bash(line, cwd)
            return done.returncode, done.stdout
        words = bash(f"printf '%s\\0' {first[0]}", cwd).stdout.split("\0")[1:-1]
        if here and "--nproc" not in words:
            done = emrun_here(*words, cwd=cwd)
        else:
            done = emrun(*words, cwd=cwd, ranks=4 if "--nproc" in words else 0)
        if first[0] == line:
            return done.returncode, done.stderr + done.stdout
        for name, text in (("stdout", done.stdout), ("stderr", done.stderr)):
            (tmp_path / name).write_text(text)
        told = f"emrun() {{ cat {tmp_path}/stdout; cat {tmp_path}/stderr >&2; return {done.returncode}; }}\n"
        done = bash(told + line, cwd)
        return done.returncode, done.stdout

    return run


def transcript(block):
    """Return the commands of a block of kind `console`, each with the output that the page shows."""
    parts = re.split(r"^\$ (.*)\n", block["text"], flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


SHOWN = {
    command
    for name in PAGES
    for block in blocks(page(name), "console")
    if block["info"] != "slow"
    for command, _ in transcript(block)
}
"""The commands that run where a page of docs/ shows their output; they are not run a second time."""


def normal(text):
    """Return an output as it is compared: without numbers, sizes and times, whatever the width of columns and lines."""
    text = re.sub(r"\b0 [KMG]B\b", "0 B", re.sub(r"\d[\d.,:e+-]*", "0", text))
    text = re.sub(r"\b0 (min|h|d)\b", "0 s", text)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [re.sub(r"-{2,}", "--", line) for line in lines if line]


def fits(shown, output):
    """Tell whether an output is the one that a page shows, in which a line `...` stands for any lines."""
    parts = [re.escape(line) if line != "..." else "\0" for line in normal(shown)]
    pattern = "".join("(?:.*\n)*?" if part == "\0" else f"{part}\n" for part in parts)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in normal(output))) is not None


def shortened(text):
    """Return an output in which one epoch is written as several are, since `make test` may train only one."""
    return re.sub(r"\b1 epoch\b", "1 epochs", text)


def check_transcript(name, block, run, *, shorter=False):
    """Compare the output of a block's commands with what the page shows; or replace what the page shows.

    With `shorter`, the commands in SHORTER train less, and what a model has learnt is not compared.
    """
    for command, shown in transcript(block):
        override = SHORTER.get(command) if shorter else None
        output = SLOW_START.sub("", run(f"{command} {override}" if override else command))
        if shorter:
            fitting = command.startswith(LEARNT) or fits(shortened(shown), shortened(output))
        else:
            fitting = fits(shown, output)
        if fitting:
            continue
        if not os.environ.get("REFRESH_TRANSCRIPTS"):
            assert shown == output
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(f"$ {command}\n{shown}", f"$ {command}\n{output}"), encoding="utf-8")


def test_a_transcript_shows_what_a_command_prints():
    output = "epoch 1  loss 0.5\nepoch 2  loss 0.4\nname   value\n-----  ----\nloss   0.4\n"
    assert fits("epoch 1  loss 0.7\n...\nname value\n---- ---\nloss 12.3\n", output)
    assert fits("...\n", output)
    assert not fits("epoch 1  loss 0.7\nname value\n---- ---\nloss 12.3\n", output)
    assert not fits("epoch 1  lost 0.7\n...\n", output)


def test_every_command_and_transcript_of_the_readme_works(tmp_path, shell):
    place = shutil.copytree(SAMPLES, tmp_path / "emrun" / "sample_configs").parent
    (block,) = blocks(README, "sh")
    for line in block["text"].splitlines():
        status, output = shell(SET_UP.get(line, line), place, here=True)
        assert status == 0, output
        if moved := re.search(r"\bcd (\w+)", line):
            place = place / moved[1]
    quick, slow = blocks(README, "console")
    check_transcript("README.md", quick, lambda line: shell(line, place, here=True)[1])
    assert slow["info"] == "slow"
    (tumours,) = place.glob("log/tumours_*")
    assert best_accuracy(tumours) > 0.9


@pytest.mark.campaign
def test_the_network_of_make_train_classifies_more_than_98_percent_as_the_readme_says(tmp_path, shell):
    clone = shutil.copytree(SAMPLES, tmp_path / "sample_configs").parent
    status, output = shell(DIGITS, clone)
    assert status == 0, output
    (digits,) = clone.glob("log/digits_convnet_*")
    assert best_accuracy(digits) > 0.98


def best_accuracy(run):
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return max(json.loads(line)["streams"]["valid"]["accuracy"]["mean"] for line in lines)


def files_of(text):
    return {block["file"]: block["text"] for block in blocks(text) if block["file"]}


def test_the_project_of_the_pages_is_the_sample():
    folder = SAMPLES / "my_project"
    sample = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}
    assert files_of(page("docs/start/project.md")) == sample
    assert files_of(README).items() <= sample.items()


@pytest.fixture
def in_project(project, monkeypatch):
    """Be in the directory of the README's project, whose modules can be imported."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for other in [name for name in sys.modules if name.startswith("my_")]:  # of another test's project
        monkeypatch.delitem(sys.modules, other)
    return project


def check_data(block, index):
    """Check that a block of YAML is a config, or a part of one; or that a block of TOML can be read."""
    text = block["text"]
    if block["kind"] == "toml":
        tomllib.loads(text)
    elif block["kind"] == "yaml" and block["info"] != "wrong":
        is_part = not re.search(r"^(extends|dataset):", text, re.MULTILINE) or "\nmodel:" not in f"\n{text}"
        part = f"extends: config.yaml\n{text}" if is_part and "extends:" not in text else text
        snippet = Path(f"snippet_{index}.yaml")
        snippet.write_text(part)
        check_statically(load_config(snippet), evaluations=True)


@pytest.mark.parametrize("name", COSTLY)
def test_the_configs_of_a_page_are_valid(name, in_project):
    found = blocks(page(name))
    for block in found:
        if block["file"]:
            (in_project / block["file"]).write_text(block["text"])
    for index, block in enumerate(found):
        check_data(block, index)


@pytest.mark.whole
@pytest.mark.parametrize("name", [name for name in PAGES if name not in COSTLY])
def test_every_command_and_snippet_of_a_page_works(name, in_project, shell, warm):
    check_page(name, in_project, shell, warm, shorter=True)


def is_shortened(name):
    """Return whether `make test` runs a command of a page with less training."""
    return any(line.removeprefix("$ ") in SHORTER for line in page(name).splitlines())


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in PAGES if name in COSTLY or is_shortened(name)])
def test_every_command_of_a_page_works_as_it_is_written(name, in_project, shell, warm):
    check_page(name, in_project, shell, warm, shorter=False)


def check_page(name, project, shell, warm, *, shorter):
    """Run the commands and snippets of a page, and check its configs; see `check_transcript` for `shorter`."""
    run = partial(shell, cwd=project, here=shorter)
    replaced = SET_UP | ({command: f"{command} {override}" for command, override in SHORTER.items()} if shorter else {})
    if name == "docs/start/install.md":
        shutil.copytree(SAMPLES, project / "sample_configs")
    for index, block in enumerate(blocks(page(name))):
        kind, text = block["kind"], block["text"]
        if block["file"]:
            (project / block["file"]).write_text(text)
        if kind == "sh":
            for line in text.splitlines():
                status, output = run(replaced.get(line, line)) if line not in SHOWN else (0, "")
                assert status == 0, output
        elif kind == "console" and block["info"] != "slow":
            check_transcript(name, block, lambda command: run(command)[1], shorter=shorter)
        elif kind == "python" and not block["file"]:
            (project / f"snippet_{index}.py").write_text(text)
            done = warm.run([str(project / f"snippet_{index}.py")], project, timeout=60)
            assert done.returncode == 0, done.stderr
        else:
            check_data(block, index)


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in ["README.md", *PAGES] if "console slow" in page(name)])
def test_the_slow_transcripts_of_a_page_are_true(name, project):
    for block in blocks(page(name), "console"):
        if block["info"] == "slow":
            check_transcript(name, block, lambda command: bash(command, project, timeout=280).stdout)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def rows(text, heading):
    """Return the first column of the table below a heading, without backquotes."""
    section = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"^\| `([^`]*)`", section, re.MULTILINE)


def test_every_target_that_measures_is_listed_with_its_script():
    text = page("benchmarks/README.md")
    targets = re.findall(r"^(bench-[\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(rows(text, "Measuring")) == sorted(f"make {each}" for each in targets)
    scripts = set(re.findall(r"^\| `make [\w-]+` \| `(\w+\.py)` \|", text, re.MULTILINE))
    assert scripts == {path.name for path in (ROOT / "benchmarks").glob("*.py")}


def test_the_checks_before_a_commit_are_those_of_make_check():
    checks = re.findall(r"^ +entry: \.venv/bin/(.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    recipe = re.search(r"^check: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert checks == re.findall(r"^\t\$\(BIN\)/(.*)$", recipe, re.MULTILINE)
