"""Export a run: what `emrun export` and `emrun.export` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from emrun.base.arguments import expanded, resolved
from emrun.base.errors import UsageError
from emrun.base.wording import did_you_mean, from_here, listed
from emrun.config.import_finder import locate
from emrun.exports.formats import FORMATS, Export, Options, default_place, given
from emrun.ranks.group import number_of_ranks
from emrun.training.directories import check_run


def export(
    run_directory: str | Path,
    stream: str | None = None,
    *,
    to: str,
    output: str | Path | None = None,
    overrides: Sequence[str] = (),
    checkpoint_name: str | None = None,
    dynamic: Sequence[str] = (),
    probabilities: bool | str = False,
    tolerance: float | None = None,
    license: str | None = None,
) -> Export:
    """Write the model of a run for other programs: a folder that can be published, or a file.

    Nothing is written into the run. A program (`onnx`, `torch-export`) is run on batches of the stream in a process
    that cannot import emrun, and its outputs are compared with those of the run's model; if they differ, nothing is
    written.

    Args:
        run_directory: the directory of the run.
        stream: the stream whose batches a program is compared on; by default the one that `SaveBest` reads, else the
            first of `valid`, `test` and the train stream that the dataset has. The section `eval.<stream>` of the
            config overrides the other sections.
        to: the format, one of `emrun export --help`.
        output: the folder, which is new or empty, or the file, which is new; by default `NAME-FORMAT` in the current
            directory, with the name of the run directory.
        overrides: overrides of the config of the run.
        checkpoint_name: a name such as `latest`; by default `best`, or `latest` if there is no `best`.
        dynamic: `NAME:DIMENSION` of inputs of a program whose length may differ, such as `tokens:1`, besides that of
            the batch.
        probabilities: whether a program returns the probabilities of the classes instead of the output that the loss
            compares: true for what the loss says, or `softmax` or `sigmoid`.
        tolerance: the largest difference between the outputs of a program and those of the model; by default 1e-4 of
            the largest absolute value of the output, or 2e-2 in bf16 and fp16.
        license: the identifier of the licence of the model, for its card.

    Raises:
        UsageError: there is no such run, checkpoint, stream or format, an option is not one of the format, or the
            place is not empty.
        ConfigError: the config cannot be used.
        StateError: the model cannot be exported, or the program differs from it.
        MissingExtra: a package of the extra `export` is not installed.
        StorageError: the checkpoint is damaged or does not fit, or the export cannot be written.
        BaseException: an error of the dataset, the model or a hook.
    """
    # the format and the options that it takes
    if to not in FORMATS:
        raise UsageError(f"there is no format {to!r}{did_you_mean(to, FORMATS)} (there is {listed(list(FORMATS))})")
    if number_of_ranks() > 1:
        raise UsageError("an export is made in one process; start it without a launcher of ranks")
    directory = resolved(run_directory)
    check_run(directory)
    place = default_place(directory, to) if output is None else expanded(output).absolute()
    options = Options(
        directory, to, place, stream, overrides, checkpoint_name, dynamic, probabilities, tolerance, license
    )
    for name in given(options).keys() - FORMATS[to].takes:
        others = [each for each, other in FORMATS.items() if name in other.takes]
        raise UsageError(f"{name}: an export to {to} does not take it; formats that do: {listed(others)}")

    # the place
    is_file = bool(FORMATS[to].ending)
    if place.exists() and (is_file or not place.is_dir() or any(place.iterdir())):
        kind = "the name of a new file" if is_file else "a new or empty folder"
        raise UsageError(f"{from_here(place)} exists; choose {kind} with -o, or remove it")
    written: Export = locate(FORMATS[to].function)(options)
    return written
