"""The step record: which iterations it has, where its chunks end, and that an interruption changes nothing."""

import json
import math
import random
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from doubles import SGD, Affine, LossOfOne, Numbers, Streams

from emrun import AbstractHook, MainLoop, TorchModel, read_steps
from emrun.base.errors import ArgumentError, HookError
from emrun.loop import step_log as steps_module
from emrun.loop.progress import Progress
from emrun.loop.step_log import StepLog, WaitingNumbers, read_waiting
from emrun.record.steps import StepsFile
from emrun.storage.run import Run


class Model(LossOfOne):
    """Reports values that depend on the iteration."""

    def __init__(self):
        super().__init__()
        self.iteration = 0

    def step_values(self):
        n = self.iteration
        return {"loss": torch.tensor(1 / n), "learning_rate": [0.1 / n, 0.01]}


class Loop:
    """Calls a step record as the training loop does."""

    def __init__(self, directory, every=1, model=None):
        for name in ("config.yaml", "trace.yaml"):
            (directory / name).touch()
        self.directory = directory
        self.model = model or Model()
        self.asked = Progress()
        self.record = StepLog(self.model, self.asked, StepsFile(directory / "steps.jsonl"), every)

    @property
    def done(self):
        """The iterations that are done."""
        return self.asked.iterations_done

    @done.setter
    def done(self, number):
        self.asked.iterations_done = number

    def run(self, until, ends=()):
        """Run iterations; those in `ends` are the last of an epoch."""
        record = self.record
        record.begin()
        for n in range(self.done + 1, until + 1):
            self.model.iteration = n
            if n % 7 == 0:
                record.add("sevenths", n / 7)
            self.done = n
            if n % 5 == 0:
                record.add("fifths", torch.tensor(n))
            record.take()
            if n in ends:
                record.end_chunk()
                record.begin()

    @property
    def lines(self):
        return [json.loads(line) for line in (self.directory / "steps.jsonl").read_bytes().splitlines()]

    @property
    def content(self):
        return (self.directory / "steps.jsonl").read_bytes()


@pytest.fixture
def loop(tmp_path):
    return lambda name="run", **arguments: Loop(made(tmp_path / name), **arguments)


def made(path):
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture
def early(monkeypatch):
    """Let chunks end after 10 iterations, and the thinning begin after 40 and 100."""
    monkeypatch.setattr(steps_module, "CHUNK_LENGTH", 10)
    monkeypatch.setattr(steps_module, "THINNING", ((40, 1), (100, 2)))
    monkeypatch.setattr(steps_module, "_AT_LAST", 5)


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_a_chunk_ends_every_thousand_iterations_and_with_an_epoch(loop):
    found = loop()
    found.run(2300, ends=[300, 1400])
    spans = [(line["from"], len(line["loss"])) for line in found.lines]
    assert spans == [(1, 300), (301, 700), (1001, 400), (1401, 600)]


def test_the_values_are_those_of_the_model_and_of_the_hooks(loop):
    found = loop()
    found.run(1000)
    steps = read_steps(found.directory)
    n = np.arange(1, 1001)
    assert list(steps) == ["iteration", "loss", "learning_rate", "learning_rate_1", "fifths", "sevenths"]
    np.testing.assert_array_equal(steps["iteration"], n)
    np.testing.assert_array_equal(steps["loss"], torch.tensor([1 / each for each in range(1, 1001)]).double().numpy())
    np.testing.assert_array_equal(steps["learning_rate"], 0.1 / n)
    np.testing.assert_array_equal(steps["fifths"], np.where(n % 5 == 0, n, np.nan))
    np.testing.assert_array_equal(steps["sevenths"], np.where(n % 7 == 0, n / 7, np.nan))


@pytest.mark.parametrize(("every", "expected"), [(1, (100_000, 90_000, 20_000)), (3, (33_333, 30_000, 6_667))])
def test_later_iterations_are_thinned(loop, every, expected):
    due, found = 0, []
    while due <= 3_000_000:
        due = steps_module._following(due, every)[0]
        found.append(due)
    found = np.array(found[:-1])
    counts = [((low < found) & (found <= high)).sum() for low, high in ((0, 10**5), (10**5, 10**6), (10**6, 3 * 10**6))]
    assert tuple(counts) == expected
    assert set(found[found > 10**6] % (100 * every)) == {0}


@pytest.mark.parametrize("iterations", [30_000, pytest.param(1_000_000, marks=pytest.mark.campaign)])
def test_the_file_of_a_million_iterations_is_small(loop, iterations, monkeypatch):
    """With float32 losses and gradient norms, and learning rates of two groups that change at every step.

    With fewer iterations, as much earlier thinned, the file is as much smaller.
    """
    monkeypatch.setattr(steps_module, "THINNING", ((iterations // 10, 1), (iterations, 10)))
    values = torch.rand(iterations * 19 // 100, generator=torch.Generator().manual_seed(0))
    model, losses, norms = Model(), iter(values.unbind()), iter((values * 7).unbind())
    rate = lambda n: 5e-4 * (1 + math.cos(math.pi * n / iterations))  # noqa: E731 - a formula
    model.step_values = lambda: {"loss": next(losses), "learning_rate": [rate(model.iteration), rate(n) / 3]}
    found = loop(model=model)
    record = found.record
    record.begin()
    while (n := record.due) <= iterations:
        model.iteration = n
        found.done = n - 1
        record.add("gradient_norm", next(norms))
        found.done = n
        record.take()
    steps = read_steps(found.directory)
    np.testing.assert_array_equal(steps["loss"], values.double().numpy())
    assert set(steps) == {"iteration", "loss", "learning_rate", "learning_rate_1", "gradient_norm"}
    assert len(found.content) < 25 * iterations


@pytest.mark.parametrize("every", [1, 3, 70])
def test_thinned_chunks_name_their_distance(loop, early, every):
    found = loop(every=every)
    found.run(300, ends=range(13, 300, 13))
    recorded = [n for n in range(1, 301) if n % (every * (1 if n <= 40 else 2 if n <= 100 else 5)) == 0]
    found.record.close()
    assert read_steps(found.directory)["iteration"].tolist() == recorded


def test_without_record_steps_there_is_no_file(loop):
    found = loop(every=0)
    found.run(1000)
    found.record.close()
    assert not (found.directory / "steps.jsonl").exists()


@pytest.mark.parametrize("every", [-1, 1.5, True, "1"])
def test_a_wrong_number_of_iterations_is_an_error(every):
    with pytest.raises(ArgumentError, match=r"record_steps: .* is not a whole number of at least 0"):
        MainLoop(LossOfOne(), Numbers(), record_steps=every)


def test_a_model_without_values_writes_nothing(loop, early):
    model = Model()
    model.step_values = dict
    found = loop(model=model)
    found.run(4)
    found.record.close()
    assert not (found.directory / "steps.jsonl").exists()


def test_a_loss_without_a_value_is_left_out(loop, early):
    model = Model()
    losses = iter([1.0, None, torch.zeros((), device="meta"), torch.zeros(2), torch.tensor(1j), "no", 2])
    model.step_values = lambda: {"loss": next(losses)}
    found = loop(model=model)
    found.run(7)
    found.record.close()
    assert found.lines[0]["loss"] == [1.0, None, None, None, None, None, 2.0]


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["all", "of hooks only"])
def test_the_file_of_a_resumed_run_is_that_of_an_uninterrupted_run(loop, early, values):
    """The state is taken at random iterations; the file has grown since, by up to 40 iterations, as at a kill."""
    ends = range(17, 200, 17)
    models = [Model(), Model()]
    if values != "all":
        for model in models:
            model.step_values = dict
    straight = loop("straight", model=models[0])
    straight.run(200, ends)
    straight.record.close()
    draw = random.Random(0)
    broken = loop("broken", model=models[1])
    while broken.done < 200:
        broken.run(min(200, broken.done + draw.randrange(25)), ends)
        state, done = broken.record.state_dict(), broken.done
        broken.run(min(200, done + draw.randrange(40)), ends)
        if draw.random() < 0.5:
            broken.record.close()
        broken = loop("broken", model=models[1])
        broken.record.load_state_dict(state, done)
        broken.record.load_state_dict(state, done)  # as in the middle of an epoch
        broken.done = done
        assert broken.record.state_dict() == state
    broken.record.begin()
    broken.record.close()
    assert broken.content == straight.content


def test_a_training_that_continues_in_the_same_process_takes_the_last_chunk_back(loop, early):
    straight, broken = loop("straight"), loop("broken")
    straight.run(30)
    for n in (4, 9, 10, 23, 30):
        broken.run(n)
        broken.record.close()
        assert read_steps(broken.directory)["iteration"][-1] == n
        broken.record.close()
    straight.record.close()
    assert broken.content == straight.content


def test_another_interval_begins_a_chunk(loop, early):
    found = loop()
    found.run(25)
    state = found.record.state_dict()
    found = loop(every=3)
    found.record.load_state_dict(state, 25)
    found.done = 25
    found.run(40)
    found.record.close()
    assert read_steps(found.directory)["iteration"].tolist() == [*range(1, 26), 27, 30, 33, 36, 39]
    state = found.record.state_dict()
    found = loop(every=0)
    found.record.load_state_dict(state, 40)
    found.done = 40
    found.run(60, ends=[60])
    assert read_steps(found.directory)["iteration"][-1] == 39


@pytest.mark.parametrize(
    ("before", "after", "done"), [(1, 3, 5), (1, 3, 2), (3, 1, 8), (3, 1, 7), (2, 4, 6), (1, 3, 10)], ids=str
)
def test_another_interval_counts_at_once_wherever_the_run_was_resumed(loop, early, before, after, done):
    found = loop(every=before)
    found.run(done)
    state = found.record.state_dict()
    found = loop(every=after)
    found.record.load_state_dict(state, done)
    found.done = done
    found.run(30)
    found.record.close()
    expected = [n for n in range(1, 31) if n % (before if n <= done else after) == 0]
    assert read_steps(found.directory)["iteration"].tolist() == expected


def test_without_a_state_the_iterations_before_the_checkpoint_stay(loop, early):
    found = loop()
    found.run(40)
    found = loop()
    found.record.load_state_dict(None, 20)
    found.done = 20
    found.run(40)
    assert read_steps(found.directory)["iteration"].tolist() == list(range(1, 41))


def test_a_foreign_file_ends_the_recording_and_not_the_training(loop, early, caplog):
    found = loop()
    (found.directory / "steps.jsonl").write_text("my notes\n")
    found.run(40)
    found.record.close()
    assert found.record.state_dict() is None
    assert found.content == b"my notes\n"
    assert caplog.text.count("this run did not write it") == 1


# --- what hooks add ---------------------------------------------------------------------------------------------------


class Adds(AbstractHook):
    """Adds a value at each event that has batches."""

    def __init__(self, name="event", value=None):
        super().__init__()
        self.name, self.value = name, value
        self.losses = []

    def before_batch(self, stream_name):
        self.main_loop.record("before", self.main_loop.iterations_done)

    def before_update(self, model):
        self.main_loop.record("update", model.step_outputs["loss"].sum())

    def after_batch(self, stream_name, batch_data):
        self.main_loop.record(self.name, self.main_loop.iterations_done if self.value is None else self.value)
        if self.main_loop.training:
            self.losses.append(float(batch_data["loss"].mean()))


XY = [{"x": [n, 2.0], "y": [3.0, 5.0]} for n in (1.0, 2.0, 3.0)]


def train(hook, directory, **arguments):
    made(directory)
    (directory / "config.yaml").touch()
    model, run = TorchModel(Affine(), optimizer=SGD), Run(directory)
    with MainLoop(model, Streams(train=XY, valid=XY), [hook], run=run, on_unused_sources="ignore", **arguments) as loop:
        for _ in range(2):
            loop.epoch(["train"], ["valid"])


def test_hooks_add_values_in_the_events_of_a_batch(tmp_path):
    hook = Adds()
    train(hook, tmp_path)
    steps = read_steps(tmp_path)
    assert list(steps) == ["iteration", "loss", "learning_rate", "before", "update", "event"]
    assert steps["before"].tolist() == [0, 1, 2, 3, 4, 5]
    assert steps["event"].tolist() == steps["iteration"].tolist() == [1, 2, 3, 4, 5, 6]
    assert steps["loss"].tolist() == hook.losses
    assert steps["update"].tolist() == [2 * loss for loss in hook.losses]


def test_values_of_iterations_that_are_not_recorded_are_ignored(tmp_path):
    train(Adds(), tmp_path, record_steps=2)
    steps = read_steps(tmp_path)
    assert steps["iteration"].tolist() == steps["event"].tolist() == [2, 4, 6]
    assert steps["before"].tolist() == [1, 3, 5]


def test_without_a_run_values_are_ignored():
    hook = Adds()
    with MainLoop(TorchModel(Affine(), optimizer=SGD), Streams(train=XY), [hook], on_unused_sources="ignore") as loop:
        loop.epoch(["train"])


class AddsIn(AbstractHook):
    """Adds a value in one event, of the training or of an evaluation."""

    def __init__(self, event, evaluates=False):
        super().__init__()
        setattr(self, event, lambda: self.main_loop.evaluating == evaluates and self.main_loop.record("lost", 1))


@pytest.mark.parametrize("event", ["before_training", "before_epoch", "after_stream", "after_epoch", "after_training"])
def test_a_value_that_belongs_to_no_iteration_is_an_error(tmp_path, event):
    with pytest.raises(HookError, match=r"record\('lost', ...\) was called outside of .*before_batch, before_update"):
        train(AddsIn(event), tmp_path)


@pytest.mark.parametrize("event", ["before_epoch", "after_stream", "after_epoch"])
def test_values_are_ignored_in_an_evaluation(event):
    hook = AddsIn(event, evaluates=True)
    MainLoop(LossOfOne(), Streams(train=XY, valid=XY), [hook], on_unused_sources="ignore").run_evaluation("valid")


@pytest.mark.parametrize("name", ["loss", "learning_rate", "learning_rate_foo", "iteration", "from", "every", 3])
def test_a_name_that_the_loop_uses_is_an_error(tmp_path, name):
    with pytest.raises(HookError, match=f"record: {name!r} cannot be .* than 'loss', .* begins with 'learning_rate_'"):
        train(Adds(name), tmp_path)


@pytest.mark.parametrize("value", ["much", torch.zeros(3)], ids=repr)
def test_a_value_that_is_not_a_number_is_an_error(tmp_path, value):
    with pytest.raises(HookError, match=r"record: the value 'norm' is .*not .*number"):
        train(Adds("norm", value), tmp_path)


@pytest.mark.parametrize("event", ["before_batch", "before_update"])
def test_what_a_step_that_failed_has_recorded_is_not_that_of_the_next_step(tmp_path, event):
    class Once(AbstractHook):
        has_failed = False

        def fail(self):
            if self.main_loop.iterations_done == 1 and not self.has_failed:
                self.has_failed = True
                self.main_loop.record("once", 1.0)
                raise ValueError

    setattr(Once, event, lambda self: self.fail())
    (tmp_path / "config.yaml").touch()
    model = TorchModel(Affine(), optimizer=SGD)
    with MainLoop(model, Streams(train=XY), [Once()], run=Run(tmp_path), on_unused_sources="ignore") as loop:
        with pytest.raises(ValueError):
            loop.epoch(["train"])
        loop.epoch(["train"])
    assert list(read_steps(tmp_path)) == ["iteration", "loss", "learning_rate"]


def test_values_are_recorded_after_an_evaluation_within_an_epoch_and_not_in_it(tmp_path):
    class Evaluates(AbstractHook):
        def after_batch(self, stream_name):
            if stream_name == "train":
                self.main_loop.run_evaluation("valid")
            self.main_loop.record(stream_name, self.main_loop.iterations_done)

    train(Evaluates(), tmp_path)
    steps = read_steps(tmp_path)
    assert list(steps) == ["iteration", "loss", "learning_rate", "train"]
    assert steps["train"].tolist() == [1, 2, 3, 4, 5, 6]


def test_the_steps_before_a_failure_are_recorded(tmp_path):
    class Fails(Adds):
        def after_batch(self, stream_name, batch_data):
            if self.main_loop.iterations_done == 5:
                raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        train(Fails(), tmp_path)
    assert read_steps(tmp_path)["iteration"].tolist() == [1, 2, 3, 4, 5]  # the fifth update was made


class Elsewhere(torch.Tensor):
    """A tensor that says that it is not on the CPU, as one on a GPU does."""

    is_cpu = False


def elsewhere(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype).as_subclass(Elsewhere)


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        3,
        True,
        np.float32(0.1),
        np.array(0.5),
        torch.tensor(0.1),
        torch.tensor([[7]]),
        torch.ones((), dtype=torch.half),
        np.array([0.5]),
        Fraction(1, 2),
        Decimal("0.5"),
    ],
)
def test_a_number_is_kept_exactly(value):
    expected = value.item() if hasattr(value, "item") else value
    assert read_waiting([WaitingNumbers().keep(value)]) == [float(expected)]


def test_values_on_a_device_are_copied_and_read_together():
    slots = WaitingNumbers()
    values = [elsewhere(float(number)) for number in range(130)]
    kept = [slots.keep(value) for value in values]
    for value in values:
        value.fill_(-1.0)
    assert all(isinstance(each, torch.Tensor) for each in kept)
    assert read_waiting([None, *kept, 0.5]) == [None, *map(float, range(130)), 0.5]


def test_values_of_different_types_keep_their_order_and_their_bits():
    slots = WaitingNumbers()
    values = [elsewhere(0.1), elsewhere(0.1, torch.float64), elsewhere(7, torch.int64), elsewhere([math.inf])]
    kept = [slots.keep(value) for value in values]
    assert read_waiting(kept) == [float(torch.tensor(0.1)), 0.1, 7.0, math.inf]


def test_a_kept_value_has_no_graph():
    value = elsewhere(0.5).requires_grad_()
    assert not WaitingNumbers().keep(value * 2).requires_grad


def test_slots_that_were_made_in_inference_mode_can_be_used_outside():
    slots = WaitingNumbers()
    with torch.inference_mode():
        first = slots.keep(elsewhere(1.0))
    assert read_waiting([first, slots.keep(elsewhere(2.0))]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), r"a tensor of shape \(2,\) and torch.float32, not one real number"),
        (torch.tensor(1j), "torch.complex64, not one real number"),
        (torch.zeros((), device="meta"), "not one real number"),
        ("0.5", "is '0.5', not a number"),
        (None, "is None, not a number$"),
        (10**400, "is a number that is too large$"),
        ([1.0], "is list, not a number$"),
        (np.complex64(1), "is a number that no float can have$"),
        (Decimal("1e400"), "is a number that no float can have$"),
    ],
)
def test_what_is_not_a_number_is_an_error(value, message):
    with pytest.raises(TypeError, match=message):
        WaitingNumbers().keep(value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_value_on_a_gpu_waits_there():
    value = torch.tensor(0.1, device="cuda")
    kept = WaitingNumbers().keep(value)
    value.fill_(2.0)
    assert kept.is_cuda
    assert read_waiting([kept]) == [float(torch.tensor(0.1))]
