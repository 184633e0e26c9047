"""`emrun replay` as an installed command, on runs that really failed."""

import json
import math
import os
import signal

import pytest
from campaign import thinned
from safetensors.numpy import load_file


@pytest.fixture
def fail(doomed, emrun_here):
    """Train with overrides, into `run`; return the finished process."""

    def train(*overrides):
        return emrun_here("train", "-q", "config.yaml", *overrides, "--output-dir", "run")

    return train


def facts(doomed, number=1):
    return json.loads((doomed / "run" / "failures" / str(number) / "failure.json").read_text())


def files(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_example_with_a_nan_is_named_and_the_weights_before_it_are_saved(doomed, fail, emrun_here):
    done = fail("dataset.bad=[13]")
    assert done.returncode == 3
    assert "repeat the step that failed with: emrun replay run/failures/1\n" in done.stderr
    found = facts(doomed)
    assert found["weights"] == "before the step"
    assert found["message"] == "train/loss is NaN at iteration 4 (StopOnNaN)"
    assert (found["step"]["iteration"], found["step"]["batch"]) == (3, 3)
    assert found["checkpoint"] == {"name": "it-00000003", "iteration": 3}
    weights = load_file(doomed / "run/failures/1/model.safetensors")
    assert all(math.isfinite(values.sum()) for values in weights.values())
    before = files(doomed / "run")
    done = emrun_here("replay", "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "training on stream 'train', batch 3 of the pass, after 0 epochs and 3 iterations",
        "then: emrun.hook.TrainingAborted: train/loss is NaN at iteration 4 (StopOnNaN)",
        "now: emrun.hook.TrainingAborted: train/loss is NaN at iteration 4 (StopOnNaN)",
        "weights: before the step",
        "random states before the step: none are used",
        "note: of all hooks, only StopOnNaN is called",
        "reproduced",
        "cause: example 13",
        "example 13 has label 0, name 'train-3-13'",
        "source 'x' has values that are not finite in example 13",
    ]
    assert done.stderr == ""
    done = emrun_here("replay", "run/failures/1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    again = json.loads(done.stdout)
    error = {"error": "emrun.hook.TrainingAborted", "message": "train/loss is NaN at iteration 4 (StopOnNaN)"}
    assert (again["reproduced"], again["then"], again["causes"]) == (True, error, [[13]])
    assert again["step"] == {"stream": "train", "train": True, "batch": 3, "epoch": 0, "iteration": 3}
    assert again["examples"] == {"13": {"label": 0, "name": "train-3-13"}}
    assert again["not_finite"] == {"x": [13]}
    assert files(doomed / "run") == before


def test_an_error_of_the_model_is_raised_again_with_its_traceback(doomed, fail, emrun_here):
    done = fail("dataset.labels=[9, 30]")
    assert done.returncode == 1
    done = emrun_here("replay", "run", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert 'parts.py", line ' in done.stderr
    note, message, *_ = done.stderr.splitlines()
    assert message.rstrip() == "RuntimeError: a label is 7, with"
    assert note == "forward of Net got x: float32 (32, 4), label: int64 (32,) from 0 to 7"
    assert "cause: examples 9, 30\n" in done.stdout
    assert "note" not in done.stdout


SPIKES = "hooks=[{SkipSpike: {factor: 5.0, window: 2}}, {StopAfter: {epochs: 1}}]"


def test_a_skipped_update_is_repeated_and_the_example_behind_it_named(doomed, emrun_here):
    done = emrun_here("train", "config.yaml", SPIKES, "dataset.large=[13]", "--output-dir", "run")
    assert done.returncode == 0, done.stderr
    command = "emrun replay run/failures/1"
    line = f"saved the batch of the skipped update in run/failures/1; repeat the step with: {command}\n"
    assert line in done.stderr
    assert "error" not in done.stderr.lower()
    before = files(doomed / "run")
    done = emrun_here(*command.split()[1:])
    assert (done.returncode, done.stderr) == (0, "")
    where, then, now, *rest = done.stdout.splitlines()
    assert where == "training on stream 'train', batch 3 of the pass, after 0 epochs and 3 iterations"
    assert then == f"then: emrun.hook.UpdateSkipped: {facts(doomed)['message']}"
    assert then.startswith("then: emrun.hook.UpdateSkipped: gradient_norm 412, and the median is ")
    assert now == f"now: {then.removeprefix('then: ')}"
    assert rest == [
        "weights: before the step",
        "random states before the step: none are used",
        "note: of all hooks, only SkipSpike is called",
        "reproduced",
        "cause: example 13",
        "example 13 has label 0, name 'train-3-13'",
    ]
    assert files(doomed / "run") == before


UNLUCKY = ("model.module.unlucky=1.0", "model.module.dropout=0.5", "hooks.StopAfter.epochs=100")


@pytest.mark.campaign
def test_a_failure_that_depends_on_chance_is_repeated_with_the_same_chance(doomed, fail, emrun_here):
    """With another state of torch's generator in the capsule, the step goes through, as the next test shows."""
    assert fail(*UNLUCKY).returncode == 1
    assert facts(doomed)["random_before_step"] == ["torch"]
    assert facts(doomed)["step"]["iteration"] > 0
    done = emrun_here("replay", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "random states before the step: torch\n" in done.stdout


def test_a_failure_in_an_evaluation(doomed, fail, emrun_here):
    done = fail("dataset.bad=[0]", "dataset.stream=valid")
    assert done.returncode == 3
    done = emrun_here("replay", "run")
    assert done.returncode == 0
    assert done.stdout.startswith(
        "evaluation on stream 'valid', batch 3 of the pass, after 0 epochs and 6 iterations\n"
    )
    assert "cause: example 0\n" in done.stdout


def test_a_failure_of_emrun_eval_is_saved_with_the_evaluation(doomed, fail, emrun_here):
    assert fail("hooks.StopAfter.epochs=1").returncode == 0
    done = emrun_here("eval", "-q", "run", "valid", "dataset.bad=[31]", "dataset.stream=valid")
    assert done.returncode == 3
    assert "emrun replay run/eval/valid-1/failures/1" in done.stderr
    done = emrun_here("replay", "run/eval/valid-1")
    assert done.returncode == 0, done.stderr
    assert "cause: example 31\n" in done.stdout
    assert not (doomed / "run" / "failures").exists()


def test_what_the_environment_holds_is_not_in_a_capsule(doomed, fail, emrun_here, monkeypatch):
    monkeypatch.setenv("TOKEN", "s3cr3t-t0ken")
    fail("dataset.labels=[1]", "model.module.secret=${env:TOKEN}")
    assert (doomed / "run/failures/1").is_dir()
    for content in files(doomed / "run/failures").values():
        assert b"s3cr3t-t0ken" not in content
    done = emrun_here("replay", "run")
    assert done.returncode == 0
    assert "s3cr3t-t0ken" not in done.stdout


def test_a_fixed_model_no_longer_reproduces_the_failure(doomed, fail, emrun_here):
    fail("dataset.labels=[9]")
    source = (doomed / "parts.py").read_text()
    (doomed / "parts.py").write_text(source.replace("label.max() > 2", "False").replace("(label)", "(label % 3)"))
    (doomed / "parts.py").write_text(
        (doomed / "parts.py").read_text().replace("logits, label, red", "logits, label % 3, red")
    )
    done = emrun_here("replay", "run")
    assert (done.returncode, done.stderr) == (1, "")
    assert "now: the step succeeds\n" in done.stdout
    assert "\nnot reproduced\n" in done.stdout


def test_a_capsule_that_is_damaged_is_refused_in_one_line(doomed, fail, emrun_here):
    fail("dataset.bad=[13]")
    path = doomed / "run/failures/1/state.pt"
    path.write_bytes(path.read_bytes()[:-1])
    done = emrun_here("replay", "run")
    assert done.returncode == 74
    assert "capsule run/failures/1: state.pt is missing or was changed; the capsule is damaged" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_that_cannot_be_written_does_not_hide_the_error(doomed, emrun_here, fail):
    source = (doomed / "parts.py").read_text()
    failing = "        if label.max() > 2:\n"
    in_the_way = failing + "            open('run/failures', 'w').close()\n"
    (doomed / "parts.py").write_text(source.replace(failing, in_the_way))
    done = fail("dataset.labels=[9]")
    assert done.returncode == 1
    assert "RuntimeError: a label is 7" in done.stderr
    assert "warning: cannot save the batch that failed: StorageError: " in done.stderr
    assert "emrun replay" not in done.stderr


NO_FAILURES = [
    ["dataset.raises=a broken file"],  # it raises before its first batch
    ["model.outputs=[logits]"],
    ["model.inputs=[x, labl]"],
    ["hooks.StopAfter={iterations: 2}"],
]


@pytest.mark.parametrize("overrides", thinned(NO_FAILURES, NO_FAILURES[::2]))
def test_an_error_that_is_not_a_failure_of_a_step_leaves_no_capsule(doomed, fail, overrides):
    fail(*overrides)
    assert not (doomed / "run" / "failures").exists()


def test_an_interruption_leaves_no_capsule(doomed, emrun):
    done = emrun("train", "-q", "config.yaml", "dataset.raises=interrupt", "--output-dir", "run")
    assert done.returncode == -signal.SIGINT
    assert not (doomed / "run" / "failures").exists()


def test_wrong_usage_is_an_error(doomed, fail, emrun_here):
    fail("hooks.StopAfter.epochs=1")
    done = emrun_here("replay", "run")
    assert done.returncode == 2
    assert "run has no recorded failure" in done.stderr
    done = emrun_here("replay", os.devnull)
    assert done.returncode == 2
    assert "is neither a run directory nor a capsule" in done.stderr


def test_a_capsule_outside_of_its_run_has_no_config_to_build_the_model_from(doomed, fail, emrun_here):
    fail("dataset.bad=[13]")
    (doomed / "run/failures/1").rename(doomed / "sent")
    done = emrun_here("replay", "sent")
    assert done.returncode == 2
    assert "is not in the failures directory of a run" in done.stderr


def test_a_failure_of_a_stream_is_not_a_step_and_the_log_has_it(doomed, fail, emrun_here):
    assert fail("dataset.raises=no disk").returncode == 1
    done = emrun_here("replay", "run")
    assert done.returncode == 2
    assert done.stderr == (
        "error: run has no recorded failure: no step of the model or a hook has failed; if a stream failed, or a hook "
        "outside of a batch, the traceback is in run/train.log; StopOnNaN records a step with after_batch: true\n"
    )
    assert "ValueError: no disk" in (doomed / "run" / "train.log").read_text()
