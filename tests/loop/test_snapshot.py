"""The state of a training, with a model and hooks that have nothing but a state."""

import logging
import random

import pytest
import torch

from emrun import AbstractHook, AbstractModel, MainLoop
from emrun.base.errors import StateError
from emrun.loop.progress import Phase, Progress
from emrun.loop.ranks.states import RankStates
from emrun.loop.run_length import ChangedData, RunLength
from emrun.loop.snapshot import Snapshot
from emrun.loop.step_log import StepLog
from emrun.ranks.group import Ranks
from emrun.record.metrics_log import MetricsLog
from emrun.storage.checkpoints.state_file import load_state
from emrun.storage.run import Run
from emrun.streams.dataset_streams import DatasetStreams


class Model(AbstractModel):
    input_names = output_names = ()

    def __init__(self, in_background=False):
        self.weights = 0
        self.momentum = [0]
        self._in_background = in_background

    def run(self, batch, train, stream):
        return {}

    def state_dict(self):
        return {"momentum": self.momentum}

    def load_state_dict(self, state):
        self.momentum = state["momentum"]

    def save(self, directory):
        (directory / "weights").write_text(str(self.weights))

    def stage(self):
        weights = str(self.weights)
        return (lambda directory: (directory / "weights").write_text(weights)) if self._in_background else None

    def load(self, directory):
        self.weights = int((directory / "weights").read_text())


class Count(AbstractHook):
    def __init__(self, count=0):
        super().__init__()
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Other(Count):
    pass


class Data:
    def __init__(self, first=0):
        self.first = first

    def train_stream(self):
        return [{"x": [self.first]}, {"x": [1]}, {"x": [2]}]


def state_of(run=None, hooks=(), data=None):
    """Return a state and its streams."""
    streams = DatasetStreams(data or Data(), "train")
    return made(Model(), hooks, streams, MetricsLog(run.directory if run is not None else None)), streams


def made(model, hooks, streams, record):
    hooks = list(hooks)
    progress = Progress()
    return Snapshot(
        model,
        hooks,
        None,
        progress,
        streams,
        record,
        StepLog(model, progress, record.steps, 1),
        RunLength(model, hooks, progress, streams, None, has_zeroth_epoch=True),
        ChangedData(streams),
        has_run=record.directory is not None,
        ranks=Ranks(),
        of_ranks=RankStates(model, hooks, Ranks(), 0),
        follows=False,
    )


def written(state, place):
    """Write a snapshot of the state; return what was written."""
    place.mkdir()
    write, _ = state.take()
    write(place)
    return load_state(place)


def moved(state, streams):
    """Move a state to just after the first batch of its second epoch."""
    state.progress.start_from(1, 4, 4, Phase.TRAIN)
    assert next(iter(streams.get("train", train=True))) is not None
    return state


def test_a_checkpoint_brings_another_state_to_the_same_point(tmp_path):
    state, streams = state_of()
    moved(state, streams)
    written(state, tmp_path / "place")
    expected = random.random()
    other, its_streams = state_of()
    other.load(tmp_path / "place")
    assert other.progress.point == (1, 4, "train")
    random.seed(0)
    other.resume(lambda epoch_id: None)
    assert random.random() == expected
    assert [batch["x"] for batch in its_streams.get("train", train=True)] == [[1], [2]]


def counts_after(place, before, now):
    """Save the state of hooks, load it into others, and return their counts."""
    written(state_of(hooks=before)[0], place / "place")
    state, _ = state_of(hooks=now)
    state.load(place / "place")
    return [hook.count for hook in now]


def test_states_of_hooks_are_matched_by_class_and_order(tmp_path, caplog):
    assert counts_after(tmp_path, [Count(1), Other(2), Count(3)], [Other(), Count(), Count()]) == [2, 1, 3]
    assert not caplog.text


def test_an_error_in_the_state_of_a_hook_or_the_model_names_them():
    class Broken(Count):
        def state_dict(self):
            raise KeyError("best")

    with pytest.raises(KeyError) as caught:
        state_of(hooks=[Count(), Broken()])[0].encoded()
    assert caught.value.__notes__ == ["in hook Broken, state_dict"]
    state, _ = state_of()
    state.model.state_dict = Broken().state_dict
    with pytest.raises(KeyError) as caught:
        state.encoded()
    assert caught.value.__notes__ == [f"in model {type(state.model).__name__}, state_dict"]


def test_hooks_that_are_more_than_before_begin_anew_with_a_warning(tmp_path, caplog):
    now = [Count(), Count(8), Count(9), Other(7)]
    assert counts_after(tmp_path, [Count(1)], now) == [1, 8, 9, 7]
    said = "hooks without a state in the checkpoint begin anew: Count number 2, Count number 3; list new hooks"
    assert [record.getMessage().startswith(said) for record in caplog.records] == [True]


def test_the_state_of_a_hook_that_is_there_no_more_is_dropped(tmp_path, caplog):
    assert counts_after(tmp_path, [Count(1), Count(2), Other(3)], [Count()]) == [1]
    assert not caplog.text


def test_a_hook_that_saves_checkpoints_is_known_by_their_name(tmp_path, caplog):
    def saving(name, count=0):
        hook = Count(count)
        hook.saves = (name,)
        return hook

    now = [saving("new", 9), saving("b"), saving("a"), Count()]
    assert counts_after(tmp_path, [saving("a", 1), saving("b", 2), Count(3)], now) == [9, 2, 1, 3]
    assert "begin anew: Count of 'new'; list new hooks" in caplog.text


def test_a_copy_is_what_checkpoints_get_until_it_is_dropped(tmp_path):
    hook = Count(1)
    state, _ = state_of(Run(tmp_path), [hook])
    state.keep_copy()
    hook.count = state.progress.iterations_done = 2
    kept = written(state, tmp_path / "kept")
    state.end_epoch(trained=False)
    now = written(state, tmp_path / "now")
    assert [each["hooks"][f"{__name__}.Count"]["count"] for each in (kept, now)] == [1, 2]
    assert [each["loop"]["iterations_done"] for each in (kept, now)] == [0, 2]


def test_without_a_run_no_copy_is_made():
    class Bad(Count):
        def state_dict(self):
            raise AssertionError

    state_of(hooks=[Bad()])[0].keep_copy()


def test_what_is_staged_for_another_thread_does_not_change_any_more(tmp_path):
    model = Model(in_background=True)
    write, in_background = made(model, (), DatasetStreams(Data(), "train"), MetricsLog(None)).take()
    model.weights = model.momentum[0] = 5
    write(tmp_path)
    assert in_background
    assert (tmp_path / "weights").read_text() == "0"
    assert load_state(tmp_path)["model"] == {"momentum": [0]}


@pytest.mark.parametrize("kept", [False, True], ids=["now", "kept"])
def test_tensors_that_are_staged_for_another_thread_are_copies(tmp_path, kept):
    (tmp_path / "place").mkdir()
    model, hook = Model(in_background=True), Count((torch.zeros(2), {"sums": [torch.zeros(1, dtype=torch.float64)]}))
    model.momentum = [torch.zeros(3)]
    state = made(model, [hook], DatasetStreams(Data(), "train"), MetricsLog(tmp_path))
    if kept:
        state.keep_copy()
    write, _ = state.take()
    for each in (model.momentum[0], hook.count[0], hook.count[1]["sums"][0]):
        each += 1
    write(tmp_path / "place")
    found = load_state(tmp_path / "place")
    first, second = found["hooks"][f"{__name__}.Count"]["count"]
    assert found["model"]["momentum"][0].tolist() == [0, 0, 0]
    assert first.tolist() == [0, 0]
    assert second["sums"][0].tolist() == [0]
    assert second["sums"][0].dtype == torch.float64


def test_a_model_that_cannot_stage_is_saved_by_the_thread_that_waits():
    _, in_background = state_of()[0].take()
    assert not in_background


@pytest.mark.parametrize(("done", "phase"), [((0, 0), Phase.BEFORE), ((0, 2), Phase.BETWEEN), ((1, 3), Phase.BETWEEN)])
def test_a_training_that_starts_from_loaded_weights_skips_the_zeroth_epoch(done, phase):
    loop = MainLoop(Model(), Data())
    loop.start_from(*done)
    assert loop.progress.point == (*done, phase.value)


def test_metrics_go_back_to_their_length_at_the_checkpoint(tmp_path):
    run = Run(tmp_path)
    state, _ = state_of(run)
    state.record.add_epoch(0, 0, 0, 1.0, {})
    written(state, tmp_path / "place")
    state.record.add_epoch(1, 3, 3, 1.0, {})
    state.load(tmp_path / "place")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_what_cannot_be_saved_is_named():
    with pytest.raises(StateError, match=r"Count.count is object, which cannot be saved"):
        state_of(hooks=[Count(object())])[0].encoded()


def test_a_stream_that_gives_another_batch_logs_a_warning(tmp_path, caplog):
    state, streams = state_of()
    written(moved(state, streams), tmp_path / "place")
    other, _ = state_of(data=Data(first=5))
    other.load(tmp_path / "place")
    with caplog.at_level(logging.WARNING):
        other.resume(lambda epoch_id: None)
    assert "this resume is not exact: stream 'train'" in caplog.text


def test_to_resume_without_a_checkpoint_leaves_the_random_states():
    before = random.getstate()
    state_of()[0].resume(pytest.fail)
    assert random.getstate() == before


def test_random_states_come_back_once(tmp_path):
    state, _ = state_of()
    written(state, tmp_path / "place")
    state.load(tmp_path / "place")
    state.resume(pytest.fail)
    random.random()
    before = random.getstate()
    state.resume(pytest.fail)
    assert random.getstate() == before


# what a file holds is looked at


def changed(place, **changes):
    torch.save({**load_state(place), **changes}, place / "state.pt")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"names": {"best": "../victim"}}, "names.best is '../victim', but must be"),
        ({"loop": None}, r"its content cannot be used \(TypeError: "),
        ({"loop": {"epochs_done": "1", "iterations_done": 0, "updates_done": 0, "phase": "train"}}, "its content"),
        ({"loop": {"epochs_done": 1, "iterations_done": 0, "updates_done": 0, "phase": "x"}}, "its content cannot"),
        ({"hooks": [1]}, "its content cannot"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_used_is_an_error_before_anything_is_loaded(tmp_path, changes, said):
    place = tmp_path / "place"
    written(state_of()[0], place)
    changed(place, **changes)
    state, _ = state_of(hooks=[Count(3)])
    state.model.weights = 5
    with pytest.raises(StateError, match=f"^{place / 'state.pt'}: {said}"):
        state.load(place)
    assert state.model.weights == 5


def test_a_hook_that_cannot_take_back_its_state_is_named_with_the_checkpoint(tmp_path):
    place = tmp_path / "place"
    written(state_of(hooks=[Count(3)])[0], place)
    changed(place, hooks={f"{__name__}.Count": {}})
    with pytest.raises(KeyError, match="count") as caught:  # whose fault that is, only its author knows
        state_of(hooks=[Count()])[0].load(place)
    (note,) = caught.value.__notes__
    assert note.startswith(f"while Count.load_state_dict loaded {place / 'state.pt'}: state of hook Count")
