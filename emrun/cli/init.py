"""`emrun init`."""

from __future__ import annotations

import errno
import itertools
from contextlib import suppress
from pathlib import Path

import click

from emrun.base.arguments import expanded
from emrun.base.errors import StorageError, reason_of
from emrun.base.wording import did_you_mean, few, listed
from emrun.cli.console import GivenPath, named, quietly

_SAMPLES = Path(__file__).parent.parent / "sample_configs"
_DEFAULT = "my_project"
_COPIED = (".md", ".py", ".yaml")  # not the data that a sample's prepare.py has written into a clone
_README = """\
# {name}
{about}
{prepare}Find mistakes without training, train, resume after an interrupt, and evaluate. `emrun train` prints
the run directory, RUN_DIR:

    emrun check config.yaml
    emrun train config.yaml
    emrun resume RUN_DIR
    emrun eval RUN_DIR valid

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
    "--from", "sample", metavar="SAMPLE", default=_DEFAULT, show_default=True,
    shell_complete=quietly(lambda context, typed: named(samples(), typed)),
    help="The sample that is copied; an unknown name lists them all.",
)  # fmt: skip
def init(directory: Path, sample: str) -> None:
    """Create a project in DIR: a sample config, the Python files that it names, a README and a test.

    DIR must not exist, or be empty; a directory .git may be there. A config without other files is copied as
    config.yaml. Train it with: cd DIR; emrun train config.yaml
    """
    known = samples()
    if sample not in known:
        near = did_you_mean(sample, known)
        raise click.UsageError(f"there is no sample {sample!r}{near} (there are {listed(list(known))})")
    target = expanded(directory)
    if not target.is_dir() and (target.is_symlink() or target.exists()):
        raise click.UsageError(f"{target} is not a directory")
    names = sorted(path.name for path in target.iterdir() if path.name != ".git") if target.is_dir() else []
    if names:
        raise click.UsageError(f"{target} is not empty (it has {few(names)}); name a new or an empty directory")
    files = _files(known[sample])
    try:
        _write(target, files)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, f"cannot write the project: {reason_of(error)}") from error
    click.echo(f"created {target} from the sample {sample}: {listed(list(files))}")
    first = "python prepare.py; " if "prepare.py" in files else ""
    click.echo(f"train it with: cd {click.format_filename(target)}; {first}emrun train config.yaml")


def samples() -> dict[str, Path]:
    """Return the samples: name -> a directory with a `config.yaml`, or a config."""
    entries = sorted(_SAMPLES.iterdir())
    projects = {path.name: path for path in entries if (path / "config.yaml").is_file()}
    return dict(sorted({**projects, **{path.stem: path for path in entries if path.suffix == ".yaml"}}.items()))


def _files(sample: Path) -> dict[str, bytes]:
    """Return the files of a project made from a sample: name -> content."""
    if sample.is_dir():
        copied = [path for path in sorted(sample.iterdir()) if path.suffix in _COPIED]
        files = {path.name: path.read_bytes() for path in copied}
    else:
        files = {"config.yaml": sample.read_bytes()}
    prepares = "prepare.py" in files
    texts = {
        "README.md": _README.format(
            name=sample.stem,
            about=_comment(files["config.yaml"].decode()),
            prepare=_PREPARE if prepares else "",
            extras="metrics,data,transformers" if b"transformers" in files["config.yaml"] else "metrics,data",
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
