"""A run that is interrupted at any event and resumed ends in the same bits as one that was never stopped.

Tests here fail without any of these, as was checked once by removing each by hand: restoring the random states;
restoring them after the replay of the stream instead of before it; the copy of the state that is used during
evaluations; the states of ComputeStats, StopAfter, SaveBest and WriteCSV; `trained` of TorchModel; the rewinding of
metrics.jsonl.
"""

import shutil
import threading

import pytest
from samples import SAMPLES
from training.resuming import (
    AROUND_UPDATES,
    DATA,
    FEW_HOOKS,
    HOOKS,
    Interrupt,
    config_of,
    interrupted,
    result,
    resumed,
    straight,
    train_with,
)

from emrun import AbstractHook, TrainingTerminated, create_training, resume_training
from emrun.training.create import train

KINDS = [  # global random numbers that are drawn in a reader thread cannot be exact
    *((kind, buffer) for kind in ("context", "plain", "own_random") for buffer in (0, 2)),
    ("global_random", 0),
    ("stateful", 0),
]


def readers():
    return {thread for thread in threading.enumerate() if thread.name.startswith("emrun-read")}


SWEPT = [  # with some of the events; all with all events below
    ("context", 0, None), ("plain", 2, None), ("own_random", 0, None),
    ("global_random", 0, None), ("stateful", 0, None), ("context", 0, 3), ("stateful", 0, 3),
]  # fmt: skip
SWEEPS = [
    *((*case, 5 * number, 80) for number, case in enumerate(SWEPT)),
    *((*kind, size, 0, 1) for size in (None, 3) for kind in KINDS),
]


@pytest.mark.campaign  # the next test interrupts one run at many events
@pytest.mark.parametrize(("kind", "buffer", "fixed_epoch_size", "first", "step"), SWEEPS)
@pytest.mark.timeout(600)
def test_an_interrupt_at_any_event_changes_nothing(
    project, kind, buffer, fixed_epoch_size, first, step, recwarn, patient
):
    before = readers()
    config = config_of(kind, buffer=buffer, fixed_epoch_size=fixed_epoch_size)
    events = interrupted(config, project / "straight", None)
    expected = result(project / "straight")
    assert expected["loop"]["phase"] == "between"
    for at in range(1 + first, len(events) + 1, step):
        directory = project / f"at-{at}"
        interrupted(config, directory, at)
        resumed(directory)
        found = result(directory)
        assert {key: found[key] == expected[key] for key in expected} == dict.fromkeys(expected, True), events[at - 1]
        assert readers() <= before
        shutil.rmtree(directory)


def test_a_training_interrupted_at_every_event_in_turn_ends_the_same(project):
    config = config_of(hooks=FEW_HOOKS)
    interrupted(config, project / "straight", None)
    directory = project / "often"
    interrupted(config, directory, 40)
    for _ in range(200):
        training = resume_training(directory)
        if training is None:
            break
        hook = Interrupt(14)  # an evaluation, which begins anew each time, has eight events after before_epoch
        train_with(training, hook)
    else:
        raise AssertionError("the training makes no progress")
    assert result(directory) == result(project / "straight")


def test_a_hook_that_is_not_interrupted_here_is_found():
    names = {next(iter(entry)) if isinstance(entry, dict) else entry for entry in HOOKS}
    names |= {name.partition(" ")[0] for name in AROUND_UPDATES}  # in test_mechanics.py
    names |= {"SavePredictions", "SkipSpike", "Check", "Mixup"}  # in test_resumed_gradients.py and test_everything.py
    names |= {"ClassificationMetrics", "Flatten", "AccumulateVariables", "SaveConfusionMatrix", "SaveFile"}  # there too
    names |= {"SaveExamples", "LogitsToCsv", "SequenceToCsv", "PlotLines", "SaveMasks"}  # there too
    names |= {"WriteSQLite", "WriteTensorBoard", "LogProfile", "Benchmark", "Profile"}  # there too
    names |= {"WriteMLflow", "WriteTrackio", "WriteWandb"}  # in tests/hooks, with their stores
    files = {path.stem.replace("_", "") for path in (SAMPLES.parent / "hooks").glob("[!_]*.py")}
    assert {name.lower() for name in names} == files


class End(AbstractHook):
    """Ends the training at an event."""

    def __init__(self, event, epoch):
        super().__init__()
        self.ends_at = epoch
        setattr(self, event, self.end)

    def end(self, stream_name):
        if stream_name == "train" and self.main_loop.iterations_done == 5 * self.ends_at:
            raise TrainingTerminated("enough")


def test_an_end_behind_the_last_batch_of_an_epoch_does_not_add_a_pass(project):
    """Leaving the phase `TRAIN` only after the event makes this fail."""
    config = config_of(hooks=FEW_HOOKS)
    expected = straight(project, config)
    train_with(create_training(config, output_dir=project / "run"), End("after_stream", 1))
    train(resume_training(project / "run", checkpoint_name="latest"))
    assert result(project / "run") == expected


@pytest.mark.campaign
def test_a_signal_behind_the_last_batch_of_a_pass_does_not_add_a_pass(project):
    (project / "tail_data.py").write_text(
        DATA + "\nimport os\nimport signal\n\n\nclass Tail(Data):\n"
        "    def __init__(self, kind, at=0):\n        super().__init__(kind)\n        self.at, self.passes = at, 0\n\n"
        "    def plain(self):\n        self.passes += 1\n        yield from super().plain()\n"
        "        if self.passes == self.at:\n            os.kill(os.getpid(), signal.SIGINT)\n"
    )
    config = {**config_of("plain", FEW_HOOKS), "dataset": {"class": "tail_data.Tail", "kind": "plain"}}
    expected = straight(project, config)
    train(create_training({**config, "dataset": {**config["dataset"], "at": 2}}, output_dir=project / "run"))
    text = (project / "run" / "config.yaml").read_text()
    assert "at: 2" in text
    training = resume_training(project / "run", ["dataset.at=0"])
    assert training.main_loop.iterations_done == 5
    train(training)
    assert result(project / "run") == expected
