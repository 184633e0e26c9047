"""Capsules: what is saved of a batch, when no capsule is written, and the random states before a step."""

import errno
import json
import resource

import numpy as np
import pytest
import torch
from doubles import SGD, Affine

from emrun import AbstractHook, AbstractModel, TorchModel, TrainingAborted, TrainingTerminated
from emrun.base.errors import ArgumentError, EmrunError, StorageError, UsageError
from emrun.loop.main_loop import MainLoop
from emrun.storage.capsules import MOST, Step, find_capsule, keep_failure, kind_of, read_capsule
from emrun.storage.run import create_run
from emrun.storage.sealed import json_digest
from emrun.storage.step_randomness import StepRandomness

STEP = Step("train", True, False, 1, 7, 2, 3, None, None, None)


class Model(AbstractModel):
    input_names = output_names = ()
    has_updated = False

    def run(self, batch, train, stream):
        return {}

    def save(self, directory):
        (directory / "weights.txt").write_text("1 2 3")

    def load(self, directory):
        pass


@pytest.fixture
def run(tmp_path):
    run = create_run("seed: 1\n", "run", output_root=tmp_path, output_dir=tmp_path / "run", seed=1)
    yield run
    run.release()


def keep(run, error=None, batch=None, model=None, step=STEP, **others):
    options = {"randomness": StepRandomness(), "hook": None, "checkpoint": None, **others}
    return keep_failure(run.directory, error or ValueError("bad"), step, batch or {}, model or Model(), **options)


def kept(run, **arguments):
    place = keep(run, **arguments)
    assert place is not None
    return read_capsule(*find_capsule(place))


def test_a_capsule_says_where_and_why(run):
    found = kept(run, error=ValueError("not this\nway"), checkpoint=("it-00000005", 5))
    assert found.step == STEP
    assert (found.facts["error"], found.facts["message"]) == ("ValueError", "not this\nway")
    assert found.facts["checkpoint"] == {"name": "it-00000005", "iteration": 5}
    assert found.facts["traceback"].endswith("ValueError: not this\nway\n")
    assert set(found.facts["versions"]) == {"emrun", "python", "torch", "numpy"}
    assert (found.place / "config.yaml").read_text() == "seed: 1\n"
    assert found.run_directory == run.directory


@pytest.mark.parametrize(
    ("has_updated", "train", "event", "weights"),
    [
        (False, True, None, "before the step"),
        (True, True, None, "after the update"),
        (None, True, None, "unknown: Model does not report whether the step made an update"),
        (None, True, "before_batch", "before the step"),
        (True, False, None, "before the step"),
        (True, True, "before_batch", "before the step"),
    ],
)
def test_a_capsule_says_whether_the_weights_have_changed(run, has_updated, train, event, weights):
    model = Model()
    model.has_updated = has_updated
    step = Step("train", train, False, 1, 7, 2, 3, event, None, None)
    assert kept(run, model=model, step=step).facts["weights"] == weights


def test_a_broken_device_loses_the_weights_but_not_the_batch(run, caplog):
    class Broken(Model):
        def save(self, directory):
            super().save(directory)
            raise RuntimeError("device-side assert")

    found = kept(run, model=Broken(), batch={"x": [1, 2]})
    assert found.facts["weights"] == "lost"
    assert found.batch == {"x": [1, 2]}
    assert not (found.place / "weights.txt").exists()
    assert "cannot save the weights: device-side assert" in caplog.text


def test_the_state_of_the_hook_that_failed_is_kept_if_it_can_be(run):
    class Counter(AbstractHook):
        def state_dict(self):
            return self.state

    hook = Counter()
    hook.state = {"count": 3}
    assert kept(run, hook=hook).state["hook"] == {"count": 3}
    hook.state = {"count": object()}
    found = kept(run, hook=hook)
    assert found.state["hook"] is None
    assert "hook.count is object" in found.facts["left_out"]["the hook's state"]


@pytest.mark.parametrize(
    "error", [TrainingTerminated("enough"), ArgumentError("loss", "none"), StorageError(errno.ENOSPC, "full")]
)
def test_what_is_not_a_failure_of_a_step_leaves_no_capsule(run, error):
    assert keep(run, error=error) is None
    assert not (run.directory / "failures").exists()


def test_a_guard_leaves_a_capsule(run):
    assert keep(run, error=TrainingAborted("NaN")) == run.directory / "failures" / "1"


@pytest.mark.parametrize(
    "failing",
    [
        "capsules.save_state",
        "capsules.seal",
        "sealed.write_flushed",
        "capsules._facts",
        "step_randomness.random_state",
    ],
)
def test_a_full_disk_or_any_other_mishap_is_one_line_of_the_log_and_leaves_nothing(run, caplog, monkeypatch, failing):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"emrun.storage.{failing}", full)
    assert keep(run) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("cannot save the batch that failed: ")
    folder = run.directory / "failures"
    assert not folder.exists() or not list(folder.iterdir())


def test_a_write_that_ends_halfway_leaves_nothing(run, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        assert keep(run, batch={"x": np.zeros(100_000)}) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((run.directory / "failures").iterdir())
    assert "cannot save the batch that failed: StorageError" in caplog.text


def test_only_the_newest_are_kept(run):
    for _ in range(MOST + 2):
        place = keep(run)
    names = sorted(path.name for path in (run.directory / "failures").iterdir())
    assert names == ["3", "4", "5", "6", "7"]
    assert place.name == "7"
    assert find_capsule(run.directory)[0] == place


def test_what_a_killed_process_left_is_removed(run):
    left = run.directory / "failures" / ".tmp-1"
    left.mkdir(parents=True)
    keep(run)
    assert not left.exists()


def test_a_run_without_failures_has_no_capsule(run):
    with pytest.raises(UsageError, match="has no recorded failure"):
        find_capsule(run.directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 5}, "format 5 is newer than this emrun supports"),
        ({"format": 2}, "format 2 is of an earlier version of emrun, which alone can replay it"),
        ({"files": {}}, "files is .*, but must be a mapping that has state.pt"),
    ],
    ids=["newer", "earlier", "files"],
)
def test_a_capsule_with_another_content_is_refused(run, change, message):
    place = keep(run)
    path = place / "failure.json"
    content = {**json.loads(path.read_text()), **change}
    del content["sha256"]
    path.write_text(json.dumps({**content, "sha256": json_digest(content)}))
    with pytest.raises(EmrunError, match=message):
        read_capsule(place, run.directory)


def test_names_of_errors_have_their_module():
    assert kind_of(ValueError()) == "ValueError"
    assert kind_of(TrainingAborted()) == "emrun.hook.TrainingAborted"


class Picky(Model):
    """A model that fails on its third batch."""

    count = 0

    def run(self, batch, train, stream):
        self.count += 1
        if self.count == 3:
            raise ValueError("no")
        return {}


def test_the_loop_keeps_the_batch_that_fails_and_only_with_a_run(run):
    batches = [{"x": [index]} for index in range(5)]
    for directory in (run, None):
        loop = MainLoop(Picky(), None, run=directory, on_unused_sources="ignore")
        with pytest.raises(ValueError, match="no"), loop:
            loop.epoch([batches])
        assert (loop.capsule is None) == (directory is None)
        if loop.capsule is not None:
            found = read_capsule(*find_capsule(loop.capsule))
            assert found.batch == {"x": [2]}
            assert (found.step.stream, found.step.batch, found.step.iteration) == ("unnamed_train_0", 2, 2)


class Passes:
    """Streams of the same batch, again and again."""

    def train_stream(self):
        return [{"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}] * 3

    def valid_stream(self):
        return self.train_stream()


def failing(run, hook, **options):
    """Train on `Passes` until a hook fails; return the capsule."""
    model = TorchModel(Affine(), ["x", "y"], ["loss"], optimizer=SGD, **options)
    loop = MainLoop(model, Passes(), [hook], run=run, skip_zeroth_epoch=True, on_unused_sources="ignore")
    with pytest.raises(ValueError, match="bad"):
        loop.run_training()
    return read_capsule(*find_capsule(loop.capsule))


def test_a_step_that_fails_while_a_pass_of_another_stream_is_open_is_one_of_the_training(run):
    class Fails(AbstractHook):
        def after_batch(self):
            if self.main_loop.training:
                recalibrate(self.main_loop.evaluation_pass("valid"))

    def recalibrate(batches):
        next(batches)
        raise ValueError("bad")

    step = failing(run, Fails()).step
    assert (step.stream, step.train, step.iteration, step.batch) == ("train", True, 0, 0)


def test_an_evaluation_that_fails_within_the_last_update_of_an_epoch_has_its_own_position(run):
    class Fails(AbstractHook):
        def before_update(self):
            if self.main_loop.iterations_done == 2:  # the last batch makes an update alone
                self.main_loop.run_evaluation("valid")

        def after_batch(self):
            if self.main_loop.evaluating:
                raise ValueError("bad")

    loop_step = failing(run, Fails(), accumulate=2).step
    first = read_capsule(sorted((run.directory / "failures").iterdir())[0], run.directory).step
    assert (first.stream, first.train, first.pass_number, first.batch) == ("valid", False, 0, 0)
    assert (loop_step.stream, loop_step.train, loop_step.batch) == ("train", True, 2)


def test_a_stream_that_fails_leaves_no_capsule(run):
    def broken():
        yield {"x": [0]}
        raise ValueError("no more")

    loop = MainLoop(Model(), None, run=run, on_unused_sources="ignore")
    with pytest.raises(ValueError, match="no more"), loop:
        loop.epoch([broken()])
    assert loop.capsule is None


# Batches in types that can be saved, and back

BATCH = {
    "tensor": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
    "gradient": torch.ones(2, requires_grad=True),
    "float16": np.array([1.5, np.inf], np.float16),
    "unsigned": np.array([1, 2**16 - 1], np.uint16),
    "big endian": np.array([1.5, 2.5], ">f8"),
    "reversed": np.arange(2)[::-1],
    "flags": np.array([True, False]),
    "complex": np.array([1j, 2.0]),
    "words": np.array(["a", "bc"]),
    "texts": ["x", "äöü"],
    "numbers": [1, 2.5],
    "ragged": [np.arange(2), torch.arange(3)],
    "nested": [{"a": np.ones(1)}, {"a": np.zeros(2)}],
    "nothing": [None, None],
}


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, equal_nan=True)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


@pytest.mark.parametrize("name", BATCH)
def test_a_source_comes_back_as_it_was(run, name):
    found = kept(run, batch={name: BATCH[name]}).batch[name]
    assert type(found) is type(BATCH[name])
    assert equal(found, BATCH[name])


def test_what_cannot_be_stored_safely_is_left_out_and_named(run):
    objects = np.array([object(), None])
    batch = {"x": [1, 2], "objects": objects, "dates": np.array(["2026-01-01"] * 2, "M8[D]"), "some": [object(), 1]}
    found = kept(run, batch=batch)
    assert list(found.batch) == ["x"]
    assert list(found.facts["left_out"]) == ["objects", "dates", "some"]
    assert found.facts["left_out"]["some"].startswith("source 'some'[0] is object, which cannot be saved")
