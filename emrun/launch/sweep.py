"""Runs the trials of a sweep: which one comes next, which ones are left to other machines, and when it ends."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emrun.base.errors import RunInUse
from emrun.base.signals import Signals
from emrun.base.temporary import temporary_folder
from emrun.base.wording import counted
from emrun.launch.jobs import Job, Jobs
from emrun.launch.results import DONE, Result, objective_of, result_of
from emrun.launch.settings import Sweep
from emrun.launch.trials import Experiment, Trial, Trials
from emrun.runs.stored_run import StoredRun
from emrun.storage.files import make_directory, storing
from emrun.storage.lock import ANOTHER, RunLock, writer_of
from emrun.storage.trace import mark_pruned

if TYPE_CHECKING:
    from emrun.launch.search import Search

_LOG = logging.getLogger(__name__)

WRONG_SWEEP = 78
"""Exit status of a trial: all trials would fail in this way before they train."""
_IN_USE = 75
_LOOK = 0.5  # seconds between two looks at the files of other processes, and of running trials
_MOST_LINES = 12  # of what a failed trial has printed


@dataclass(slots=True)
class _Running:
    """A trial that this process has started."""

    job: Job
    experiment: Experiment
    trial: Trial
    ends_sweep: Path  # a file that the process makes if the other trials would fail as it did
    looked: float = 0.0
    is_pruned: bool = False
    is_asked_to_end: bool = False

    def ask_to_end(self, number: int) -> None:
        """Send a signal, once: a trial that gets a second one ends without a checkpoint."""
        if not self.is_asked_to_end:
            self.is_asked_to_end = True
            self.job.send(number)


@dataclass(slots=True)
class Ending:
    """How a sweep ended.

    Args:
        exit_status: that of the command.
        signal_number: the signal that ended it; None for none.
        text: what a trial printed that ended the sweep.
    """

    exit_status: int = 0
    signal_number: int | None = None
    text: str = ""


class SweepLoop:
    """Runs trials until all are done.

    Args:
        trials: makes the trials.
        settings: the section `sweep`.
        jobs: starts processes.
        arguments: returns what a process for a trial is started with, which gets the path of a file: to make it ends
            the sweep.
        threads: the number of threads of a trial that has none recorded; None to leave it as it is.
        search: chooses combinations and prunes; None for a grid without a pruner.
    """

    def __init__(
        self,
        trials: Trials,
        settings: Sweep,
        jobs: Jobs,
        arguments: Any,
        threads: int | None,
        search: Search | None,
    ) -> None:
        self._trials = trials
        self._settings = settings
        self._jobs = jobs
        self._arguments = arguments
        self._threads = threads
        self._search = search
        self._experiments = list(planned(trials, settings, search))
        self._running: list[_Running] = []
        self._done: dict[Path, Result] = {}
        self._elsewhere: dict[Path, float] = {}  # trials of other processes -> when to look again
        self._look_again = 0.0  # when to look for experiments of other processes
        self._ended: set[str] = set()  # experiments of which the proposals know the results
        self._refused: set[Path] = set()  # was in use, but nobody writes it
        self._ending: Ending | None = None
        self._signals = Signals()
        self._folder = Path()
        self._is_waiting = False
        self._is_interrupted = False

    def run(self) -> Ending:
        """Run the trials.

        SIGINT and SIGTERM end the running trials with checkpoints; a second signal kills them.
        """
        with storing(self._trials.directory, "create"):
            make_directory(self._trials.directory, exist_ok=True)
        with self._signals, temporary_folder("sweep") as self._folder:
            try:
                while self._step():
                    self._signals.wait(_LOOK)
            finally:
                for running in self._running:  # after an error of this process
                    running.ask_to_end(signal.SIGTERM)
        failed = [result for result in self._done.values() if result.status not in ("finished", "pruned")]
        return self._ending or Ending(1 if failed else 0)

    def _step(self) -> bool:
        """Do what there is to do; return whether anything is left."""
        # what has happened since the last step
        while self._signals.pending:
            self._handle(self._signals.pending.pop(0))
        for running in list(self._running):
            if running.job.poll() is not None:
                self._running.remove(running)
                self._end(running)
            elif self._settings.pruner and not running.is_pruned and time.monotonic() - running.looked > _LOOK:
                self._prune_if_worse(running)

        # the next trials
        used = {running.job.slot for running in self._running}
        for slot in range(self._settings.jobs):
            if slot in used or self._ending is not None:
                continue
            trial = self._next()
            if trial is None:
                break
            self._start(*trial, slot)
        is_left = bool(self._running) or (self._ending is None and bool(self._elsewhere))
        if is_left and not self._running and not self._is_waiting:
            self._is_waiting = True
            _LOG.info("waiting for %s of other processes", counted(len(self._elsewhere), "trial"))
        return is_left

    def _handle(self, number: int) -> None:
        """End the sweep: the first signal lets trials save checkpoints, the second one kills them."""
        is_second = self._is_interrupted
        self._is_interrupted = True
        self._ending = self._ending or Ending(128 + number, number)
        if self._running and not is_second:
            _LOG.info("%s: running trials save checkpoints; a second signal kills them", signal.Signals(number).name)
        for running in self._running:
            if is_second:
                running.job.send(signal.SIGKILL)
            else:
                running.ask_to_end(number)

    def _next(self) -> tuple[Experiment, Trial] | None:
        """Return the next trial to start; None if there is none now."""
        search = self._search if self._settings.method not in ("grid", "random") else None
        if search is not None and time.monotonic() >= self._look_again:
            self._add_known(search)

        # an experiment that is known
        for experiment in self._experiments:
            for trial in experiment.trials:
                if self._is_free(trial):
                    return experiment, trial
            self._note_end(experiment)

        # a new one
        while search is not None and not search.is_exhausted and search.count < (self._settings.trials or 0):
            values, proposal = search.propose()
            experiment = self._trials.experiment(values)
            repeated = next((known for known in self._experiments if known.trials == experiment.trials), None)
            if repeated is not None:
                search.repeat(proposal, [self._done.get(trial.directory, _UNKNOWN) for trial in repeated.trials])
                continue
            self._experiments.append(experiment)
            search.begin(experiment, proposal)
            free = next((trial for trial in experiment.trials if self._is_free(trial)), None)
            if free is not None:
                return experiment, free
        return None

    def _is_free(self, trial: Trial) -> bool:
        """Return whether a trial may be started now."""
        place = trial.directory
        if place in self._done or any(each.trial.directory == place for each in self._running):
            return False
        if time.monotonic() < self._elsewhere.get(place, 0.0):
            return False
        result = result_of(trial, self._settings)
        self._elsewhere.pop(place, None)
        if result.status in DONE:
            self._done[place] = result
            if result.status == "changed":
                _LOG.warning("%s was resumed with another config; it does not count as a trial of this sweep", place)
        elif result.status == "running":
            self._elsewhere[place] = time.monotonic() + _LOOK
        return result.status not in (*DONE, "running")

    def _add_known(self, search: Search) -> None:
        """Add the experiments that other processes, or earlier ones, have chosen."""
        self._look_again = time.monotonic() + _LOOK
        for experiment in self._trials.known():
            if all(experiment.trials != other.trials for other in self._experiments):
                self._experiments.append(experiment)
                search.begin(experiment)

    def _note_end(self, experiment: Experiment) -> None:
        """Tell the proposals the results of an experiment that is done."""
        name = experiment.trials[0].directory.name
        results = [self._done.get(trial.directory) for trial in experiment.trials]
        if self._search is not None and name not in self._ended and None not in results:
            self._ended.add(name)
            self._search.end(experiment, [result for result in results if result is not None])

    def _start(self, experiment: Experiment, trial: Trial, slot: int) -> None:
        threads = result_of(trial, self._settings).threads or self._threads
        ends_sweep = self._folder / f"{slot}.ends"
        job = self._jobs.start(self._arguments(trial, ends_sweep), slot, threads)
        if self._search is not None and self._settings.method in ("grid", "random"):
            self._search.begin(experiment)
        self._running.append(_Running(job, experiment, trial, ends_sweep))
        self._is_waiting = False

    def _prune_if_worse(self, running: _Running) -> None:
        running.looked = time.monotonic()
        values = objective_of(StoredRun(running.trial.directory), str(self._settings.objective))
        if self._search is not None and self._search.should_prune(running.experiment, values):
            running.is_pruned = True
            running.ask_to_end(signal.SIGTERM)

    def _end(self, ended: _Running) -> None:
        """Note how the process of a trial ended."""
        status = ended.job.poll()
        place = ended.trial.directory
        seconds = time.monotonic() - ended.job.began
        text = ended.job.output()
        assert status is not None
        is_named = writer_of(place) not in (None, ANOTHER)
        if status == _IN_USE and (is_named or place not in self._refused):
            if not is_named:
                self._refused.add(place)
            self._elsewhere[place] = time.monotonic() + _LOOK
            return
        if ended.ends_sweep.exists():
            self._stop(Ending(2 if status == WRONG_SWEEP else status, None, text))
            return
        result = result_of(ended.trial, self._settings)
        if ended.is_pruned and result.status == "interrupted":
            result = self._marked_as_pruned(ended, result)

        # what the log says of it
        shown = self._shown(ended)
        if result.status in ("finished", "pruned"):
            value = "" if result.value is None else f", {self._settings.objective} {result.value:.6g}"
            self._done[place] = result
            _LOG.info("%s: %s in %.1f s%s (%s)", shown, result.status, seconds, value, self._progress())
        elif self._ending is not None:
            _LOG.info("%s: %s", shown, result.reason or result.status)
        else:
            word = "failed" if result.status in ("failed", "waiting") or status == _IN_USE else result.status
            self._done[place] = replace(result, status=word, reason=result.reason or f"exit status {status}")
            lines = text.strip().splitlines()[-_MOST_LINES:]
            how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
            _LOG.error("%s: %s (%s)%s", shown, word, how, "".join(f"\n    {line}" for line in lines))
            if self._settings.on_error == "stop":
                self._stop(Ending(1))
        self._note_end(ended.experiment)

    def _stop(self, ending: Ending) -> None:
        """End the sweep; trials that run save checkpoints."""
        self._ending = self._ending or ending
        for running in self._running:
            running.ask_to_end(signal.SIGTERM)

    def _marked_as_pruned(self, ended: _Running, result: Result) -> Result:
        epoch, value = result.values[-1]
        reason = f"pruned after epoch {epoch}: {self._settings.objective} {value:.6g}"
        try:
            lock = RunLock(ended.trial.directory)
        except RunInUse:
            return result
        try:
            mark_pruned(ended.trial.directory, reason)
        finally:
            lock.release()
        return replace(result, status="pruned", reason=reason)

    def _progress(self) -> str:
        """Return how many trials are done, and of how many, such as `3 of 12`."""
        parameters = self._trials.parameters
        settings = self._settings
        experiments = settings.trials or math.prod(len(parameter.values) for parameter in parameters)
        return f"{len(self._done)} of {experiments * settings.runs_per_experiment}"

    def _shown(self, ended: _Running) -> str:
        """Return what a trial is called in the log."""
        parts = [
            f"{parameter.name}={parameter.shown(ended.experiment.values[parameter.name])}"
            for parameter in self._trials.parameters
        ]
        if self._settings.repeats > 1:
            parts.append(f"seed={ended.trial.seed}")
        if ended.trial.fold is not None:
            parts.append(f"fold={ended.trial.fold}")
        name = self._trials.called(ended.trial)
        return f"{name} ({', '.join(parts)})" if parts else name


_UNKNOWN = Result("running")


def planned(trials: Trials, settings: Sweep, search: Search | None) -> Iterator[Experiment]:
    """Yield the experiments of a sweep: all that are known before the first result, or that have directories.

    Args:
        trials: makes the trials.
        settings: the section `sweep`.
        search: proposes the combinations of method `random`, which do not depend on results; None for a grid.
    """
    if settings.is_grid:
        yield from trials.grid()
        return
    if settings.method != "random" or search is None:
        return
    seen: set[tuple[Trial, ...]] = set()
    for _ in range(settings.trials or 0):
        values, proposal = search.propose()
        search.repeat(proposal, [_UNKNOWN])
        experiment = trials.experiment(values)
        if experiment.trials not in seen:
            seen.add(experiment.trials)
            yield experiment
