"""Write the outputs of a run's model for every example of a stream to a file, or return them."""

from __future__ import annotations

import glob
import logging
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from emrun.base.arguments import expanded, resolved
from emrun.base.errors import ArgumentError, StreamError, UsageError
from emrun.base.sources import ID, NEW
from emrun.base.wording import from_here
from emrun.config.import_finder import locate
from emrun.config.plan import Plan
from emrun.config.recipe import Recipe
from emrun.hook import AbstractHook
from emrun.ranks.group import join
from emrun.storage.run import CHECKPOINTS
from emrun.training.create import assemble_alike, check_alike
from emrun.training.evaluate import check_stream, find_checkpoint, load_checkpoint, name_of_checkpoint
from emrun.training.members import config_of
from emrun.training.user_code import log_code_directory

_LOG = logging.getLogger(__name__)

_ORDER = "with the rows of ctx.batches, position is the row of the data; a source `id` names each row"


@dataclass(frozen=True, slots=True)
class Predictions:
    """What `predict` has written: `rows` with `columns` to `file`, by a checkpoint of an epoch and iteration.

    There is no checkpoint if the model is made of runs. The column `position` is the `row` of the data, or the place in
    the `stream`, which only the user's code orders; `order` is None if the rows have ids. `left_out` has the ids of bad
    examples that have no row, and why; see `main_loop.on_bad_example`.
    """

    file: Path
    rows: int
    columns: tuple[str, ...]
    checkpoint: Path | None
    epoch: int
    iteration: int
    order: str | None
    left_out: Mapping[str, str]


Columns = dict[str, "np.ndarray[Any, Any]"]
"""Name -> the values of all examples, with a first axis of examples."""


@overload
def predict(
    run_directory: str | Path, stream: str | None = None, file: None = None, *given: Any, **options: Any
) -> Columns: ...
@overload
def predict(
    run_directory: str | Path, stream: str | None = None, file: str | Path = ..., *given: Any, **options: Any
) -> Predictions: ...
def predict(
    run_directory: str | Path,
    stream: str | None = None,
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    config: str | Path | None = None,
    checkpoint_name: str | None = None,
    variables: Sequence[str] | None = None,
    *,
    data: str | Path | None = None,
    classes: bool = False,
    probabilities: bool | str = False,
    overwrite: bool = False,
    limit: int = 100_000,
    generate: int | None = None,
) -> Predictions | Columns:
    """Return the outputs of a run's model for every example of a stream as arrays, or write them to a file.

    Nothing is written into the run. The stream may lack the labels: losses and metrics that need a source that is not
    there are left out, and sources whose parameter of `forward` has a default value; both are logged.
    Of the hooks, only those that change batches (`before_batch`) are run. `fixed_batch_size` has no effect.

    Args:
        run_directory: the directory of the run.
        stream: the name of the stream. The section `eval.<stream>` of the config overrides the other sections.
        file: ends in `.parquet`, `.csv` or `.jsonl`; see the hook `SavePredictions`. A text that ends in `/` is a
            folder, which gets a mask for each example. None to return arrays.
        overrides: overrides that are applied afterwards.
        config: a config to use instead of the config of the run; one without dataset or model is merged over it.
        checkpoint_name: a name such as `latest`; by default `best`, or `latest` if there is no `best`.
        variables: outputs and sources to write; by default all outputs with one value for each example.
        data: where data are that the run has not seen, instead of a stream: what the method `new_stream` of the dataset
            takes, such as a folder, a file of rows or one picture. The data that the run was trained on need not be
            there. Losses and metrics are left out, and the section `eval.new` applies.
        classes: add the number and the name of the predicted class; see the hook `SavePredictions`.
        probabilities: write the probabilities of the classes instead; see the hook `SavePredictions`.
        overwrite: replace a file that exists.
        limit: the most examples of which arrays are returned; a file has any number.
        generate: write answers instead, for so many chats, the first ones: what is before the last answer of each, that
            answer, and the one that the model generates, of the most probable tokens, at most 128.

    Returns:
        With a file, what was written. Otherwise name -> array, with a first axis of examples: `id` or `position`, and
        the outputs.

    Raises:
        UsageError: there is no such run, checkpoint or stream, or data are named beside a stream. The file cannot have
            this name, or exists. Without a file: the stream has more examples than `limit`, or there are several ranks.
        ConfigError: the config cannot be used.
        StreamError: a batch lacks a source that the model itself, or one of `variables`, needs.
        StorageError: the checkpoint is damaged or does not fit, or the file cannot be written.
        BaseException: an error of the dataset, the model or a hook.
    """
    path = None if data is None else expanded(data).absolute()
    if (stream is None) == (path is None):
        raise UsageError("name a stream, or data that the run has not seen: one of the two")
    if path is not None and not path.exists() and not glob.has_magic(str(path)):
        raise UsageError(f"there is no file or folder {path}")
    stream = stream or NEW
    joined = join()
    directory = resolved(run_directory)
    is_folder = isinstance(file, str) and file.endswith("/")
    place = None if file is None else expanded(file).absolute()
    root = directory / CHECKPOINTS
    if place is None and joined.several:
        raise UsageError("several ranks return no columns: name a file, as in predict(run, stream, 'predictions.csv')")
    with joined.in_step() as exchange:
        if place is not None and joined.is_first and place.exists() and not overwrite:
            raise UsageError(f"{from_here(place)} exists; choose another file, or replace it with --overwrite")

        # the plan, with a hook that collects the outputs
        base = config_of(directory, config)
        plan = Plan.of(base.overlaid(stream, [*overrides, "main_loop.fixed_batch_size=null"]))
        check_alike(plan, exchange)
        find_checkpoint(plan, directory, checkpoint_name)
        try:
            if generate is not None:
                if place is None or joined.several or variables or classes or probabilities:
                    what = "needs a file and one process, and writes neither variables, classes nor probabilities"
                    raise UsageError(f"generate: {what}")
                saver = locate("emrun.hooks._generated_answers.GeneratedAnswers")(stream, place, generate)
            elif place is None:
                saver = locate("emrun.hooks._predicted_arrays.PredictedArrays")(
                    stream, variables, classes, limit, probabilities
                )
            elif is_folder and (classes or probabilities):
                raise UsageError(f"{file} is a folder of masks, which has neither classes nor probabilities")
            elif is_folder:
                saver = locate("emrun.hooks._predicted_masks.PredictedMasks")(stream, place, variables)
            else:
                saver = locate("emrun.hooks.SavePredictions")(
                    stream, place, variables, classes=classes, probabilities=probabilities
                )
        except ArgumentError as error:
            raise UsageError(error.message) from error
        log_code_directory(plan)
        plan = replace(plan, hooks=[recipe for recipe in plan.hooks if changes_batches(recipe)])

        # the objects, with the weights of the checkpoint
        is_new_data = path is not None
        training = assemble_alike(
            plan, exchange, directory, run=None, is_evaluation=True, classes=directory, is_new_data=is_new_data
        )
        check_stream(training.dataset, stream, path)
        if is_new_data or generate is not None:
            training.model.without_measures()
        else:
            training.model.predict_only()
        if is_new_data:
            getattr(training.dataset, "need", lambda sources: None)(training.model.input_names)
        loop = training.main_loop
        saver.dataset = training.dataset
        loop.change_hooks([*loop.hooks, saver])
        loaded = load_checkpoint(training, root, name_of_checkpoint(root, checkpoint_name), exchange)
    try:
        loop.run_evaluation(stream, in_order=True, path=path, batches=generate)
    except StreamError as error:
        if path is not None:
            error.refuse_data(from_here(path))
        elif "forward of" in str(error):
            error.add_note(
                "leave out a source that a prediction does not need: 'model.inputs=[...]' with the others"
                if base.root.get("model", "inputs") is not None
                else "a label may be absent if its parameter of forward has a default value, such as label=None"
            )
        raise

    # what was written
    rows, columns = joined.from_first("rows and columns", (saver.rows, tuple(saver.columns)))
    if not rows:
        what = f"stream {stream!r}" if path is None else str(from_here(path))
        raise StreamError(f"{what} has no rows; nothing is written", first_batch=True)
    order = None
    read = loop.streams.get(stream, train=False, in_order=True, path=path)
    left_out = dict(ChainMap(*joined.all_gathered("left out", read.left_out)))
    if ID not in columns:
        order = "row" if read.rows == rows or saver.has_numbers else "stream"
    if order == "stream":
        _LOG.info("position counts the rows as stream %r gives them: only its own code orders them; %s", stream, _ORDER)
    if place is None:
        return saver.arrays  # type: ignore[no-any-return]
    checkpoint, epoch, iteration = (loaded[0], loaded[1].epoch, loaded[1].iteration) if loaded else (None, 0, 0)
    return Predictions(place, rows, columns, checkpoint, epoch, iteration, order, left_out)


def changes_batches(recipe: Recipe) -> bool:
    """Return whether a hook that is not built yet may change batches, as far as its class tells."""
    hook_class = recipe.target
    if not (isinstance(hook_class, type) and issubclass(hook_class, AbstractHook)):
        return True
    return hook_class.changes_batches and hook_class.before_batch is not AbstractHook.before_batch
