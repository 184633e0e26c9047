"""Hooks that change batches before the model gets them: sources they add, replace and remove, in every command."""

import json
import logging
import sys

import numpy as np
import pytest
from campaign import thinned
from doubles import LossOfOne

from emrun import AbstractHook, MainLoop, create_training
from emrun.base.errors import StreamError
from emrun.cli.replay import report
from emrun.diagnosis.replay import replay
from emrun.hooks import StopAfter

PARTS = """
import numpy as np
import torch
from emrun import AbstractHook


class Data:
    def train_stream(self, ctx):
        for rows in ctx.batches(48, 8, shuffle=True):
            yield {"x": np.outer(rows, np.ones(4)).astype("float32"), "label": rows % 3, "id": rows}

    def valid_stream(self, ctx):
        for rows in ctx.batches(16, 8):
            yield {"x": np.outer(rows, np.ones(4)).astype("float32"), "label": rows % 3, "id": rows}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.2))

    def forward(self, x, label, label_b, weight):
        logits = self.inner(x / 48)
        losses = [torch.nn.functional.cross_entropy(logits, each, reduction="none") for each in (label, label_b)]
        if self.training and not x.isfinite().all():
            raise FloatingPointError(f"{x.isfinite().sum().item()} numbers, {logits.detach()[0, 0].item():.9f}")
        return {"loss": weight * losses[0] + (1 - weight) * losses[1]}


class Mixup(AbstractHook):
    def __init__(self, twice=False, fails_at=None, breaks=None):
        super().__init__()
        self.twice, self.fails_at, self.breaks = twice, fails_at, breaks

    def before_batch(self, batch):
        weight = torch.rand(()) if self.main_loop.training else torch.ones(())
        rows = torch.randperm(len(batch["label"]))
        if "label_b" in batch and not self.twice:
            raise RuntimeError("mixed already")
        if self.main_loop.training and self.main_loop.iterations_done == self.fails_at:
            batch["x"] = batch["x"] * float("nan")
            if self.breaks:
                raise KeyError(f"row {rows[0].item()}, {sorted(batch)}")
        mixed = float(weight) * batch["x"] + (1 - float(weight)) * batch["x"][rows.numpy()]
        batch.update(x=mixed, label_b=batch["label"][rows.numpy()], weight=weight.repeat(len(rows)))


class Ids(AbstractHook):
    def __init__(self, fails_at=None):
        super().__init__()
        self.fails_at = fails_at

    def after_batch(self, batch_data):
        assert {"id", "label_b", "loss"} <= batch_data.keys()
        if self.main_loop.training and self.main_loop.iterations_done == self.fails_at:
            raise KeyError(f"{float(batch_data['weight'][0]):.9f}")


class Both(Mixup):
    def after_batch(self, batch_data):
        if self.main_loop.training and self.main_loop.iterations_done == 3:
            raise KeyError(f"{float(batch_data['weight'][0]):.9f} {float(batch_data['x'].sum()):.6f}")


class Raises(AbstractHook):
    def before_batch(self, batch):
        batch["x"] = batch["pixels"]
"""

CONFIG = {
    "seed": 3,
    "dataset": {"class": "parts_of_mixup.Data"},
    "model": {"module": {"class": "parts_of_mixup.Net"}, "optimizer": {"class": "SGD", "lr": 0.1}},
    "main_loop": {"extra_streams": ["valid"], "report": False},
    "hooks": [
        {"ComputeStats": {"variables": ["loss"]}},
        {"parts_of_mixup.Mixup": {}},
        {"parts_of_mixup.Ids": {}},
        {"StopAfter": {"epochs": 2}},
    ],
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose model needs sources that a hook adds."""
    (tmp_path / "parts_of_mixup.py").write_text(PARTS)
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "parts_of_mixup", raising=False)
    yield tmp_path
    sys.modules.pop("parts_of_mixup", None)


def test_a_hook_adds_sources_that_the_loss_needs_in_train_eval_and_check(emrun_here, project):
    done = emrun_here("train", "-q", "config.yaml", "--output-dir", "run")
    assert (done.returncode, done.stderr) == (0, "")  # nor is a source unused, which a hook may read
    done = emrun_here("eval", "-q", "run", "valid")
    assert (done.returncode, done.stderr) == (0, "")
    done = emrun_here("check", "config.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert next(line for line in done.stdout.splitlines() if " label_b " in line).endswith(" model")
    assert "Mixup (possibly), Ids (possibly)" in next(line for line in done.stdout.splitlines() if " id " in line)


@pytest.mark.campaign
def test_verify_resume_finds_a_hook_that_adds_sources_exact(emrun, project):
    done = emrun("verify-resume", "config.yaml", "--at", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact" in done.stdout


def test_a_run_whose_hook_replaces_sources_resumes_within_an_epoch_to_the_same_bits(emrun_here, project):
    for directory, iterations in (("whole", 8), ("parts", 4)):
        done = emrun_here(
            "train", "-q", "config.yaml", "--output-dir", directory, f"hooks.StopAfter.iterations={iterations}"
        )
        assert done.returncode == 0
    done = emrun_here("resume", "-q", "parts", "hooks.StopAfter.iterations=8")
    assert (done.returncode, done.stderr) == (0, "")
    weights = [project / run / "checkpoints" / "latest" / "model.safetensors" for run in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_hook_that_cannot_change_a_batch_is_reported_by_check(emrun_here, project):
    done = emrun_here("check", "config.yaml", "hooks=[parts_of_mixup.Raises]")
    assert done.returncode == 1
    assert "KeyError: 'pixels'" in done.stderr
    assert "in before_batch of Raises" in done.stderr


def test_a_source_that_is_missing_in_spite_of_the_hooks_is_reported_with_them(emrun_here, project):
    (project / "parts_of_mixup.py").write_text(PARTS.replace("label_b=", "label_c="))
    for command in ("check", "train"):
        done = emrun_here(command, "config.yaml")
        assert done.returncode == 2
        assert (
            "stream 'train', batch 0 of the epoch, after before_batch of Mixup: forward of Net needs label_b, which "
            "the batch does not have; did you mean 'label'? (it has x, label, id, label_c, weight)"
        ) in done.stderr


def failed(*overrides):
    training = create_training("config.yaml", output_dir="run", overrides=overrides)
    with pytest.raises(Exception) as caught:
        training.main_loop.run_training()
    return caught.value


def test_the_model_gets_in_a_replay_what_the_hooks_had_made_for_it(project):
    failed("hooks.1.fails_at=2")
    found = replay("run")
    assert found.capsule.facts["error"] == "FloatingPointError"
    assert {"label_b", "weight"} <= found.capsule.batch.keys()
    assert found.reproduced, report(found)  # the dropout of the model included: its random states are behind the hook's


def test_a_hook_that_fails_before_a_batch_gets_in_a_replay_what_it_had_got(project):
    failed("hooks.1.fails_at=2", "hooks.1.breaks=true")
    found = replay("run")
    assert np.isfinite(found.capsule.batch["x"]).all()  # not what it had begun to make of it
    assert found.reproduced, report(found)


def test_a_hook_that_fails_after_a_batch_does_not_change_it_a_second_time(project):
    failed("hooks=[parts_of_mixup.Both]")
    found = replay("run")
    assert found.capsule.step.event == "after_batch"
    assert found.reproduced, report(found)
    assert "before_batch of the hooks is not called: the saved batch already has their changes" in report(found)


# In this process


class Batches:
    """Gives the same mappings in every pass, so that a change of one would show."""

    def __init__(self, *batches):
        self.batches = batches

    def train_stream(self):
        return iter(self.batches)


class Change(AbstractHook):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def before_batch(self, batch):
        self.function(batch)


class Seen(AbstractHook):
    """Keeps what it is given."""

    changes_batches = False
    reads = ("x",)

    def __init__(self):
        super().__init__()
        self.before, self.after = [], []

    def before_batch(self, batch):
        self.before.append(batch)

    def after_batch(self, batch_data):
        self.after.append(batch_data)


def run(batches, *hooks, **arguments):
    loop = MainLoop(LossOfOne(), Batches(*batches), [*hooks, StopAfter(epochs=1)], skip_zeroth_epoch=True, **arguments)
    loop.run_training()
    return loop


def test_the_streams_own_mapping_stays_as_it_was():
    batch, seen = {"x": [1, 2], "y": [3, 4]}, Seen()
    run([batch], Change(lambda batch: (batch.update(x=[5, 6], z=[7, 8]), batch.pop("y"))), seen)
    assert batch == {"x": [1, 2], "y": [3, 4]}
    assert seen.before == [{"x": [5, 6], "z": [7, 8]}]
    assert seen.after[0].keys() == {"x", "z", "loss"}


def test_a_hook_that_only_looks_gets_the_streams_own_mapping():
    batch, seen = {"x": [1, 2]}, Seen()
    run([batch], seen)
    assert seen.before[0] is batch


def test_sources_of_unequal_length_that_a_hook_leaves_are_an_error_that_names_it():
    message = r"batch 1 of the epoch, after before_batch of Change: sources of unequal length: x 2, z 1"
    add = Change(lambda batch: batch.update(z=[0] * (1 if batch["x"][0] == 3 else 2)))
    with pytest.raises(StreamError, match=message) as caught:
        run([{"x": [1, 2]}, {"x": [3, 4]}], add)
    assert caught.value.exit_status == 1


def test_the_form_is_checked_before_the_hooks():
    called = []
    with pytest.raises(StreamError, match=r"batch 1 of the epoch: sources of unequal length"):
        run([{"x": [1]}, {"x": [3, 4], "y": [1]}], Change(called.append))
    assert len(called) == 1


def test_batches_of_another_length_are_dropped_before_the_hooks():
    called = []
    run([{"x": [1]}, {"x": [3, 4]}], Change(called.append), fixed_batch_size=2)
    assert called == [{"x": [3, 4]}]


def test_the_length_is_that_which_the_hooks_leave():
    class Length(AbstractHook):
        reads = ()

        def after_batch(self):
            self.length = self.main_loop.batch_length

    length = Length()
    run([{"x": [1, 2, 3]}], Change(lambda batch: batch.update(x=batch["x"][:2])), length)
    assert length.length == 2


def test_a_batch_that_hooks_leave_empty_is_an_empty_batch():
    seen = Seen()
    run(
        [{"x": [1]}, {"x": [2]}],
        Change(lambda batch: batch["x"] == [1] and batch.clear()),
        seen,
        on_empty_batch="ignore",
    )
    assert [each["x"] for each in seen.after] == [[2]]


@pytest.mark.parametrize(
    ("methods", "count"),
    [
        ({"after_batch": lambda self, batch_data: None}, 0),
        ({"after_batch": lambda self, **_: None}, 0),
        ({"before_batch": lambda self, batch: None}, 0),
        ({"after_batch": lambda self, stream_name: None}, 1),
        ({"after_batch": lambda self, batch_data: None, "reads": ()}, 1),
        ({"after_batch": lambda self, batch_data: None, "reads": ("extra",)}, 0),
        ({"after_epoch": lambda self, epoch_data: None}, 1),
    ],
)
def test_a_source_is_unused_unless_a_hook_that_gets_the_batches_may_read_it(methods, count, caplog):
    caplog.set_level(logging.WARNING)
    run([{"x": [1], "extra": [2]}], type("Hook", (AbstractHook,), methods)())
    assert caplog.text.count("neither the model nor a hook reads the source extra") == count


def test_a_guard_that_looks_at_all_variables_reads_all(caplog):
    from emrun.hooks import SaveEvery, ShowProgress, StopOnNaN

    run([{"x": [1], "extra": [2]}], StopOnNaN(after_batch=True))
    assert "neither the model nor a hook reads" not in caplog.text
    run([{"x": [1], "extra": [2]}], StopOnNaN(), ShowProgress())
    assert "neither the model nor a hook reads the source extra" in caplog.text
    assert SaveEvery.reads == ()


def test_a_hook_that_is_not_given_the_batch_does_not_cost_a_copy():
    class Counts(AbstractHook):
        def before_batch(self, stream_name):
            """Count."""

    batch, seen = {"x": [1, 2]}, Seen()
    run([batch], Counts(), seen)
    assert seen.before[0] is batch


IN_PLACE = """

class InPlace(AbstractHook):
    def before_batch(self, batch):
        batch["x"] *= 2


class Replaces(AbstractHook):
    def before_batch(self, batch):
        batch["x"] = batch["x"] * 2
        batch["more"] = batch.pop("id")
"""


@pytest.mark.parametrize(
    ("hook", "warns", "buffer"),
    thinned(
        [("InPlace", True, 0), ("InPlace", True, 3), ("Replaces", False, 3)],
        [("InPlace", True, 3)],
    ),
)
def test_only_a_hook_that_changes_arrays_in_place_makes_a_resume_within_an_epoch_warn(
    emrun_here, project, hook, warns, buffer
):
    (project / "parts_of_mixup.py").write_text(PARTS.replace('raise RuntimeError("mixed already")', "pass") + IN_PLACE)
    hooks = f"hooks=[parts_of_mixup.Mixup, parts_of_mixup.{hook}, {{StopAfter: {{iterations: 4}}}}]"
    if hook == "InPlace":
        hooks = hooks.replace(
            "parts_of_mixup.Mixup, parts_of_mixup.InPlace", "parts_of_mixup.InPlace, parts_of_mixup.Mixup"
        )
    done = emrun_here("train", "-q", "config.yaml", "--output-dir", "run", hooks, f"main_loop.buffer={buffer}")
    assert done.returncode == 0, done.stderr
    done = emrun_here("resume", "-q", "run", "hooks.StopAfter.iterations=8")
    assert done.returncode == 0, done.stderr
    assert ("this resume is not exact: stream 'train' gives other values of 'x' than before" in done.stderr) == warns
    assert (
        "InPlace and Mixup (before_batch)" in done.stderr or "InPlace, Mixup (before_batch)" in done.stderr
    ) == warns
    assert warns or done.stderr == ""
