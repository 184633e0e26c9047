"""Replays in this process: which examples are named, and how the repeated step may differ from the original."""

import os
import sys
import warnings
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from campaign import thinned

from emrun import AbstractHook, create_training
from emrun.base.errors import StateError, StorageError, UsageError
from emrun.cli.replay import report
from emrun.diagnosis.replay import halve, replay


@pytest.fixture
def fail(doomed, monkeypatch):
    """Train with overrides until the run fails; return the error."""
    monkeypatch.chdir(doomed)
    monkeypatch.syspath_prepend(doomed)
    monkeypatch.delitem(sys.modules, "parts", raising=False)

    def train(*overrides):
        training = create_training("config.yaml", output_dir="run", overrides=["main_loop.report=false", *overrides])
        with pytest.raises(Exception) as caught:
            training.main_loop.run_training()
        return caught.value

    yield train
    sys.modules.pop("parts", None)


@pytest.fixture
def skip(doomed, monkeypatch):
    """Train with overrides for one epoch, in which an update is skipped."""
    monkeypatch.chdir(doomed)
    monkeypatch.syspath_prepend(doomed)
    for name in ("parts", "shrinks"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def train(*overrides):
        hooks = "hooks=[{SkipSpike: {factor: 5.0}}, {StopAfter: {epochs: 1}}]"
        training = create_training("config.yaml", output_dir="run", overrides=["dataset.large=[13]", hooks, *overrides])
        training.main_loop.run_training()
        assert training.model.state_dict()["skipped_updates"]["total"] == 1
        assert training.main_loop.capsule is None  # the run has not failed

    yield train
    for name in ("parts", "shrinks"):
        sys.modules.pop(name, None)


@pytest.fixture
def one_cause(monkeypatch):
    """Look for one example that fails alone, where any does, and causes are not the subject: each is tried in a run."""
    monkeypatch.setattr("emrun.diagnosis.replay._MOST", 1)


def causes(found):
    return [line for line in report(found).splitlines() if line.startswith(("cause", "source"))]


def test_two_examples_are_both_named_by_their_numbers_and_strings(fail):
    fail("dataset.bad=[4, 21]")
    found = replay("run")
    assert causes(found) == [
        "cause: examples 4, 21",
        "source 'x' has values that are not finite in examples 4, 21",
    ]
    lines = report(found).splitlines()
    assert [line.partition(" has ")[0] for line in lines if line.startswith("example ")] == ["example 4", "example 21"]
    assert [line.partition("name ")[2] for line in lines if line.startswith("example ")] == [
        "'train-3-4'",
        "'train-3-21'",
    ]


@pytest.mark.parametrize(
    ("kind", "source"), thinned([("mapping", "x.values.others"), ("jagged", "x")], [("mapping", "x.values.others")])
)
def test_examples_of_mappings_and_nested_tensors_are_named(fail, kind, source):
    fail("dataset.bad=[4]", f"dataset.kind={kind}")
    assert causes(replay("run")) == [
        "cause: example 4",
        f"source {source!r} has values that are not finite in example 4",
    ]


def test_a_batch_norm_needs_two_examples_and_the_source_tells_which(fail):
    fail("dataset.bad=[13]", "model.module.batch_norm=true")
    found = replay("run")
    assert found.reproduced
    assert causes(found) == [
        "cause: examples 12, 13 together",
        "source 'x' has values that are not finite in example 13",
    ]


ROOT = ("model.inputs=[x]", "model.module={class: parts.Root}", "dataset.bad=[7]")


def test_a_gradient_that_is_not_a_number_is_found_before_it_is_used_and_on_request_the_operation_behind_it(fail):
    error = fail(*ROOT)
    assert str(error) == "train/gradient of scale is NaN at iteration 4 (StopOnNaN)"
    found = replay("run")
    assert found.reproduced
    assert found.capsule.facts["weights"] == "before the step"
    assert causes(found)[0] == "cause: example 7"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = replay("run", anomaly=True)
    assert found.reproduced
    assert found.anomaly.startswith("Error detected in MulBackward0. Traceback of forward call that caused the error:")
    assert "torch.sqrt(torch.nan_to_num(x).abs() * self.scale)" in found.anomaly
    assert "Triggered internally" not in found.anomaly


@pytest.mark.campaign
def test_without_an_anomaly_the_report_is_nothing(fail):
    fail("dataset.labels=[1]")
    assert replay("run", anomaly=True).anomaly == "no gradient is NaN"


def test_a_guard_that_looks_after_the_update_has_a_note(fail):
    fail("dataset.bad=[13]", "main_loop.on_nan_loss=warn", "hooks=[{parts.Guard: {message: bad}}]")
    found = replay("run", device="cpu")
    assert found.reproduced  # its count of batches is part of the message, and of its state
    assert found.capsule.facts["weights"] == "after the update"
    text = report(found)
    assert "note: the weights are those after the step's update; there is no checkpoint before it" in text
    assert "cause: each example that was tried fails alone (examples 0 to 15)" in text


OWN = (
    "dataset.bad=[13]",
    "model={class: parts.OwnScheme, module: {class: parts.Net}, inputs: [x, label]}",
    "hooks=[{StopAfter: {epochs: 1}}]",
)


@pytest.mark.parametrize(
    ("fails", "weights"),
    thinned([("before", "before the step"), ("after", "after the update")], [("after", "after the update")]),
)
@pytest.mark.usefixtures("one_cause")
def test_the_weights_of_a_custom_update_scheme_are_described_correctly(fail, fails, weights):
    assert str(fail(*OWN, f"model.fails={fails}")) == f"bad {fails} the update"
    found = replay("run")
    assert found.capsule.facts["weights"] == weights
    assert found.reproduced
    assert f"weights: {weights}" in report(found)
    assert ("those after the step's update" in report(found)) is (fails == "after")


@pytest.mark.campaign
def test_an_update_that_cannot_be_detected_has_a_note(fail):
    fail(*OWN, "model.by_hand=true")
    text = report(replay("run"))
    assert "weights: unknown: OwnScheme does not report whether the step made an update" in text
    assert "note: the weights may be those after the step's update; there is no checkpoint before it" in text


@pytest.mark.campaign
def test_weights_after_the_update_are_reported_with_the_newest_checkpoint(fail):
    fail("dataset.bad=[13]", "main_loop.on_nan_loss=warn", "hooks=[parts.Guard, {SaveEvery: {every: 2 iterations}}]")
    text = report(replay("run"))
    assert "the weights are those after the step's update; it-00000002 was saved 1 iteration before the step" in text


@pytest.mark.parametrize(
    ("window", "at", "reproduced"),
    # the last batch of an epoch, a batch before it, the end of a window
    thinned([(4, 5, True), (4, 4, False), (2, 3, True)], [(4, 4, False)]),
)
def test_of_a_skipped_update_of_several_batches_the_last_one_is_repeated_alone(doomed, skip, window, at, reproduced):
    skip(f"model.accumulate={window}", f"dataset.at={at}", "hooks.SkipSpike.window=1")
    found = replay("run")
    last = 3 if at == 3 else 5
    assert (found.capsule.step.iteration, found.capsule.step.batch) == (last, last)
    assert found.capsule.batch["name"][13] == f"train-{last}-13"
    assert found.capsule.facts["weights"] == "before the step"
    assert found.reproduced is reproduced
    assert causes(found) == ["cause: example 13"] * reproduced
    text = report(found)
    assert ("now: the step succeeds" in text) is not reproduced
    assert "note: the batch makes an update alone; the gradients of the others of its update were not saved" in text


HOOKS = ("{ClipGradients: {norm: 1.0}}", "LogNorms")


@pytest.mark.parametrize(("hook", "at"), thinned(product(HOOKS, (0, 2, 4)), [(HOOKS[0], 2)]))
def test_a_loss_in_the_middle_of_a_window_is_replayed_with_its_own_batch(fail, at, hook):
    fail("dataset.bad=[13]", f"dataset.at={at}", "model.accumulate=4", f"hooks=[{hook}, {{StopAfter: {{epochs: 1}}}}]")
    found = replay("run")
    assert (found.capsule.step.iteration, found.capsule.batch["name"][13]) == (at, f"train-{at}-13")
    assert found.reproduced
    assert causes(found)[0] == "cause: example 13"


def test_a_skipped_update_is_replayed_with_the_batch_whose_loss_is_not_finite(fail, skip):
    skip("dataset.large=[]", "dataset.bad=[13]", "dataset.at=1", "model.accumulate=4")
    found = replay("run")
    assert (found.capsule.step.iteration, found.reproduced) == (1, True)
    assert causes(found)[0] == "cause: example 13"


def test_the_batch_of_a_skipped_update_has_the_changes_of_hooks(doomed, skip):
    (doomed / "shrinks.py").write_text(SHRINKS)
    skip("dataset.large=[0, 13]", "hooks=[shrinks.Shrink, {SkipSpike: {window: 2}}, {StopAfter: {epochs: 1}}]")
    found = replay("run")
    assert found.reproduced
    assert found.capsule.batch["x"].shape == (16, 4)
    assert causes(found) == ["cause: example 5"]


@pytest.mark.campaign
def test_a_batch_that_is_dropped_is_not_taken_for_the_last_one_of_a_window(doomed, skip):
    (doomed / "shrinks.py").write_text(SHRINKS)
    hooks = "hooks=[shrinks.Drop, {SkipSpike: {window: 1}}, {StopAfter: {epochs: 1}}]"
    skip(hooks, "dataset.at=4", "model.accumulate=4", "main_loop.on_empty_batch=ignore")
    found = replay("run")
    assert found.reproduced
    assert (found.capsule.step.batch, found.capsule.batch["name"][0]) == (4, "train-4-0")


SHRINKS = """
from emrun import AbstractHook


class Shrink(AbstractHook):
    def before_batch(self, batch):
        for name, values in batch.items():
            batch[name] = values[8:24]


class Drop(AbstractHook):
    def before_batch(self, batch):
        if batch["name"][0] == "train-5-0":
            batch.clear()
"""


@pytest.mark.usefixtures("one_cause")
def test_a_hook_that_fails_is_called_again(fail):
    fail("hooks=[StopOnNaN, parts.Faulty, {StopAfter: {epochs: 1}}]")
    found = replay("run")
    assert (found.capsule.step.event, found.capsule.step.hook) == ("before_batch", 1)
    assert found.capsule.facts["weights"] == "before the step"
    assert found.reproduced
    assert "now: KeyError: 'the first is train-2-0'" in report(found)


ASKS = """
import torch
from emrun import AbstractHook
from parts import Data


class Asks(Data):
    def __init__(self, model, on_bad_example, **kwargs):
        super().__init__(**kwargs)
        self.drawn = [on_bad_example, *torch.rand(2).tolist(), *model.module.layer.bias.tolist()]

    def train_stream(self, ctx):
        return Batches(super().train_stream(ctx))


class Batches:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return self.batches

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Tells(AbstractHook):
    def before_batch(self):
        raise ValueError(self.dataset.drawn)
"""


@pytest.mark.usefixtures("one_cause")
def test_a_dataset_that_takes_the_model_is_built_after_it_as_in_the_training(fail, doomed, monkeypatch):
    (doomed / "asks.py").write_text(ASKS)
    monkeypatch.delitem(sys.modules, "asks", raising=False)
    fail("dataset.class=asks.Asks", "main_loop.on_bad_example=warn", "hooks=[asks.Tells, {StopAfter: {epochs: 1}}]")
    assert replay("run").reproduced
    del sys.modules["asks"]


@pytest.mark.campaign
def test_a_hook_that_changes_the_directory_is_called_again(fail, monkeypatch):
    def moves(self, **kwargs):
        os.chdir(os.sep)
        AbstractHook.__init__(self, **kwargs)

    fail("hooks=[StopOnNaN, parts.Faulty, {StopAfter: {epochs: 1}}]")
    monkeypatch.setattr(sys.modules["parts"].Faulty, "__init__", moves)
    assert replay("run").reproduced


def test_another_hook_in_its_place_is_refused(fail):
    fail("hooks=[StopOnNaN, parts.Faulty, {StopAfter: {epochs: 1}}]")
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("parts.Faulty", "parts.Guard"))
    with pytest.raises(StateError, match=r"hooks\[1\] is Guard, not Faulty as when the run failed"):
        replay("run")


@pytest.mark.campaign
def test_a_config_that_has_changed_since_has_a_note(fail):
    fail("dataset.bad=[13]")
    config = Path("run/config.yaml")
    config.write_text(config.read_text() + "# a comment\n")
    found = replay("run")
    assert found.reproduced
    assert found.notes[0].startswith("config.yaml has changed since the run failed")


def test_another_architecture_is_refused(fail):
    fail("dataset.bad=[13]")
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("parts.Net", "parts.Root").replace("    - label\n", ""))
    with pytest.raises(StateError, match="does not fit the module"):
        replay("run")


@pytest.mark.usefixtures("one_cause")
def test_without_the_random_states_a_failure_by_chance_is_not_repeated(fail, monkeypatch):
    from emrun.diagnosis import replay as replaying

    fail("model.module={class: parts.Net, unlucky: 1.0, dropout: 0.5}", "hooks.StopAfter.epochs=100")
    assert replay("run").reproduced
    monkeypatch.setattr(replaying, "set_random_state", lambda state: torch.manual_seed(1))
    found = replay("run")
    assert not found.reproduced
    assert report(found).endswith("not reproduced")


def test_a_capsule_cut_or_flipped_anywhere_is_refused(fail, doomed):
    fail("dataset.bad=[13]")
    for name in ("state.pt", "model.safetensors", "failure.json"):
        path = doomed / "run/failures/1" / name
        content = path.read_bytes()
        for position in range(0, len(content.rstrip(b"\n")), len(content) // 20):  # the last newline may be missing
            flipped = bytes([content[position] ^ 4])
            for damaged in (content[:position], content[:position] + flipped + content[position + 1 :]):
                path.write_bytes(damaged)
                with pytest.raises(StorageError, match="damaged"):
                    replay(path.parent)
        path.unlink()
        with pytest.raises((StorageError, UsageError)):
            replay(path.parent)
        path.write_bytes(content)


def test_a_replay_changes_neither_the_run_nor_random_states(fail, doomed):
    fail("dataset.bad=[13]")
    before = {path: path.read_bytes() for path in doomed.rglob("*") if path.is_file() and "pycache" not in str(path)}
    torch.manual_seed(5)
    np.random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1]
    replay("run")
    after = {path: path.read_bytes() for path in doomed.rglob("*") if path.is_file() and "pycache" not in str(path)}
    assert before == after
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 32])
def test_halving_names_every_single_cause(count):
    for bad in ([0], [count - 1], [0, count - 1], list(range(count))):
        found = halve(list(range(count)), lambda examples, bad=bad: bool(set(examples) & set(bad)), 100)
        assert found == [[index] for index in sorted(set(bad))]


def test_halving_keeps_examples_together_that_only_fail_together():
    assert halve(list(range(8)), lambda examples: {4, 5} <= set(examples), 100) == [[4, 5]]
    assert halve(list(range(8)), lambda examples: {1, 6} <= set(examples), 100) == [list(range(8))]


def test_halving_stops_when_it_has_found_enough():
    calls = []
    found = halve(list(range(1000)), lambda examples: calls.append(examples) or True, 3)
    assert found == [[0], [1], [2]]
    assert len(calls) < 30


@pytest.mark.campaign
def test_an_evaluation_has_no_anomaly_to_look_for(fail):
    fail("dataset.labels=[1]", "dataset.stream=valid")
    assert replay("run", anomaly=True).anomaly == "not looked for, because an evaluation has no gradients"


@pytest.mark.campaign
def test_one_iteration_is_not_written_in_the_plural(fail):
    fail("dataset.bad=[4]", "dataset.at=1")
    assert report(replay("run")).splitlines()[0].endswith(" of the pass, after 0 epochs and 1 iteration")
