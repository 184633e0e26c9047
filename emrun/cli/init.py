"""`emrun init`."""

from __future__ import annotations

import errno
import itertools
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import get_args

import click

from emrun.base.arguments import expanded, resolved
from emrun.base.errors import StorageError, reason_of
from emrun.base.tables import Table, width
from emrun.base.wording import did_you_mean, few, from_here, in_one_line, listed
from emrun.cli.console import GivenPath, named, quietly
from emrun.config.names import bases
from emrun.diagnosis.first_config import Task, first_config
from emrun.diagnosis.first_look import look
from emrun.exports.archive import unpack

_SAMPLES = Path(__file__).parent.parent / "sample_configs"
_DEFAULT = "my_project"
_COPIED = (".md", ".py", ".yaml")  # not the data that a sample's prepare.py has written into a clone
_TRANSFORMERS = re.compile(b"transformers|emrun:(chat|text)")
_README = """\
# {name}
{about}
{prepare}Find mistakes without training, train, resume after an interrupt, and evaluate. `emrun train` prints
the run directory, RUN_DIR:

    emrun check config.yaml
    emrun train config.yaml
    emrun resume RUN_DIR
    emrun eval RUN_DIR {stream}
{predict}
`test_project.py` is a test for pytest: it runs `emrun check`. If a library is missing:
`pip install 'emrun[{extras}]'`.
"""
_PREPARE = """\
Write the data, once:

    python prepare.py

"""
_TEST = '''\
"""The config works: `emrun check` reads the data, and tries a step, evaluations, saving and loading."""

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent


def test_the_config():
{prepare}    subprocess.run([sys.executable, "-m", "emrun", "check", "config.yaml"], cwd=PROJECT, check=True)
'''
_TEST_PREPARES = '    subprocess.run([sys.executable, "prepare.py"], cwd=PROJECT, check=True)\n'


@click.command()
@click.argument("directory", metavar="DIR", type=GivenPath(path_type=Path))
@click.option(
    "--from", "sample", metavar="SAMPLE|FILE.zip", show_default=_DEFAULT,
    shell_complete=quietly(lambda context, typed: named(samples(), typed)),
    help="The sample, or the base such as emrun:tabular, that is copied (an unknown name lists them all); or an "
    "archive, of which DIR becomes the run.",
)  # fmt: skip
@click.option(
    "--data", metavar="PATH", type=GivenPath(path_type=Path),
    help="Look at a folder of pictures, a .csv, .jsonl or .parquet file, and write a config for it.",
)  # fmt: skip
@click.option("--target", "column", metavar="COLUMN", help="With --data: the column to predict.")
@click.option(
    "--task", type=click.Choice(get_args(Task)), help="With --data: what to learn; by default what the data look like."
)
def init(directory: Path, sample: str | None, data: Path | None, column: str | None, task: Task | None) -> None:
    """Create a project in DIR: a sample config, the Python files that it names, a README and a test.

    DIR must not exist, or be empty; a directory .git may be there. A config without other files is copied as
    config.yaml. Train it with: cd DIR; emrun train config.yaml

    With --from FILE.zip, DIR becomes the run of which emrun export --to archive has made the file: emrun eval, predict,
    resume and verify-run take DIR. It has the code of the run, which these import: unpack only what you trust.

    With --data PATH, the config is written for the data at PATH, which are only read: a base with its settings, and a
    comment for each. What was seen is printed: rows, gaps, classes, sizes, and columns that are different in each row.
    """
    if data is None and (column is not None or task is not None):
        raise click.UsageError("--target and --task need --data PATH")
    if data is not None and sample is not None:
        raise click.UsageError("--data writes a config of its own; leave out --from")
    if sample is not None and sample.endswith(".zip"):
        _unpack(expanded(sample), resolved(directory))
        return
    known = samples()
    sample = sample or _DEFAULT
    if sample not in known:
        if expanded(sample).is_file():
            raise click.UsageError(f"{sample} is not the name of an archive, which ends in .zip")
        near = did_you_mean(sample, known)
        raise click.UsageError(f"there is no sample {sample!r}{near} (there are {listed(list(known))})")
    target = expanded(directory)
    if not target.is_dir() and (target.is_symlink() or target.exists()):
        raise click.UsageError(f"{target} is not a directory")
    names = sorted(path.name for path in target.iterdir() if path.name != ".git") if target.is_dir() else []
    if names:
        raise click.UsageError(f"{target} is not empty (it has {few(names)}); name a new or an empty directory")
    made = None if data is None else first_config(look(expanded(data).resolve()), column, task)
    if made is None:
        files = _files(known[sample])
    else:
        predict = f"\nPredict new data:\n\n    {made.predicting}\n"
        config = made.text(target.resolve()).encode()
        files = _with_texts({"config.yaml": config}, target.name, made.evaluated, predict)
    try:
        _write(target, files)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, f"cannot write the project: {reason_of(error)}") from error
    origin = f"from the sample {sample}"
    if made is not None:
        origin = f"with emrun:{made.base}"
        for line in made.seen:
            click.echo(line.folded(width(sys.stdout)) if isinstance(line, Table) else line)
    click.echo(f"created {target} {origin}: {listed(list(files))}")
    first = "python prepare.py; " if "prepare.py" in files else ""
    click.echo(f"train it with: cd {click.format_filename(target)}; {first}emrun train config.yaml")
    if made is not None:
        click.echo(f"predict new data with: {made.predicting}")


def _unpack(file: Path, target: Path) -> None:
    """Unpack an archive, and say what is inside and what can be done with it."""
    content = unpack(file, target)
    checkpoints = listed([in_one_line(name) for name in content["checkpoints"]])
    click.echo(f"created {target}: run {in_one_line(content['run'])}, checkpoint {checkpoints}, without its data")
    click.echo(f"resume it with: emrun resume {click.format_filename(from_here(target))}")


def samples() -> dict[str, Path]:
    """Return the samples and bases: name -> a directory with a `config.yaml`, or a config."""
    entries = sorted(_SAMPLES.iterdir())
    projects = {path.name: path for path in entries if (path / "config.yaml").is_file()}
    files = {path.stem: path for path in entries if path.suffix == ".yaml"}
    return {**dict(sorted({**projects, **files}.items())), **bases()}


def _files(sample: Path) -> dict[str, bytes]:
    """Return the files of a project made from a sample: name -> content."""
    if sample.is_dir():
        copied = [path for path in sorted(sample.iterdir()) if path.suffix in _COPIED]
        files = {path.name: path.read_bytes() for path in copied}
    else:
        files = {"config.yaml": sample.read_bytes()}
    return _with_texts(files, sample.stem)


def _with_texts(files: dict[str, bytes], name: str, stream: str = "valid", predict: str = "") -> dict[str, bytes]:
    """Return the files of a project with a README and a test, unless they have these."""
    prepares = "prepare.py" in files
    texts = {
        "README.md": _README.format(
            name=name,
            about=_comment(files["config.yaml"].decode()),
            prepare=_PREPARE if prepares else "",
            stream=stream,
            predict=predict,
            extras="metrics,data,transformers" if _TRANSFORMERS.search(files["config.yaml"]) else "metrics,data",
        ),
        "test_project.py": _TEST.format(prepare=_TEST_PREPARES if prepares else ""),
    }
    return {**files, **{name: text.encode() for name, text in texts.items() if name not in files}}


def _comment(config: str) -> str:
    """Return the comment at the beginning of a sample, as a paragraph between empty lines."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), config.splitlines())
    shown = [line.replace("#   ", "\n    ").removeprefix("# ").removeprefix("#") for line in lines]  # commands are code
    return "".join(f"\n{line}" for line in shown) + "\n"


def _write(target: Path, files: dict[str, bytes]) -> None:
    """Write the files into a directory, all or none."""
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []  # not a file that another process has written
    try:
        for name, content in files.items():
            with (target / name).open("xb") as file:
                written.append(target / name)
                file.write(content)
    except BaseException:
        with suppress(OSError):  # the error that is told is the one of the write
            for path in written:
                path.unlink()
            if is_new:
                target.rmdir()
        raise
