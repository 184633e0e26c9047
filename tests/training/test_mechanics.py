"""Every key that changes how a step is computed, alone and with another: a resume of the run is exact.

`make test` has some keys alone, each killed once, and some pairs and keys that are interrupted too; `make campaign` has
all keys and pairs with all kills and places. `docs/guide/step.md` has the list.
"""

import copy
import itertools
import os
import shutil
import signal

import pytest
from campaign import thinned
from in_ranks import in_ranks, results_of
from training.resuming import (
    AROUND_UPDATES,
    FEW_HOOKS,
    HOOKS,
    Interrupt,
    config_of,
    copy_of_run,
    result,
    resumed,
    train_with,
)

from emrun import AbstractHook, create_training, resume_training
from emrun.ranks.group import ranks
from emrun.training.create import train

PARTS = '''
import torch


class Hits:
    """A metric of a whole stream: the share of correct predictions."""

    def __init__(self):
        self.reset()

    def update(self, loss, label):
        self.found += ((loss < 0.7) & (label >= 0)).sum()
        self.seen += len(label)

    def compute(self):
        return self.found / self.seen

    def reset(self):
        self.found, self.seen = torch.zeros(()), 0

    def state_dict(self):
        return {"found": self.found, "seen": self.seen}

    def load_state_dict(self, state):
        self.found, self.seen = state["found"], state["seen"]


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 2, padding=1), torch.nn.Dropout(0.3), torch.nn.Conv2d(4, 2, 2), torch.nn.Flatten()
        )
        self.gain = 1.0

    def forward(self, x, y):
        logits = self.layers(x[:, None, :, None].expand(-1, -1, -1, 3)).unflatten(1, (2, -1)).mean(2) * self.gain
        losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        return {"loss": losses, "scalar": losses.mean(), "accuracy": (logits.argmax(dim=1) == y).float()}
'''

MECHANICS = {
    "accumulate": {"accumulate": 2},
    "micro batches": {"micro_batch_size": 2},
    "schedule": {"scheduler": {"class": "Cosine", "warmup": "2 updates", "final": 0.1}},
    "torch's schedule": {"scheduler": {"class": "OneCycleLR", "max_lr": 0.05, "total_steps": 10, "step_on": "update"}},
    "groups": {"optimizer": {"class": "AdamW", "lr": 0.05, "groups": [{"match": "bias$", "weight_decay": 0.0}]}},
    "several optimizers": {
        "optimizer": {
            "first": {"class": "AdamW", "lr": 0.05, "match": r"layers\.[01]", "no_decay": "biases_and_norms"},
            "last": {"class": "SGD", "lr": 0.1, "momentum": 0.9, "match": r"layers\.3"},
        }
    },
    "optimizer of two modes": {"optimizer": {"class": "schedulefree.AdamWScheduleFree", "lr": 0.05, "warmup_steps": 2}},
    "compile": {"compile": {"backend": "aot_eager"}},
    "recompute": {"recompute": r"layers\.[023]"},
    "bf16": {"precision": "bf16"},
    "fp16": {
        "precision": "fp16",
        "outputs": ["scalar", "accuracy"],
        "loss": {"large": {"class": "torch.nn.Identity", "inputs": ["scalar"], "scale": 30.0}},  # skips updates
    },
    "channels last": {"module": {"class": "mechanics_parts.Convolutions"}, "memory_format": "channels_last"},
    "metric of a stream": {"metrics": {"hits": {"class": "mechanics_parts.Hits", "inputs": ["loss", "y"]}}},
}
"""Name -> the keys of the section `model`."""

PAIRS = [
    ("several optimizers", "fp16"),
    ("AverageWeights of kind swa", "Freeze"),
]
"""The pairs of `make test`; two of which both set a key cannot be combined."""


KILLS = (14, 19, 23)
"""The batches, those of evaluations included, after which a run is killed: in the evaluation of an epoch, in the middle
of an update of the next one, in the evaluation of the last one."""


class InterruptByKill(AbstractHook):
    """Copies the run directory at events, which is what a kill leaves."""

    def __init__(self, directory, at):
        super().__init__()
        self.directory, self.at, self.count = directory, at, 0

    def copy(self):
        self.count += 1
        if self.count in self.at:
            copy_of_run(self.main_loop, self.directory, f"{self.directory}-{self.count}")

    def after_batch(self):
        self.copy()


class InterruptToSave(AbstractHook):
    """Sends SIGUSR1 after a batch of an evaluation, and copies the run directory after the next one."""

    def __init__(self, directory, at):
        super().__init__()
        self.directory, self.at, self.count = directory, at, 0

    def after_batch(self, stream_name):
        self.count += stream_name == "valid"
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.count == self.at + 1:
            copy_of_run(self.main_loop, self.directory, f"{self.directory}-saved")


def config_with(*names, hooks=HOOKS):
    config = copy.deepcopy(config_of(hooks=hooks))
    del config["model"]["scheduler"]
    for name in names:
        config["model"] |= copy.deepcopy(MECHANICS.get(name, {}))
    around = [{name.partition(" ")[0]: AROUND_UPDATES[name]} for name in names if name in AROUND_UPDATES]
    config["hooks"] = [*around, *config["hooks"]]
    return config


def run(config, directory, at=None):
    """Train until the n-th event; return the events."""
    training = create_training(config, output_dir=directory)
    hook = Interrupt(at)
    train_with(training, hook)
    return hook.events


def check(
    project,
    *names,
    kills=KILLS,
    places=("an update", "an epoch", "the end of an epoch", "an evaluation"),
    after="",
    hooks=HOOKS,
):
    """Compare runs that are interrupted, or killed, with one that is not.

    Args:
        project: the directory.
        names: the keys of `MECHANICS`.
        kills: after which batches the run is killed.
        places: within what it is interrupted by a signal.
        after: within what it is interrupted twice: there, and after the first batch of training that follows.
        hooks: those that the run has in any case.
    """
    (project / "mechanics_parts.py").write_text(PARTS)
    config = config_with(*names, hooks=hooks)
    training = create_training(config, output_dir=project / "straight")
    seen = Interrupt()
    train_with(training, seen, InterruptByKill(project / "straight", kills))
    expected = result(project / "straight")
    trained, evaluated = (
        [number for number, event in enumerate(seen.events, 1) if event == f"after_batch {stream}"]
        for stream in ("train", "valid")
    )
    events = {  # five train batches and three of valid in an epoch; the zeroth evaluates both
        "an epoch": trained[11],
        "an update": trained[12],
        "the end of an epoch": trained[9],
        "an evaluation": evaluated[4],
    }
    for place in places:
        run(config, project / "run", events[place])
        resumed(project / "run")
        assert result(project / "run") == expected, place
        shutil.rmtree(project / "run")
    if after:
        run(config, project / "run", events[after])
        again = Interrupt("after_batch train")
        train_with(resume_training(project / "run"), again)
        assert again.events[-1] == "after_batch train"
        resumed(project / "run")
        assert result(project / "run") == expected, f"{after}, then a batch"
    for killed in sorted(project.glob("straight-*")):
        resumed(killed)
        assert result(killed) == expected, f"killed: {killed.name}"


def test_without_any(project):
    check(project, kills=KILLS[::2], places=())


TWICE = ("accumulate",)
"""What is also interrupted in an evaluation, then after a batch of the next epoch, in `make test`."""


FEW = (*TWICE, "optimizer of two modes", "metric of a stream")
"""What `make test` has alone; it has others in `PAIRS`, and schedules, groups, clipping, norms and averages in their
tests."""


@pytest.mark.whole
@pytest.mark.parametrize("name", thinned([*MECHANICS, *AROUND_UPDATES], FEW))
def test_alone(project, name):
    after = "an evaluation" if name in TWICE else ""
    check(project, name, kills=KILLS[1:2], places=(), after=after, hooks=FEW_HOOKS)


@pytest.mark.campaign
@pytest.mark.parametrize("names", [(), *((name,) for name in (*MECHANICS, *AROUND_UPDATES))], ids=" + ".join)
def test_alone_at_every_place(project, names):
    check(project, *names, after="an evaluation")


@pytest.mark.campaign
@pytest.mark.parametrize("name", thinned(["AverageWeights", "optimizer of two modes"], ["AverageWeights"]))
def test_a_checkpoint_by_a_signal_within_an_evaluation_that_has_other_weights(project, name):
    (project / "mechanics_parts.py").write_text(PARTS)
    config = config_with(name, hooks=FEW_HOOKS)
    train(create_training(config, output_dir=project / "straight"))
    training = create_training(config, output_dir=project / "run")
    train_with(training, InterruptToSave(project / "run", at=4))  # the first of three batches in the first epoch
    assert result(project / "run") == result(project / "straight")
    resumed(project / "run-saved")
    assert result(project / "run-saved") == result(project / "straight")


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_in_a_pair(project, pair):
    """One pair is killed, another is interrupted; in campaigns, all are both."""
    is_killed = pair == PAIRS[0]
    kills, places = (KILLS[1:2], ()) if is_killed else ((), ("an update",))
    check(project, *pair, kills=kills, places=places, hooks=FEW_HOOKS)


ALL_PAIRS = [
    pair
    for pair in itertools.combinations([*MECHANICS, *AROUND_UPDATES], 2)
    if MECHANICS.get(pair[0], {}).keys().isdisjoint(MECHANICS.get(pair[1], {}))
    and not (pair[0] == "optimizer of two modes" and pair[1].startswith("AverageWeights"))  # which is an error
    and not all(name.startswith("AverageWeights") for name in pair)
    and pair != ("several optimizers", "channels last")  # the module has other names
]


@pytest.mark.campaign
@pytest.mark.parametrize("pair", ALL_PAIRS, ids=" + ".join)
def test_in_every_pair(project, pair):
    check(project, *pair)


class SignalOnRank(AbstractHook):
    """Sends a signal to one rank before the n-th batch, those of evaluations included."""

    every_rank = True
    reads = ()

    def __init__(self, rank, at, number):
        super().__init__()
        self.rank, self.at, self.number, self.count = rank, at, number, 0

    def before_batch(self):
        self.count += 1
        if self.count == self.at and ranks().rank == self.rank:
            os.kill(os.getpid(), self.number)


def run_of_ranks(config, directory, *signals):
    """Train on this rank, with `SignalOnRank` for these arguments."""
    train_with(create_training(config, output_dir=directory), *(SignalOnRank(*each) for each in signals))


OF_RANKS = [name for name in [*MECHANICS, *AROUND_UPDATES] if name not in ("fp16", "metric of a stream")]
"""What several ranks can do."""


@pytest.mark.campaign  # tests/cli/test_ranks.py has a rank that is killed, test_sharding.py an interruption of all
@pytest.mark.timeout(600)  # each rank of each resume compiles again
@pytest.mark.parametrize(
    ("name", "kills", "interrupts", "hooks"),
    [
        ("AverageWeights", KILLS[1:2], [], FEW_HOOKS),
        *((name, KILLS, [(0, 13), (1, 5)], HOOKS) for name in OF_RANKS),
    ],
)
def test_alone_on_two_ranks(project, name, kills, interrupts, hooks):
    (project / "mechanics_parts.py").write_text(PARTS)
    config = config_with(name, hooks=hooks)
    if name == "AverageWeights of kind swa":
        config["hooks"][0]["AverageWeights"]["batch_norm"] = "average"
    in_ranks(2, run_of_ranks, config, project / "straight")
    expected = result(project / "straight")
    for at in kills:
        found = results_of(2, run_of_ranks, config, project / "run", (1, at, signal.SIGKILL))
        assert found[1] == -signal.SIGKILL
        in_ranks(2, resumed, project / "run")
        assert result(project / "run") == expected, f"killed at {at}"
        shutil.rmtree(project / "run")
    for rank, at in interrupts:
        in_ranks(2, run_of_ranks, config, project / "run", (rank, at, signal.SIGINT))
        in_ranks(2, resumed, project / "run")
        assert result(project / "run") == expected, f"interrupted at {at}"
        shutil.rmtree(project / "run")
