"""One of the runs of `verify-resume` or `verify-run`: recorded in its own process, and interrupted at a given point."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.utils._pytree import keystr, tree_flatten_with_path

from emrun.base.encoding import GENERATORS, Rows, digest, random_state
from emrun.base.errors import exit_status
from emrun.base.randomness import preserved_randomness
from emrun.base.types import Batch, EpochData, Json
from emrun.config.config import load_config
from emrun.config.plan import with_statistics
from emrun.dataset import open_stream, stream_lengths
from emrun.diagnosis.model_facts import optimizers
from emrun.diagnosis.numerics.on_ranks import measure_on_ranks
from emrun.diagnosis.private_state import forgetful, private_state
from emrun.diagnosis.recorded_trainings import TEMPORARY, Job, Point
from emrun.diagnosis.rehearsal import is_tracker
from emrun.epoch_data import numbers
from emrun.hook import AbstractHook, TrainingTerminated
from emrun.loop.main_loop import MainLoop
from emrun.ranks.group import leave, rank_of, ranks
from emrun.ranks.pieces import rows_of
from emrun.ranks.process_end import end_process
from emrun.record.rows import Reader
from emrun.record.step_columns import read_steps
from emrun.storage.checkpoints.manifest import FROZEN, TRAINED
from emrun.storage.checkpoints.shards import has_tensors, read_tensors, whole_of
from emrun.storage.checkpoints.state_file import FILE, load_state, short_key
from emrun.storage.checkpoints.weights import FILE as WEIGHTS, INDEX, UNFROZEN
from emrun.storage.run import CHECKPOINTS
from emrun.stream_context import StreamContext
from emrun.training.build import Training
from emrun.training.create import create_training, train
from emrun.training.evaluate import evaluate
from emrun.training.resume import resume_training

_Record = Callable[..., None]

_TAIL = 2  # iterations of the third epoch that are run
_TRIED = 4  # batches that are read to see whether a stream draws global random numbers
_BEFORE_KILL = 2  # iterations between the last checkpoint and SIGKILL
_STOPS = "emrun.hooks.stop_after.StopAfter"  # left out, so that the limits of the config do not end the run
_WEIGHTS = ".safetensors"


def main(given: Sequence[str]) -> int:
    """Run a job and record what happens in it; return 0, also if the run has failed.

    Args:
        given: the `Job` as JSON.
    """
    fields = json.loads(given[0])
    job = Job(**{**fields, "point": fields["point"] and Point(**fields["point"])})
    os.environ |= {"TQDM_DISABLE": "1", "TMPDIR": str(Path(job.place, TEMPORARY))}
    tempfile.tempdir = None  # which the environment says
    sys.dont_write_bytecode = True  # no files next to the modules of the config
    logging.getLogger().handlers.clear()  # those of the command

    record_file = job.record(rank_of() if job.ranks > 1 else 0)

    def record(kind: str, **values: Any) -> None:
        with record_file.open("a", encoding="utf-8") as file:  # closed after each event: a kill loses none
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    try:
        _run(job, record)
        leave()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may also have called sys.exit
        status = exit_status(error)
        text = "".join(traceback.format_exception(error)) if status == 1 else str(error)
        record("error", status=status, text=text, error=type(error).__name__)
        leave(waits=False)
    end_process(0)
    return 0


def _run(job: Job, record: _Record) -> None:
    if job.checkpoint is not None:
        by_stream = {}
        for stream in job.streams:
            given = evaluate(
                job.config,
                stream,
                job.overrides,
                checkpoint_name=job.checkpoint,
                output_dir=job.directory,
                as_trained=True,
            )
            by_stream[stream] = numbers(given[stream])
        record("final", statistics=by_stream)
        return
    if job.measures:
        measure_on_ranks(job)
        record("final", directory=str(job.directory))
        return

    # a training
    if job.resume:
        training = resume_training(job.directory)
    else:
        training = create_training(
            with_statistics(load_config(job.config, job.overrides)),
            output_dir=job.directory,
            checks_schedule=not job.is_shortened,
            prepared=None if job.prepared is None else Path(job.prepared),
        )
    if training is None:  # a hook had ended the run, not the signal
        _record_end(job, record)
        return
    loop = training.main_loop
    name = loop.train_stream_name
    known_length = loop.stream_sizes.get(name) or stream_lengths(training.dataset).get(name, 0)
    if job.longest is not None and known_length > job.longest:
        record("long", updates=loop.horizon.updates, window=loop.model.iterations_per_update)
        return

    # with this hook, which records it
    probe = Probe(record, job)
    probe.limits = loop.limits  # the schedules are those of the config
    loop.parts.length.never_end()
    hooks = [
        hook
        for hook in loop.hooks
        if not (is_tracker(hook) or f"{type(hook).__module__}.{type(hook).__qualname__}" == _STOPS)
    ]
    loop.change_hooks([*hooks, probe])
    record("outcome", status=train(training).status)
    if not probe.is_too_long:
        record(
            "private",
            attributes=private_state(training.model, hooks, training.dataset),
            draws=_draws(training),
            forgetful=forgetful(hooks),
        )
        _record_end(job, record)


def _record_end(job: Job, record: _Record) -> None:
    """Record the final state of the run, once for all ranks."""
    if ranks().is_first:
        record("final", **_final(job.directory))


class Probe(AbstractHook):
    """Records what happens in each batch, and interrupts or ends the run; only verifications use this hook.

    Args:
        record: called with the kind and the values of an event, which it writes into the record.
        job: says where to interrupt or to end the run.
    """

    main_loop: MainLoop  # this hook uses more of the main loop than others may
    changes_batches = False
    every_rank = True
    reads = ()

    def __init__(self, record: _Record, job: Job) -> None:
        super().__init__()
        self._record = record
        self._job = job
        self._batch = 0  # number of the batch in the pass, for evaluations
        self._before: dict[str, Any] = {}
        self._checks_weights = job.is_moved
        self._end = job.end
        self.is_too_long = False

    def before_training(self) -> None:
        """Record where the run begins."""
        loop = self.main_loop
        self._record(
            "begin",
            iteration=loop.iterations_done,
            epochs=loop.training_epochs_done,
            window=loop.model.iterations_per_update,
            buffer=loop.reading_ahead["buffer"],
        )

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Note the batch and the random states before the model runs."""
        if self._checks_weights:
            newest = self.main_loop.progress.newest_checkpoint
            place = self._job.directory / CHECKPOINTS / (newest[0] if newest is not None else "latest")
            self._record("restored", wrong=_not_restored(self.main_loop.model, place))
            self._checks_weights = False
        self._before = {"batch": digest(batch), "random_before": _digests(random_state()), "sources": set(batch)}

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Record the batch and its outputs; then interrupt or end the run where the job says."""
        loop = self.main_loop
        self._batch += 1
        sources = self._before.pop("sources")
        number = None if loop.training else self._batch
        passes = {"pass": loop.get_stream(stream_name).position.pass_number} if loop.training else {}
        self._record(
            "batch",
            training=loop.training,
            iteration=loop.iterations_done,
            stream=stream_name,
            number=number,
            **self._before,
            outputs={name: digest(value) for name, value in batch_data.items() if name not in sources},
            shown={name: _shown(value) for name, value in batch_data.items() if name not in sources},
            rates=_learning_rates(loop.model),
            random=_digests(random_state()),
            **passes,
        )
        self._act(stream_name, number)

    def after_stream(self, stream_name: str) -> None:
        """Start counting batches for the next stream."""
        self._batch = 0

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Record where an epoch ends."""
        loop = self.main_loop
        if loop.training_epochs_done == 2 and self._end is None:
            self._end = loop.iterations_done + _TAIL
        self._record("epoch", epoch=loop.training_epochs_done, iteration=loop.iterations_done)

    def _act(self, stream_name: str, number: int | None) -> None:
        loop = self.main_loop
        job = self._job
        point = self._job.point
        done = loop.iterations_done
        if point is not None:
            if loop.training and job.by == signal.SIGKILL and done == point.iteration - _BEFORE_KILL:
                loop.request_checkpoint("verify-resume")
            if (done, stream_name, number) == (point.iteration, point.stream, point.batch):
                loop.wait_for_checkpoints()  # so that a killed run always resumes from the same checkpoint
                ranks().all_gathered("kill", None)  # on which each rank waits for rank 0
                os.kill(os.getpid(), job.by)
                loop.parts.requests.exchange()  # several ranks would agree some iterations later
        if not loop.training:
            return
        if job.longest is not None and loop.training_epochs_done == 0 and done > job.longest:
            self.is_too_long = True
            self._record("long", updates=loop.horizon.updates, window=loop.model.iterations_per_update)
            raise TrainingTerminated("the epoch is too long", alike=True)
        if self._end is not None and done >= self._end:
            raise TrainingTerminated(f"{done} iterations are recorded", alike=True)


def _not_restored(model: Any, place: Path) -> list[str]:
    """Return the names of the weights and states of optimizers of which this rank has not those of a checkpoint."""
    if not hasattr(model, "module"):
        return []
    saved = read_tensors(place, TRAINED if has_tensors(place, TRAINED) else WEIGHTS)
    now = model.module.state_dict()
    state = load_state(place)["model"]
    of_model = model.state_dict()
    pairs = [({name: now.get(name) for name in saved}, saved)]
    pairs += [(of_model[key], state[key]) for key in ("optimizer", "optimizers") if key in state]
    wrong = []
    for one, other in pairs:
        saved_leaves = dict(tree_flatten_with_path(other)[0])
        for path, value in tree_flatten_with_path(one)[0]:
            rows: Any = rows_of(value)
            expected = saved_leaves.get(path)
            if isinstance(rows, Rows) and expected is not None:
                expected = expected[rows.begin : rows.begin + len(rows.values)]
                rows = rows.values
            if digest(rows) != digest(whole_of(expected)):
                wrong.append(keystr(path))
    return wrong


def _digests(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(value) for name, value in state.items()}


def _shown(value: Any) -> str | None:
    """Return the text of an output for messages: its mean or its value; None for other types."""
    if isinstance(value, torch.Tensor) and value.numel() and value.is_floating_point():
        return f"{value.double().mean().item():.9g}"
    return repr(value) if isinstance(value, int | float) else None


def _learning_rates(model: Any) -> list[str]:
    groups = [group for optimizer in optimizers(model).values() for group in optimizer.param_groups]
    return [repr(float(group["lr"])) for group in groups if "lr" in group]


def _final(directory: Path) -> Json:
    """Return the final state of the run: the newest checkpoint, metrics and steps, as strings under their names."""
    place = directory / CHECKPOINTS / "latest"
    state = load_state(place)
    weights: dict[str, str] = {}
    for path in sorted(place.iterdir()):
        if path.suffix == _WEIGHTS:
            kind = "" if path.name in (WEIGHTS, FROZEN, UNFROZEN) else f"{path.stem}: "
            weights |= {f"{kind}{name}": digest(value) for name, value in load_file(path).items()}
        elif path.name not in (FILE, INDEX, "manifest.json"):
            weights[path.name] = digest(np.fromfile(path, dtype=np.uint8))
    hooks = {short_key(key): hook_state for key, hook_state in state["hooks"].items()}
    began = state["epoch_began"] or {"random": {}}
    at_first = {
        f"{name} at the start of the epoch": generator_state for name, generator_state in began["random"].items()
    }
    metrics: dict[str, str] = {}
    for line in Reader(directory).epochs():
        epoch = f"epoch {line['epoch']}"
        metrics |= {epoch: "present", **{f"{epoch}: {key}": text for key, text in _flat(line["streams"], "").items()}}
    columns = read_steps(directory)
    iterations = columns.pop("iteration").tolist()
    steps = {
        f"{name} of iteration {iteration}": repr(value)
        for name, values in columns.items()
        for iteration, value in zip(iterations, values.tolist(), strict=True)
    }
    return {
        "weights": weights,
        "model": _flat(state["model"], ""),
        "hooks": _flat(hooks, ""),
        "loop": _flat(state["loop"], ""),
        # without the random states at the start of passes: a resume has only those that it needs
        "streams": {name: text for name, text in _flat(state["streams"], "").items() if ".began" not in name},
        # with those at the start of the epoch in which the run ended
        "generators": _digests({**state["random"], **at_first}),
        "metrics": metrics,
        "steps": steps,
    }


def _flat(value: Any, key: str) -> dict[str, str]:
    """Return a tree as a flat mapping of names to strings."""
    if isinstance(value, Mapping):
        pairs = [(f"{key}.{name}" if key else str(name), child) for name, child in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(f"{key}[{index}]", child) for index, child in enumerate(value)]
    else:
        value = whole_of(value)
        return {key: f"digest {digest(value)}" if isinstance(value, torch.Tensor) else repr(value)}
    return {name: text for where, child in pairs for name, text in _flat(child, where).items()}


def _draws(training: Training) -> dict[str, list[str]]:
    """Return the global random generators that each stream draws from after its first batch."""
    loop = training.main_loop
    draws = {}
    for name in loop.streams.sources:
        trains = name == loop.train_stream_name
        context = StreamContext(name, seed=loop.seed, epoch=int(trains), read_by=loop.streams.reading.by)
        seen: dict[str, set[str]] = {generator: set() for generator in GENERATORS}
        with preserved_randomness():
            stream = iter(open_stream(training.dataset, name, context))
            with suppress(Exception):  # errors of the stream are not reported here
                for _ in itertools.islice(stream, _TRIED):
                    for key, state in random_state().items():
                        seen[key].add(digest(state))
        draws[name] = [key for key, states in seen.items() if len(states) > 1]
    return draws
