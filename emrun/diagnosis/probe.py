"""One of the trainings of `verify-resume`, in a process of its own: recorded, and interrupted where it is told."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from emrun.dataset import open_stream
from emrun.diagnosis.private_state import attributes, unsaved_state
from emrun.encoding import digest, random_state
from emrun.errors import exit_status
from emrun.hook import AbstractHook, TrainingTerminated
from emrun.loop.main_loop import MainLoop
from emrun.randomness import preserved_randomness
from emrun.storage.metrics import METRICS
from emrun.storage.run import CHECKPOINTS
from emrun.storage.state_file import FILE, load_state
from emrun.stream_context import StreamContext
from emrun.training.build import Training
from emrun.training.create import create_training, train
from emrun.training.resume import resume_training
from emrun.types import Batch, EpochData

_TAIL = 2  # iterations of the third epoch
_TRIED = 4  # batches of a stream, to see whether it draws global random numbers
_STOPS = "emrun.hooks.stop_after.StopAfter"  # the limits of the config do not count here
_WEIGHTS = ".safetensors"
_TRUSTED = ("emrun.", "torch.")  # their states are complete


def main(job_text: str) -> None:
    """Run a training and write down what happens in it, each time as a line of JSON.

    Args:
        job_text: JSON with `record` (the file), `directory` (of the run), `resume` (whether to go on with it, or to
            begin it from `config` and `overrides`), `end` (the iteration that ends it; null for the first ones of the
            third epoch), `longest` (give up when an epoch is longer), `interrupt` (null, or `signal`, `iteration`,
            `stream`, `batch`), `save_at` (the iteration at which to save a checkpoint).
    """
    job = json.loads(job_text)
    record = _Record(Path(job["record"]))
    try:
        _run(job, record)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may also have called sys.exit
        status = exit_status(error)
        text = "".join(traceback.format_exception(error)) if status == 1 else str(error)
        record.add("error", status=status, text=text)


def _run(job: Mapping[str, Any], record: _Record) -> None:
    directory = Path(job["directory"])
    if job["resume"]:
        training = resume_training(directory)
    else:
        training = create_training(job["config"], output_dir=directory, overrides=job["overrides"])
    if training is None:  # ended by one of its hooks, not by the signal
        record.add("final", **_final(directory))
        return
    loop = training.main_loop
    if job["longest"] is not None and _known_length(training) > job["longest"]:
        record.add("long")
        return
    probe = Probe(record, job)
    loop.change_hooks([*(hook for hook in loop.hooks if _name_of(type(hook)) != _STOPS), probe])
    record.add("outcome", status=train(training).status)
    if not probe.is_too_long:
        record.add("private", attributes=_private(training), draws=_draws(training), forgetful=_forgetful(loop))
        record.add("final", **_final(directory))


class _Record:
    """A file to which lines are added that outlive the process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, kind: str, **values: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")


class Probe(AbstractHook):
    """Writes down what each batch does, and interrupts or ends the training; only `verify-resume` has this hook.

    Args:
        record: where to.
        job: see `main`.
    """

    main_loop: MainLoop  # of which it asks more than other hooks
    changes_batches = False
    reads = ()

    def __init__(self, record: _Record, job: Mapping[str, Any]) -> None:
        super().__init__()
        self._record = record
        self._job = job
        self._batch = 0  # of the stream's pass, in an evaluation
        self._before: dict[str, Any] = {}
        self._second_end: int | None = None
        self.is_too_long = False

    def before_training(self) -> None:
        """Write down where the training begins."""
        loop = self.main_loop
        self._record.add("begin", iteration=loop.iterations_done, epochs=loop.training_epochs_done)

    def before_batch(self, stream_name: str, batch: Batch) -> None:
        """Look at the batch before the model does."""
        self._before = {"batch": digest(batch), "random_before": _digests(random_state()), "sources": set(batch)}

    def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
        """Write down what came of it; then interrupt the training, or end it."""
        loop = self.main_loop
        self._batch += 1
        sources = self._before.pop("sources")
        entry = {
            "training": loop.training,
            "iteration": loop.iterations_done,
            "stream": stream_name,
            "number": None if loop.training else self._batch,
            **self._before,
            "outputs": {name: digest(value) for name, value in batch_data.items() if name not in sources},
            "shown": {name: _shown(value) for name, value in batch_data.items() if name not in sources},
            "rates": _learning_rates(loop.model),
            "random": _digests(random_state()),
        }
        if loop.training:
            entry["pass"] = loop.get_stream(stream_name).position.pass_number
        self._record.add("batch", **entry)
        self._act(stream_name)

    def after_stream(self, stream_name: str) -> None:
        """Count the batches of the next stream from the beginning."""
        self._batch = 0

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Write down where an epoch ends."""
        loop = self.main_loop
        if loop.training_epochs_done == 2 and self._second_end is None:
            self._second_end = loop.iterations_done
        self._record.add("epoch", epoch=loop.training_epochs_done, iteration=loop.iterations_done)

    def _act(self, stream_name: str) -> None:
        loop, job = self.main_loop, self._job
        done = loop.iterations_done
        if loop.training and done == job["save_at"]:
            loop.request_checkpoint("verify-resume")
        point = job["interrupt"]
        if point is not None:
            here = (done, stream_name, None if loop.training else self._batch)
            if here == (point["iteration"], point["stream"], point["batch"]):
                loop.wait_for_checkpoints()  # so that a killed training goes on from the same one every time
                os.kill(os.getpid(), point["signal"])
        if not loop.training:
            return
        if job["longest"] is not None and loop.training_epochs_done == 0 and done > job["longest"]:
            self.is_too_long = True
            self._record.add("long")
            raise TrainingTerminated("the epoch is long")
        end = job["end"]
        if end is None and self._second_end is not None:
            end = self._second_end + _TAIL
        if end is not None and done >= end:
            raise TrainingTerminated(f"{done} iterations are verified")


def _known_length(training: Training) -> int:
    """Return how many batches make an epoch, 0 when that is not known."""
    loop = training.main_loop
    if loop.fixed_epoch_size is not None:
        return loop.fixed_epoch_size
    counts = getattr(training.dataset, "num_batches", None)
    return int((counts.get(loop.train_stream_name) if isinstance(counts, Mapping) else None) or 0)


def _digests(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(value) for name, value in state.items()}


def _shown(value: Any) -> str | None:
    """Return a number that stands for an output in messages."""
    if isinstance(value, torch.Tensor) and value.numel() and value.is_floating_point():
        return f"{value.double().mean().item():.9g}"
    return repr(value) if isinstance(value, int | float) else None


def _learning_rates(model: Any) -> list[str]:
    groups = getattr(getattr(model, "optimizer", None), "param_groups", ())
    return [repr(float(group["lr"])) for group in groups if "lr" in group]


def _final(directory: Path) -> dict[str, Any]:
    """Return what the training has come to: the newest checkpoint and the metrics, as texts by their names."""
    place = directory / CHECKPOINTS / "latest"
    state = load_state(place)
    weights: dict[str, str] = {}
    for path in sorted(place.iterdir()):
        if path.suffix == _WEIGHTS:
            weights |= {name: digest(value) for name, value in load_file(path).items()}
        elif path.name not in (FILE, "manifest.json"):
            weights[path.name] = digest(np.fromfile(path, dtype=np.uint8))
    hooks: dict[str, str] = {}
    for each in state["hooks"]:
        number = f" ({each['occurrence'] + 1})" if each["occurrence"] else ""
        hooks |= _flat(each["state"], f"{each['class'].rpartition('.')[2]}{number}")
    metrics = directory / METRICS
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
    return {
        "weights": weights,
        "model": _flat(state["model"], ""),
        "hooks": hooks,
        "loop": _flat(state["loop"], ""),
        "streams": _flat(_without_began(state["streams"]), ""),
        "generators": _generators(state),
        "metrics": {f"epoch {line['epoch']}{key}": value for line in lines for key, value in _metrics(line).items()},
    }


def _generators(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the random states, and those with which the epoch began that the training ended in."""
    began = state["epoch_began"]
    at_first = _digests(began["random"]) if began else {}
    return {**_digests(state["random"]), **{f"{name} as the epoch began": each for name, each in at_first.items()}}


def _metrics(line: Mapping[str, Any]) -> dict[str, str]:
    return {"": "there", **{f": {key}": value for key, value in _flat(line["streams"], "").items()}}


def _flat(value: Any, key: str) -> dict[str, str]:
    """Return a tree as names and texts."""
    if isinstance(value, Mapping):
        pairs = [(f"{key}.{name}" if key else str(name), child) for name, child in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(f"{key}[{index}]", child) for index, child in enumerate(value)]
    else:
        return {key: f"digest {digest(value)}" if isinstance(value, torch.Tensor) else repr(value)}
    return {name: text for where, child in pairs for name, text in _flat(child, where).items()}


def _without_began(value: Any) -> Any:
    """Leave out the random states in which passes began: a resume has them only as far as it needs them."""
    if isinstance(value, Mapping):
        return {key: _without_began(child) for key, child in value.items() if key != "began"}
    return value


def _private(training: Training) -> dict[str, str]:
    """Return what objects keep in attributes of their own: where a difference may come from."""
    found = unsaved_state(training.model)
    for hook in training.main_loop.hooks:
        if not isinstance(hook, Probe):
            found |= attributes(hook, f"hook {type(hook).__name__}")
    return found | attributes(training.dataset, f"dataset {type(training.dataset).__name__}")


def _draws(training: Training) -> dict[str, list[str]]:
    """Return the global generators that each stream draws from behind its first batch."""
    loop, found = training.main_loop, {}
    for name in loop.dataset_streams:
        context = StreamContext(name, seed=loop.seed, epoch=int(name == loop.train_stream_name))
        changed: dict[str, None] = {}
        with preserved_randomness():
            stream = iter(open_stream(training.dataset, name, context))
            before = None
            for _ in range(_TRIED):
                try:
                    next(stream)
                except Exception:  # also a stream that has come to its end
                    break
                after = _digests(random_state())
                changed |= dict.fromkeys(key for key in after if before is not None and after[key] != before[key])
                before = after
        found[name] = list(changed)
    return found


def _forgetful(loop: MainLoop) -> list[str]:
    """Return the names of the user's hooks that have no state of their own."""
    kinds = [type(hook) for hook in loop.hooks if not isinstance(hook, Probe)]
    own = [kind for kind in kinds if not kind.__module__.startswith(_TRUSTED)]
    return [kind.__name__ for kind in own if kind.state_dict is AbstractHook.state_dict]


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
